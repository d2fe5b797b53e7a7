use std::time::Duration;

use super::{DeadHead, Mode, OpenError, Reader, TableName};

/// The settings that all readers of a table must share. The first reader that starts records them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// A value of [`Reader::word`].
    pub reader: String,
    /// A value of [`Mode::word`].
    pub mode: String,
    /// How long a claim lasts; `None` if none is recorded.
    pub lease: Option<Duration>,
    /// A value of [`DeadHead::word`]; `None` if none is recorded, as in every mode without order.
    pub dead_head: Option<String>,
}

impl Registration {
    /// The registration that the first process to read the table records.
    pub fn of(reader: Reader, mode: Mode, lease: Duration) -> Self {
        Self {
            reader: reader.word().to_owned(),
            mode: mode.word().to_owned(),
            lease: Some(recorded_lease(lease_millis(lease))),
            dead_head: mode.dead_head().map(|rule| rule.word().to_owned()),
        }
    }

    /// Refuses a process whose settings differ from the recorded ones.
    pub(super) fn check(
        &self,
        table: &TableName,
        reader: Reader,
        mode: Mode,
        lease: Duration,
    ) -> Result<(), OpenError> {
        let table = || table.clone();
        if self.reader != reader.word() {
            return Err(OpenError::OtherReader { table: table(), recorded: self.reader.clone(), asked: reader });
        }
        if self.mode != mode.word() {
            return Err(OpenError::OtherMode { table: table(), recorded: self.mode.clone(), asked: mode.word() });
        }
        let asked = recorded_lease(lease_millis(lease));
        if let Some(recorded) = self.lease.filter(|recorded| *recorded != asked) {
            return Err(OpenError::OtherLease { table: table(), recorded, asked });
        }
        match (&self.dead_head, mode.dead_head().map(DeadHead::word)) {
            (Some(recorded), Some(asked)) if recorded != asked => {
                Err(OpenError::OtherDeadHead { table: table(), recorded: recorded.clone(), asked })
            }
            _ => Ok(()),
        }
    }
}

/// A lease as databases record it.
pub fn lease_millis(lease: Duration) -> i64 {
    i64::try_from(lease.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// A lease as a database recorded it.
pub fn recorded_lease(millis: i64) -> Duration {
    Duration::from_millis(millis.max(0) as u64)
}
