//! Which changes of a Protobuf schema keep its readers and writers working, by the rules of Confluent's registry.
//!
//! One rule is stricter: a number that becomes a list, or the other way round, is always a finding.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto};

use crate::schema::ParsedSchema;
use named_types::{Kind, ScalarKind, TypeRef, Types};

mod named_types;

/// How a new version of a schema must relate to the versions before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// Anything goes.
    None,
    /// The new version reads what the last one wrote.
    #[default]
    Backward,
    /// The new version reads what every earlier one wrote.
    BackwardTransitive,
    /// The last version reads what the new one writes.
    Forward,
    /// Every earlier version reads what the new one writes.
    ForwardTransitive,
    /// Backward and forward.
    Full,
    /// Backward and forward, for every earlier version.
    FullTransitive,
}

/// The text is no [`Level`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a compatibility level: use NONE, BACKWARD, BACKWARD_TRANSITIVE, FORWARD, FORWARD_TRANSITIVE, FULL or \
     FULL_TRANSITIVE"
)]
pub struct UnknownLevel(pub String);

impl Level {
    /// All levels.
    pub const ALL: [Self; 7] = [
        Self::None,
        Self::Backward,
        Self::BackwardTransitive,
        Self::Forward,
        Self::ForwardTransitive,
        Self::Full,
        Self::FullTransitive,
    ];

    /// The name in Confluent's REST API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "NONE",
            Self::Backward => "BACKWARD",
            Self::BackwardTransitive => "BACKWARD_TRANSITIVE",
            Self::Forward => "FORWARD",
            Self::ForwardTransitive => "FORWARD_TRANSITIVE",
            Self::Full => "FULL",
            Self::FullTransitive => "FULL_TRANSITIVE",
        }
    }

    fn is_backward(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardTransitive | Self::Full | Self::FullTransitive)
    }

    fn is_forward(self) -> bool {
        matches!(self, Self::Forward | Self::ForwardTransitive | Self::Full | Self::FullTransitive)
    }

    /// True if every earlier version counts, and not only the last one.
    pub fn is_transitive(self) -> bool {
        matches!(self, Self::BackwardTransitive | Self::ForwardTransitive | Self::FullTransitive)
    }

    /// What keeps `new` from following `earlier`, which are the versions that count, oldest first. Empty if nothing
    /// does.
    pub fn check<'a>(
        self,
        new: &ParsedSchema,
        earlier: impl DoubleEndedIterator<Item = &'a ParsedSchema>,
    ) -> Vec<Finding> {
        let mut findings = Vec::new();
        let count = if self.is_transitive() { usize::MAX } else { 1 };
        for earlier in earlier.rev().take(count) {
            if self.is_backward() {
                findings.extend(findings_of_reader(new, earlier));
            }
            if self.is_forward() {
                findings.extend(findings_of_reader(earlier, new));
            }
        }
        findings
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<Self, UnknownLevel> {
        let found = Self::ALL.into_iter().find(|level| level.as_str().eq_ignore_ascii_case(text));
        found.ok_or_else(|| UnknownLevel(text.chars().take(64).collect()))
    }
}

/// The rules of compatibility, by the names that Confluent gave them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// PACKAGE_CHANGED
    PackageChanged,
    /// MESSAGE_REMOVED
    MessageRemoved,
    /// FIELD_KIND_CHANGED
    FieldKindChanged,
    /// FIELD_SCALAR_KIND_CHANGED
    FieldScalarKindChanged,
    /// FIELD_NAMED_TYPE_CHANGED
    FieldNamedTypeChanged,
    /// FIELD_NUMERIC_LABEL_CHANGED
    FieldNumericLabelChanged,
    /// REQUIRED_FIELD_ADDED
    RequiredFieldAdded,
    /// REQUIRED_FIELD_REMOVED
    RequiredFieldRemoved,
    /// ONEOF_FIELD_REMOVED
    OneofFieldRemoved,
    /// MULTIPLE_FIELDS_MOVED_TO_ONEOF
    MultipleFieldsMovedToOneof,
    /// FIELD_MOVED_TO_EXISTING_ONEOF
    FieldMovedToExistingOneof,
}

impl Rule {
    /// Its name in Confluent's REST API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PackageChanged => "PACKAGE_CHANGED",
            Self::MessageRemoved => "MESSAGE_REMOVED",
            Self::FieldKindChanged => "FIELD_KIND_CHANGED",
            Self::FieldScalarKindChanged => "FIELD_SCALAR_KIND_CHANGED",
            Self::FieldNamedTypeChanged => "FIELD_NAMED_TYPE_CHANGED",
            Self::FieldNumericLabelChanged => "FIELD_NUMERIC_LABEL_CHANGED",
            Self::RequiredFieldAdded => "REQUIRED_FIELD_ADDED",
            Self::RequiredFieldRemoved => "REQUIRED_FIELD_REMOVED",
            Self::OneofFieldRemoved => "ONEOF_FIELD_REMOVED",
            Self::MultipleFieldsMovedToOneof => "MULTIPLE_FIELDS_MOVED_TO_ONEOF",
            Self::FieldMovedToExistingOneof => "FIELD_MOVED_TO_EXISTING_ONEOF",
        }
    }
}

/// One reason why a reader with one schema cannot read what a writer with another schema writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule that is broken.
    pub rule: Rule,
    /// A sentence that names the message and the field.
    pub explanation: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule.as_str(), self.explanation)
    }
}

/// What keeps a program with the schema `reader` from reading what a program with the schema `writer` writes.
pub fn findings_of_reader(reader: &ParsedSchema, writer: &ParsedSchema) -> Vec<Finding> {
    let mut comparison = Comparison {
        reader: Types::of(reader),
        writer: Types::of(writer),
        visited: BTreeSet::new(),
        findings: Vec::new(),
    };
    let (reader, writer) = (reader.file(), writer.file());
    if reader.package() != writer.package() {
        comparison
            .add(Rule::PackageChanged, format!("the package is {:?} and was {:?}", reader.package(), writer.package()));
    }
    comparison.messages("", &reader.message_type, &writer.message_type);
    comparison.findings
}

struct Comparison<'a> {
    reader: Types<'a>,
    writer: Types<'a>,
    /// The pairs of full names that are compared already. Messages may contain each other.
    visited: BTreeSet<(String, String)>,
    findings: Vec<Finding>,
}

impl<'a> Comparison<'a> {
    fn add(&mut self, rule: Rule, explanation: String) {
        self.findings.push(Finding { rule, explanation });
    }

    /// Compares the messages of two files, or those that are nested in two messages. `scope` is the name around them.
    fn messages(&mut self, scope: &str, reader: &'a [DescriptorProto], writer: &'a [DescriptorProto]) {
        for written in writer.iter().filter(|message| !is_map_entry(message)) {
            let name = join(scope, written.name());
            match reader.iter().find(|message| message.name() == written.name() && !is_map_entry(message)) {
                Some(read) => self.message(&name, read, written),
                None => self.add(Rule::MessageRemoved, format!("message {name} is missing")),
            }
        }
    }

    /// `name` is the name without the package, which may differ.
    fn message(&mut self, name: &str, reader: &'a DescriptorProto, writer: &'a DescriptorProto) {
        let pair = (self.reader.full_name(reader), self.writer.full_name(writer));
        if !self.visited.insert(pair) {
            return;
        }
        self.fields(name, reader, writer);
        self.oneofs(name, reader, writer);
        self.messages(name, &reader.nested_type, &writer.nested_type);
    }

    /// Fields are the same if they have the same number. Their names do not matter.
    fn fields(&mut self, name: &str, reader: &'a DescriptorProto, writer: &'a DescriptorProto) {
        let (read, written) = (by_number(reader), by_number(writer));
        for (number, field) in &written {
            match read.get(number) {
                Some(read) => self.field(name, read, field),
                None if field.label() == Label::Required => {
                    let explanation = format!("required field {name}.{} ({number}) is missing", field.name());
                    self.add(Rule::RequiredFieldRemoved, explanation);
                }
                None => {}
            }
        }
        for (number, field) in read.iter().filter(|(number, _)| !written.contains_key(*number)) {
            if field.label() == Label::Required {
                let explanation = format!("field {name}.{} ({number}) is new and required", field.name());
                self.add(Rule::RequiredFieldAdded, explanation);
            }
        }
    }

    fn field(&mut self, message: &str, reader: &'a FieldDescriptorProto, writer: &'a FieldDescriptorProto) {
        let place = format!("field {message}.{} ({})", reader.name(), reader.number());
        self.types(&place, self.reader.of_field(reader), self.writer.of_field(writer));
        let is_numeric = self.reader.of_field(reader).scalar().is_some_and(|kind| kind != ScalarKind::StringOrBytes);
        // Numbers in a list are packed, so a reader of one number finds none. The last text of a list can be read.
        if is_numeric && reader.label() != writer.label() && self.same_scalar(reader, writer) {
            let (now, before) = (label(reader), label(writer));
            self.add(Rule::FieldNumericLabelChanged, format!("{place} is {now} and was {before}"));
        }
    }

    fn same_scalar(&self, reader: &'a FieldDescriptorProto, writer: &'a FieldDescriptorProto) -> bool {
        self.reader.of_field(reader).scalar() == self.writer.of_field(writer).scalar()
    }

    fn types(&mut self, place: &str, reader: TypeRef<'a>, writer: TypeRef<'a>) {
        match (&reader.kind, &writer.kind) {
            (Kind::Scalar(read), Kind::Scalar(written)) if read != written => {
                let explanation = format!("{place} has type {} and had {}", reader.name, writer.name);
                self.add(Rule::FieldScalarKindChanged, explanation);
            }
            (Kind::Scalar(_), Kind::Scalar(_)) => {}
            (Kind::Map(read), Kind::Map(written)) => {
                for (part, read, written) in [("key", read.0, written.0), ("value", read.1, written.1)] {
                    let (read, written) = (self.reader.of_field(read), self.writer.of_field(written));
                    self.types(&format!("the {part} of {place}"), read, written);
                }
            }
            (Kind::Message(read), Kind::Message(written)) => self.named_types(place, &reader, &writer, read, written),
            _ => {
                let explanation = format!("{place} has type {} and had {}", reader.name, writer.name);
                self.add(Rule::FieldKindChanged, explanation);
            }
        }
    }

    fn named_types(
        &mut self,
        place: &str,
        reader: &TypeRef<'a>,
        writer: &TypeRef<'a>,
        read: &Option<&'a DescriptorProto>,
        written: &Option<&'a DescriptorProto>,
    ) {
        if reader.local_name != writer.local_name {
            let explanation = format!("{place} has type {} and had {}", reader.name, writer.name);
            self.add(Rule::FieldNamedTypeChanged, explanation);
        } else if let (Some(read), Some(written)) = (read, written) {
            // The type may be imported, from other schemas in the two versions.
            self.message(reader.local_name, read, written);
        }
    }

    fn oneofs(&mut self, name: &str, reader: &'a DescriptorProto, writer: &'a DescriptorProto) {
        let (read, written) = (by_number(reader), by_number(writer));
        for (index, oneof) in oneofs(reader) {
            let members = reader.field.iter().filter(|field| oneof_of(field) == Some(index));
            let before = members.filter_map(|field| written.get(&field.number()));
            let (in_oneof, alone) =
                before.partition::<Vec<&&FieldDescriptorProto>, _>(|field| oneof_of(field).is_some());
            let place = format!("oneof {name}.{oneof}");
            if alone.len() > 1 {
                let explanation = format!("{place} has {} fields that could be set together", alone.len());
                self.add(Rule::MultipleFieldsMovedToOneof, explanation);
            } else if alone.len() == 1 && !in_oneof.is_empty() {
                let explanation = format!("{place} has field {}, which was outside of a oneof", alone[0].name());
                self.add(Rule::FieldMovedToExistingOneof, explanation);
            }
        }
        for (index, oneof) in oneofs(writer) {
            if !oneofs(reader).any(|(_, name)| name == oneof) {
                continue;
            }
            let members = writer.field.iter().filter(|field| oneof_of(field) == Some(index));
            for field in members.filter(|field| !read.contains_key(&field.number())) {
                let explanation = format!("oneof {name}.{oneof} lacks field {} ({})", field.name(), field.number());
                self.add(Rule::OneofFieldRemoved, explanation);
            }
        }
    }
}

/// The name of something in a scope; the scope may be empty.
fn join(scope: &str, name: &str) -> String {
    match scope {
        "" => name.to_owned(),
        scope => format!("{scope}.{name}"),
    }
}

fn is_map_entry(message: &DescriptorProto) -> bool {
    message.options.as_ref().is_some_and(|options| options.map_entry())
}

fn by_number(message: &DescriptorProto) -> BTreeMap<i32, &FieldDescriptorProto> {
    message.field.iter().map(|field| (field.number(), field)).collect()
}

/// The oneof that a field is in. A field with the word `optional` is in one that only the compiler knows.
fn oneof_of(field: &FieldDescriptorProto) -> Option<i32> {
    field.oneof_index.filter(|_| !field.proto3_optional())
}

/// The oneofs that the author wrote, with their indexes.
fn oneofs(message: &DescriptorProto) -> impl Iterator<Item = (i32, &str)> {
    let named = message.oneof_decl.iter().enumerate().map(|(index, oneof)| (index as i32, oneof.name()));
    named.filter(|(index, _)| message.field.iter().any(|field| oneof_of(field) == Some(*index)))
}

fn label(field: &FieldDescriptorProto) -> &'static str {
    match field.label() {
        Label::Optional => "a single value",
        Label::Required => "required",
        Label::Repeated => "repeated",
    }
}

fn scalar_kind(kind: Type) -> Option<ScalarKind> {
    Some(match kind {
        Type::Int32 | Type::Int64 | Type::Uint32 | Type::Uint64 | Type::Bool | Type::Enum => ScalarKind::Number,
        Type::Sint32 | Type::Sint64 => ScalarKind::SignedNumber,
        Type::String | Type::Bytes => ScalarKind::StringOrBytes,
        Type::Fixed32 | Type::Sfixed32 => ScalarKind::Fixed32,
        Type::Fixed64 | Type::Sfixed64 => ScalarKind::Fixed64,
        Type::Float => ScalarKind::Float,
        Type::Double => ScalarKind::Double,
        Type::Message | Type::Group => return None,
    })
}

#[cfg(test)]
mod tests;
