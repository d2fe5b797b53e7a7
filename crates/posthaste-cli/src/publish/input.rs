//! Reads events from a file that contains one event, a JSON array of events, or one event on each line.

use std::io::{self, BufRead};

use posthaste_api::{EventIn, InputError, read_json};
use serde_json::value::RawValue;

/// A part of the input that should be an event.
#[derive(Debug, PartialEq)]
pub struct Entry {
    /// The line on which the entry starts, from 1.
    pub line: u64,
    /// The offset in the input at which the entry ends, in bytes.
    pub end: u64,
    /// The text of the event, byte for byte, or the reason why it is invalid.
    pub event: Result<String, String>,
}

/// Passes every entry to `take`, until `take` returns false. Reads line by line, because the input may be endless.
pub fn read(reader: &mut dyn BufRead, take: &mut dyn FnMut(Entry) -> bool) -> io::Result<()> {
    let mut lines = Lines { reader, number: 0, end: 0 };
    let Some(first) = lines.next_non_blank()? else { return Ok(()) };
    // A first line that is an incomplete JSON value, or an array, starts a document of several lines.
    if starts_document(&first.bytes) {
        let (line, mut document) = (first.number, first.bytes);
        let start = first.start;
        lines.end = start + document.len() as u64 + lines.reader.read_to_end(&mut document)? as u64;
        if !read_document(&document, line, lines.end, take) {
            // Not one JSON document: read it line by line. The first line is an error.
            let mut lines = Lines { reader: &mut document.as_slice(), number: line - 1, end: start };
            read_lines(&mut lines, take)?;
        }
        return Ok(());
    }
    if take(first.entry()) { read_lines(&mut lines, take) } else { Ok(()) }
}

fn starts_document(line: &[u8]) -> bool {
    let is_array = line.trim_ascii_start().starts_with(b"[");
    is_array || serde_json::from_slice::<&RawValue>(line).is_err_and(|error| error.is_eof())
}

fn read_lines(lines: &mut Lines<'_>, take: &mut dyn FnMut(Entry) -> bool) -> io::Result<()> {
    while let Some(line) = lines.next_non_blank()? {
        if !take(line.entry()) {
            break;
        }
    }
    Ok(())
}

/// Reads one JSON value that may span several lines. If the text is not one, returns false without calling `take`.
fn read_document(document: &[u8], first_line: u64, end: u64, take: &mut dyn FnMut(Entry) -> bool) -> bool {
    let Ok(text) = std::str::from_utf8(document) else { return false };
    if let Ok(events) = serde_json::from_str::<Vec<&RawValue>>(text) {
        let (mut line, mut seen) = (first_line, 0);
        for event in events {
            let event = event.get();
            // Count the line breaks before the event to get its line.
            let place = event.as_ptr().addr() - text.as_ptr().addr();
            line += text.as_bytes()[seen..place].iter().filter(|byte| **byte == b'\n').count() as u64;
            seen = place;
            let read = end - (text.len() - place - event.len()) as u64;
            if !take(Entry { line, end: read, event: checked(event) }) {
                break;
            }
        }
        return true;
    }
    let event = serde_json::from_str::<&RawValue>(text).ok();
    let starts_array = text.trim_ascii_start().starts_with('[');
    match event {
        Some(event) => take(Entry { line: first_line, end, event: checked(event.get()) }),
        None if starts_array => {
            let error = serde_json::from_str::<Vec<&RawValue>>(text).err();
            let (line, why) = error.map(|error| (error.line() as u64, without_position(&error))).unwrap_or_default();
            let message = format!("is not JSON, so no event of the array is sent: {why}");
            take(Entry { line: first_line + line.saturating_sub(1), end, event: Err(message) })
        }
        None => return false,
    };
    true
}

/// Returns the text if it is a valid event. The server may still refuse it for reasons that only the server can check.
fn checked(text: &str) -> Result<String, String> {
    read_json::<EventIn>(text.as_bytes()).map_err(|error| match error {
        InputError::NotAnObject(_) => "is not an event: write one JSON object for each".to_owned(),
        InputError::Malformed(_) => match serde_json::from_str::<&RawValue>(text) {
            Err(error) => format!("is not JSON: {} (column {})", without_position(&error), error.column()),
            Ok(_) => error.to_string(),
        },
        error => error.to_string(),
    })?;
    Ok(text.to_owned())
}

fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).map(str::to_owned).unwrap_or(text)
}

struct Lines<'a> {
    reader: &'a mut dyn BufRead,
    number: u64,
    end: u64,
}

struct Line {
    number: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl Lines<'_> {
    /// The next line that is not blank.
    fn next_non_blank(&mut self) -> io::Result<Option<Line>> {
        loop {
            let mut bytes = Vec::new();
            let length = self.reader.read_until(b'\n', &mut bytes)?;
            if length == 0 {
                return Ok(None);
            }
            let start = self.end;
            self.number += 1;
            self.end += length as u64;
            if !bytes.trim_ascii().is_empty() {
                return Ok(Some(Line { number: self.number, start, bytes }));
            }
        }
    }
}

impl Line {
    fn entry(&self) -> Entry {
        let event = match std::str::from_utf8(&self.bytes) {
            Ok(text) => checked(text.trim()),
            Err(_) => Err("is not UTF-8".to_owned()),
        };
        Entry { line: self.number, end: self.start + self.bytes.len() as u64, event }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: &str = r#"{"eventType":"a","sourceService":"s","payload":{ "x" : 1.0 }}"#;

    fn entries(text: &[u8]) -> Vec<Entry> {
        let mut found = Vec::new();
        read(&mut &*text, &mut |entry| {
            found.push(entry);
            true
        })
        .unwrap();
        found
    }

    fn lines_and_texts(text: &str) -> Vec<(u64, Result<String, String>)> {
        entries(text.as_bytes()).into_iter().map(|entry| (entry.line, entry.event)).collect()
    }

    #[test]
    fn empty_input_has_no_entries() {
        assert_eq!(entries(b""), []);
        assert_eq!(entries(b"\n \n"), []);
        assert_eq!(entries(b"[]"), []);
    }

    #[test]
    fn one_event_on_each_line_keeps_its_bytes() {
        let text = format!("{EVENT}\n\n  {EVENT} \r\n{EVENT}");
        let expected = [1, 3, 4].map(|line| (line, Ok(EVENT.to_owned())));
        assert_eq!(lines_and_texts(&text), expected);
        let last = entries(text.as_bytes()).pop().unwrap();
        assert_eq!(last.end, text.len() as u64);
    }

    #[test]
    fn one_event_may_take_several_lines() {
        let pretty = EVENT.replace(',', ",\n").replace('{', "{\n");
        assert_eq!(lines_and_texts(&format!("\n{pretty}\n")), [(2, Ok(pretty.clone()))]);
    }

    #[test]
    fn the_events_of_an_array_keep_their_bytes_and_lines() {
        let text = format!("[\n{EVENT},\n\n{EVENT},{{}}]\n");
        let found = lines_and_texts(&text);
        assert_eq!(found[..2], [(2, Ok(EVENT.to_owned())), (4, Ok(EVENT.to_owned()))]);
        let (line, error) = &found[2];
        assert!(*line == 4 && error.as_ref().unwrap_err().contains("eventType: is missing"), "{error:?}");
        assert_eq!(entries(text.as_bytes())[2].end, text.len() as u64 - 2);
    }

    #[test]
    fn bad_lines_are_reported_and_the_others_are_read() {
        let text = format!("{EVENT}\nnot json\n{{\"eventTyp\":\"a\"}}\n{EVENT}\n");
        let found = lines_and_texts(&text);
        assert!(found[0].1.is_ok() && found[3].1.is_ok() && found.len() == 4);
        assert!(found[1].1.as_ref().unwrap_err().starts_with("is not JSON: "), "{found:?}");
        let message = found[2].1.as_ref().unwrap_err();
        assert!(
            message.starts_with("eventTyp: unknown field \"eventTyp\"; did you mean \"eventType\"?; "),
            "{message}"
        );
        assert!(message.contains("sourceService: is missing"), "every violation is reported: {message}");
    }

    #[test]
    fn an_incomplete_first_line_is_a_bad_line() {
        let found = lines_and_texts(&format!("\n{{\"eventType\":\n{EVENT}\n"));
        assert_eq!((found[0].0, found[1].0, found.len()), (2, 3, 2));
        assert!(found[0].1.is_err() && found[1].1.is_ok());
    }

    #[test]
    fn a_broken_array_is_one_error_with_its_line() {
        let found = lines_and_texts(&format!("[{EVENT},\n{EVENT}\n{EVENT}]"));
        assert_eq!((found.len(), found[0].0), (1, 3));
        assert!(found[0].1.as_ref().unwrap_err().starts_with("is not JSON, so no event"), "{found:?}");
    }

    #[test]
    fn a_line_that_is_not_utf8_is_reported() {
        let mut text = EVENT.as_bytes().to_vec();
        text.extend_from_slice(b"\n\xff\xfe\n");
        assert_eq!(entries(&text)[1].event, Err("is not UTF-8".to_owned()));
    }

    #[test]
    fn reading_ends_when_take_returns_false() {
        let mut count = 0;
        read(&mut format!("{EVENT}\n{EVENT}\n").as_bytes(), &mut |_| {
            count += 1;
            false
        })
        .unwrap();
        assert_eq!(count, 1);
    }
}
