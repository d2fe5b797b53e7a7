use std::borrow::Cow;
use std::hash::{Hash, Hasher};

use serde_json::value::RawValue;

use super::number::Decimal;
use super::pointer::Pointer;

/// How deep a payload is read. Paths have fewer parts and values nest less deep, in sum, so no condition could tell a
/// value below this depth from another one.
const MAX_DEPTH: usize = 128;

/// A JSON value, which is compared by its meaning: numbers by value, objects without regard to the order of members.
#[derive(Clone, Debug)]
pub enum Json<'a> {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// The text of a number.
    Number(Cow<'a, str>),
    /// A text without quotation marks and escapes.
    Text(Cow<'a, str>),
    /// An array.
    Array(Vec<Json<'a>>),
    /// An object.
    Object(Object<'a>),
    /// A value that exists and is equal to nothing: one that is nested too deep, or a text with half of a surrogate
    /// pair, which no Unicode text can contain.
    Incomparable,
}

/// A JSON object.
#[derive(Clone, Debug)]
pub struct Object<'a> {
    /// Sorted by name, each name once.
    members: Vec<(Cow<'a, str>, Json<'a>)>,
    /// False if the name of a member contains half of a surrogate pair. No path can name that member, which is left
    /// out; and no object is equal to one that has it.
    is_comparable: bool,
}

impl<'a> Json<'a> {
    /// Reads a JSON text; `None` if it is not JSON.
    ///
    /// If an object has several members of the same name, the last one counts. Below a depth of 128, values are
    /// [`Incomparable`](Self::Incomparable): paths of conditions have at most 32 parts and their values nest at most 64
    /// deep, so no condition is affected.
    pub fn parse(text: &'a [u8]) -> Option<Self> {
        // The check does not recurse, so hostile nesting cannot exhaust the stack. It leaves a text of correct syntax.
        let text: &'a RawValue = serde_json::from_slice(text).ok()?;
        Reader { rest: text.get() }.value(0)
    }

    /// The value that the pointer names.
    pub fn find(&self, pointer: &Pointer) -> Option<&Self> {
        pointer.parts().try_fold(self, |value, part| match value {
            Self::Object(Object { members, .. }) => {
                members.binary_search_by(|(name, _)| name.as_ref().cmp(part)).ok().map(|index| &members[index].1)
            }
            Self::Array(elements) => elements.get(index(part)?),
            _ => None,
        })
    }

    /// True if the value nests at most this deep and contains nothing incomparable.
    pub(super) fn is_comparable(&self, depth: usize) -> bool {
        let fits = |inner: &Self| depth > 0 && inner.is_comparable(depth - 1);
        match self {
            Self::Incomparable => false,
            Self::Array(elements) => elements.iter().all(fits),
            Self::Object(object) => object.is_comparable && object.members.iter().all(|(_, value)| fits(value)),
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::Text(_) => true,
        }
    }

    /// The same value without a reference to its text.
    pub fn into_owned(self) -> Json<'static> {
        let owned = |text: Cow<'_, str>| Cow::Owned(text.into_owned());
        match self {
            Self::Null => Json::Null,
            Self::Bool(value) => Json::Bool(value),
            Self::Number(text) => Json::Number(owned(text)),
            Self::Text(text) => Json::Text(owned(text)),
            Self::Array(elements) => Json::Array(elements.into_iter().map(Json::into_owned).collect()),
            Self::Object(Object { members, is_comparable }) => {
                let members = members.into_iter().map(|(name, value)| (owned(name), value.into_owned())).collect();
                Json::Object(Object { members, is_comparable })
            }
            Self::Incomparable => Json::Incomparable,
        }
    }
}

/// The index that a part of a pointer means in an array: digits without a leading zero.
fn index(part: &str) -> Option<usize> {
    let is_index = part == "0" || (part.bytes().all(|byte| byte.is_ascii_digit()) && !part.starts_with('0'));
    is_index.then(|| part.parse().ok()).flatten()
}

impl PartialEq for Json<'_> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(one), Self::Bool(other)) => one == other,
            (Self::Number(one), Self::Number(other)) => one == other || Decimal::new(one) == Decimal::new(other),
            (Self::Text(one), Self::Text(other)) => one == other,
            (Self::Array(one), Self::Array(other)) => one == other,
            (Self::Object(one), Self::Object(other)) => {
                one.is_comparable && other.is_comparable && one.members == other.members
            }
            _ => false,
        }
    }
}

/// An incomparable value is not equal to itself. No index holds one, see `is_comparable`.
impl Eq for Json<'_> {}

impl Hash for Json<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Self::Null | Self::Incomparable => {}
            Self::Bool(value) => value.hash(state),
            Self::Number(text) => Decimal::new(text).hash(state),
            Self::Text(text) => text.hash(state),
            Self::Array(elements) => elements.hash(state),
            Self::Object(object) => object.members.hash(state),
        }
    }
}

/// Reads a text whose syntax is correct.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    /// The next value. `None` cannot happen, because the syntax is correct.
    fn value(&mut self, depth: usize) -> Option<Json<'a>> {
        match self.peek()? {
            b'{' | b'[' if depth == MAX_DEPTH => {
                self.skip_nested();
                Some(Json::Incomparable)
            }
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Some(self.text()?.map_or(Json::Incomparable, Json::Text)),
            _ => {
                let end = self.rest.find([',', ']', '}', ' ', '\t', '\n', '\r']).unwrap_or(self.rest.len());
                Some(match self.take(end) {
                    "null" => Json::Null,
                    "true" => Json::Bool(true),
                    "false" => Json::Bool(false),
                    number => Json::Number(Cow::Borrowed(number)),
                })
            }
        }
    }

    fn array(&mut self, depth: usize) -> Option<Json<'a>> {
        self.take(1);
        let mut elements = Vec::new();
        while self.peek()? != b']' {
            elements.push(self.value(depth + 1)?);
            if self.peek()? == b',' {
                self.take(1);
            }
        }
        self.take(1);
        Some(Json::Array(elements))
    }

    fn object(&mut self, depth: usize) -> Option<Json<'a>> {
        self.take(1);
        let (mut members, mut is_comparable) = (Vec::new(), true);
        while self.peek()? != b'}' {
            let name = self.text()?;
            self.peek()?; // the colon
            self.take(1);
            let value = self.value(depth + 1)?;
            match name {
                Some(name) => members.push((name, value)),
                None => is_comparable = false,
            }
            if self.peek()? == b',' {
                self.take(1);
                self.peek()?;
            }
        }
        self.take(1);
        // The sort is stable: of equal names, the last one written is the first of the reversed list.
        members.reverse();
        members.sort_by(|(one, _), (other, _)| one.cmp(other));
        members.dedup_by(|(one, _), (kept, _)| one == kept);
        Some(Json::Object(Object { members, is_comparable }))
    }

    /// The next text; the inner `None` if it contains half of a surrogate pair.
    fn text(&mut self) -> Option<Option<Cow<'a, str>>> {
        let quoted = self.quoted()?;
        match quoted.contains('\\') {
            true => Some(serde_json::from_str::<String>(quoted).ok().map(Cow::Owned)),
            false => Some(Some(Cow::Borrowed(&quoted[1..quoted.len() - 1]))),
        }
    }

    /// The next text with its quotation marks.
    fn quoted(&mut self) -> Option<&'a str> {
        let bytes = self.rest.as_bytes();
        let mut end = 1;
        while *bytes.get(end)? != b'"' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        Some(self.take(end + 1))
    }

    /// Skips an array or object without recursion.
    fn skip_nested(&mut self) {
        let mut open = 0_usize;
        while let Some(byte) = self.peek() {
            match byte {
                b'"' => {
                    self.quoted();
                    continue;
                }
                b'{' | b'[' => open += 1,
                b'}' | b']' => open -= 1,
                _ => {}
            }
            // Outside of texts, JSON is ASCII.
            self.take(1);
            if open == 0 {
                return;
            }
        }
    }

    /// The next byte after white space.
    fn peek(&mut self) -> Option<u8> {
        let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        self.take(self.rest.bytes().take_while(is_space).count());
        self.rest.bytes().next()
    }

    fn take(&mut self, length: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(length.min(self.rest.len()));
        self.rest = rest;
        taken
    }
}
