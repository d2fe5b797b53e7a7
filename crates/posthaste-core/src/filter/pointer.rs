/// The longest path, in characters.
const MAX_PATH: usize = 512;
/// The most parts of a path. See [`Json::parse`](super::Json::parse) for what depends on it.
const MAX_PARTS: usize = 32;

/// A JSON pointer (RFC 6901), which names one value in a document.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pointer(Vec<Box<str>>);

/// Why a text is no JSON pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PointerError {
    /// It does not start with a slash.
    #[error("does not start with a slash: write a JSON pointer such as /order/country, or an empty text for the whole")]
    NoSlash,
    /// A `~` is followed by something else than `0` or `1`.
    #[error("contains a ~ that starts neither ~0, which means ~, nor ~1, which means /")]
    Tilde,
    /// It is too long.
    #[error("has more than {MAX_PATH} characters or more than {MAX_PARTS} parts")]
    TooLong,
}

impl Pointer {
    /// Reads a pointer.
    pub fn parse(text: &str) -> Result<Self, PointerError> {
        if text.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let parts = text.strip_prefix('/').ok_or(PointerError::NoSlash)?;
        if text.chars().count() > MAX_PATH || parts.split('/').count() > MAX_PARTS {
            return Err(PointerError::TooLong);
        }
        Ok(Self(parts.split('/').map(unescaped).collect::<Result<_, _>>()?))
    }

    /// The names of members and indexes of elements on the way to the value.
    pub(super) fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(AsRef::as_ref)
    }
}

fn unescaped(part: &str) -> Result<Box<str>, PointerError> {
    let mut pieces = part.split('~');
    let mut text = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (character, rest) = match piece.split_at_checked(1) {
            Some(("0", rest)) => ('~', rest),
            Some(("1", rest)) => ('/', rest),
            _ => return Err(PointerError::Tilde),
        };
        text.push(character);
        text.push_str(rest);
    }
    Ok(text.into())
}
