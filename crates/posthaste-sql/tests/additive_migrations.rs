//! Migrations are additive, so that the programs of the previous release work with the schema of the next one, and a large
//! table in use is neither rewritten nor locked for long. A statement that only makes sense later, such as the removal of a
//! column that no program reads any more, gets a migration of its own that is compatible with newer programs only, and an
//! entry in [`CONTRACTING`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Migrations that are not additive, and therefore compatible only with programs that know this: none yet. Each is a path
/// such as `postgres/hub/0009_remove_x.up.sql`.
const CONTRACTING: &[&str] = &[];

/// The statements of a migration without comments, in upper case, with single spaces.
fn statements(sql: &str) -> Vec<String> {
    let code: Vec<&str> = sql.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
    let (mut statements, mut statement, mut in_body) = (Vec::new(), String::new(), false);
    for word in code.join("\n").split_whitespace() {
        let word = word.to_uppercase();
        // The body of a function is between $$ and $$, that of a trigger on SQLite between BEGIN and END.
        in_body = match word.trim_end_matches(';') {
            "$$" => !in_body,
            "BEGIN" => true,
            "END" if !statement.contains("$$") => false,
            _ => in_body,
        };
        statement.push_str(&word);
        match word.ends_with(';') && !in_body {
            true => statements.push(std::mem::take(&mut statement)),
            false => statement.push(' '),
        }
    }
    assert!(statement.trim().is_empty(), "a statement does not end: {statement}");
    statements
}

/// The word after `before`, which is the name of a table.
fn table_after(statement: &str, before: &str) -> Option<String> {
    let (_, rest) = statement.split_once(before)?;
    let name = rest.trim_start().trim_start_matches("IF NOT EXISTS ").split([' ', '(']).next()?;
    Some(name.trim_matches('"').to_owned())
}

/// Why a migration is not additive.
fn problems(sql: &str, is_postgres: bool) -> Vec<String> {
    let statements = statements(sql);
    let made: BTreeSet<String> = statements
        .iter()
        .filter(|statement| statement.starts_with("CREATE TABLE "))
        .filter_map(|statement| table_after(statement, "CREATE TABLE "))
        .collect();
    let is_made = |table: Option<String>| table.is_some_and(|table| made.contains(&table));
    let problem = |statement: &String| {
        if statement.starts_with("CREATE TABLE ") || statement.starts_with("CREATE FUNCTION ") {
            return None;
        }
        if statement.starts_with("CREATE TRIGGER ") || statement.starts_with("INSERT INTO ") {
            let table = table_after(statement, " ON ").filter(|_| statement.starts_with("CREATE TRIGGER "));
            let table = table.or_else(|| table_after(statement, "INSERT INTO "));
            return (!is_made(table)).then_some("changes what older programs find in a table");
        }
        if statement.contains("INDEX ") && statement.starts_with("CREATE ") {
            return match is_made(table_after(statement, " ON ")) {
                true => None,
                false if statement.starts_with("CREATE UNIQUE ") => Some("refuses rows that older programs may write"),
                false if is_postgres && !statement.starts_with("CREATE INDEX CONCURRENTLY IF NOT EXISTS ") => {
                    Some("locks the table: CREATE INDEX CONCURRENTLY IF NOT EXISTS in a migration of its own")
                }
                false if is_postgres && (statements.len() > 1 || !sql.starts_with("-- no-transaction")) => {
                    Some("cannot run in a transaction: one statement, after the line `-- no-transaction`")
                }
                false => None,
            };
        }
        if statement.starts_with("ALTER TABLE ") && is_made(table_after(statement, "ALTER TABLE ")) {
            return None;
        }
        let Some((_, column)) = statement.split_once(" ADD COLUMN ").filter(|_| statement.starts_with("ALTER TABLE "))
        else {
            return Some("is not additive");
        };
        let has = |word: &str| column.contains(word);
        if column.contains(" DROP ") || column.contains(" ALTER ") || column.contains(" RENAME ") {
            Some("is not additive")
        } else if has(" NOT NULL") && !has(" DEFAULT ") {
            Some("refuses the rows of older programs: the column needs a default")
        } else if has(" UNIQUE") || has(" PRIMARY ") || has(" CHECK") || has(" REFERENCES ") || has("GENERATED ") {
            Some("reads or rewrites the whole table")
        } else if has(" DEFAULT ") && column.split_once(" DEFAULT ").is_some_and(|(_, default)| default.contains('(')) {
            Some("rewrites the whole table: the default must be constant")
        } else {
            None
        }
    };
    let described = |statement: &String| Some(format!("{}: {statement}", problem(statement)?));
    statements.iter().filter_map(described).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect();
    files.sort();
    files
}

#[test]
fn every_migration_is_additive() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let mut checked = 0;
    for file in files(&folder).into_iter().filter(|file| file.to_string_lossy().ends_with(".up.sql")) {
        let name = file.strip_prefix(&folder).unwrap().to_string_lossy().into_owned();
        let sql = std::fs::read_to_string(&file).unwrap();
        // The outbox of a hub is in the folder of the outbox. Ordered mode is chosen before the table is in use.
        if sql.contains("{up of ") || name.contains("/ordered/") || CONTRACTING.contains(&name.as_str()) {
            continue;
        }
        let problems = problems(&sql, name.starts_with("postgres/"));
        assert!(problems.is_empty(), "{name}: {problems:#?}");
        checked += 1;
    }
    assert!(checked >= 15, "{checked} migrations were found");
}

#[test]
fn statements_that_are_not_additive_are_found() {
    let both = [
        "DROP TABLE a;",
        "ALTER TABLE a DROP COLUMN b;",
        "ALTER TABLE a RENAME TO b;",
        "ALTER TABLE a RENAME COLUMN b TO c;",
        "ALTER TABLE a ALTER COLUMN b TYPE bigint;",
        "ALTER TABLE a ADD COLUMN b bigint NOT NULL;",
        "ALTER TABLE a ADD COLUMN b bigint, DROP COLUMN c;",
        "ALTER TABLE a ADD COLUMN b bigint CHECK (b > 0);",
        "ALTER TABLE a ADD COLUMN b timestamptz NOT NULL DEFAULT clock_timestamp();",
        "ALTER TABLE a ADD CONSTRAINT c UNIQUE (b);",
        "CREATE UNIQUE INDEX i ON a (b);",
        "CREATE OR REPLACE FUNCTION f() RETURNS void LANGUAGE sql AS $$ SELECT 1; $$;",
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END;",
        "UPDATE a SET b = 1;",
        "DELETE FROM a;",
        "INSERT INTO a (b) VALUES (1);",
    ];
    for sql in both {
        assert_eq!((problems(sql, true).len(), problems(sql, false).len()), (1, 1), "{sql}");
    }
    for sql in ["CREATE INDEX i ON a (b);", "CREATE INDEX CONCURRENTLY IF NOT EXISTS i ON a (b);"] {
        assert_eq!((problems(sql, true).len(), problems(sql, false).len()), (1, 0), "{sql}");
    }
    let additive = [
        "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON a (b);",
        "ALTER TABLE a ADD COLUMN b bigint NOT NULL DEFAULT 0; ALTER TABLE a ADD COLUMN c text; -- DROP TABLE a;",
        "CREATE TABLE a (b bigint NOT NULL); CREATE UNIQUE INDEX i ON a (b); ALTER TABLE a ALTER COLUMN b TYPE integer;
         INSERT INTO a (b) VALUES (1); CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; UPDATE c SET d = 1; END;",
        "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS $$ BEGIN DELETE FROM a; IF b THEN c; END IF; END $$;",
    ];
    for sql in additive {
        assert!(problems(sql, true).is_empty(), "{sql}: {:?}", problems(sql, true));
    }
}
