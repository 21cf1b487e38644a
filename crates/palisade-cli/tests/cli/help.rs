//! `palisade help`.

use crate::every_verb::verbs;
use crate::support::*;

#[test]
fn help_is_the_flag_of_the_same_name() {
    let store = Store::new();
    let same = |words: &[&str], flags: &[&str]| {
        let asked = finish_soon(store.palisade(words));
        assert_eq!(asked.status.code(), Some(0), "{asked:?}");
        assert_eq!(stderr(&asked), "", "{words:?}");
        let flagged = finish_soon(store.palisade(flags));
        assert_eq!(stdout(&asked), stdout(&flagged), "{words:?}");
        assert!(stdout(&asked).contains("Usage: palisade"), "{asked:?}");
    };
    same(&["help"], &["--help"]);
    for verb in verbs() {
        same(&["help", &verb], &[&verb, "--help"]);
    }
    same(&["help", "fence", "check"], &["fence", "check", "--help"]);
    assert!(!store.path("store").exists(), "none of this opened a store");
}

#[test]
fn help_for_what_there_is_not() {
    let store = Store::new();
    let output = finish_soon(store.palisade(&["help", "rnu"]));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("rnu"), "{output:?}");
    assert_eq!(stdout(&output), "");
}
