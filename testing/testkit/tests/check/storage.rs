//! I1 and I5: what the storage accepted, compared with its answers.

use palisade_testkit::lab::check::Invariant as I;
use palisade_testkit::lab::history::{Event, Kept, What, Written};

use crate::support::*;

fn write(client: &str, op: u64, token: u64, times: [u64; 2], answer: Written) -> Vec<Event> {
    let value = format!("{client}:{op}");
    vec![
        ev(times[0], client, What::WriteCalled { op, token, value }),
        ev(times[1], client, What::WriteReturned { op, answer }),
    ]
}

fn read(client: &str, op: u64, times: [u64; 2], seen: Option<(u64, &str)>) -> Vec<Event> {
    let answer = seen.map(|(token, value)| Kept {
        token,
        value: value.to_owned(),
    });
    vec![
        ev(times[0], client, What::ReadCalled { op }),
        ev(times[1], client, What::ReadReturned { op, answer }),
    ]
}

fn stored(entries: &[(&str, u64, u64)]) -> Vec<Event> {
    let count = entries.len() as u64;
    let entries = entries.iter().enumerate().map(|(at, (client, op, token))| {
        ev(
            900 + at as u64,
            client,
            What::Stored {
                op: *op,
                token: *token,
            },
        )
    });
    entries
        .chain([ev(990, "harness", What::StoredAll { count })])
        .collect()
}

#[test]
fn a_lower_token_after_a_higher_one_is_refused() {
    let high = write("b", 1, 2, [10, 20], Written::Accepted);
    let low = write("a", 1, 1, [30, 40], Written::Accepted);
    I::FencedExclusion.refuses([high.clone(), low], [20, 30, 40]);
    // Concurrent writes: the storage may have accepted the lower token first.
    let beside = write("a", 1, 1, [15, 40], Written::Accepted);
    I::FencedExclusion.accepts([high.clone(), beside]);
    let stale = write("a", 1, 1, [30, 40], Written::Stale { highest: 2 });
    I::FencedExclusion.accepts([high, stale]);
    I::FencedExclusion.leaves_open(turn("a", 1, [0, 10, 20]));
}

#[test]
fn a_storage_whose_own_record_goes_back_is_refused() {
    let writes = all(vec![
        write("b", 1, 2, [10, 20], Written::Accepted),
        write("a", 1, 1, [15, 25], Written::Accepted),
    ]);
    I::FencedExclusion.accepts([writes.clone(), stored(&[("a", 1, 1), ("b", 1, 2)])]);
    I::FencedExclusion.refuses([writes, stored(&[("b", 1, 2), ("a", 1, 1)])], [900, 901]);
}

#[test]
fn a_lost_update_is_refused() {
    let writes = all(vec![
        write("a", 1, 1, [10, 20], Written::Accepted),
        write("b", 1, 2, [30, 40], Written::Accepted),
        write("c", 1, 3, [50, 60], Written::Unknown),
    ]);
    let with = |entries: &[(&str, u64, u64)]| all(vec![writes.clone(), stored(entries)]);
    I::NoLostUpdate.accepts(with(&[("a", 1, 1), ("b", 1, 2)]));
    I::NoLostUpdate.accepts(with(&[("a", 1, 1), ("b", 1, 2), ("c", 1, 3)]));
    I::NoLostUpdate.refuses(with(&[("b", 1, 2)]), [10, 20]);
    I::NoLostUpdate.leaves_open(writes);
}

#[test]
fn an_update_from_nowhere_or_there_twice_or_refused_before_is_refused() {
    let one = write("a", 1, 1, [10, 20], Written::Accepted);
    let with = |entries: &[(&str, u64, u64)]| all(vec![one.clone(), stored(entries)]);
    I::NoLostUpdate.refuses(with(&[("a", 1, 1), ("z", 9, 1)]), [901]);
    I::NoLostUpdate.refuses(with(&[("a", 1, 1), ("a", 1, 1)]), [10, 900, 901]);
    let stale = write("b", 1, 0, [30, 40], Written::Stale { highest: 1 });
    let both = all(vec![one, stale, stored(&[("a", 1, 1), ("b", 1, 0)])]);
    I::NoLostUpdate.refuses(both, [30, 40, 901]);
}

#[test]
fn a_stale_read_is_refused() {
    let writes = all(vec![
        read("c", 1, [0, 5], None),
        write("a", 1, 1, [10, 20], Written::Accepted),
        write("b", 1, 2, [30, 40], Written::Accepted),
    ]);
    let with = |seen| all(vec![writes.clone(), read("c", 2, [50, 60], seen)]);
    I::Linearizable.accepts(with(Some((2, "b:1"))));
    I::Linearizable.refuses(with(Some((1, "a:1"))), [50, 60]);
    I::Linearizable.refuses(with(None), [50, 60]);
    I::Linearizable.leaves_open(turn("a", 1, [0, 10, 20]));
}

#[test]
fn an_unknown_write_may_show_late_in_part_or_never_but_not_come_and_go() {
    let first = write("a", 1, 1, [10, 20], Written::Accepted);
    let open = vec![ev(
        30,
        "b",
        What::WriteCalled {
            op: 1,
            token: 2,
            value: "b:1".into(),
        },
    )];
    let with = |reads: Vec<Vec<Event>>| all(vec![first.clone(), open.clone(), all(reads)]);
    let (old, new, half) = (Some((1, "a:1")), Some((2, "b:1")), Some((2, "a:1")));
    I::Linearizable.accepts(with(vec![
        read("c", 1, [40, 50], old),
        read("c", 2, [60, 70], new),
    ]));
    I::Linearizable.accepts(with(vec![read("c", 1, [40, 50], half)]));
    I::Linearizable.accepts(with(vec![read("c", 1, [40, 50], old)]));
    I::Linearizable.refuses(
        with(vec![
            read("c", 1, [40, 50], new),
            read("c", 2, [60, 70], old),
        ]),
        [60, 70],
    );
}

#[test]
fn a_write_that_was_refused_must_have_had_a_reason() {
    let one = write("a", 1, 5, [10, 20], Written::Accepted);
    let refused = |highest| write("b", 1, 3, [30, 40], Written::Stale { highest });
    I::Linearizable.accepts([one.clone(), refused(5)]);
    I::Linearizable.refuses([one, refused(4)], [30, 40]);
}
