//! Names that an engine may mishandle, but must keep apart.

use palisade::Client;
use palisade::report::Scope;

/// Names with everything that a path, a URL, JSON or Go's notion of a printable character could
/// mishandle.
pub const NASTY: &[&str] = &[
    "a/b",
    "/a",
    "a/",
    "a//b",
    "a/../b",
    ".",
    "..",
    ".lock",
    "100%",
    "%2F",
    "%zz",
    "a b",
    " a ",
    "a?b#c&d=e+f",
    "\"quoted\\\"",
    "<&>",
    "{a}",
    "ünï",
    "e\u{301}",
    "🔒",
    "zero\u{200b}width",
    "\u{202e}turned",
    "👩\u{200d}🚀",
    "no\u{a0}break",
    "line\u{2028}end",
    "private\u{e000}",
    "not\u{378}assigned",
    "\u{feff}marked",
];

/// Locks, surveys and unlocks every nasty name, beside a name that is nearly equal.
///
/// # Panics
/// If one fails.
pub async fn every_nasty_name(client: &Client) {
    for name in NASTY {
        let mutex = client.mutex(*name);
        let hold = mutex
            .lock()
            .await
            .unwrap_or_else(|error| panic!("{name:?}: {error}"));
        assert!(
            mutex.try_lock().await.expect("an answer").is_none(),
            "{name:?} twice"
        );
        let scope = Scope::Line(hold.name().clone());
        for scope in [scope, Scope::Prefix(String::new())] {
            let lines = client.survey(scope).await.expect("lines");
            let shown: Vec<&str> = lines.iter().map(|line| line.name.as_str()).collect();
            assert_eq!(shown, [*name]);
        }
        hold.release().await.expect("a release");
        let none = client
            .survey(Scope::Prefix(String::new()))
            .await
            .expect("lines");
        assert!(none.is_empty(), "{name:?} is still there: {none:?}");
    }
}
