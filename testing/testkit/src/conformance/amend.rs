//! What `Engine::amend` promises.

use palisade::engine::Ask::{self, Whole};
use palisade::engine::{Amended, Amendment, Claim, Place};

use super::{Fixture, cases, needs};

cases! { pub(super) CASES, "amend";
    "A held whole line can become a reader; other readers in line follow at once." => [
        writer_becomes_a_reader if needs::shared,
        readers_in_line_follow if needs::shared,
        readers_behind_a_waiting_writer_stay_there if needs::fair_shared,
    ],
    "A reader becomes the whole line only as the one holder, else [`Amended::Busy`] and nothing changes." => [
        sole_reader_becomes_the_whole_line if needs::shared,
        reader_beside_another_is_busy if needs::shared,
    ],
    "A value is replaced and shown by `survey`." => [
        value_is_replaced_and_shown,
    ],
    "A ticket that is no longer in the line is [`Amended::Gone`]." => [
        left_ticket_can_not_be_amended,
        another_incarnation_can_not_be_amended,
    ],
}

async fn writer_becomes_a_reader(fx: Fixture) {
    let line = fx.line("downgrade");
    let writer = line.held(Whole).await;
    assert_eq!(writer.reweigh(Ask::READ).await, Amended::Done);
    assert_eq!(writer.now().await, writer.place, "the count stays");
    line.held(Ask::READ).await;
    line.busy(Whole).await;
    let holders = line.shown().await.holders;
    assert_eq!(holders[0].ask, Ask::READ, "what it weighs now");
    assert_eq!(holders.len(), 2, "the readers");
}

async fn readers_in_line_follow(fx: Fixture) {
    let line = fx.line("downgrade");
    let writer = line.held(Whole).await;
    let one = line.waiting(Ask::READ).await;
    let two = line.waiting(Ask::READ).await;
    assert_eq!(writer.reweigh(Ask::READ).await, Amended::Done);
    one.granted().await;
    two.granted().await;
}

async fn readers_behind_a_waiting_writer_stay_there(fx: Fixture) {
    let line = fx.line("downgrade");
    let writer = line.held(Whole).await;
    let next = line.waiting(Whole).await;
    let reader = line.waiting(Ask::READ).await;
    assert_eq!(writer.reweigh(Ask::READ).await, Amended::Done);
    assert_eq!(next.now().await, Place::Waiting, "the writer");
    assert_eq!(reader.now().await, Place::Waiting, "the reader behind it");
}

async fn sole_reader_becomes_the_whole_line(fx: Fixture) {
    let line = fx.line("upgrade");
    let reader = line.held(Ask::READ).await;
    assert_eq!(reader.reweigh(Whole).await, Amended::Done);
    assert_eq!(reader.now().await, reader.place, "the count stays");
    line.busy(Ask::READ).await;
    assert_eq!(line.shown().await.holders[0].ask, Whole);
}

async fn reader_beside_another_is_busy(fx: Fixture) {
    let line = fx.line("upgrade");
    let one = line.held(Ask::READ).await;
    let two = line.held(Ask::READ).await;
    for reader in [&one, &two] {
        assert_eq!(reader.reweigh(Whole).await, Amended::Busy);
        assert_eq!(reader.now().await, reader.place);
    }
    let holders = line.shown().await.holders;
    let asks: Vec<Ask> = holders.iter().map(|holder| holder.ask).collect();
    assert_eq!(asks, [Ask::READ, Ask::READ]);
    two.leave().await;
    assert_eq!(one.reweigh(Whole).await, Amended::Done, "alone");
}

async fn value_is_replaced_and_shown(fx: Fixture) {
    let line = fx.line("value");
    let claim = Claim {
        value: Some("first".into()),
        ..line.claim(Whole)
    };
    let held = line.enter(claim).await;
    let shown = async || line.shown().await.holders[0].value.clone();
    assert_eq!(shown().await.as_deref(), Some("first"));
    for value in ["second", "", "dritter Wert: ß\u{1F512}\n\"quoted\""] {
        let amended = held.amend(Amendment::Value(value.into())).await;
        assert_eq!(amended, Amended::Done);
        assert_eq!(shown().await.as_deref(), Some(value));
        assert_eq!(
            line.shown().await.holders[0].sequence,
            Some(held.sequence())
        );
    }
}

async fn left_ticket_can_not_be_amended(fx: Fixture) {
    let line = fx.line("gone");
    let held = line.held(Whole).await;
    held.leave().await;
    let late = held.amend(Amendment::Value("late".into())).await;
    assert_eq!(late, Amended::Gone);
    line.until_empty().await;
}

async fn another_incarnation_can_not_be_amended(fx: Fixture) {
    let line = fx.line("gone");
    let other = line.held(Whole).await.another_incarnation();
    let late = other.amend(Amendment::Value("late".into())).await;
    assert_eq!(late, Amended::Gone);
    assert_eq!(line.shown().await.holders[0].value, None);
}
