use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use posthaste_api::suggest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::Config;
use crate::output::say;

/// Read if it exists and --config names no other file.
const DEFAULT_FILE: &str = "posthaste.toml";
/// The prefix of the environment variables, and the separator between section and key.
const PREFIX: &str = "POSTHASTE__";
const SEPARATOR: &str = "__";

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration file {} cannot be read", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("configuration file {}: {message}", path.display())]
    File { path: PathBuf, message: String },
    #[error("environment variable {name}: {message}")]
    Variable { name: String, message: String },
    #[error("{}", .0.join("\n"))]
    Invalid(Vec<String>),
}

/// Values that override the defaults. A later layer overrides an earlier one. Remembers the origin of each value.
#[derive(Default)]
pub struct Layers {
    values: Table,
    origins: BTreeMap<String, String>,
    file: Option<PathBuf>,
}

impl Layers {
    /// The file and the environment of this process, in that order.
    pub fn of_process(named_file: Option<&Path>) -> Result<Self, ConfigError> {
        let mut layers = Self::default();
        match named_file {
            Some(path) => layers.add_file(path)?,
            None if Path::new(DEFAULT_FILE).exists() => layers.add_file(Path::new(DEFAULT_FILE))?,
            None => {}
        }
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str() else { continue };
            if let Some(meant) = misspelt(name) {
                say(format_args!("warning: environment variable {name} sets nothing: did you mean {meant}?"));
            }
            if !name.starts_with(PREFIX) {
                continue;
            }
            let refused = |message: &str| ConfigError::Variable { name: name.to_owned(), message: message.to_owned() };
            layers.add_variable(name, value.to_str().ok_or_else(|| refused("is not UTF-8"))?)?;
        }
        Ok(layers)
    }

    /// The configuration file, if one was read.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    pub fn add_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        let wrong = |error: toml::de::Error| ConfigError::File {
            path: path.to_owned(),
            message: suggest::explain(error.to_string().trim_end()),
        };
        // Parse as `Config` first: only errors of this step contain the line in the file.
        toml::from_str::<Config>(&text).map_err(wrong)?;
        let values: Table = text.parse().map_err(wrong)?;
        self.merge(values, &format!("in {}", path.display()));
        self.file = Some(path.to_owned());
        Ok(())
    }

    /// Adds the value of an environment variable `POSTHASTE__SECTION__KEY`.
    pub fn add_variable(&mut self, name: &str, text: &str) -> Result<(), ConfigError> {
        let refused = |message: String| ConfigError::Variable { name: name.to_owned(), message };
        let key = name.strip_prefix(PREFIX).unwrap_or(name).to_lowercase();
        let path: Vec<&str> = key.split(SEPARATOR).collect();
        let layer = nested(&path, typed::<Config>(&path, text).map_err(refused)?);
        self.merge(layer, &format!("by environment variable {name}"));
        Ok(())
    }

    /// Adds the value of a command-line flag that sets a key.
    pub fn add_flag(&mut self, flag: &str, key: &str, text: &str) {
        let path: Vec<&str> = key.split('.').collect();
        self.merge(nested(&path, Value::String(text.to_owned())), &format!("by {flag}"));
    }

    /// Builds the configuration. Fails if a value in it cannot be used.
    pub fn config(self) -> Result<Config, ConfigError> {
        self.config_with(|_| true)
    }

    /// Builds the configuration for a command that uses only this section and the log. Fails only if a value in one of them
    /// cannot be used.
    pub fn config_of_section(self, section: &str) -> Result<Config, ConfigError> {
        self.config_with(|key| key.split('.').next().is_some_and(|name| name == section || name == "telemetry"))
    }

    fn config_with(self, is_used: impl Fn(&str) -> bool) -> Result<Config, ConfigError> {
        let config: Result<Config, toml::de::Error> = Value::Table(self.values).try_into();
        let config = config.map_err(|error| ConfigError::Invalid(vec![error.to_string().trim_end().to_owned()]))?;
        let mut violations = config.violations();
        violations.retain(|(key, _)| is_used(key));
        if violations.is_empty() {
            return Ok(config);
        }
        let messages = violations.into_iter().map(|(key, why)| match self.origins.get(key) {
            Some(origin) => format!("{key} (set {origin}) {why}"),
            None => format!("{key} {why}"),
        });
        Err(ConfigError::Invalid(messages.collect()))
    }

    fn merge(&mut self, layer: Table, origin: &str) {
        merge(&mut self.values, layer, "", &mut |key| {
            self.origins.insert(key, origin.to_owned());
        });
    }
}

/// The correct name of a variable that has the wrong number of underscores, such as POSTHASTE_HTTP_LISTEN. Ignores all
/// other variables: they may belong to other programs. Kubernetes, for example, names variables after each service.
fn misspelt(name: &str) -> Option<String> {
    if !name.starts_with("POSTHASTE") || name.starts_with(PREFIX) {
        return None;
    }
    let folded = |name: &str| name.replace('_', "");
    let mut keys = Vec::new();
    variables(&Table::try_from(Config::default()).ok()?, PREFIX, &mut keys);
    keys.into_iter().find(|key| folded(key) == folded(name))
}

/// The names of the variables for every key in the table.
fn variables(table: &Table, inside: &str, found: &mut Vec<String>) {
    for (name, value) in table {
        let name = format!("{inside}{}", name.to_uppercase());
        match value {
            Value::Table(table) => variables(table, &format!("{name}{SEPARATOR}"), found),
            _ => found.push(name),
        }
    }
}

fn merge(values: &mut Table, layer: Table, inside: &str, set: &mut dyn FnMut(String)) {
    for (name, value) in layer {
        let key = format!("{inside}{name}");
        match (values.get_mut(&name), value) {
            (Some(Value::Table(below)), Value::Table(above)) => merge(below, above, &format!("{key}."), set),
            (None, Value::Table(above)) => {
                let mut below = Table::new();
                merge(&mut below, above, &format!("{key}."), set);
                values.insert(name, Value::Table(below));
            }
            (_, value) => {
                set(key);
                values.insert(name, value);
            }
        }
    }
}

fn nested(path: &[&str], value: Value) -> Table {
    let value = path.iter().skip(1).rev().fold(value, |value, name| {
        let mut table = Table::new();
        table.insert((*name).to_owned(), value);
        Value::Table(table)
    });
    let mut table = Table::new();
    table.insert((*path.first().unwrap_or(&"")).to_owned(), value);
    table
}

/// The value of a variable, with the type that its key needs. A key that accepts text gets the text itself. For other
/// keys the text is parsed as a TOML value: a number, a boolean or a list. The type of `T` decides, not the default
/// value, so this works for an optional key, too.
fn typed<T: DeserializeOwned + Default + Serialize>(path: &[&str], text: &str) -> Result<Value, String> {
    let read = |value: Value| Value::Table(nested(path, value)).try_into::<T>().map(drop);
    let Err(refusal) = read(Value::String(text.to_owned())) else {
        return Ok(Value::String(text.to_owned()));
    };
    let bare = format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
    let bare_refusal = match bare {
        Some(value) => match read(value.clone()) {
            Ok(()) => return Ok(value),
            Err(error) => Some(error),
        },
        None => None,
    };
    if let Some(section) = section_at::<T>(path) {
        let keys: Vec<_> = section.keys().map(|key| key.to_uppercase()).collect();
        return Err(format!(
            "names a section: add one of its keys, {SEPARATOR}{}",
            keys.join(&format!(" or {SEPARATOR}"))
        ));
    }
    let message = refusal.message();
    Err(match message.split_once(", expected ").map(|(_, expected)| expected.trim_end()) {
        Some("a boolean") => format!("{text:?} is neither true nor false"),
        Some("a sequence") if bare_refusal.is_none() => {
            format!("{text:?} is not a list as TOML writes it, such as [\"a\", \"b\"] or [{{ key = \"value\" }}]")
        }
        Some(number) if NUMBERS.contains(&number) && bare_refusal.is_none() => {
            format!("{text:?} is not a whole number")
        }
        // For a key that accepts no text, the error about the parsed value is more useful than the one about the text.
        _ if message.starts_with("invalid type: string") => {
            suggest::explain(bare_refusal.as_ref().unwrap_or(&refusal).message())
        }
        _ => suggest::explain(message),
    })
}

/// The names that serde uses for whole numbers.
const NUMBERS: [&str; 8] = ["u8", "u16", "u32", "u64", "usize", "i32", "i64", "isize"];

fn section_at<T: Default + Serialize>(path: &[&str]) -> Option<Table> {
    let defaults = Value::try_from(T::default()).ok()?;
    let found = path.iter().try_fold(&defaults, |value, name| value.get(name))?;
    found.as_table().cloned()
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;
