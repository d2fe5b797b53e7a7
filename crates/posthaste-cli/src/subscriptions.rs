use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{ArgAction, Subcommand};
use posthaste_api::{
    AuthIn, AuthOut, FilterConditionIn, Headers, Input, InputError, PayloadType, Secret, Subscription, SubscriptionIn,
};
use posthaste_hub::{Created, SubscriptionRequest};
use posthaste_webhook::Endpoint;
use uuid::Uuid;

use crate::client::{Client, Page};
use crate::definitions::{KeyFlags, ListPart, id, key_text, say_total};
use crate::exit::UsageError;
use crate::output::{Output, Table, moment, say};

mod filter;

use filter::{condition, filter_text};

/// The password, if no file contains it. There is no flag for it: all users of the machine can see arguments.
const PASSWORD_VARIABLE: &str = "POSTHASTE_PASSWORD";

#[derive(Subcommand)]
pub enum SubscriptionsCommand {
    /// List subscriptions
    List {
        /// Only subscriptions of this subscriber
        #[arg(long, value_name = "NAME")]
        subscriber_id: Option<String>,
        /// Only subscriptions to this definition
        #[arg(long, value_name = "ID", value_parser = id)]
        definition_id: Option<Uuid>,
        #[command(flatten)]
        part: ListPart,
    },
    /// Show one subscription
    Get {
        #[arg(value_parser = id)]
        id: Uuid,
    },
    /// Create a subscription; with --event and similar flags, also its definition if it does not exist
    Create(Box<SubscriptionFlags>),
    /// Change the given values, keep the others
    Update {
        #[arg(value_parser = id)]
        id: Uuid,
        #[command(flatten)]
        flags: Box<SubscriptionFlags>,
    },
    /// Delete a subscription
    Delete {
        #[arg(value_parser = id)]
        id: Uuid,
    },
}

#[derive(clap::Args)]
pub struct SubscriptionFlags {
    #[command(flatten)]
    key: KeyFlags,
    /// Existing definition, instead of --event and similar flags
    #[arg(long = "definition", value_name = "ID", value_parser = id, conflicts_with_all = ["event_type", "source_service", "resource_type", "operation_type"])]
    definition_id: Option<Uuid>,
    /// Address that events are sent to
    #[arg(long = "to", value_name = "URL", visible_alias = "endpoint", value_parser = address)]
    endpoint: Option<String>,
    /// Name of the subscriber [default: host and port of --to]
    #[arg(long = "subscriber", value_name = "NAME", visible_alias = "subscriber-id")]
    subscriber_id: Option<String>,
    /// Content type to assume for a payload that has none
    #[arg(long, value_enum)]
    payload_type: Option<PayloadKind>,
    /// Header to add to each request; can be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = name_and_value)]
    headers: Vec<(String, String)>,
    /// How long one request may take, such as 2s
    #[arg(long)]
    timeout: Option<String>,
    /// How many immediate retries follow a failed request
    #[arg(long, value_name = "NUMBER")]
    max_retry: Option<u32>,
    /// Only events of this tenant
    #[arg(long = "tenant", value_name = "ID", visible_alias = "tenant-id")]
    tenant_id: Option<String>,
    /// Only events whose JSON payload meets this condition: PATH OP [JSON], such as '/country eq "DE"'; can be repeated,
    /// and replaces all earlier conditions
    ///
    /// PATH is a JSON pointer; one with spaces is written as a JSON text, and "" is the whole payload. OP is eq, ne, in,
    /// prefix or exists. JSON is the value to compare with, such as 100, "DE" or ["DE", "AT"].
    #[arg(long = "filter", value_name = "CONDITION", value_parser = condition)]
    filter: Vec<FilterConditionIn>,
    /// Remove all conditions
    #[arg(long, conflicts_with = "filter")]
    no_filter: bool,
    /// true to deliver events to the subscription, false to match none
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    active: Option<bool>,
    #[command(flatten)]
    auth: AuthFlags,
}

#[derive(clap::Args)]
struct AuthFlags {
    /// Authenticate as this user; the password is in --password-file or POSTHASTE_PASSWORD
    #[arg(long, value_name = "USER", group = "auth")]
    basic: Option<String>,
    /// File that contains the password; - is stdin
    #[arg(long, value_name = "FILE", requires = "basic")]
    password_file: Option<PathBuf>,
    /// Send the token in this file as `Authorization: Bearer`; - is stdin
    #[arg(long, value_name = "FILE", group = "auth")]
    token_file: Option<PathBuf>,
    /// Send the JWT in this file as `Authorization: Bearer`; - is stdin
    #[arg(long, value_name = "FILE", group = "auth")]
    jwt_file: Option<PathBuf>,
    /// Send no credentials
    #[arg(long, group = "auth")]
    no_auth: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum PayloadKind {
    Json,
    Binary,
}

pub async fn run(command: SubscriptionsCommand, client: &Client, output: Output) -> anyhow::Result<()> {
    match command {
        SubscriptionsCommand::List { subscriber_id, definition_id, part } => {
            let [page, size, cursor] = part.query();
            let definition_id = definition_id.map(|id| id.to_string());
            let query = [("subscriberId", subscriber_id), ("definitionId", definition_id), page, size, cursor];
            let page = client.subscriptions(&query).await?;
            output.print(&page, list)?;
            say_total(&page);
        }
        SubscriptionsCommand::Get { id } => output.print(&client.subscription(id).await?.value, detail)?,
        SubscriptionsCommand::Create(flags) => output.print(&create(*flags, client).await?, detail)?,
        SubscriptionsCommand::Update { id, flags } => {
            let before = client.subscription(id).await?;
            let after = flags.applied_to(unchanged(&before.value))?;
            output.print(&client.update_subscription(&before, &after).await?, detail)?;
        }
        SubscriptionsCommand::Delete { id } => {
            client.delete_subscription(id).await?;
            say(format_args!("deleted subscription {id}"));
        }
    }
    Ok(())
}

async fn create(flags: SubscriptionFlags, client: &Client) -> anyhow::Result<Subscription> {
    if flags.definition_id.is_none() && flags.key.is_empty() {
        return Err(UsageError("which events? give --event TYPE, or --definition ID".to_owned()).into());
    }
    let endpoint = flags.endpoint.clone().ok_or_else(|| UsageError("which endpoint? give --to URL".to_owned()))?;
    let key = flags.key.clone();
    let new = SubscriptionIn { subscriber_id: authority(&endpoint), ..SubscriptionIn::default() };
    let new = flags.applied_to(new)?;
    // Validate before creating the definition: a refused subscription must leave no definition behind.
    if let Err(errors) = SubscriptionRequest::from(new.clone()).validate() {
        return Err(UsageError(InputError::Invalid(errors).to_string()).into());
    }
    if new.event_key.is_none() {
        return Ok(report_existing(client.create_subscription(&new).await?));
    }
    let made = match client.create_definition(&key.definition(None)).await {
        Ok(definition) => Some(definition),
        Err(error) if error.is_conflict() => None,
        Err(error) => return Err(error.into()),
    };
    match client.create_subscription(&new).await {
        Ok(created) => {
            if let Some(definition) = made {
                say(format_args!("created definition {} for it", definition.id));
            }
            Ok(report_existing(created))
        }
        Err(error) => {
            if let Some(definition) = made {
                // If this fails, too, an unused definition remains, which is harmless.
                let _ = client.delete_definition(definition.id).await;
            }
            Err(error.into())
        }
    }
}

/// Prints a message if the subscription existed before.
fn report_existing(created: Created<Subscription>) -> Subscription {
    match created {
        Created::New(subscription) => subscription,
        Created::Existing(subscription) => {
            say("this subscription exists already and was not changed; `subscriptions update` changes it");
            subscription
        }
    }
}

impl SubscriptionFlags {
    fn applied_to(self, mut subscription: SubscriptionIn) -> anyhow::Result<SubscriptionIn> {
        if let Some(id) = self.definition_id {
            subscription.definition_id = Some(id.to_string());
            subscription.event_key = None;
        } else if !self.key.is_empty() {
            subscription.definition_id = None;
            subscription.event_key = Some(self.key.key());
        }
        if let Some(endpoint) = self.endpoint {
            subscription.endpoint = endpoint;
        }
        if let Some(subscriber_id) = self.subscriber_id {
            subscription.subscriber_id = subscriber_id;
        }
        if let Some(kind) = self.payload_type {
            subscription.payload_type = match kind {
                PayloadKind::Json => PayloadType::Json,
                PayloadKind::Binary => PayloadType::Binary,
            };
        }
        if !self.headers.is_empty() {
            subscription.headers = Some(Headers(self.headers));
        }
        subscription.timeout = self.timeout.or(subscription.timeout);
        subscription.max_retry = self.max_retry.or(subscription.max_retry);
        subscription.tenant_id = self.tenant_id.or(subscription.tenant_id);
        if !self.filter.is_empty() || self.no_filter {
            subscription.filter = Some(self.filter);
        }
        subscription.active = self.active.unwrap_or(subscription.active);
        subscription.auth = self.auth.read()?.or(subscription.auth);
        Ok(subscription)
    }
}

impl AuthFlags {
    fn read(self) -> anyhow::Result<Option<AuthIn>> {
        let secret = |path: &Path| secret_in(path).map(Some);
        Ok(if let Some(username) = self.basic {
            let password = match self.password_file {
                Some(path) => secret(&path)?,
                None => std::env::var(PASSWORD_VARIABLE).ok().map(Secret::from),
            };
            Some(AuthIn::BasicAuth { username, password })
        } else if let Some(path) = self.token_file {
            Some(AuthIn::HeaderToken { token: secret(&path)? })
        } else if let Some(path) = self.jwt_file {
            Some(AuthIn::JwtHeader { token: secret(&path)? })
        } else {
            self.no_auth.then_some(AuthIn::None {})
        })
    }
}

/// The text of the file without the line break at its end, which editors add.
fn secret_in(path: &Path) -> anyhow::Result<Secret> {
    let mut text = String::new();
    let read = match path == Path::new("-") {
        true => std::io::stdin().read_to_string(&mut text).map(|_| text),
        false => std::fs::read_to_string(path),
    };
    let text = read.with_context(|| format!("secret file {} cannot be read", path.display()))?;
    Ok(Secret::from(text.trim_end_matches(['\r', '\n']).to_owned()))
}

/// Reads `name=value`.
pub fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Accepts an address that can be called. The error does not repeat the address, because it may contain a token.
fn address(text: &str) -> Result<String, String> {
    match Endpoint::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{error}, such as https://example.com/hook or http://localhost:9000/")),
    }
}

fn authority(endpoint: &str) -> String {
    let url = url::Url::parse(endpoint).ok();
    let authority = url.as_ref().map(url::Url::authority).unwrap_or_default();
    // Leave credentials out of the name. The server refuses an address that contains any.
    authority.rsplit('@').next().unwrap_or_default().to_owned()
}

/// A request that changes nothing. The client does not know the secrets: if they are absent or masked, the server keeps
/// the stored ones.
fn unchanged(subscription: &Subscription) -> SubscriptionIn {
    SubscriptionIn {
        subscriber_id: subscription.subscriber_id.clone(),
        definition_id: Some(subscription.definition_id.to_string()),
        event_key: None,
        endpoint: subscription.endpoint.clone(),
        protocol: subscription.protocol,
        payload_type: subscription.payload_type,
        auth: None,
        headers: None,
        timeout: subscription.timeout.clone(),
        max_retry: subscription.max_retry,
        tenant_id: subscription.tenant_id.clone(),
        filter: Some(subscription.filter.iter().cloned().map(FilterConditionIn::from).collect()),
        active: subscription.active,
    }
}

fn list(page: &Page<Subscription>) -> Table {
    let mut table = Table::new(["ID", "SUBSCRIBER", "EVENT", "FILTER", "ENDPOINT", "AUTH", "ACTIVE"]);
    for subscription in &page.items {
        table.row([
            subscription.id.to_string(),
            subscription.subscriber_id.clone(),
            key_text(&subscription.event_key),
            filter_text(&subscription.filter),
            subscription.endpoint.clone(),
            auth_text(&subscription.auth),
            yes_or_no(subscription.active),
        ]);
    }
    table
}

fn detail(subscription: &Subscription) -> Table {
    let headers = subscription.headers.0.iter().map(|(name, value)| format!("{name}={value}"));
    Table::of_fields([
        ("id", subscription.id.to_string()),
        ("subscriber", subscription.subscriber_id.clone()),
        ("events", key_text(&subscription.event_key)),
        ("definition", subscription.definition_id.to_string()),
        ("endpoint", subscription.endpoint.clone()),
        ("payload type", subscription.payload_type.content_type().to_owned()),
        ("auth", auth_text(&subscription.auth)),
        ("headers", headers.collect::<Vec<_>>().join(" ")),
        ("timeout", subscription.timeout.clone().unwrap_or_default()),
        ("max retry", subscription.max_retry.map(|retries| retries.to_string()).unwrap_or_default()),
        ("tenant", subscription.tenant_id.clone().unwrap_or_default()),
        ("filter", filter_text(&subscription.filter)),
        ("active", yes_or_no(subscription.active)),
        ("created", moment(subscription.created_at)),
        ("updated", moment(subscription.updated_at)),
    ])
}

fn auth_text(auth: &AuthOut) -> String {
    match auth {
        AuthOut::None => "none".to_owned(),
        AuthOut::BasicAuth { username } => format!("basic as {username}"),
        AuthOut::HeaderToken => "token".to_owned(),
        AuthOut::JwtHeader => "jwt".to_owned(),
    }
}

fn yes_or_no(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_line_break_at_the_end_of_a_secret_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, " s3cret \r\n").unwrap();
        assert_eq!(secret_in(&path).unwrap().expose(), " s3cret ");
        let error = secret_in(&folder.path().join("none")).unwrap_err();
        assert!(error.to_string().contains("none cannot be read"));
    }

    #[test]
    fn a_subscriber_without_a_name_is_named_after_its_address() {
        assert_eq!(authority("http://localhost:9000/hook?token=x"), "localhost:9000");
        assert_eq!(authority("https://user:secret@example.com/hook"), "example.com");
        assert_eq!(authority("not an address"), "");
    }
}
