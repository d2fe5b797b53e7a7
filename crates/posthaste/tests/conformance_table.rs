//! `docs/conformance.md` lists exactly the tests of the suite.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The number of behaviours in each section.
const SECTIONS: [(char, u32); 17] = [
    ('A', 14),
    ('B', 14),
    ('C', 9),
    ('D', 6),
    ('E', 8),
    ('F', 8),
    ('G', 12),
    ('H', 17),
    ('I', 4),
    ('J', 6),
    ('K', 7),
    ('L', 5),
    ('M', 4),
    ('N', 2),
    ('O', 2),
    ('P', 6),
    ('Z', 16),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// Id, test (file and name) and stores of every line of the table.
fn lines() -> Vec<(String, String, String)> {
    let table = fs::read_to_string(root().join("../../docs/conformance.md")).unwrap();
    let mut lines = Vec::new();
    for line in table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| id ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [id, behaviour, tests, stores] = cells[..] else { panic!("four cells: {line}") };
        assert!(!behaviour.is_empty(), "{id} describes its behaviour");
        let (tests, stores): (Vec<_>, Vec<_>) = (tests.split("<br>").collect(), stores.split("<br>").collect());
        assert_eq!(tests.len(), stores.len(), "{id}: one entry of stores per test");
        for (test, stores) in tests.into_iter().zip(stores) {
            lines.push((id.to_owned(), test.trim_matches('`').to_owned(), stores.to_owned()));
        }
    }
    lines
}

/// A file of the suite, or the one with the doc tests.
fn source(file: &str) -> String {
    let path = match file {
        "must_not_compile" => root().join("src/must_not_compile.rs"),
        file => root().join(format!("tests/conformance/{file}.rs")),
    };
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The test names that the blocks of a macro list.
fn listed(source: &str, block: &str) -> BTreeSet<String> {
    let begin = format!("\n{block}! {{");
    let blocks = source.split(&begin).skip(1);
    let names = blocks.flat_map(|block| block.split('}').next().unwrap_or_default().split(','));
    names.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
}

#[test]
fn every_behaviour_has_a_line() {
    let found: BTreeSet<String> = lines().into_iter().map(|(id, ..)| id).collect();
    let expected = SECTIONS.iter().flat_map(|(section, last)| (1..=*last).map(move |at| format!("{section}{at}")));
    let expected: BTreeSet<String> = expected.collect();
    let missing: Vec<_> = expected.difference(&found).collect();
    let unknown: Vec<_> = found.difference(&expected).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "missing {missing:?}, unknown {unknown:?}");
}

#[test]
fn every_test_exists_and_runs_on_the_named_stores() {
    for (id, test, stores) in lines() {
        let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("{test} names its file"));
        assert!(name.starts_with(&format!("{}_", id.to_lowercase())), "{test} begins with {id}");
        let source = source(file);
        assert!([format!("fn {name}("), format!("fn {name}<")].iter().any(|name| source.contains(name)), "no {test}");
        let (on_stores, on_databases) = (listed(&source, "on_every_store"), listed(&source, "on_every_database"));
        let is_listed = match stores.as_str() {
            "all" => on_stores.contains(name),
            "databases" => on_databases.contains(name),
            _ => !on_stores.contains(name) && !on_databases.contains(name),
        };
        assert!(is_listed, "{test} does not run on: {stores}");
    }
}

#[test]
fn every_test_is_in_the_table() {
    let mut by_file: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (_, test, _) in lines() {
        let (file, name) = test.split_once("::").unwrap();
        by_file.entry(file.to_owned()).or_default().insert(name.to_owned());
    }
    for (file, tests) in by_file {
        let source = source(&file);
        for name in listed(&source, "on_every_store").union(&listed(&source, "on_every_database")) {
            assert!(tests.contains(name), "{file}::{name} is not in docs/conformance.md");
        }
    }
}
