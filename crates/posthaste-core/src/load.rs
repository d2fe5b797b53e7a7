use std::ops::{AddAssign, SubAssign};

/// A number of items in memory and their size, or a limit on both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// How many items.
    pub items: usize,
    /// Their size together.
    pub bytes: usize,
}

impl Load {
    /// One item of this size.
    pub fn one(bytes: usize) -> Self {
        Self { items: 1, bytes }
    }

    /// What is left of this limit.
    #[must_use]
    pub fn saturating_sub(self, used: Self) -> Self {
        Self { items: self.items.saturating_sub(used.items), bytes: self.bytes.saturating_sub(used.bytes) }
    }

    /// One part of so many.
    #[must_use]
    pub fn part(self, parts: usize) -> Self {
        Self { items: self.items / parts, bytes: self.bytes / parts }
    }

    /// True if this load is within the limit.
    pub fn is_within(self, limit: Self) -> bool {
        self.items <= limit.items && self.bytes <= limit.bytes
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, more: Self) {
        self.items += more.items;
        self.bytes += more.bytes;
    }
}

impl SubAssign for Load {
    fn sub_assign(&mut self, less: Self) {
        self.items -= less.items;
        self.bytes -= less.bytes;
    }
}

/// Splits items into parts within this limit, in order. An item that exceeds the limit is a part of its own.
pub fn parts<T>(items: impl IntoIterator<Item = T>, limit: Load, bytes: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let (mut parts, mut load) = (Vec::<Vec<T>>::new(), Load::default());
    for item in items {
        load += Load::one(bytes(&item));
        match parts.last_mut().filter(|_| load.is_within(limit)) {
            Some(part) => part.push(item),
            None => {
                load = Load::one(bytes(&item));
                parts.push(vec![item]);
            }
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_within_the_limit_and_a_large_item_is_alone() {
        let limit = Load { items: 3, bytes: 10 };
        let split = |sizes: &[usize]| parts(sizes.to_vec(), limit, |size| *size);
        assert_eq!(split(&[1, 1, 1, 1, 9, 1, 99, 2]), [vec![1, 1, 1], vec![1, 9], vec![1], vec![99], vec![2]]);
        assert!(split(&[]).is_empty());
    }
}
