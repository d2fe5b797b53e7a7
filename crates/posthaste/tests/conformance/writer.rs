//! B: writing, and the hook around it.

use std::sync::{Arc, Mutex};

use posthaste::{Event, HookError, Mode, Outbox, Transaction, WriteError, WriterHook};
use posthaste_core::outbox::Store;
use posthaste_testing::{HookCall, RecordingHook};

use crate::harness::{Book, Harness, Watched, event, events, on_every_store, watched};

on_every_store! {
    b1_a_write_belongs_to_a_transaction,
    b2_a_single_write_is_a_batch_of_one,
    b3_a_batch_is_one_insert_and_answers_in_order,
    b4_an_empty_batch_does_nothing,
    b5_the_short_forms_write_once,
    b6_the_hook_is_called_in_order,
    b7_before_write_may_replace_the_batch,
    b8_an_empty_answer_suppresses_the_write,
    b9_a_refusing_hook_aborts_the_write,
    b10_after_write_gets_what_was_inserted_and_cannot_harm,
    b11_each_write_is_told_its_end_once,
    b12_a_panic_after_the_end_reaches_nobody,
    b13_without_a_hook_nothing_is_kept,
    b14_a_hook_cannot_change_what_is_written,
}

type Outboxed<H> = Outbox<Watched<<H as Harness>::Store>>;

/// A writer with a hook, over a store that keeps book.
async fn hooked<H: Harness>(db: &H, hook: impl WriterHook) -> (Outboxed<H>, Book) {
    let (pool, book) = watched(db).await;
    (Outbox::new(pool).mode(Mode::WriterOnly).hook(hook).start().await.unwrap(), book)
}

async fn begin<S: Store>(outbox: &Outbox<S>) -> Transaction<S> {
    outbox.begin().await.unwrap()
}

async fn is_there<S: Store>(outbox: &Outbox<S>, event: &Event) -> bool {
    outbox.find(event.id()).await.unwrap().is_some()
}

async fn b1_a_write_belongs_to_a_transaction<H: Harness>(db: H) {
    // That one cannot be written without is shown by the doc test of the same name.
    let (outbox, _) = hooked(&db, RecordingHook::new()).await;
    let event = event();
    let mut transaction = begin(&outbox).await;
    outbox.write(&mut transaction, &event).await.unwrap();
    drop(transaction);
    assert!(!is_there(&outbox, &event).await);
}

async fn b2_a_single_write_is_a_batch_of_one<H: Harness>(db: H) {
    let hook = RecordingHook::new();
    let (outbox, book) = hooked(&db, hook.clone()).await;
    let event = event();
    let mut transaction = begin(&outbox).await;
    let id = outbox.write(&mut transaction, &event).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(id.as_deref(), Some(event.id()));
    assert_eq!(hook.calls()[0], HookCall::BeforeWrite(vec![event]));
    assert_eq!(book.calls("insert"), [1]);
}

async fn b3_a_batch_is_one_insert_and_answers_in_order<H: Harness>(db: H) {
    let (outbox, book) = hooked(&db, RecordingHook::new()).await;
    let events = events(5);
    let mut transaction = begin(&outbox).await;
    let ids = outbox.write_all(&mut transaction, &events).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(ids, events.iter().map(Event::id).collect::<Vec<_>>());
    assert_eq!(book.calls("insert"), [5]);
    let mut numbers = Vec::new();
    for event in &events {
        numbers.push(outbox.find(event.id()).await.unwrap().unwrap().seq);
    }
    assert!(numbers.is_sorted(), "{numbers:?}");
}

async fn b4_an_empty_batch_does_nothing<H: Harness>(db: H) {
    let hook = RecordingHook::new();
    let (outbox, book) = hooked(&db, hook.clone()).await;
    let mut transaction = begin(&outbox).await;
    let ids = outbox.write_all(&mut transaction, Vec::<Event>::new()).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!((ids.len(), hook.calls().len(), book.calls("insert").len()), (0, 0, 0));
}

async fn b5_the_short_forms_write_once<H: Harness>(db: H) {
    let (outbox, book) = hooked(&db, RecordingHook::new()).await;
    let mut transaction = begin(&outbox).await;
    let text = outbox.write(&mut transaction, Event::text("t", "{}")).await.unwrap().unwrap();
    let typed = Event::json("t", &serde_json::json!({"id": 7})).unwrap();
    let json = outbox.write(&mut transaction, typed).await.unwrap().unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(book.calls("insert"), [1, 1]);
    for (id, payload) in [(text, "{}"), (json, "{\"id\":7}")] {
        let row = outbox.find(&id).await.unwrap().unwrap();
        assert_eq!(row.event.unwrap().payload().as_bytes(), payload.as_bytes());
    }
}

async fn b6_the_hook_is_called_in_order<H: Harness>(db: H) {
    let hook = RecordingHook::new();
    let (outbox, book) = hooked(&db, hook.clone()).await;
    let batch = events(2);
    let mut transaction = begin(&outbox).await;
    outbox.write_all(&mut transaction, &batch).await.unwrap();
    let written = [HookCall::BeforeWrite(batch.clone()), HookCall::AfterWrite(batch.clone())];
    assert_eq!(hook.calls(), written, "its end is not known yet");
    assert_eq!(book.calls("insert"), [2]);
    transaction.commit().await.unwrap();
    assert_eq!(hook.calls()[2..], [HookCall::AfterCommit(batch.clone())]);
    let mut transaction = begin(&outbox).await;
    let other = events(1);
    outbox.write_all(&mut transaction, &other).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(hook.calls()[5..], [HookCall::AfterRollback(other)]);
}

/// Answers with something else than it was given, and writes down what comes after.
#[derive(Clone)]
struct Replacing {
    by: Vec<Event>,
    after: RecordingHook,
}

impl WriterHook for Replacing {
    fn before_write(&self, _: Vec<Event>) -> Result<Vec<Event>, HookError> {
        Ok(self.by.clone())
    }

    fn after_write(&self, events: &[Event]) {
        self.after.after_write(events);
    }

    fn after_commit(&self, events: &[Event]) {
        self.after.after_commit(events);
    }
}

async fn b7_before_write_may_replace_the_batch<H: Harness>(db: H) {
    let hook = Replacing { by: events(3), after: RecordingHook::new() };
    let (outbox, book) = hooked(&db, hook.clone()).await;
    let original = event();
    let mut transaction = begin(&outbox).await;
    let ids = outbox.write_all(&mut transaction, [&original]).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(ids, hook.by.iter().map(Event::id).collect::<Vec<_>>());
    assert_eq!(book.calls("insert"), [3]);
    assert_eq!(hook.after.calls(), [HookCall::AfterWrite(hook.by.clone()), HookCall::AfterCommit(hook.by.clone())]);
    assert!(!is_there(&outbox, &original).await && is_there(&outbox, &hook.by[2]).await);
}

async fn b8_an_empty_answer_suppresses_the_write<H: Harness>(db: H) {
    let hook = Replacing { by: Vec::new(), after: RecordingHook::new() };
    let (outbox, book) = hooked(&db, hook.clone()).await;
    let mut transaction = begin(&outbox).await;
    assert_eq!(outbox.write(&mut transaction, event()).await.unwrap(), None);
    assert!(outbox.write_all(&mut transaction, events(2)).await.unwrap().is_empty());
    transaction.commit().await.unwrap();
    assert_eq!((book.calls("insert").len(), hook.after.calls().len()), (0, 0));
}

/// Refuses, or panics.
struct Refusing {
    panics: bool,
}

impl WriterHook for Refusing {
    fn before_write(&self, _: Vec<Event>) -> Result<Vec<Event>, HookError> {
        assert!(!self.panics, "as it was told");
        Err("not on Sundays".into())
    }
}

async fn b9_a_refusing_hook_aborts_the_write<H: Harness>(db: H) {
    for panics in [false, true] {
        let (outbox, book) = hooked(&db, Refusing { panics }).await;
        let mut transaction = begin(&outbox).await;
        let refused = outbox.write(&mut transaction, event()).await;
        let Err(WriteError::Hook(source)) = refused else { panic!("the hook's error reaches the caller") };
        assert!(panics || source.to_string() == "not on Sundays");
        transaction.commit().await.unwrap();
        assert!(book.calls("insert").is_empty());
    }
}

/// Panics whenever something has happened.
struct Panicking(RecordingHook);

impl WriterHook for Panicking {
    fn after_write(&self, events: &[Event]) {
        self.0.after_write(events);
        panic!("never mind");
    }

    fn after_commit(&self, events: &[Event]) {
        self.0.after_commit(events);
        panic!("never mind");
    }

    fn after_rollback(&self, events: &[Event]) {
        self.0.after_rollback(events);
        panic!("never mind");
    }
}

async fn b10_after_write_gets_what_was_inserted_and_cannot_harm<H: Harness>(db: H) {
    let seen = RecordingHook::new();
    let (outbox, _) = hooked(&db, Panicking(seen.clone())).await;
    let batch = events(3);
    let mut transaction = begin(&outbox).await;
    outbox.write_all(&mut transaction, &batch).await.unwrap();
    assert_eq!(seen.calls(), [HookCall::AfterWrite(batch.clone())]);
    transaction.commit().await.unwrap();
    assert!(is_there(&outbox, &batch[2]).await);
}

async fn b11_each_write_is_told_its_end_once<H: Harness>(db: H) {
    let hook = RecordingHook::new();
    let (outbox, _) = hooked(&db, hook.clone()).await;
    let (first, second) = (events(1), events(2));
    for commits in [true, false] {
        let (first, second) = if commits { (first.clone(), second.clone()) } else { (events(1), events(2)) };
        let before = hook.calls().len();
        let mut transaction = begin(&outbox).await;
        outbox.write_all(&mut transaction, &first).await.unwrap();
        outbox.write_all(&mut transaction, &second).await.unwrap();
        let expected = match commits {
            true => {
                transaction.commit().await.unwrap();
                [HookCall::AfterCommit(first), HookCall::AfterCommit(second)]
            }
            false => {
                transaction.rollback().await.unwrap();
                [HookCall::AfterRollback(first), HookCall::AfterRollback(second)]
            }
        };
        assert_eq!(hook.calls()[before + 4..], expected);
    }
}

async fn b12_a_panic_after_the_end_reaches_nobody<H: Harness>(db: H) {
    let seen = RecordingHook::new();
    let (outbox, _) = hooked(&db, Panicking(seen.clone())).await;
    let mut transaction = begin(&outbox).await;
    outbox.write_all(&mut transaction, events(1)).await.unwrap();
    outbox.write_all(&mut transaction, events(1)).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = begin(&outbox).await;
    outbox.write(&mut transaction, event()).await.unwrap();
    transaction.rollback().await.unwrap();
    let ends = seen.calls().into_iter().filter(|call| !matches!(call, HookCall::AfterWrite(_)));
    let ends: Vec<HookCall> = ends.collect();
    assert!(matches!(ends[..], [HookCall::AfterCommit(_), HookCall::AfterCommit(_), HookCall::AfterRollback(_)]));
}

async fn b13_without_a_hook_nothing_is_kept<H: Harness>(db: H) {
    let (pool, book) = watched(&db).await;
    let outbox = Outbox::new(pool).mode(Mode::WriterOnly).start().await.unwrap();
    let mut transaction = begin(&outbox).await;
    let id = outbox.write(&mut transaction, event()).await.unwrap().unwrap();
    transaction.commit().await.unwrap();
    assert!(outbox.find(&id).await.unwrap().is_some());
    assert_eq!((book.calls("begin").len(), book.calls("insert"), book.calls("commit").len()), (1, vec![1], 1));
}

/// Keeps what it was given and changes its own copy at every call.
#[derive(Clone, Default)]
struct Hoarding(Arc<Mutex<Vec<Event>>>);

impl WriterHook for Hoarding {
    fn before_write(&self, events: Vec<Event>) -> Result<Vec<Event>, HookError> {
        *self.0.lock().unwrap() = events.clone();
        Ok(events)
    }

    fn after_write(&self, events: &[Event]) {
        let mut kept = self.0.lock().unwrap();
        assert_eq!(kept.len(), events.len());
        kept.clear();
    }

    fn after_commit(&self, events: &[Event]) {
        self.0.lock().unwrap().extend_from_slice(events);
    }
}

async fn b14_a_hook_cannot_change_what_is_written<H: Harness>(db: H) {
    let hook = Hoarding::default();
    let (outbox, _) = hooked(&db, hook.clone()).await;
    let batch = events(2);
    let mut transaction = begin(&outbox).await;
    let ids = outbox.write_all(&mut transaction, &batch).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(ids.len(), 2);
    assert_eq!(*hook.0.lock().unwrap(), batch, "what is reported is what was inserted");
}
