use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use posthaste_core::hub_store::SchemaText;
use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorProto};
use protox::Compiler;
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};
use ring::digest;

use crate::framing::{Indexes, MAX_INDEXES};

/// The longest text of a schema, in bytes.
pub const MAX_TEXT: usize = 1024 * 1024;
/// How many schemas a schema may import, directly and through others.
pub const MAX_REFERENCES: usize = 64;
/// How deeply imports may be nested.
pub const MAX_IMPORT_DEPTH: usize = 16;
/// How deeply braces and brackets may be nested. The parser needs stack for each level.
const MAX_NESTING: usize = 64;
/// The name of the file that has the text. The text itself does not say it.
const FILE_NAME: &str = "schema.proto";

/// The texts of all schemas that a schema imports, directly and through others, by the name in the `import` statement.
pub type Imports = BTreeMap<String, String>;

/// A Protobuf schema that was read and checked.
#[derive(Debug)]
pub struct ParsedSchema {
    text: SchemaText,
    file: FileDescriptorProto,
    /// The imported files, except Google's.
    imports: Vec<FileDescriptorProto>,
    /// The full name of each message, by its position.
    names: BTreeMap<Vec<i32>, String>,
    positions: BTreeMap<String, Indexes>,
    digest: Bytes,
}

/// Why a text is not a usable schema.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// The text is longer than [`MAX_TEXT`].
    #[error("the schema has {length} bytes, more than {MAX_TEXT}")]
    TooLong {
        /// The length of the text.
        length: usize,
    },
    /// There are more references than [`MAX_REFERENCES`].
    #[error("the schema has {count} references, more than {MAX_REFERENCES}")]
    TooManyReferences {
        /// The number of references.
        count: usize,
    },
    /// Imports are nested more deeply than [`MAX_IMPORT_DEPTH`].
    #[error("the references of the schema are nested more than {MAX_IMPORT_DEPTH} deep")]
    DeepReferences,
    /// Messages or brackets are nested too deeply.
    #[error("the schema is nested more than {MAX_NESTING} deep")]
    Nested,
    /// The text is not Protobuf.
    #[error("the schema is not valid Protobuf: {problem}")]
    Invalid {
        /// What is wrong.
        problem: String,
    },
    /// A schema without a message describes nothing.
    #[error("the schema has no message")]
    NoMessage,
}

impl ParsedSchema {
    /// Reads a schema. The text is a `.proto` file, or the base64 of a serialized file descriptor, as some clients
    /// register it. Google's well-known types need no import of the caller.
    pub fn parse(text: SchemaText, imports: &Imports) -> Result<Self, SchemaError> {
        if text.references.len().max(imports.len()) > MAX_REFERENCES {
            return Err(SchemaError::TooManyReferences { count: text.references.len().max(imports.len()) });
        }
        let length = imports.values().fold(text.text.len(), |sum, import| sum.saturating_add(import.len()));
        if text.text.len() > MAX_TEXT || length > MAX_TEXT * 4 {
            return Err(SchemaError::TooLong { length });
        }
        let mut files = BTreeMap::from([(FILE_NAME.to_owned(), read(FILE_NAME, &text.text)?)]);
        for (name, import) in imports {
            files.insert(name.clone(), read(name, import)?);
        }
        let mut resolver = ChainFileResolver::new();
        resolver.add(GivenFiles(files));
        resolver.add(GoogleFileResolver::new());
        let mut compiler = Compiler::with_file_resolver(resolver);
        let compiled = compiler.include_imports(true).open_file(FILE_NAME).map_err(invalid)?.file_descriptor_set();
        let mut imports: Vec<_> =
            compiled.file.into_iter().filter(|file| !file.name().starts_with("google/protobuf/")).collect();
        // The compiler puts every file after those that it imports.
        let Some(file) = imports.pop().filter(|file| !file.message_type.is_empty()) else {
            return Err(SchemaError::NoMessage);
        };
        let mut names = BTreeMap::new();
        for (index, message) in file.message_type.iter().enumerate() {
            collect_names(message, file.package(), &mut vec![index as i32], &mut names);
        }
        let positions = names.iter().filter_map(|(path, name)| Some((name.clone(), Indexes::new(path)?))).collect();
        let digest = digest_of(&file, &text);
        Ok(Self { text, file, imports, names, positions, digest })
    }

    /// The schema as its author wrote it.
    pub fn text(&self) -> &SchemaText {
        &self.text
    }

    /// The schema as Protobuf describes itself.
    pub fn file(&self) -> &FileDescriptorProto {
        &self.file
    }

    /// The file of the schema, then the files that it imports. Google's are left out.
    pub fn files(&self) -> impl Iterator<Item = &FileDescriptorProto> {
        std::iter::once(&self.file).chain(&self.imports)
    }

    /// The base64 of the serialized file descriptor.
    pub fn serialized(&self) -> String {
        STANDARD.encode(self.file.encode_to_vec())
    }

    /// Identifies the schema: comments and white space do not change it, and neither does the form of the text.
    pub fn digest(&self) -> &Bytes {
        &self.digest
    }

    /// The full name of the message at this position.
    pub fn message_name(&self, indexes: &[i32]) -> Option<&str> {
        self.names.get(indexes).map(String::as_str)
    }

    /// The position of the message with this full name.
    pub fn position(&self, message_name: &str) -> Option<&Indexes> {
        self.positions.get(message_name)
    }
}

/// The files of one schema, by name.
struct GivenFiles(BTreeMap<String, File>);

impl FileResolver for GivenFiles {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        self.0.get(name).cloned().ok_or_else(|| protox::Error::file_not_found(name))
    }
}

fn read(name: &str, text: &str) -> Result<File, SchemaError> {
    if nesting(text) > MAX_NESTING {
        return Err(SchemaError::Nested);
    }
    if let Some(mut file) = serialized_file(text) {
        file.name = Some(name.to_owned());
        file.source_code_info = None;
        return Ok(File::from_file_descriptor_proto(file));
    }
    File::from_source(name, text).map_err(invalid)
}

/// A text that is base64 of a descriptor. No `.proto` file with a message is base64: it has braces.
fn serialized_file(text: &str) -> Option<FileDescriptorProto> {
    let bytes = STANDARD.decode(text.trim()).ok()?;
    FileDescriptorProto::decode(&bytes[..]).ok()
}

fn invalid(error: protox::Error) -> SchemaError {
    // Only the debug form names file, line and column.
    SchemaError::Invalid { problem: format!("{error:?}") }
}

/// How deeply the brackets of a text are nested, outside of comments and strings.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        match byte {
            b'{' | b'[' | b'(' | b'<' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' | b')' | b'>' => depth = depth.saturating_sub(1),
            b'"' | b'\'' => rest = after_string(rest, *byte),
            b'/' if rest.first() == Some(&b'/') => rest = after_line(rest),
            b'/' if rest.first() == Some(&b'*') => {
                rest = rest.windows(2).skip(1).position(|end| end == b"*/").map_or(&[], |at| &rest[at + 3..]);
            }
            _ => {}
        }
    }
    deepest
}

/// A string ends at its quote or at the end of its line.
fn after_string(mut rest: &[u8], quote: u8) -> &[u8] {
    while let [byte, after @ ..] = rest {
        rest = match byte {
            b'\\' if after.first().is_some_and(|next| *next != b'\n') => &after[1..],
            _ => after,
        };
        if *byte == quote || *byte == b'\n' {
            break;
        }
    }
    rest
}

fn after_line(rest: &[u8]) -> &[u8] {
    rest.iter().position(|byte| *byte == b'\n').map_or(&[], |at| &rest[at + 1..])
}

fn collect_names(message: &DescriptorProto, scope: &str, path: &mut Vec<i32>, names: &mut BTreeMap<Vec<i32>, String>) {
    let name = match scope {
        "" => message.name().to_owned(),
        scope => format!("{scope}.{}", message.name()),
    };
    // A deeper message cannot be the message of a frame.
    if path.len() < MAX_INDEXES {
        for (index, nested) in message.nested_type.iter().enumerate() {
            path.push(index as i32);
            collect_names(nested, &name, path, names);
            path.pop();
        }
    }
    names.insert(path.clone(), name);
}

/// Digests what distinguishes one schema from another: its descriptor and the schemas that it refers to.
fn digest_of(file: &FileDescriptorProto, text: &SchemaText) -> Bytes {
    let mut file = FileDescriptorProto { name: None, source_code_info: None, ..file.clone() };
    // Some compilers write `proto2`, others leave it out.
    if file.syntax() == "proto2" {
        file.syntax = None;
    }
    file.message_type.iter_mut().for_each(remove_default_json_names);
    file.extension.iter_mut().for_each(|field| field.json_name = None);
    let mut digest = digest::Context::new(&digest::SHA256);
    digest.update(&file.encode_to_vec());
    let mut references: Vec<_> = text.references.iter().collect();
    references.sort();
    for reference in references {
        digest.update(format!("\0{}\0{}\0{}", reference.name, reference.subject, reference.version).as_bytes());
    }
    Bytes::copy_from_slice(digest.finish().as_ref())
}

/// Some compilers write the name of a field in JSON even if it is the default, others do not.
fn remove_default_json_names(message: &mut DescriptorProto) {
    for field in &mut message.field {
        if field.json_name.as_deref() == Some(&default_json_name(field.name())) {
            field.json_name = None;
        }
    }
    message.extension.iter_mut().for_each(|field| field.json_name = None);
    message.nested_type.iter_mut().for_each(remove_default_json_names);
}

/// The name in camel case, as Protobuf defines it.
fn default_json_name(name: &str) -> String {
    let mut json_name = String::with_capacity(name.len());
    let mut capital = false;
    for character in name.chars() {
        if character == '_' {
            capital = true;
        } else {
            json_name.push(if capital { character.to_ascii_uppercase() } else { character });
            capital = false;
        }
    }
    json_name
}

#[cfg(test)]
mod tests {
    use posthaste_core::hub_store::SchemaReference;

    use super::*;

    fn parse(text: &str) -> Result<ParsedSchema, SchemaError> {
        ParsedSchema::parse(SchemaText { text: text.to_owned(), references: Vec::new() }, &Imports::new())
    }

    fn problem(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    const NESTED: &str = r#"
        syntax = "proto3";
        package shop.v1;
        import "google/protobuf/timestamp.proto";
        message First { google.protobuf.Timestamp at = 1; }
        message Second {
          message A { message Deep { string text = 1; } }
          message B { Second.A.Deep deep = 1; map<string, int32> counts = 2; }
        }
    "#;

    #[test]
    fn messages_are_found_by_position_and_by_name() {
        let schema = parse(NESTED).unwrap();
        let found = [
            (&[0][..], "shop.v1.First"),
            (&[1], "shop.v1.Second"),
            (&[1, 0], "shop.v1.Second.A"),
            (&[1, 0, 0], "shop.v1.Second.A.Deep"),
            (&[1, 1], "shop.v1.Second.B"),
        ];
        for (path, name) in found {
            assert_eq!(schema.message_name(path), Some(name));
            assert_eq!(&schema.position(name).unwrap()[..], path);
        }
        assert_eq!(schema.message_name(&[2]), None);
        assert_eq!(schema.message_name(&[]), None);
        assert_eq!(schema.position("First"), None, "names are full names");
        assert_eq!(&parse("message Bare {}").unwrap().position("Bare").unwrap()[..], [0]);
    }

    #[test]
    fn layout_comments_and_the_serialized_form_do_not_change_the_digest() {
        let schema = parse(NESTED).unwrap();
        let commented = NESTED.replace("message First", "// A comment { [ ( <\n/* another \" */ message\n\n   First");
        assert_ne!(commented, NESTED);
        assert_eq!(parse(&commented).unwrap().digest(), schema.digest());
        let serialized = parse(&schema.serialized()).unwrap();
        assert_eq!(serialized.digest(), schema.digest());
        assert_eq!(serialized.message_name(&[1, 0, 0]), Some("shop.v1.Second.A.Deep"));
        for changed in [
            NESTED.replace("text = 1", "text = 2"),
            NESTED.replace("text", "words"),
            NESTED.replace("shop.v1", "shop.v2"),
            NESTED.replace("string text = 1", "string text = 1 [json_name = \"Text\"]"),
        ] {
            assert_ne!(parse(&changed).unwrap().digest(), schema.digest(), "{changed}");
        }
    }

    #[test]
    fn imports_are_resolved_by_their_name() {
        let reference =
            |version| SchemaReference { name: "shop/money.proto".to_owned(), subject: "money".to_owned(), version };
        let text = r#"syntax = "proto3"; import "shop/money.proto"; message Order { shop.Money total = 1; }"#;
        let order = |version| SchemaText { text: text.to_owned(), references: vec![reference(version)] };
        let money = r#"syntax = "proto3"; package shop; message Money { int64 cents = 1; }"#;
        let imports = Imports::from([("shop/money.proto".to_owned(), money.to_owned())]);
        let schema = ParsedSchema::parse(order(1), &imports).unwrap();
        assert_eq!(schema.message_name(&[0]), Some("Order"));
        assert_eq!(schema.message_name(&[1]), None, "an imported message has no position");
        assert_eq!(schema.files().count(), 2);
        let newer = ParsedSchema::parse(order(2), &imports).unwrap();
        assert_ne!(schema.digest(), newer.digest(), "another version of an import is another schema");
        let missing = ParsedSchema::parse(order(1), &Imports::new()).unwrap_err().to_string();
        assert!(missing.contains("shop/money.proto"), "{missing}");
        let broken = Imports::from([("shop/money.proto".to_owned(), "message {".to_owned())]);
        let broken = ParsedSchema::parse(order(1), &broken).unwrap_err().to_string();
        assert!(broken.contains("shop/money.proto"), "{broken}");
    }

    #[test]
    fn bad_schemas_are_refused_with_a_reason() {
        assert!(problem("{\"type\": \"record\"}").contains("not valid Protobuf"));
        assert!(problem("syntax = \"proto3\";\nmessage A { Unknown b = 1; }").contains("schema.proto:2:13"));
        assert!(problem("syntax = \"proto3\"; message A { string a = 1; string b = 1; }").contains("number"));
        assert_eq!(parse("").unwrap_err(), SchemaError::NoMessage);
        assert_eq!(parse("enum E { ZERO = 0; }").unwrap_err(), SchemaError::NoMessage);
        assert!(matches!(parse(&"x".repeat(MAX_TEXT + 1)), Err(SchemaError::TooLong { .. })));
        let references = vec![SchemaReference { name: String::new(), subject: String::new(), version: 1 }; 65];
        let text = SchemaText { text: "message A {}".to_owned(), references };
        let many = ParsedSchema::parse(text, &Imports::new()).unwrap_err();
        assert_eq!(many, SchemaError::TooManyReferences { count: 65 });
    }

    /// A parser that needs stack for each level must not see them.
    #[test]
    fn deep_nesting_is_refused_before_it_is_parsed() {
        for open in ["message A {", "option (a) = { b {", "option (a) = { b [", "option (a) = { b: <", "message A(("] {
            assert_eq!(parse(&open.repeat(50_000)).unwrap_err(), SchemaError::Nested, "{open}");
            // A string that does not end must not hide what follows on the next line.
            assert_eq!(parse(&format!("\"\n{}", open.repeat(50_000))).unwrap_err(), SchemaError::Nested, "{open}");
        }
        let hidden = format!("/* {} */ // {}\nmessage A {{}}", "{".repeat(100), "[".repeat(100));
        assert!(parse(&hidden).is_ok());
    }
}
