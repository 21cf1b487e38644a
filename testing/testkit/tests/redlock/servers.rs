//! The servers themselves: which of them may vote, and what they have lost.

use std::sync::mpsc;
use std::time::Duration;

use palisade::ErrorKind;
use palisade::events::{Event, Observer};

use super::support::{FRESH, Five, soon, until};

/// A lock is on A, B and C, and C restarts empty. If C may vote, the lock is granted again.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarted_does_not_vote() {
    for guarded in [true, false] {
        let Some(five) = Five::start() else { return };
        let holder = five.client(FRESH).await;
        let _hold = five.lock_on_three(&holder, "job").await;
        // All have run for longer than the longest ttl before C restarts.
        let max_ttl = Duration::from_secs(3);
        tokio::time::sleep(max_ttl + Duration::from_secs(1)).await;
        let guard = if guarded { "on" } else { "off" };
        let options = format!("namespace=&max_ttl=3s&restart_guard={guard}");
        let other = five.client(&options).await;
        assert!(other.mutex("free").try_lock().await.unwrap().is_some());
        five.running.nodes()[2].wipe().unwrap();
        let second = async || {
            let second = other.mutex("job").try_lock().await;
            // Its first request may find the connection closed.
            match second {
                Ok(second) => second.is_some(),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                    false
                }
            }
        };
        if guarded {
            for _ in 0..20 {
                assert!(!second().await, "a second grant");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            until("C votes again", second).await;
        } else {
            // The control: the test can detect a second grant.
            until("a second grant", second).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_have_just_started_say_so() {
    let Some(five) = Five::start() else { return };
    let client = five.client("namespace=").await;
    let mutex = client.mutex("job");
    let error = mutex.try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let said = error.message().to_owned();
    let begin = "5 of 5 servers restarted less than 60s ago and do not vote yet; a majority can \
                 vote in ";
    assert!(said.starts_with(begin), "{error}");
    assert!(said.ends_with("s (see restart_guard=)"), "{error}");
    let checkup = client.check().await.unwrap();
    let found = |code| {
        checkup
            .findings
            .iter()
            .find(move |found| found.code == code)
    };
    assert!(found("not_voting").unwrap().message.starts_with(begin));

    // One that is down is named; one that nobody waited for is not.
    five.running.nodes()[1].kill().unwrap();
    let names_it = async || {
        let error = mutex.try_lock().await.unwrap_err();
        assert!(!error.message().contains("no answer"), "{error}");
        assert!(!error.message().contains("0 of 5"), "{error}");
        let host = format!("127.0.0.1:{}", five.running.nodes()[1].port());
        error.message().starts_with("4 of 5") && error.message().contains(&host)
    };
    until("the dead server is named", names_it).await;
}

/// Whoever waits is told what for, once, and again when it is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_servers_that_restarted_says_so() {
    struct Stalls(mpsc::Sender<Option<String>>);
    impl Observer for Stalls {
        fn see(&self, event: &Event<'_>) {
            if let Event::Stalled { why, .. } = event {
                let why = why.map(|why| why.message().to_owned());
                self.0.send(why).unwrap();
            }
        }
    }
    let Some(five) = Five::start() else { return };
    let (sender, told) = mpsc::channel();
    let client = five.client("namespace=&max_ttl=3s&ttl=3s").await;
    let client = client.observed_by(Stalls(sender));
    let _hold = soon("it votes", client.mutex("job").lock()).await.unwrap();
    let told: Vec<_> = told.try_iter().collect();
    let why = told[0].as_ref().unwrap();
    assert!(why.contains("restarted less than 3s ago"), "{told:?}");
    assert_eq!(told.last(), Some(&None), "{told:?}");
    // Fewer and fewer of them abstain at the end, and each number is the same reason.
    assert!(told.len() <= 4, "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_named_twice_is_refused() {
    let Some(five) = Five::start() else { return };
    let ports: Vec<u16> = five
        .running
        .nodes()
        .iter()
        .map(|node| node.port())
        .collect();
    let twice = format!(
        "redlock://127.0.0.1:{},127.0.0.1:{},127.0.0.1:{},{}?{FRESH}",
        ports[0],
        ports[1],
        ports[2],
        five.proxies[0].addr()
    );
    let error = palisade::connect(&twice).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("would vote twice"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_tells_of_each_server_and_correctness_is_refused() {
    let Some(five) = Five::start() else { return };
    let client = five.client(FRESH).await;
    let found = client.check().await.unwrap();
    assert!(
        found
            .findings
            .iter()
            .all(|f| f.code != "clocks_apart" && f.code != "server_down")
    );
    five.running.nodes()[1].kill().unwrap();
    let found = client.check().await.unwrap().findings;
    assert!(
        found.iter().any(|finding| finding.code == "server_down"),
        "{found:?}"
    );
    let refused = client.for_correctness().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotForCorrectness);
    let long = client
        .mutex("job")
        .ttl(Duration::from_secs(61))
        .lock()
        .await;
    assert_eq!(long.unwrap_err().kind(), ErrorKind::InvalidArgument);
}
