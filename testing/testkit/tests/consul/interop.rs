//! `consul lock` and palisade exclude each other on the same keys, both ways.

use palisade::ErrorKind;
use palisade_testkit::lab::launch::Running;

use crate::util::{beside_others, consul_holds, consul_lock, fails, get, holder, soon};

#[tokio::test(flavor = "multi_thread")]
async fn palisade_waits_for_consul_lock() {
    let running = need!("consul");
    let client = beside_others(&running, "").await;
    let theirs = tokio::task::block_in_place(|| consul_holds(&running, &[], "web"));
    let mutex = client.mutex("web/.lock");
    assert!(mutex.try_lock().await.unwrap().is_none(), "two holders");
    let shown = client
        .survey(palisade::report::Scope::Prefix(String::new()))
        .await
        .unwrap();
    assert_eq!(shown.len(), 1, "{shown:?}");
    assert_eq!(shown[0].name, "web/.lock");
    assert_eq!(
        Some(&shown[0].holders[0].id),
        holder(&running, "web/.lock").as_ref()
    );
    let waiting = tokio::spawn(async move { mutex.lock().await });
    tokio::task::block_in_place(|| theirs.interrupt());
    let hold = soon("the grant", waiting).await.unwrap().unwrap();
    assert!(hold.token().0 > 0);
    hold.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn consul_lock_waits_for_palisade() {
    let running = need!("consul");
    let client = beside_others(&running, "").await;
    let hold = client.mutex("web/.lock").lock().await.unwrap();
    let run = |arguments: &[&str]| consul_lock(&running, arguments);
    let refused = run(&["-child-exit-code", "-try=300ms", "web", "echo held"]);
    assert!(
        !tokio::task::block_in_place(|| refused.ended()),
        "two holders"
    );
    let waits = run(&["-child-exit-code", "web", "echo held"]);
    assert!(waits.is_silent());
    hold.release().await.unwrap();
    assert_eq!(tokio::task::block_in_place(|| waits.line()), "held");
    assert!(tokio::task::block_in_place(|| waits.ended()));
    let again = client.mutex("web/.lock").lock().await.unwrap();
    again.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_are_shared_with_consul_lock() {
    let running = need!("consul");
    let client = beside_others(&running, "").await;
    let semaphore = client.semaphore("pool", 3);
    let theirs = tokio::task::block_in_place(|| consul_holds(&running, &["-n=3"], "pool"));
    let one = semaphore
        .try_acquire()
        .await
        .unwrap()
        .expect("two of three");
    let two = semaphore
        .try_acquire()
        .await
        .unwrap()
        .expect("three of three");
    assert!(
        semaphore.try_acquire().await.unwrap().is_none(),
        "four of three"
    );
    assert_eq!(holders(&running), 3);
    let refused = consul_lock(
        &running,
        &[
            "-child-exit-code",
            "-n=3",
            "-try=300ms",
            "pool",
            "echo held",
        ],
    );
    assert!(
        !tokio::task::block_in_place(|| refused.ended()),
        "four of three"
    );
    let shown = client
        .survey(palisade::report::Scope::Prefix(String::new()))
        .await
        .unwrap();
    assert_eq!((shown.len(), shown[0].holders.len()), (1, 3), "{shown:?}");
    assert_eq!(shown[0].capacity, Some(3));

    // One of ours leaves: one of theirs is granted.
    let waits = consul_lock(
        &running,
        &[
            "-child-exit-code",
            "-n=3",
            "pool",
            "echo held; exec sleep 600",
        ],
    );
    one.release().await.unwrap();
    assert_eq!(tokio::task::block_in_place(|| waits.line()), "held");
    // One of theirs leaves: one of ours is granted.
    let waiting = tokio::spawn(async move { semaphore.acquire().await });
    tokio::task::block_in_place(|| theirs.interrupt());
    let three = soon("the grant", waiting).await.unwrap().unwrap();
    three.release().await.unwrap();
    two.release().await.unwrap();
    tokio::task::block_in_place(|| waits.interrupt());
    // Another capacity on a name in use is refused, and so is the lock below it.
    let hold = client.semaphore("pool", 2).acquire().await.unwrap();
    fails(
        client.semaphore("pool", 3).try_acquire().await,
        ErrorKind::CapacityMismatch,
    );
    fails(
        client.mutex("pool/.lock").try_lock().await,
        ErrorKind::CapacityMismatch,
    );
    fails(
        client.mutex("pool").try_lock().await,
        ErrorKind::CapacityMismatch,
    );
    hold.release().await.unwrap();
}

/// The number of holders in Consul's own layout.
fn holders(running: &Running) -> usize {
    let pair = get(running, "/v1/kv/pool/.lock?raw&consistent");
    assert_eq!(pair["Limit"], 3);
    pair["Holders"].as_object().unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn consul_lock_does_not_overwrite_readers() {
    let running = need!("consul");
    let client = beside_others(&running, "").await;
    let reader = client.rwlock("doc/.lock").read().await.unwrap();
    let refused = consul_lock(
        &running,
        &["-child-exit-code", "-try=300ms", "doc", "echo held"],
    );
    assert!(
        !tokio::task::block_in_place(|| refused.ended()),
        "a writer beside a reader"
    );
    reader.release().await.unwrap();
    let allowed = consul_lock(&running, &["-child-exit-code", "doc", "echo held"]);
    assert!(tokio::task::block_in_place(|| allowed.ended()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_something_else_is_not_overwritten() {
    let running = need!("consul");
    let client = beside_others(&running, "").await;
    let port = running.nodes()[0].port();
    palisade_testkit::lab::launch::wire::http(port, "PUT", "/v1/kv/app/config", "precious")
        .unwrap();
    fails(
        client.mutex("app/config").try_lock().await,
        ErrorKind::Unusable,
    );
    let (_, kept) =
        palisade_testkit::lab::launch::wire::http(port, "GET", "/v1/kv/app/config?raw", "")
            .unwrap();
    assert_eq!(kept, "precious");
}
