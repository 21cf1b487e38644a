//! Histories can be read back that several processes wrote, one of which was killed.

use palisade::BootTime;
use palisade_testkit::lab::check::{Invariant, Verdict};
use palisade_testkit::lab::history::{History, Recorder, What, timeline};

use crate::support::{ask, ev, held, release, turn};

fn lines(events: Vec<palisade_testkit::lab::history::Event>) -> String {
    History::of(events).to_lines()
}

#[test]
fn files_are_merged_by_time() {
    let a = lines(turn("a", 1, [0, 10, 30]));
    let b = lines(turn("b", 2, [5, 40, 50]));
    let merged = History::merge(&[("a".into(), a), ("b".into(), b)]).unwrap();
    let times: Vec<u64> = merged.events.iter().map(|event| event.at).collect();
    assert!(times.is_sorted() && times.len() == 8, "{times:?}");
    assert_eq!(merged.torn, 0);
}

#[test]
fn a_torn_last_line_is_counted_and_any_other_is_an_error() {
    let whole = lines(vec![
        ev(1, "a", ask(1)),
        ev(2, "a", held(1, 7)),
        ev(3, "a", release(7)),
    ]);
    for cut in 1..whole.len() {
        let torn = History::merge(&[("a".into(), whole[..cut].to_owned())]).unwrap();
        let ended = whole[..cut].ends_with('\n');
        assert_eq!(torn.torn, usize::from(!ended), "cut at {cut}");
        assert_eq!(
            torn.events.len(),
            whole[..cut].matches('\n').count(),
            "cut at {cut}"
        );
    }
    let holed = whole.replacen("\"client\"", "\"cl", 1);
    let error = History::merge(&[("some file".into(), holed)]).unwrap_err();
    assert_eq!((error.line, error.file.as_str()), (1, "some file"));
}

#[test]
fn a_recorder_appends_and_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    let earlier = BootTime::now();
    Recorder::open(&path, "a", "x").unwrap().record(What::End);
    let again = Recorder::open(&path, "a", "x").unwrap();
    again.record_at(earlier, "b", What::Kill);
    let history = History::read(dir.path()).unwrap();
    assert_eq!(history.events.len(), 2);
    assert_eq!(
        (history.events[0].client.as_str(), &history.events[0].what),
        ("b", &What::Kill)
    );
}

#[test]
fn a_timeline_is_one_file_that_shows_every_lane_and_every_breach() {
    let events = [turn("a", 1, [0, 10, 50]), turn("<b>", 2, [5, 40, 60])].concat();
    let history = History::of(events);
    let verdict = Invariant::BelievedExclusion.check(&history, &crate::support::params());
    assert!(matches!(verdict, Verdict::Violated(_)));
    let page = timeline::page(
        "a <title>",
        &history,
        &[(Invariant::BelievedExclusion, verdict)],
    );
    assert!(page.contains("I2 believed exclusion") && page.contains("both believed in"));
    assert!(
        !page.contains("<b>") && !page.contains("a <title>"),
        "names are escaped"
    );
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside} in the page");
    }
}
