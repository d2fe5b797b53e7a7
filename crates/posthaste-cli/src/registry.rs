//! The Schema Registry of a configuration.

use std::sync::Arc;

use posthaste_hub::{ChannelSettings, RegistryAuth};
use posthaste_schema::{ClientOptions, Credentials, OptionsError, RegistryClient, SchemaRegistry};

use crate::config::Registry;
use crate::embedded::StartError;
use crate::secret_text;

/// The address of the registry that this server serves.
const BUILT_IN: &str = "builtin";

/// The reason why a server cannot use this registry, if there is one.
pub fn refusal(url: &str) -> Option<String> {
    match ClientOptions::new(url) {
        _ if url == BUILT_IN => None,
        Ok(_) => None,
        Err(error) => Some(format!("is not \"builtin\" and cannot be used: {error}")),
    }
}

/// The reason why a channel cannot have this registry of its own, if there is one.
pub fn refusal_of_channel(url: &str) -> Option<String> {
    ClientOptions::new(url).err().map(|error| format!("cannot be used: {error}"))
}

/// The registry of a channel that has its own.
pub fn of_channel(channel: &ChannelSettings) -> Result<Option<Arc<dyn SchemaRegistry>>, StartError> {
    let Some(url) = channel.registry_url.clone() else { return Ok(None) };
    let RegistryAuth { username, password, token } = channel.registry_auth.clone();
    open(&Registry { url, username, password, token })
}

/// Opens the registry, if it is not the built-in one. Does not contact it.
pub fn open(registry: &Registry) -> Result<Option<Arc<dyn SchemaRegistry>>, StartError> {
    if registry.url == BUILT_IN {
        return Ok(None);
    }
    let refused = |error: OptionsError| StartError::RegistrySetting(error.to_string());
    let mut options = ClientOptions::new(&registry.url).map_err(refused)?;
    let resolve = |key, value| secret_text::resolve(key, value).map_err(StartError::RegistrySetting);
    let token = resolve("registry.token", &registry.token)?;
    if !token.is_empty() {
        options = options.credentials(&Credentials::Bearer { token }).map_err(refused)?;
    } else if !registry.username.is_empty() {
        let username = registry.username.clone();
        let password = resolve("registry.password", &registry.password)?;
        options = options.credentials(&Credentials::Basic { username, password }).map_err(refused)?;
    }
    Ok(Some(Arc::new(RegistryClient::new(options))))
}

/// Contacts the registry, and says what is wrong with it.
pub async fn check(registry: &Registry) -> Result<String, StartError> {
    let Some(client) = open(registry)? else { return Ok("built in".to_owned()) };
    client.check().await.map_err(StartError::Registry)?;
    Ok("answers".to_owned())
}
