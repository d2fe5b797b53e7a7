use std::time::Duration;

use posthaste_api::Domain;

use super::*;
use crate::config::DEFAULT_CONFIG;

fn from_file(text: &str) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some.toml");
    std::fs::write(&path, text).unwrap();
    let mut layers = Layers::default();
    layers.add_file(&path)?;
    layers.config()
}

fn from_variable(name: &str, text: &str) -> Result<Config, ConfigError> {
    let mut layers = Layers::default();
    layers.add_variable(name, text)?;
    layers.config()
}

fn refusal(result: Result<Config, ConfigError>) -> String {
    result.unwrap_err().to_string()
}

/// The default file with its example uncommented.
fn with_example() -> String {
    let is_example = |line: &str| {
        let line = line.strip_prefix("# ").unwrap_or_default();
        line.starts_with("[[") || line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '))
    };
    let lines = DEFAULT_CONFIG.lines().map(|line| if is_example(line) { &line[2..] } else { line });
    lines.collect::<Vec<_>>().join("\n")
}

fn keys(table: &Table, inside: &str, found: &mut Vec<String>) {
    for (name, value) in table {
        match value {
            Value::Table(table) => keys(table, &format!("{inside}{name}."), found),
            Value::Array(list) => {
                for item in list.iter().filter_map(Value::as_table) {
                    keys(item, &format!("{inside}{name}."), found);
                }
            }
            _ => found.push(format!("{inside}{name}")),
        }
    }
    found.sort();
}

#[test]
fn the_default_file_is_the_built_in_default() {
    let read: Config = toml::from_str(DEFAULT_CONFIG).unwrap();
    assert_eq!(read, Config::default());
    assert!(read.violations().is_empty());
}

#[test]
fn the_default_file_names_every_key() {
    let example: Config = toml::from_str(&with_example()).unwrap();
    assert_eq!((example.routing.rules.len(), example.channels.len(), example.sources.len()), (1, 1, 1));
    let (mut written, mut known) = (Vec::new(), Vec::new());
    keys(&with_example().parse().unwrap(), "", &mut written);
    keys(&Table::try_from(&example).unwrap(), "", &mut known);
    assert_eq!(written, known);
}

#[test]
fn later_layers_win() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some.toml");
    std::fs::write(&path, "[http]\nlisten = '127.0.0.1:1'\n[outbox]\nbatch_size = 7\nlease = '9s'\n").unwrap();
    let mut layers = Layers::default();
    layers.add_file(&path).unwrap();
    layers.add_variable("POSTHASTE__HTTP__LISTEN", "127.0.0.1:2").unwrap();
    layers.add_variable("POSTHASTE__OUTBOX__LEASE", "11s").unwrap();
    layers.add_flag("--listen", "http.listen", "127.0.0.1:3");
    let config = layers.config().unwrap();
    assert_eq!(config.http.listen.port(), 3);
    assert_eq!(config.outbox.lease, Duration::from_secs(11));
    assert_eq!(config.outbox.batch_size, 7);
    assert_eq!(config.outbox.max_attempts, 10);
}

#[test]
fn a_missing_named_file_is_an_error() {
    let error = Layers::default().add_file(Path::new("no/such/file.toml")).unwrap_err();
    assert_eq!(error.to_string(), "configuration file no/such/file.toml cannot be read");
}

#[test]
fn unknown_keys_in_a_file_are_refused_with_line_and_suggestion() {
    let message = refusal(from_file("[outbox]\nbatch_sise = 7\n"));
    assert!(message.contains("some.toml: ") && message.contains("line 2"), "{message}");
    assert!(message.contains(r#"unknown field "batch_sise"; did you mean "batch_size"?"#), "{message}");
    let message = refusal(from_file("[htpp]\n"));
    assert!(message.contains(r#"did you mean "http"?"#), "{message}");
}

#[test]
fn unknown_variables_are_refused_with_a_suggestion() {
    let message = refusal(from_variable("POSTHASTE__HTTP__LISTN", "127.0.0.1:1"));
    assert_eq!(
        message,
        "environment variable POSTHASTE__HTTP__LISTN: unknown field \"listn\"; did you mean \"listen\"?"
    );
    let message = refusal(from_variable("POSTHASTE__HTTPS__LISTEN", "127.0.0.1:1"));
    assert!(message.ends_with("unknown field \"https\"; did you mean \"http\"?"), "{message}");
    let message = refusal(from_variable("POSTHASTE__DLT", "1"));
    assert!(message.contains("names a section") && message.contains("__RETRY_INTERVAL"), "{message}");
}

#[test]
fn variables_reach_every_kind_of_value() {
    assert_eq!(from_variable("POSTHASTE__DELIVERY__MAX_RETRY", "0").unwrap().delivery.max_retry, 0);
    assert_eq!(from_variable("POSTHASTE__CLIENT__SERVER", "http://h:1").unwrap().client.server, "http://h:1");
    let rules = r#"[{ event_type = "user.*", domain = "user-lifecycle" }]"#;
    let rules = from_variable("POSTHASTE__ROUTING__RULES", rules).unwrap().routing.rules;
    assert_eq!(rules[0].domain, Domain::UserLifecycle);
    let message = refusal(from_variable("POSTHASTE__DELIVERY__MAX_RETRY", "many"));
    assert!(message.ends_with("\"many\" is not a whole number"), "{message}");
    let message = refusal(from_variable("POSTHASTE__OUTBOX__LEASE", "30"));
    assert!(message.contains("\"30\" is not a duration: write a number with its unit"), "{message}");
}

#[test]
fn settings_of_the_kafka_client_are_read_in_every_form() {
    let text = "[bus.kafka]\nsecurity.protocol = 'SSL'\n'ssl.ca.location' = 'ca.pem'\nlinger.ms = 5\nlog_queue = true";
    let kafka = from_file(text).unwrap().bus.kafka;
    let settings =
        [("linger.ms", "5"), ("log.queue", "true"), ("security.protocol", "SSL"), ("ssl.ca.location", "ca.pem")];
    assert_eq!(kafka.0, settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    let kafka = from_variable("POSTHASTE__BUS__KAFKA__SASL_PASSWORD", "42").unwrap().bus.kafka;
    assert_eq!(kafka.0["sasl.password"], "42");
    assert!(!format!("{kafka:?}").contains("42"), "the value may be a secret");
}

#[test]
fn unusable_values_are_refused_with_key_and_origin() {
    for (text, expected) in [
        ("[outbox]\nbatch_size = 0", "outbox.batch_size (set in "),
        ("[outbox]\nlease = '99ms'", "is shorter than 100ms"),
        ("[outbox]\nlease = 30", "expected a duration as text"),
        ("[http]\nlisten = 'localhost'", "\"localhost\" is not an IP address with a port, such as 127.0.0.1:8080"),
        ("[http]\nlisten = '0.0.0.0:8080'", "this version has no API keys yet"),
        ("[bus]\nurl = 'nats://broker:4222'", "bus.url (set in "),
        ("[bus]\nacks = 'some'", "unknown value \"some\"; known: all, 1, 0"),
        ("[registry]\nurl = 'registry:8081'", "registry.url (set in "),
        ("[[channels]]\nevent_type = 'a'\ncompatibility = 'backwards'", "use NONE, BACKWARD, "),
        ("[bus]\npartitions = 0", "bus.partitions (set in "),
        ("[bus]\ntopic_prefix = 'a b'", "bus.topic_prefix"),
        ("[database]\nurl = 'mysql://localhost/x'", "names MySQL, on which there is no hub"),
        ("[database]\nurl = 'postgres://localhost/x'", "secrets.key_file is empty, and this database has no file"),
        ("[database]\nmax_connections = 16", "is less than 17"),
        ("[database]\nurl = 'sqlite::memory:'", "is in memory"),
        ("[database]\nurl = 'posthaste.db'", "write sqlite://FILE"),
        ("[telemetry]\nlog = 'posthaste=loud'", "telemetry.log"),
        ("[egress]\nallow = ['10.1.2.3/8']", "\"10.1.2.3/8\" does not start with the first address of its range"),
        ("[egress]\nallow = ['10.0.0.0/8', 'shop-db']", "\"shop-db\" is not a range of addresses: write one such as"),
        ("[egress]\nallow = '10.0.0.0/8'", "expected a sequence"),
        ("[egress]\nallow = [8]", "expected a string"),
        ("[egress]\nallowed = []", "did you mean \"allow\"?"),
        ("[routing]\ndefault_domain = 'organisation'", "did you mean \"organization\"?"),
        ("[[routing.rules]]\nevent_type = 'x'", "missing field `domain`"),
    ] {
        let message = refusal(from_file(text));
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn a_list_in_a_variable_is_refused_with_what_is_wrong_in_it() {
    let of = |text| from_variable("POSTHASTE__EGRESS__ALLOW", text);
    let allow = of(r#"["10.0.0.0/8", "::1"]"#).unwrap().egress.allow;
    assert_eq!(allow, ["10.0.0.0/8", "::1/128"].map(|text| text.parse().unwrap()));
    let message = refusal(of(r#"["10.0.0.0/33"]"#));
    assert!(
        message.contains("POSTHASTE__EGRESS__ALLOW: \"10.0.0.0/33\" has a prefix that is not 0 to 32"),
        "{message}"
    );
    let message = refusal(of("10.0.0.0/8"));
    assert!(message.contains("is not a list as TOML writes it, such as [\"a\", \"b\"]"), "{message}");
}

#[test]
fn loopback_endpoints_are_allowed_as_long_as_the_server_listens_on_loopback() {
    let mut config = from_file("[egress]\nallow = ['10.0.0.0/8']").unwrap();
    let judge = |config: &Config, address: [u8; 4]| config.egress_policy().judge(address.into()).is_ok();
    assert!(judge(&config, [127, 0, 0, 1]) && judge(&config, [10, 0, 0, 1]) && !judge(&config, [192, 168, 0, 1]));
    config.http.listen = ([0, 0, 0, 0], 8080).into();
    assert!(!judge(&config, [127, 0, 0, 1]) && judge(&config, [10, 0, 0, 1]));
}

#[test]
fn one_error_lists_all_violations() {
    let message = refusal(from_file("[outbox]\nbatch_size = 0\n[delivery]\nconcurrency = 0\n"));
    assert_eq!(message.lines().count(), 2, "{message}");
}

#[test]
fn the_default_key_file_is_the_database_file_with_key_added() {
    let config = from_variable("POSTHASTE__DATABASE__URL", "sqlite:///var/lib/p/p.db").unwrap();
    assert_eq!(config.key_file(), Path::new("/var/lib/p/p.db.key"));
}

#[test]
fn a_variable_with_too_few_underscores_is_recognised() {
    assert_eq!(misspelt("POSTHASTE_HTTP_LISTEN").as_deref(), Some("POSTHASTE__HTTP__LISTEN"));
    assert_eq!(misspelt("POSTHASTE_OUTBOX__BATCH_SIZE").as_deref(), Some("POSTHASTE__OUTBOX__BATCH_SIZE"));
    for others in ["POSTHASTE__HTTP__LISTEN", "POSTHASTE_PASSWORD", "POSTHASTE_SERVICE_HOST", "HTTP_LISTEN"] {
        assert_eq!(misspelt(others), None, "{others}");
    }
}

#[derive(Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Example {
    cleanup: Cleanup,
}

#[derive(Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Cleanup {
    enabled: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

#[test]
fn variables_reach_booleans_optional_values_and_nested_keys() {
    let value = |key: &str, text: &str| typed::<Example>(&["cleanup", key], text);
    assert_eq!(value("enabled", "true"), Ok(Value::Boolean(true)));
    assert_eq!(value("limit", "7"), Ok(Value::Integer(7)));
    assert_eq!(value("name", "7"), Ok(Value::String("7".to_owned())), "the key accepts text");
    assert_eq!(value("enabled", "yes"), Err("\"yes\" is neither true nor false".to_owned()));
    assert_eq!(value("limit", "many"), Err("\"many\" is not a whole number".to_owned()));
    assert!(value("limit", "-1").unwrap_err().contains("-1"));
    assert!(value("enabld", "true").unwrap_err().contains("did you mean \"enabled\"?"));
    assert!(typed::<Example>(&["cleanup"], "true").unwrap_err().starts_with("names a section: add one of its keys"));
}

#[test]
fn published_rows_are_kept_for_the_dedupe_window() {
    let short = refusal(from_file("[retention]\noutbox = \"23h\""));
    assert!(
        short.contains("retention.outbox (set ") && short.contains("shorter than ingest.dedupe_window, 1day"),
        "{short}"
    );
    for text in [
        "[retention]\noutbox = \"off\"",
        "[retention]\noutbox = \"1d\"",
        "retention.outbox = \"1m\"\ningest.dedupe_window = \"1m\"",
    ] {
        assert!(from_file(text).is_ok(), "{text}");
    }
    let long = refusal(from_variable("POSTHASTE__INGEST__DEDUPE_WINDOW", "8d"));
    assert!(long.contains("retention.outbox") && long.contains("8days"), "{long}");
    let cleanup = from_variable("POSTHASTE__DLT__CLEANUP__ENABLED", "true").unwrap().dlt.cleanup;
    assert_eq!((cleanup.enabled, cleanup.interval), (true, Duration::from_secs(3_600)));
}
