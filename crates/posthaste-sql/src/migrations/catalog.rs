use std::collections::{BTreeSet, HashMap};

/// What a schema lacks, in words. Both lists have lines of a kind, a name and a form: `column channel.event_type text`.
/// `expected` is the catalog of a schema that was just migrated. It is a file, because a user without the right to create
/// tables could not make such a schema to compare with. Things that are not expected may be there: newer programs add them.
pub(crate) fn missing(expected: &str, found: &[String]) -> Vec<String> {
    let forms: HashMap<(&str, &str), &str> = found.iter().map(|line| parsed(line)).collect();
    let tables: BTreeSet<&str> = found.iter().filter_map(|line| table_of(line)).collect();
    let mut missing = Vec::new();
    for line in expected.lines() {
        let ((kind, name), form) = parsed(line);
        match (table_of(line), forms.get(&(kind, name))) {
            (Some(table), _) if !tables.contains(table) => {
                let all = format!("table {table} is missing");
                if !missing.contains(&all) {
                    missing.push(all);
                }
            }
            (_, None) => missing.push(format!("{kind} {name} is missing")),
            (_, Some(found)) if *found != form => {
                missing.push(format!("{kind} {name} is {found:?}, expected {form:?}"))
            }
            _ => {}
        }
    }
    missing
}

fn parsed(line: &str) -> ((&str, &str), &str) {
    let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
    // The arguments of a function belong to its name.
    let (name, form) = if kind == "function" { (rest, "") } else { rest.split_once(' ').unwrap_or((rest, "")) };
    ((kind, name), form)
}

/// The table of a line about a part of a table, whose name is `table.part`.
fn table_of(line: &str) -> Option<&str> {
    let ((kind, name), _) = parsed(line);
    (kind != "function").then(|| name.split_once('.').map_or(name, |(table, _)| table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_different_is_named_once() {
        let expected = "column a.x bigint not null\ncolumn a.y text\ncolumn b.z text\nfunction f(bigint, text)\n\
                        index a.a_x valid\nindex b.b_z valid\ntrigger a.t\n";
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        assert!(missing(expected, &lines(expected)).is_empty());
        let more = format!("{expected}column a.new text\nindex a.new valid\ncolumn other.x text\n");
        assert!(missing(expected, &lines(&more)).is_empty());
        let found = lines("column a.x integer\nindex a.a_x not valid\nfunction f(bigint)\n");
        assert_eq!(
            missing(expected, &found),
            [
                "column a.x is \"integer\", expected \"bigint not null\"",
                "column a.y is missing",
                "table b is missing",
                "function f(bigint, text) is missing",
                "index a.a_x is \"not valid\", expected \"valid\"",
                "trigger a.t is missing",
            ]
        );
    }
}
