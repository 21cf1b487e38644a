//! What a client promises before and around its locks.

use std::time::Duration;

use palisade::engine::{Ask, Permits, Tokens};
use palisade::report::{Scope, Severity};
use palisade::{Capability, Client, ErrorKind, Eviction, Guarantee, Hold, Patience, Which};

use super::fixture::{fails, free, granted};
use super::{Fixture, NotApplicable, SOON, cases, needs, permits, soon, within};
use crate::spy::Spy;

cases! { pub(super) CASES, "client";
    "What can't work is refused before anything is asked of the engine." => [
        a_ttl_out_of_range_is_refused,
        a_bad_name_is_refused,
        an_unknown_option_is_refused,
        what_the_engine_lacks_is_unsupported,
        a_resize_that_cant_work_is_refused,
    ],
    "A resize is felt by those who wait." => [
        resize_grants_who_waits if needs::resize,
    ],
    "`for_correctness` is refused on class C and on dangerous settings, with the reason, and \
     granted otherwise." => [
        correctness_goes_by_the_class_and_the_checkup,
    ],
    "The engine says what it is, without secrets." => [
        describe_is_scheme_and_host,
        check_answers,
    ],
    "An eviction tells the owner first, and removes when it has let go or its lease has ended." => [
        evict_waits_for_the_owner,
        evict_ends_with_the_lease,
        evict_by_id_takes_a_waiter,
        evict_of_nothing_is_false,
    ],
    "A client that is dropped leaves nothing behind, and others go on." => [
        dropped_clients_leave_nothing,
    ],
}

/// Asserts that `ask` is refused as unsupported before any request is made.
pub(super) async fn is_refused(fx: &Fixture, ask: Ask) {
    let (spy, client) = fx.spied_client().await;
    refuses(&client, &spy, ask).await;
}

async fn refuses(client: &Client, spy: &Spy, ask: Ask) {
    for patience in [Patience::NoWait, Patience::For(SOON), Patience::Forever] {
        let line = client.line("refused", ask);
        let answer = soon("the refusal", line.acquire(patience)).await;
        let error = fails(answer, ErrorKind::Unsupported);
        assert!(error.message().len() > 10, "no reason in {error}");
    }
    assert_eq!(spy.total(), 0, "requests made");
}

async fn a_ttl_out_of_range_is_refused(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    let range = fx.capability().ttl;
    let too_long = range.max + Duration::from_secs(1);
    for ttl in [Duration::ZERO, range.min / 2, too_long] {
        let tried = client.mutex("ttl").ttl(ttl).try_lock().await;
        fails(tried, ErrorKind::InvalidArgument);
    }
    assert_eq!(spy.total(), 0, "requests made");
    for ttl in [range.min, range.max] {
        // The shortest ttl may be over before anything can be done with it.
        if let Err(error) = client.mutex("ttl").ttl(ttl).try_lock().await {
            assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        }
    }
}

async fn a_resize_that_cant_work_is_refused(fx: Fixture) {
    let (spy, client) = fx.spied_client().await;
    for (name, capacity, kind) in [
        ("resized", 0, ErrorKind::InvalidArgument),
        ("resized", u32::MAX, ErrorKind::InvalidArgument),
        ("", 2, ErrorKind::InvalidName),
    ] {
        fails(client.resize(name, capacity).await, kind);
    }
    if !fx.capability().resize {
        fails(client.resize("resized", 2).await, ErrorKind::Unsupported);
    }
    assert_eq!(spy.total(), 0, "requests made");
}

async fn resize_grants_who_waits(fx: Fixture) {
    let client = fx.client();
    let resized = client.resize("permits", 2).await.unwrap();
    assert!(!resized, "permits of an empty line");
    let semaphore = client.semaphore("permits", 1);
    let first = semaphore.acquire().await.unwrap();
    let waiter = fx.queued("permits", 1, async move { semaphore.acquire().await });
    let waiter = waiter.await;
    let resized = fx.other_client().await.resize("permits", 2).await;
    assert!(resized.unwrap(), "permits there");
    let second = granted(waiter).await;
    assert!(first.is_valid() && second.is_valid(), "a hold was lost");
}

async fn a_bad_name_is_refused(fx: Fixture) {
    let client = fx.client();
    for name in ["", "a\nb", "a\0b", &"x".repeat(256)] {
        fails(client.mutex(name).lock().await, ErrorKind::InvalidName);
        fails(client.rwlock(name).try_read().await, ErrorKind::InvalidName);
        let permit = client.semaphore(name, 2).try_acquire().await;
        fails(permit, ErrorKind::InvalidName);
        fails(client.election(name).leader().await, ErrorKind::InvalidName);
        let both = client.multi_lock([name, "b"]).try_lock().await;
        fails(both, ErrorKind::InvalidName);
    }
}

async fn an_unknown_option_is_refused(fx: Fixture) {
    let refused = fx.client_with("nosuchoption", "hunter2").await;
    let error = fails(refused, ErrorKind::Config);
    let shown = format!("{error} {error:?}");
    assert!(shown.contains("nosuchoption"), "{shown} does not name it");
    assert!(!shown.contains("hunter2"), "the value is shown");
}

/// Uses a spy that hides capabilities, since the engine itself may lack none.
async fn what_the_engine_lacks_is_unsupported(fx: Fixture) {
    let poor = |permits| {
        let mut poor = fx.capability();
        (poor.shared, poor.permits) = (false, permits);
        poor
    };
    let (spy, client) = fx.spying(fx.engine(), poor(Permits::Slots));
    refuses(&client, &spy, Ask::READ).await;
    refuses(&client, &spy, permits(2, 3)).await;
    let (spy, client) = fx.spying(fx.engine(), poor(Permits::None));
    refuses(&client, &spy, permits(1, 3)).await;
    drop(free(client.mutex("refused").try_lock().await));
}

async fn correctness_goes_by_the_class_and_the_checkup(fx: Fixture) {
    let Capability { class, tokens, .. } = fx.capability();
    let fit = class != Guarantee::Timed && tokens != Tokens::None;
    let findings = fx.client().check().await.unwrap().findings;
    let danger = findings
        .into_iter()
        .find(|f| f.severity == Severity::Danger);
    match fx.client().for_correctness().await {
        Ok(client) => {
            assert!(fit, "class {class} passes for correctness");
            assert!(danger.is_none(), "passes for correctness with {danger:?}");
            drop(free(client.mutex("correct").try_lock().await));
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotForCorrectness, "{error}");
            if fit {
                let danger = danger.expect("a reason");
                let said = |part: &str| error.message().contains(part);
                let told = said(&danger.message) && said(&danger.remedy);
                assert!(told, "{danger:?} is not in {error}");
            }
        }
    }
    let fast = fx.client().for_efficiency();
    drop(free(fast.mutex("fast").try_lock().await));
}

async fn describe_is_scheme_and_host(fx: Fixture) {
    let shown = fx.client().describe();
    let scheme = fx.url().split(':').next().unwrap();
    assert!(shown.starts_with(scheme), "{shown}");
    let options = shown.contains("namespace") || shown.contains('?');
    assert!(!options, "{shown} shows options");
    let debug = format!("{:?}", fx.client());
    assert!(debug.contains(&shown), "{debug} does not show {shown}");
}

async fn check_answers(fx: Fixture) {
    let client = fx.client();
    let checkup = soon("the findings", client.check()).await.unwrap();
    for finding in checkup.findings {
        let parts = [finding.code, &finding.message, &finding.remedy];
        assert!(parts.iter().all(|part| !part.is_empty()), "{finding:?}");
    }
}

/// A hold of another client.
async fn owned(fx: &Fixture, ttl: Duration) -> (Client, Hold) {
    let owner = fx.other_client().await;
    let mutex = owner.mutex("evicted").ttl(ttl);
    let hold = mutex.lock().await.unwrap();
    (owner, hold)
}

async fn evict_waits_for_the_owner(fx: Fixture) {
    let (_owner, hold) = owned(&fx, fx.long_ttl()).await;
    let (operator, name) = (fx.client(), hold.name().clone());
    let evict =
        tokio::spawn(async move { operator.evict(&name, Which::Holders, Eviction::Mark).await });
    soon("the loss", hold.lost()).await;
    let line = fx.line("evicted");
    assert_eq!(line.length().await, (1, 0), "before it let go");
    assert!(!evict.is_finished(), "the eviction did not wait");
    drop(hold);
    let evicted = soon("the eviction", evict).await.unwrap().unwrap();
    assert!(evicted, "a holder to evict");
    line.until_empty().await;
}

async fn evict_ends_with_the_lease(fx: Fixture) {
    let ttl = fx.fit(fx.short_ttl() * 2);
    let (_owner, hold) = owned(&fx, ttl).await;
    // The owner keeps its hold, but the eviction does not wait beyond its lease.
    let operator = fx.client();
    let evict = operator.evict(hold.name(), Which::Holders, Eviction::Mark);
    assert!(within(ttl + SOON, "the eviction", evict).await.unwrap());
    assert!(!hold.is_valid(), "an evicted hold is valid");
    fx.line("evicted").until_empty().await;
}

async fn evict_by_id_takes_a_waiter(fx: Fixture) {
    if !fx.capability().waiters_visible {
        NotApplicable::because("waiters are not visible");
    }
    let (_owner, hold) = owned(&fx, fx.long_ttl()).await;
    let mutex = fx.mutex("evicted").ttl(fx.long_ttl());
    let waiter = fx.queued("evicted", 1, async move { mutex.lock().await });
    let waiter = waiter.await;
    let id = fx.line("evicted").ids().await.1.remove(0);
    let operator = fx.client();
    let evict = operator.evict(hold.name(), Which::Claim(&id), Eviction::Mark);
    assert!(soon("the eviction", evict).await.unwrap());
    let ended = soon("the waiter's end", waiter).await.unwrap();
    fails(ended, ErrorKind::Lost);
    assert!(hold.is_valid(), "the holder was touched");
}

async fn evict_of_nothing_is_false(fx: Fixture) {
    let (client, name) = (fx.client(), fx.line("nothing").name);
    for how in [Eviction::Mark, Eviction::Remove] {
        for which in [Which::Holders, Which::Claim("0")] {
            assert!(!client.evict(&name, which, how).await.unwrap());
        }
    }
}

async fn dropped_clients_leave_nothing(fx: Fixture) {
    for round in 0..10 {
        let client = fx.lasting_client().await;
        let hold = client.mutex(format!("round-{round}")).lock().await;
        drop((client, hold.unwrap()));
    }
    let empty = async {
        let scope = || Scope::Prefix("round-".into());
        while !fx.client().survey(scope()).await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the release of all", empty).await;
}
