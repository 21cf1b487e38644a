//! Names that are hard to write down.

use palisade::Client;
use palisade::core::report::Scope;
use palisade_testkit::launch;

/// Names with everything that a path, a URL, JSON or Go's idea of a printable character could
/// stumble over.
const NASTY: &[&str] = &[
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

/// Takes, shows and gives back a lock of every nasty name, beside one that is called nearly so.
async fn every_nasty_name(client: &Client) {
    for name in NASTY {
        let mutex = client.mutex(*name).unwrap();
        let hold = mutex
            .lock()
            .await
            .unwrap_or_else(|error| panic!("{name:?}: {error}"));
        assert!(mutex.try_lock().await.unwrap().is_none(), "{name:?} twice");
        let scope = Scope::Line(hold.name().clone());
        for scope in [scope, Scope::Prefix(String::new())] {
            let lines = client.survey(scope).await.unwrap();
            let shown: Vec<&str> = lines.iter().map(|line| line.name.as_str()).collect();
            assert_eq!(shown, [*name]);
        }
        hold.release().await.unwrap();
        let none = client.survey(Scope::Prefix(String::new())).await.unwrap();
        assert!(none.is_empty(), "{name:?} is still there: {none:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_name_locks_shows_and_goes() {
    let Some(running) = launch::need("etcd") else {
        return;
    };
    for namespace in ["palisade", "ü/\u{200b}"] {
        let url = format!("{}?namespace={namespace}", running.url());
        every_nasty_name(&palisade::connect(&url).await.unwrap()).await;
    }
}
