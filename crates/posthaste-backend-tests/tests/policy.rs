//! Checks the rules of ARCHITECTURE.md for crates and dependencies with `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The crates of ours that each crate may depend on. Tests may also use posthaste-testing and posthaste-backend-tests.
const ARROWS: &[(&str, &[&str])] = &[
    ("posthaste-core", &[]),
    ("posthaste-sql", &["posthaste-core"]),
    ("posthaste-kafka", &["posthaste-core"]),
    ("posthaste-schema", &["posthaste-core"]),
    ("posthaste-webhook", &["posthaste-core"]),
    ("posthaste-api", &["posthaste-core"]),
    ("posthaste-hub", &["posthaste-core", "posthaste-schema", "posthaste-webhook", "posthaste-api"]),
    ("posthaste-server", &["posthaste-core", "posthaste-schema", "posthaste-api", "posthaste-hub"]),
    (
        "posthaste-cli",
        &[
            "posthaste-core",
            "posthaste-sql",
            "posthaste-kafka",
            "posthaste-schema",
            "posthaste-webhook",
            "posthaste-api",
            "posthaste-hub",
            "posthaste-server",
        ],
    ),
    ("posthaste", &["posthaste-core", "posthaste-sql"]),
    ("posthaste-testing", &["posthaste-core"]),
    ("posthaste-backend-tests", &["posthaste-core", "posthaste-testing"]),
];

/// Technologies, and the crates of ours that may use each.
const HOMES: &[(&str, &[&str])] = &[
    ("sqlx", &["posthaste-sql"]),
    ("axum", &["posthaste-server", "posthaste-cli"]),
    ("hyper-rustls", &["posthaste-schema", "posthaste-webhook"]),
    ("clap", &["posthaste-cli"]),
    ("rdkafka", &["posthaste-kafka"]),
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--all-features"])
        .current_dir(workspace())
        .output()
        .expect("cargo metadata runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON")
}

fn deny_list() -> toml::Table {
    let text = std::fs::read_to_string(workspace().join("deny.toml")).expect("deny.toml is there");
    text.parse().expect("deny.toml is TOML")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn packages(metadata: &Value) -> &Vec<Value> {
    metadata["packages"].as_array().expect("packages")
}

/// Our crates, and the dependencies of each without its dev-dependencies.
fn ours(metadata: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let ours = packages(metadata).iter().filter(|package| package["source"].is_null());
    ours.map(|package| {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let built_on = dependencies.iter().filter(|dependency| dependency["kind"] != "dev");
        (text(package, "name").to_owned(), built_on.map(|dependency| text(dependency, "name").to_owned()).collect())
    })
    .collect()
}

#[test]
fn crates_depend_only_on_allowed_crates() {
    let arrows: BTreeMap<_, _> = ARROWS.iter().copied().collect();
    for (name, dependencies) in ours(&metadata()) {
        let allowed = arrows.get(name.as_str()).unwrap_or_else(|| panic!("{name} is not in the list of crates"));
        for dependency in dependencies.iter().filter(|dependency| dependency.starts_with("posthaste")) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not depend on {dependency}");
        }
    }
}

#[test]
fn each_technology_is_used_only_in_its_crates() {
    for (name, dependencies) in ours(&metadata()) {
        for (technology, homes) in HOMES {
            let knows = dependencies.contains(*technology);
            assert!(!knows || homes.contains(&name.as_str()), "{name} must not use {technology}");
        }
    }
}

/// A service that uses one database compiles neither the drivers of the others nor the hub.
#[test]
fn the_library_depends_on_one_database_driver_and_no_server() {
    let drivers = [("postgres", "sqlx-postgres"), ("mysql", "sqlx-mysql"), ("sqlite", "sqlx-sqlite")];
    for (feature, driver) in drivers {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--locked", "-p", "posthaste", "--features", feature, "--edges", "normal"])
            .args(["--prefix", "none", "--format", "{p}"])
            .current_dir(workspace().join("crates/posthaste"))
            .output()
            .expect("cargo tree runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8(output.stdout).expect("names are text");
        let crates: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
        for (_, other) in drivers {
            assert_eq!(crates.contains(other), other == driver, "{feature}: {other}");
        }
        for foreign in ["hyper", "axum", "tonic", "rdkafka", "rustls", "clap", "prost"] {
            assert!(!crates.contains(foreign), "{feature} depends on {foreign}");
        }
        assert!(crates.len() <= 135, "{feature} depends on {} crates", crates.len());
    }
}

#[test]
fn only_posthaste_sql_contains_sql() {
    for name in ours(&metadata()).keys().filter(|name| *name != "posthaste-sql") {
        for file in sources(&workspace().join("crates").join(name).join("src")) {
            let source = std::fs::read_to_string(&file).expect("a source file");
            // Comments are excluded: examples in the documentation show SQL of a service.
            let source: String = source.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            for statement in ["SELECT ", "INSERT INTO ", "DELETE FROM ", "CREATE TABLE "] {
                assert!(!source.contains(statement), "{} holds SQL: {statement}", file.display());
            }
        }
    }
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a source folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files.extend(sources(&path)),
            false if path.extension().is_some_and(|extension| extension == "rs") => files.push(path),
            false => {}
        }
    }
    files
}

#[test]
fn licences_are_allowed_and_sources_are_the_registry() {
    let deny = deny_list();
    let allowed: BTreeSet<&str> =
        deny["licenses"]["allow"].as_array().expect("a list").iter().filter_map(|licence| licence.as_str()).collect();
    for package in packages(&metadata()).iter().filter(|package| !package["source"].is_null()) {
        let (name, source) = (text(package, "name"), text(package, "source"));
        assert!(source.starts_with("registry+"), "{name} comes from {source}");
        let licence = text(package, "license").replace('/', " OR ");
        let fits = licence.trim_matches(['(', ')']).split(" OR ").any(|choice| {
            choice
                .trim_matches(['(', ')'])
                .split(" AND ")
                .all(|part| allowed.contains(part.trim_matches(['(', ')', ' '])))
        });
        // In an AND of choices, each choice must contain an allowed licence.
        let fits = fits
            || licence
                .split(" AND ")
                .all(|part| part.trim_matches(['(', ')']).split(" OR ").any(|choice| allowed.contains(choice)));
        assert!(fits, "{name} has licence {licence:?}");
    }
}

#[test]
fn banned_crates_are_absent() {
    let deny = deny_list();
    let metadata = metadata();
    for ban in deny["bans"]["deny"].as_array().expect("a list") {
        let banned = ban["crate"].as_str().expect("the name of a crate");
        // Only these crates may depend on the banned one.
        let wrappers = ban.get("wrappers").and_then(|wrappers| wrappers.as_array()).into_iter().flatten();
        let wrappers: BTreeSet<&str> = wrappers.filter_map(|name| name.as_str()).collect();
        let found = dependents(&metadata, banned);
        let refused: Vec<&String> = found.iter().filter(|name| !wrappers.contains(name.as_str())).collect();
        assert!(refused.is_empty(), "{banned} is banned, and these depend on it: {refused:?}");
    }
}

/// The crates that depend on this one, in any build.
fn dependents(metadata: &Value, name: &str) -> BTreeSet<String> {
    let names: BTreeMap<&str, &str> =
        packages(metadata).iter().map(|package| (text(package, "id"), text(package, "name"))).collect();
    let nodes = metadata["resolve"]["nodes"].as_array().expect("the resolved graph");
    let depends = |node: &&Value| {
        let dependencies = node["dependencies"].as_array().expect("dependencies");
        dependencies.iter().any(|id| names[id.as_str().expect("an id")] == name)
    };
    nodes.iter().filter(depends).map(|node| names[text(node, "id")].to_owned()).collect()
}

#[test]
fn every_crate_inherits_the_lints_that_forbid_unsafe_code() {
    for name in ours(&metadata()).keys() {
        let manifest =
            std::fs::read_to_string(workspace().join("crates").join(name).join("Cargo.toml")).expect("a manifest");
        let manifest: toml::Table = manifest.parse().expect("a manifest is TOML");
        assert_eq!(manifest["lints"]["workspace"].as_bool(), Some(true), "{name}");
    }
}
