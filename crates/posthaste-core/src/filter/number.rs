use std::hash::{Hash, Hasher};

/// The value of a JSON number: its digits without zeros at either end, and the power of ten of the last digit. So numbers
/// of any size compare without loss, and 100, 100.0 and 1e2 are the same.
///
/// A power of ten that exceeds 64 bits counts as the largest one.
pub(super) struct Decimal<'a> {
    is_negative: bool,
    integer: &'a str,
    fraction: &'a str,
    exponent: i64,
}

impl<'a> Decimal<'a> {
    /// Reads a number that JSON allows.
    pub(super) fn new(text: &'a str) -> Self {
        let (is_negative, text) = match text.strip_prefix('-') {
            Some(text) => (true, text),
            None => (false, text),
        };
        let (mantissa, power) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let power = power.parse().unwrap_or(if power.starts_with('-') { i64::MIN } else { i64::MAX });
        let fraction = fraction.trim_end_matches('0');
        let (integer, exponent) = match fraction.is_empty() {
            true => {
                let trimmed = integer.trim_end_matches('0');
                (trimmed, power.saturating_add_unsigned((integer.len() - trimmed.len()) as u64))
            }
            false => (integer, power.saturating_sub_unsigned(fraction.len() as u64)),
        };
        let integer = integer.trim_start_matches('0');
        let fraction = if integer.is_empty() { fraction.trim_start_matches('0') } else { fraction };
        match integer.is_empty() && fraction.is_empty() {
            true => Self { is_negative: false, integer, fraction, exponent: 0 },
            false => Self { is_negative, integer, fraction, exponent },
        }
    }

    fn digits(&self) -> impl Iterator<Item = u8> {
        self.integer.bytes().chain(self.fraction.bytes())
    }
}

impl PartialEq for Decimal<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.is_negative == other.is_negative
            && self.exponent == other.exponent
            && self.integer.len() + self.fraction.len() == other.integer.len() + other.fraction.len()
            && self.digits().eq(other.digits())
    }
}

impl Hash for Decimal<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.is_negative, self.exponent).hash(state);
        // Where the point was must not matter, so the digits are hashed one by one.
        self.digits().for_each(|digit| digit.hash(state));
    }
}
