use std::fmt;
use std::io::{self, Write};

use chrono::{DateTime, Utc};
use serde::Serialize;

/// How data is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

/// Rows under headings, each column as wide as its widest cell.
pub struct Table {
    headings: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Output {
    /// Prints all of `value` as JSON, or its most important fields as a table.
    pub fn print<T: Serialize>(self, value: &T, table: impl FnOnce(&T) -> Table) -> anyhow::Result<()> {
        match self {
            Self::Table => print(table(value)),
            Self::Json => print(format_args!("{}\n", serde_json::to_string_pretty(value)?)),
        }
    }
}

/// Data could not be written to stdout.
#[derive(Debug, thiserror::Error)]
#[error("the output cannot be written")]
pub struct PrintError(#[source] io::Error);

impl PrintError {
    /// True if the reader closed the pipe because it needs no more output, as `head` does.
    pub fn is_closed_pipe(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Writes data to stdout, unchanged.
pub fn print(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    Ok(write!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(PrintError)?)
}

/// Writes a message to stderr, so that stdout contains only data.
pub fn say(text: impl fmt::Display) {
    // A failed write to stderr cannot be reported.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

impl Table {
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self { headings: headings.map(str::to_owned).into(), rows: Vec::new() }
    }

    /// A name and a value on each line, without headings.
    pub fn of_fields<const N: usize>(fields: [(&str, String); N]) -> Self {
        let rows = fields.into_iter().filter(|(_, value)| !value.is_empty());
        Self { headings: Vec::new(), rows: rows.map(|(name, value)| vec![name.to_owned(), shown(&value)]).collect() }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| shown(cell)).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = || std::iter::once(&self.headings).chain(&self.rows).filter(|line| !line.is_empty());
        let columns = lines().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| lines().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
        let is_number = |column: usize| {
            let mut cells = self.rows.iter().filter_map(|row| row.get(column));
            !self.headings.is_empty() && !self.rows.is_empty() && cells.all(|cell| cell.parse::<f64>().is_ok())
        };
        let numbers: Vec<bool> = (0..columns).map(is_number).collect();
        for line in lines() {
            let mut text = String::new();
            for (column, cell) in line.iter().enumerate() {
                let width = widths[column];
                match numbers[column] {
                    true => text.push_str(&format!("{cell:>width$}  ")),
                    false => text.push_str(&format!("{cell:<width$}  ")),
                }
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// A time as tables show it, without fractions of a second.
pub fn moment(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// The first characters of a text, at most `longest`.
pub fn shortened(text: &str, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some(_) => text.chars().take(longest.saturating_sub(1)).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

/// Replaces control characters: a text from a subscriber must not control the terminal.
fn shown(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closed_pipe_is_not_an_error() {
        assert!(PrintError(io::ErrorKind::BrokenPipe.into()).is_closed_pipe());
        assert!(!PrintError(io::ErrorKind::StorageFull.into()).is_closed_pipe());
    }

    #[test]
    fn columns_are_aligned_and_numbers_are_right_aligned() {
        let mut table = Table::new(["NAME", "COUNT"]);
        table.row(["a".to_owned(), "7".to_owned()]);
        table.row(["longer".to_owned(), "1000".to_owned()]);
        assert_eq!(table.to_string(), "NAME    COUNT\na           7\nlonger   1000\n");
    }

    #[test]
    fn fields_without_a_value_are_left_out() {
        let table = Table::of_fields([("id", "1".to_owned()), ("note", String::new()), ("name", "x".to_owned())]);
        assert_eq!(table.to_string(), "id    1\nname  x\n");
    }

    #[test]
    fn a_table_prints_no_control_characters() {
        let mut table = Table::new(["ERROR"]);
        table.row(["\u{1b}[2Jgone\nnext".to_owned()]);
        assert_eq!(table.to_string(), "ERROR\n [2Jgone next\n");
    }

    #[test]
    fn long_texts_are_shortened_by_characters_not_bytes() {
        assert_eq!(shortened("grün", 4), "grün");
        assert_eq!(shortened("grüner", 4), "grü…");
    }
}
