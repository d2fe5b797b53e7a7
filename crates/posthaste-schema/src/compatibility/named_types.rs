//! The types that the fields of a schema name.

use std::collections::HashMap;

use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FieldDescriptorProto};

use super::{is_map_entry, join, scalar_kind};
use crate::schema::ParsedSchema;

/// All messages of a schema and of its imports, by their full name.
pub(super) struct Types<'a> {
    by_name: HashMap<String, Named<'a>>,
    names: HashMap<*const DescriptorProto, String>,
}

struct Named<'a> {
    message: &'a DescriptorProto,
    package: &'a str,
}

/// Types that are written alike can be exchanged for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScalarKind {
    Number,
    SignedNumber,
    StringOrBytes,
    Fixed32,
    Fixed64,
    Float,
    Double,
}

pub(super) enum Kind<'a> {
    Scalar(ScalarKind),
    /// The fields of key and value.
    Map((&'a FieldDescriptorProto, &'a FieldDescriptorProto)),
    /// `None` for Google's types.
    Message(Option<&'a DescriptorProto>),
}

/// The type of a field.
pub(super) struct TypeRef<'a> {
    pub(super) kind: Kind<'a>,
    /// The name in messages.
    pub(super) name: &'a str,
    /// The name without the package.
    pub(super) local_name: &'a str,
}

impl TypeRef<'_> {
    pub(super) fn scalar(&self) -> Option<ScalarKind> {
        match self.kind {
            Kind::Scalar(kind) => Some(kind),
            _ => None,
        }
    }
}

impl<'a> Types<'a> {
    pub(super) fn of(schema: &'a ParsedSchema) -> Self {
        let mut types = Self { by_name: HashMap::new(), names: HashMap::new() };
        for file in schema.files() {
            for message in &file.message_type {
                types.collect(file.package(), file.package(), message);
            }
        }
        types
    }

    fn collect(&mut self, package: &'a str, scope: &str, message: &'a DescriptorProto) {
        let name = join(scope, message.name());
        for nested in &message.nested_type {
            self.collect(package, &name, nested);
        }
        self.names.insert(message, name.clone());
        self.by_name.insert(name, Named { message, package });
    }

    pub(super) fn full_name(&self, message: &DescriptorProto) -> String {
        self.names.get(&std::ptr::from_ref(message)).cloned().unwrap_or_default()
    }

    pub(super) fn of_field(&self, field: &'a FieldDescriptorProto) -> TypeRef<'a> {
        if let Some(kind) = scalar_kind(field.r#type()) {
            let name = scalar_name(field);
            return TypeRef { kind: Kind::Scalar(kind), name, local_name: name };
        }
        // The compiler writes full names with a dot at the start.
        let name = field.type_name().trim_start_matches('.');
        let Some(Named { message, package }) = self.by_name.get(name) else {
            return TypeRef { kind: Kind::Message(None), name, local_name: name };
        };
        if let ([key, value], true) = (&message.field[..], is_map_entry(message)) {
            return TypeRef { kind: Kind::Map((key, value)), name: "map", local_name: "map" };
        }
        let local_name = name.strip_prefix(*package).map_or(name, |rest| rest.trim_start_matches('.'));
        TypeRef { kind: Kind::Message(Some(message)), name, local_name }
    }
}

fn scalar_name(field: &FieldDescriptorProto) -> &str {
    match field.r#type() {
        Type::Enum => field.type_name().trim_start_matches('.'),
        Type::Double => "double",
        Type::Float => "float",
        Type::Int64 => "int64",
        Type::Uint64 => "uint64",
        Type::Int32 => "int32",
        Type::Fixed64 => "fixed64",
        Type::Fixed32 => "fixed32",
        Type::Bool => "bool",
        Type::String => "string",
        Type::Bytes => "bytes",
        Type::Uint32 => "uint32",
        Type::Sfixed32 => "sfixed32",
        Type::Sfixed64 => "sfixed64",
        Type::Sint32 => "sint32",
        Type::Sint64 => "sint64",
        Type::Group | Type::Message => "message",
    }
}
