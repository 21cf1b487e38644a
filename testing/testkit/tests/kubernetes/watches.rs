//! The watches of the fake API server behave as a real server's, and palisade treats them as hints.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use palisade::ErrorKind;
use palisade_testkit::lab::launch::apiserver::{ApiServer, Grant, NAMESPACE};
use serde_json::{Value, json};

use crate::util::{client, seconds, server, soon};

/// The events of a watch, as they come.
struct Events(BufReader<TcpStream>);

fn watch(server: &ApiServer, query: &str) -> Events {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(seconds(20))).unwrap();
    let path =
        format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases?watch=1&{query}");
    write!(stream, "GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    reader.read_line(&mut head).unwrap();
    assert!(head.contains("200"), "{head}");
    while !matches!(head.as_str(), "\r\n" | "") {
        head.clear();
        reader.read_line(&mut head).unwrap();
    }
    Events(reader)
}

impl Iterator for Events {
    type Item = (String, Value);

    fn next(&mut self) -> Option<Self::Item> {
        let mut line = String::new();
        if self.0.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        let event: Value = serde_json::from_str(&line).unwrap();
        Some((
            event["type"].as_str().unwrap().to_owned(),
            event["object"].clone(),
        ))
    }
}

fn create(server: &ApiServer, name: &str) -> Value {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases");
    let lease = json!({ "metadata": { "name": name } });
    server.ask("POST", &path, &lease).2
}

fn version(object: &Value) -> String {
    object["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn without_a_version_what_is_there_comes_first() {
    let server = server();
    create(&server, "a");
    create(&server, "b");
    let mut events = watch(&server, "fieldSelector=metadata.name%3Da&timeoutSeconds=5");
    let (kind, object) = events.next().unwrap();
    assert_eq!(
        (kind.as_str(), &object["metadata"]["name"]),
        ("ADDED", &json!("a"))
    );
    server.edit("b", |lease| lease["spec"]["holderIdentity"] = "x".into());
    server.edit("a", |lease| lease["spec"]["holderIdentity"] = "x".into());
    let (kind, changed) = events.next().unwrap();
    assert_eq!(
        (kind.as_str(), &changed["metadata"]["name"]),
        ("MODIFIED", &json!("a"))
    );
    server.delete("a");
    let (kind, deleted) = events.next().unwrap();
    assert_eq!(kind, "DELETED");
    // The old content with a new version.
    assert_eq!(deleted["spec"]["holderIdentity"], "x");
    assert!(version(&deleted) > version(&changed));
    assert!(events.next().is_none(), "it ends with its time");
}

#[test]
fn with_a_version_only_later_changes_come() {
    let server = server();
    let lease = create(&server, "a");
    server.edit("a", |lease| lease["spec"]["holderIdentity"] = "x".into());
    let query = format!("resourceVersion={}&timeoutSeconds=1", version(&lease));
    let events: Vec<_> = watch(&server, &query).collect();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].0, "MODIFIED");
}

#[test]
fn a_version_that_is_too_old_is_told_as_an_event() {
    let server = server();
    let lease = create(&server, "a");
    // After a restart, even the object's own version is too old.
    server.forget_history();
    let query = format!("resourceVersion={}&timeoutSeconds=5", version(&lease));
    let mut events = watch(&server, &query);
    let (kind, status) = events.next().unwrap();
    assert_eq!((kind.as_str(), &status["code"]), ("ERROR", &json!(410)));
    assert_eq!(status["reason"], "Expired");
    assert!(events.next().is_none());
}

#[test]
fn a_version_from_the_future_is_silence() {
    let server = server();
    let lease = create(&server, "a");
    let ahead = version(&lease).parse::<u64>().unwrap() + 1;
    let mut events = watch(
        &server,
        &format!("resourceVersion={ahead}&timeoutSeconds=2"),
    );
    server.edit("a", |lease| {
        lease["spec"]["holderIdentity"] = "dropped".into()
    });
    server.edit("a", |lease| lease["spec"]["holderIdentity"] = "told".into());
    let (_, object) = events.next().unwrap();
    assert_eq!(object["spec"]["holderIdentity"], "told");
}

#[test]
fn labels_select_and_what_loses_its_label_is_deleted() {
    let server = server();
    create(&server, "a");
    let mut events = watch(&server, "labelSelector=palisade%2Fevict&timeoutSeconds=5");
    server.edit("a", |lease| {
        lease["metadata"]["labels"] = json!({ "palisade/evict": "" })
    });
    assert_eq!(events.next().unwrap().0, "ADDED");
    server.edit("a", |lease| {
        lease["metadata"]["labels"] = json!({ "x": "y" })
    });
    assert_eq!(events.next().unwrap().0, "DELETED");
}

/// Watches end, history is forgotten, and a release is still noticed at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_outlives_its_watches() {
    let server = server();
    let (holder, waiter) = (client(&server).await, client(&server).await);
    let hold = holder.mutex("a").lock().await.unwrap();
    let waiting = tokio::spawn(async move { waiter.mutex("a").lock().await });
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.forget_history();
    }
    assert!(!waiting.is_finished());
    hold.release().await.unwrap();
    drop(soon("the grant", waiting).await.unwrap().unwrap());
}

/// Without permission to watch, waiters poll.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_without_the_right_to_watch_is_granted_too() {
    let server = server();
    server.grant(vec![Grant::of("t", &["get", "create", "update"])]);
    let config = server.write_kubeconfig("token", "{token: t}");
    let connect = async || palisade::connect(&server.url_with(&config)).await.unwrap();
    let (holder, waiter) = (connect().await, connect().await);
    let hold = holder.mutex("a").lock().await.unwrap();
    let waiting = tokio::spawn(async move { waiter.mutex("a").lock().await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let start = Instant::now();
    hold.release().await.unwrap();
    drop(soon("the grant", waiting).await.unwrap().unwrap());
    assert!(start.elapsed() < seconds(8));
}

/// Waiters of one process share their reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_one_process_asks_little() {
    let server = server();
    let (holder, crowd) = (client(&server).await, client(&server).await);
    let hold = holder.mutex("a").lock().await.unwrap();
    let waiters: Vec<_> = (0..50)
        .map(|_| {
            let mutex = crowd.mutex("a").ttl(seconds(60));
            tokio::spawn(async move { mutex.lock_timeout(seconds(3)).await })
        })
        .collect();
    let before = server.requests("GET");
    tokio::time::sleep(seconds(2)).await;
    let asked = server.requests("GET") - before;
    // Alone, each would read once a second.
    assert!(asked < 60, "{asked} reads by 50 waiters in 2 s");
    let mut late = 0;
    for waiter in waiters {
        match waiter.await.unwrap() {
            Ok(held) => assert!(held.is_none()),
            // On a busy machine the last read may come too late.
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                late += 1;
            }
        }
    }
    assert!(late < 25, "{late} of 50 waiters have no answer");
    hold.release().await.unwrap();
}
