//! What `Engine::amend` promises.

use palisade::core::claim::Ask;
use palisade::core::clock::BootTime;
use palisade::core::engine::{Amended, Amendment, Place};

use super::bed::Seated;
use super::failure::ensure_eq;
use super::{Bed, Check, Failure, cases, needs};

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

async fn amend(bed: &Bed, seated: &Seated, ask: Ask) -> Result<Amended, Failure> {
    let amendment = Amendment::Ask(ask);
    Ok(bed.engine().amend(seated.ticket.clone(), amendment).await?)
}

async fn place(bed: &Bed, seated: &Seated) -> Result<Place, Failure> {
    Ok(bed
        .engine()
        .wait(seated.ticket.clone(), BootTime::PAST)
        .await?)
}

async fn writer_becomes_a_reader(bed: Bed) -> Check {
    let name = bed.name("downgrade")?;
    let writer = bed.hold(&name, Ask::Whole).await?;
    ensure_eq!(
        amend(&bed, &writer, Ask::READ).await?,
        Amended::Done,
        "the downgrade"
    );
    ensure_eq!(place(&bed, &writer).await?, writer.place, "the count stays");
    bed.hold(&name, Ask::READ).await?;
    bed.is_busy(&name, Ask::Whole).await?;
    let line = bed.line(&name).await?;
    ensure_eq!(line.holders[0].ask, Ask::READ, "what it weighs now");
    ensure_eq!(line.holders.len(), 2, "the readers");
    Ok(())
}

async fn readers_in_line_follow(bed: Bed) -> Check {
    let name = bed.name("downgrade")?;
    let writer = bed.hold(&name, Ask::Whole).await?;
    let one = bed.queue(&name, Ask::READ).await?;
    let two = bed.queue(&name, Ask::READ).await?;
    ensure_eq!(
        amend(&bed, &writer, Ask::READ).await?,
        Amended::Done,
        "the downgrade"
    );
    bed.granted(&one).await?;
    bed.granted(&two).await?;
    Ok(())
}

async fn readers_behind_a_waiting_writer_stay_there(bed: Bed) -> Check {
    let name = bed.name("downgrade")?;
    let writer = bed.hold(&name, Ask::Whole).await?;
    let next = bed.queue(&name, Ask::Whole).await?;
    let reader = bed.queue(&name, Ask::READ).await?;
    ensure_eq!(
        amend(&bed, &writer, Ask::READ).await?,
        Amended::Done,
        "the downgrade"
    );
    ensure_eq!(place(&bed, &next).await?, Place::Waiting, "the writer");
    ensure_eq!(
        place(&bed, &reader).await?,
        Place::Waiting,
        "the reader behind it"
    );
    Ok(())
}

async fn sole_reader_becomes_the_whole_line(bed: Bed) -> Check {
    let name = bed.name("upgrade")?;
    let reader = bed.hold(&name, Ask::READ).await?;
    ensure_eq!(
        amend(&bed, &reader, Ask::Whole).await?,
        Amended::Done,
        "the upgrade"
    );
    ensure_eq!(place(&bed, &reader).await?, reader.place, "the count stays");
    bed.is_busy(&name, Ask::READ).await?;
    ensure_eq!(
        bed.line(&name).await?.holders[0].ask,
        Ask::Whole,
        "what it weighs now"
    );
    Ok(())
}

async fn reader_beside_another_is_busy(bed: Bed) -> Check {
    let name = bed.name("upgrade")?;
    let one = bed.hold(&name, Ask::READ).await?;
    let two = bed.hold(&name, Ask::READ).await?;
    for reader in [&one, &two] {
        ensure_eq!(
            amend(&bed, reader, Ask::Whole).await?,
            Amended::Busy,
            "the upgrade"
        );
        ensure_eq!(place(&bed, reader).await?, reader.place, "where it stands");
    }
    let line = bed.line(&name).await?;
    let asks: Vec<Ask> = line.holders.iter().map(|holder| holder.ask).collect();
    ensure_eq!(asks, [Ask::READ, Ask::READ], "the holders");
    bed.engine().leave(two.ticket).await?;
    ensure_eq!(
        amend(&bed, &one, Ask::Whole).await?,
        Amended::Done,
        "the upgrade, alone"
    );
    Ok(())
}

async fn value_is_replaced_and_shown(bed: Bed) -> Check {
    let name = bed.name("value")?;
    let mut claim = bed.claim(&name, Ask::Whole);
    claim.value = Some("first".into());
    let held = bed.enter(claim).await?;
    ensure_eq!(
        bed.line(&name).await?.holders[0].value.as_deref(),
        Some("first"),
        "the value"
    );
    for value in ["second", "", "dritter Wert: ß\u{1F512}\n\"quoted\""] {
        let amendment = Amendment::Value(value.into());
        let amended = bed.engine().amend(held.ticket.clone(), amendment).await?;
        ensure_eq!(amended, Amended::Done, "the amendment");
        let line = bed.line(&name).await?;
        ensure_eq!(line.holders[0].value.as_deref(), Some(value), "the value");
        ensure_eq!(line.holders[0].sequence, Some(held.sequence()), "the count");
    }
    Ok(())
}

async fn left_ticket_can_not_be_amended(bed: Bed) -> Check {
    let name = bed.name("gone")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    bed.engine().leave(held.ticket.clone()).await?;
    let amendment = Amendment::Value("late".into());
    let amended = bed.engine().amend(held.ticket.clone(), amendment).await?;
    ensure_eq!(amended, Amended::Gone, "a ticket that left");
    bed.until_empty(&name).await
}

async fn another_incarnation_can_not_be_amended(bed: Bed) -> Check {
    let name = bed.name("gone")?;
    let held = bed.hold(&name, Ask::Whole).await?;
    let mut wrong = held.ticket.clone();
    wrong.sequence += 1;
    let amended = bed
        .engine()
        .amend(wrong, Amendment::Value("late".into()))
        .await?;
    ensure_eq!(amended, Amended::Gone, "another incarnation");
    ensure_eq!(bed.line(&name).await?.holders[0].value, None, "the value");
    Ok(())
}
