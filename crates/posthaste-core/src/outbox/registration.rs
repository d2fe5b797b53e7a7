use std::time::Duration;

use super::{DeadHead, Mode, OpenError, Reader, TableName};

/// What the readers of a table agreed on, recorded at the first start of one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// As [`Reader::word`] says it.
    pub reader: String,
    /// As [`Mode::word`] says it.
    pub mode: String,
    /// How long a claim holds; `None` where none is recorded.
    pub lease: Option<Duration>,
    /// As [`DeadHead::word`] says it; `None` where none is recorded, as in every mode without order.
    pub dead_head: Option<String>,
}

impl Registration {
    /// What a process would record that is the first to read the table.
    pub fn of(reader: Reader, mode: Mode, lease: Duration) -> Self {
        Self {
            reader: reader.word().to_owned(),
            mode: mode.word().to_owned(),
            lease: Some(recorded_lease(lease_millis(lease))),
            dead_head: mode.dead_head().map(|rule| rule.word().to_owned()),
        }
    }

    /// Refuses a process that asks for anything else than what is recorded.
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
