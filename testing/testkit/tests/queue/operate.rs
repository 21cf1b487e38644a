//! What operators see and do.

use std::time::Duration;

use palisade::queue::{Draft, MessageState, Pick};
use palisade::report::Scope;

use crate::{Fixture, cases, until};

cases! {
    a_report_counts_every_state,
    the_oldest_has_waited_since_its_push,
    messages_are_listed_and_read,
    queues_are_surveyed_by_prefix,
    a_retry_makes_one_ready,
    a_drop_removes_what_is_meant,
}

async fn a_report_counts_every_state(fx: Fixture) {
    let queue = fx.queue().await;
    assert_eq!(
        queue
            .report()
            .await
            .unwrap()
            .map_or(0, |report| report.total()),
        0
    );
    queue.push("claimed").await.unwrap();
    let claimed = queue.next().await.unwrap();
    queue.push("dead").await.unwrap();
    queue.next().await.unwrap().bury("no").await.unwrap();
    queue
        .push(Draft::new("late").delay(Duration::from_secs(600)))
        .await
        .unwrap();
    queue
        .push_all(["1", "2", "3"].map(|body| Draft::new(body).key("k")))
        .await
        .unwrap();
    queue.push_all(["4", "5"].map(Draft::new)).await.unwrap();
    let report = queue.report().await.unwrap().unwrap();
    assert_eq!(report.name, "work");
    let counts = (
        report.ready,
        report.delayed,
        report.claimed,
        report.blocked,
        report.dead,
    );
    assert_eq!(counts, (3, 1, 1, 2, 1), "{report:?}");
    assert_eq!(report.total(), 8);
    assert!(report.oldest.is_some());
    claimed.done().await.unwrap();
}

/// Also if it was behind another of its key until just now.
async fn the_oldest_has_waited_since_its_push(fx: Fixture) {
    const WORK: Duration = Duration::from_millis(300);
    let queue = fx.queue().await;
    let late = Draft::new("late").delay(WORK * 2);
    queue
        .push_all(["1", "2"].map(|body| Draft::new(body).key("k")))
        .await
        .unwrap();
    queue.push(late).await.unwrap();
    let oldest = async || queue.report().await.unwrap().unwrap().oldest;
    let pushed = palisade::BootTime::now();
    let first = queue.next().await.unwrap();
    assert_eq!(oldest().await, None, "nothing is ready");
    tokio::time::sleep(WORK).await;
    first.done().await.unwrap();
    let least = palisade::BootTime::now().saturating_since(pushed);
    let waited = oldest().await.unwrap();
    assert!(waited >= least.min(WORK), "{waited:?}");
    queue.next().await.unwrap().done().await.unwrap();
    // What its sender kept back has waited since then.
    let late = async || queue.report().await.unwrap().unwrap().ready == 1;
    until("the late one", late).await;
    let since = palisade::BootTime::now().saturating_since(pushed);
    assert!(
        oldest().await.unwrap() + WORK * 2 <= since + WORK,
        "counted from its push"
    );
}

async fn messages_are_listed_and_read(fx: Fixture) {
    let queue = fx.queue().await;
    queue
        .push(Draft::new("one").id("first").key("k"))
        .await
        .unwrap();
    let second = queue.push(Draft::new("two").key("k")).await.unwrap();
    queue
        .push(Draft::new("three").delay(Duration::from_secs(600)))
        .await
        .unwrap();
    let claimed = queue.next().await.unwrap();
    let list = queue.list(false, 10).await.unwrap();
    let states: Vec<MessageState> = list.iter().map(|message| message.state).collect();
    use MessageState::{Blocked, Claimed, Delayed};
    assert_eq!(states, [Claimed, Blocked, Delayed]);
    assert!(list.is_sorted_by_key(|message| message.number));
    assert_eq!((&*list[0].id, list[0].key.as_deref()), ("first", Some("k")));
    assert_eq!((list[0].attempts, list[0].size), (1, 3));
    assert_eq!(list[0].sequence, Some(claimed.token().0));
    assert_eq!(list[0].owner.as_ref().unwrap().pid, std::process::id());
    assert!(list[0].changes_in.is_some() && list[2].changes_in.is_some());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let age = now.unwrap().as_millis() as i128 - i128::from(list[0].pushed);
    assert!(age.abs() < 60_000, "{age} ms");
    assert_eq!(queue.list(false, 2).await.unwrap().len(), 2);
    assert!(queue.list(true, 2).await.unwrap().is_empty());

    let (report, body) = queue.read(&second.id).await.unwrap().unwrap();
    assert_eq!((report.state, &*body), (Blocked, &b"two"[..]));
    let (report, body) = queue.read("first").await.unwrap().unwrap();
    assert_eq!((report.id, &*body), ("first".to_owned(), &b"one"[..]));
    for absent in ["nobody", "@0", "@999999999", "@x", ""] {
        assert!(queue.read(absent).await.unwrap().is_none(), "{absent}");
    }
    claimed.done().await.unwrap();
    assert!(queue.read("first").await.unwrap().is_none());
}

async fn queues_are_surveyed_by_prefix(fx: Fixture) {
    let client = fx.client().await;
    for name in ["mail", "mail/eu", "pdf", "a_b", "axb"] {
        client.queue(name).push("x").await.unwrap();
    }
    let names = async |prefix: &str| -> Vec<String> {
        let scope = Scope::Prefix(prefix.to_owned());
        let reports = client.survey_queues(scope).await.unwrap();
        reports.into_iter().map(|report| report.name).collect()
    };
    assert_eq!(names("").await, ["a_b", "axb", "mail", "mail/eu", "pdf"]);
    assert_eq!(names("mail").await, ["mail", "mail/eu"]);
    assert_eq!(names("a_").await, ["a_b"]);
    assert!(names("zzz").await.is_empty());
    let other = format!("{}&namespace=else", without_namespace(&fx.url));
    let other = palisade::connect(&*other).await.unwrap();
    let all = Scope::Prefix(String::new());
    assert!(other.survey_queues(all).await.unwrap().is_empty());
}

/// A connection with two options of the same name is refused, so this removes one.
fn without_namespace(url: &str) -> String {
    url.split("&namespace=").next().unwrap_or(url).to_owned()
}

async fn a_retry_makes_one_ready(fx: Fixture) {
    let queue = fx.queue().await;
    let late = Draft::new("late")
        .id("late")
        .delay(Duration::from_secs(600));
    queue.push(late).await.unwrap();
    queue.push(Draft::new("dead").id("dead")).await.unwrap();
    queue.next().await.unwrap().bury("no").await.unwrap();
    assert_eq!(queue.retry(Pick::Id("nobody".into())).await.unwrap(), 0);
    for (id, attempt) in [("late", 1), ("dead", 1)] {
        assert_eq!(queue.retry(Pick::Id(id.into())).await.unwrap(), 1);
        let message = queue.next().await.unwrap();
        assert_eq!((message.id(), message.attempt()), (id, attempt));
        assert_eq!(
            queue.retry(Pick::Id(id.into())).await.unwrap(),
            0,
            "it is claimed"
        );
        message.done().await.unwrap();
    }
    assert_eq!(queue.retry(Pick::Dead).await.unwrap(), 0);
}

async fn a_drop_removes_what_is_meant(fx: Fixture) {
    let queue = fx.queue().await;
    let drafts = (0..1000).map(|number| Draft::new("x").key(format!("k{}", number % 600)));
    queue.push_all(drafts).await.unwrap();
    queue.push(Draft::new("x").id("one")).await.unwrap();
    let id = || Pick::Id("one".to_owned());
    assert_eq!(queue.drop_messages(id(), false).await.unwrap(), 1);
    assert_eq!(queue.drop_messages(id(), false).await.unwrap(), 0);
    let again = queue.push(Draft::new("x").id("one")).await.unwrap();
    assert!(!again.duplicate, "what was dropped is forgotten");
    let claimed = queue.next().await.unwrap();
    queue.next().await.unwrap().bury("no").await.unwrap();
    assert_eq!(queue.drop_messages(Pick::Dead, false).await.unwrap(), 1);
    assert_eq!(queue.drop_messages(Pick::All, false).await.unwrap(), 999);
    assert!(claimed.is_valid());
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 1);
    claimed.done().await.unwrap();
}
