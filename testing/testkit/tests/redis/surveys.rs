//! What surveys cost beside the messages of queues.

use futures_util::StreamExt;
use palisade::queue::Draft;
use palisade::report::Scope;

use super::support::{Server, soon, until};

/// A survey of a prefix has to walk all keys. Beside a watch, which is told of every change, it does
/// so once, and is as exact as any.
#[tokio::test]
async fn surveys_beside_a_watch_don_t_walk_the_messages() {
    const MESSAGES: usize = 20_000;
    let server = need!(Server::start());
    let (client, other) = (
        server.direct_client("").await,
        server.direct_client("").await,
    );
    let drafts = || (0..MESSAGES / 20).map(|_| Draft::new("x"));
    for _ in 0..20 {
        other.queue("jobs").push_all(drafts()).await.unwrap();
    }
    let held = other.mutex("before").lock().await.unwrap();
    let scope = Scope::Prefix(String::new());
    let names = async || -> Vec<String> {
        let lines = client.survey(scope.clone()).await.unwrap();
        lines.into_iter().map(|line| line.name).collect()
    };
    server.ask(&["CONFIG", "RESETSTAT"]);
    assert_eq!(names().await, ["before"]);
    let walk = server.calls("scan");
    assert!(walk >= 10, "{walk} calls walk {MESSAGES} messages");

    let mut watch = client.engine().watch(scope.clone());
    soon("the watch", watch.next()).await.unwrap().unwrap();
    // Another program's work, as an earlier palisade would do it.
    let mut changes = tokio::spawn(async move { while watch.next().await.is_some() {} });
    for at in 0..50 {
        let name = format!("line {at}");
        let hold = other.mutex(&name).lock().await.unwrap();
        assert_eq!(names().await, ["before", name.as_str()]);
        hold.release().await.unwrap();
        assert_eq!(names().await, ["before"]);
        other.queue("jobs").push("x").await.unwrap();
    }
    let calls = server.calls("scan");
    assert!(
        calls <= walk * 4,
        "{calls} calls for 101 surveys, {walk} for one"
    );

    // A flush, and the end of the watch.
    server.ask(&["FLUSHALL"]);
    let found = names().await;
    assert!(found.is_empty(), "{found:?}");
    drop(held);
    changes.abort();
    let _ = (&mut changes).await;
    let _held = other.mutex("after").lock().await.unwrap();
    let asked = server.calls("scan");
    assert_eq!(names().await, ["after"]);
    assert!(server.calls("scan") > asked, "there is no watch");
    let watches = async || !server.ask(&["CLIENT", "LIST"]).contains("flags=B");
    until("the end of its connection", watches).await;
}
