//! Other users of the same locks: `pg_advisory_lock` from psql with the documented keys, sqlx's
//! `PgAdvisoryLock`, and ShedLock's table.

use palisade::engine::Ask;
use palisade::report::Scope;
use palisade::{BootTime, ErrorKind, Name, Patience};
use sqlx::postgres::PgAdvisoryLock;
use sqlx::{Connection, Either, PgConnection};

use super::{
    LET_GO, Psql, SOON, advisory, connect, server, soon, sql, throughout, waits_for_a_lock,
};

/// A lock of sqlx and one of palisade by the same name, with its defaults: `key=sqlx`.
#[tokio::test]
async fn sqlx_s_advisory_lock_and_ours_exclude_each_other() {
    let server = need!(server());
    let mut theirs = PgConnection::connect(server.url()).await.unwrap();
    for (namespace, name, known_as) in [
        ("?namespace=", "nightly import ⚙", "nightly import ⚙"),
        ("", "nightly import", "palisade/nightly import"),
    ] {
        let url = format!("{}{namespace}", advisory(&server));
        let client = connect(&url).await;
        let ours = client.mutex(name);
        let sqlx = PgAdvisoryLock::new(known_as);

        let hold = ours.lock().await.unwrap();
        assert!(
            matches!(sqlx.try_acquire(&mut theirs).await, Ok(Either::Right(_))),
            "sqlx locks beside palisade"
        );
        // Our release wakes its waiter.
        let (guard, asked) = tokio::join!(
            async {
                let guard = soon(sqlx.acquire(&mut theirs)).await;
                (guard, BootTime::now())
            },
            async {
                waits_for_a_lock(&server).await;
                let asked = BootTime::now();
                hold.release().await.unwrap();
                asked
            }
        );
        let (guard, woken) = guard;
        let took = woken.saturating_since(asked);
        assert!(took < LET_GO, "it waited {took:?} for our release");
        let guard = guard.unwrap();
        assert!(
            ours.try_lock().await.unwrap().is_none(),
            "palisade locks beside sqlx"
        );
        // Its release wakes our waiter.
        let waiter = tokio::spawn(async move { ours.lock().await });
        waits_for_a_lock(&server).await;
        guard.release_now().await.unwrap();
        let woken = tokio::time::timeout(SOON, waiter).await;
        woken.unwrap().unwrap().unwrap().release().await.unwrap();
    }
    theirs.close().await.unwrap();
}

#[tokio::test]
async fn advisory_locks_of_psql_exclude_ours_and_ours_exclude_them() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    let cases = [
        ("hashtext", "nightly", "hashtext('nightly')".to_owned()),
        ("raw", "4711", "4711".to_owned()),
    ];
    for (key, name, number) in cases {
        let url = format!("{}?namespace=&key={key}", advisory(&server));
        let client = connect(&url).await;
        let lock = client.mutex(name);
        let readers = client.rwlock(name);

        let hold = lock.lock().await.unwrap();
        assert_eq!(
            psql.ask(&format!("SELECT pg_try_advisory_lock({number});")),
            ["f"],
            "{key}"
        );
        let shared = format!("SELECT pg_try_advisory_lock_shared({number});");
        assert_eq!(psql.ask(&shared), ["f"], "{key}");
        hold.release().await.unwrap();
        assert_eq!(
            psql.ask(&format!("SELECT pg_try_advisory_lock({number});")),
            ["t"],
            "{key}"
        );
        assert!(lock.try_lock().await.unwrap().is_none(), "{key}");

        // A foreign holder is shown, and its unlock wakes our waiter.
        let name = Name::new(name).unwrap();
        let line = client
            .survey(Scope::Line(name.clone()))
            .await
            .unwrap()
            .remove(0);
        assert!(line.holders[0].id.starts_with("backend-"), "{line:?}");
        assert!(line.holders[0].owner.is_none());
        let waiter = tokio::spawn(async move { lock.lock().await });
        waits_for_a_lock(&server).await;
        psql.ask(&format!("SELECT pg_advisory_unlock({number});"));
        let hold = soon(waiter).await.unwrap().unwrap();
        hold.release().await.unwrap();

        let read = readers.read().await.unwrap();
        assert_eq!(psql.ask(&shared), ["t"], "{key}");
        assert_eq!(
            psql.ask(&format!("SELECT pg_try_advisory_lock({number});")),
            ["f"],
            "{key}"
        );
        psql.ask(&format!("SELECT pg_advisory_unlock_shared({number});"));
        read.release().await.unwrap();
    }
}

/// One session serves many claims, one after the other, and is named after each only while it
/// serves it.
#[tokio::test]
async fn a_session_is_called_after_the_claim_that_it_has() {
    let server = need!(server());
    let client = connect(&advisory(&server)).await;
    let other = connect(&advisory(&server)).await;
    let named = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'palisade _%'";
    for round in 0..10 {
        let name = Name::new(format!("round {round}")).unwrap();
        let hold = client.mutex(name.as_str()).lock().await.unwrap();
        let line = other.survey(Scope::Line(name)).await.unwrap().remove(0);
        assert_eq!(line.holders[0].id, hold.claim().to_string());
        assert_eq!(
            line.holders[0].owner.as_ref().unwrap().pid,
            std::process::id()
        );
        assert_eq!(sql(&server, named), ["1"]);
        hold.release().await.unwrap();
        assert_eq!(
            sql(&server, named),
            ["0"],
            "called after a claim that has left"
        );
    }
}

#[tokio::test]
async fn a_foreign_session_is_taken_away_only_by_force() {
    let server = need!(server());
    let mut psql = need!(Psql::open(&server));
    let url = format!("{}?namespace=&key=raw", advisory(&server));
    let client = connect(&url).await;
    let name = Name::new("7").unwrap();
    psql.ask("SELECT pg_advisory_lock(7);");
    let refused = client
        .evict(&name, palisade::Which::Holders, palisade::Eviction::Mark)
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(
        client
            .evict(&name, palisade::Which::Holders, palisade::Eviction::Remove)
            .await
            .unwrap()
    );
    assert!(client.mutex("7").try_lock().await.unwrap().is_some());
}

/// The statements are ShedLock's own for PostgreSQL, with `usingDbTime`.
#[tokio::test]
async fn a_shedlock_job_and_palisade_exclude_each_other() {
    let server = need!(server());
    let url = format!("{}?namespace=&layout=shedlock&ttl=1s", server.url());
    let client = connect(&url).await;
    let lock = client.mutex("nightly");
    let first = lock.lock().await.unwrap();
    let theirs = "INSERT INTO shedlock(name, lock_until, locked_at, locked_by) VALUES('nightly', \
        timezone('utc', CURRENT_TIMESTAMP) + interval '60 seconds', \
        timezone('utc', CURRENT_TIMESTAMP), 'job-host') ON CONFLICT (name) DO UPDATE SET \
        lock_until = timezone('utc', CURRENT_TIMESTAMP) + interval '60 seconds', \
        locked_at = timezone('utc', CURRENT_TIMESTAMP), locked_by = 'job-host' \
        WHERE shedlock.lock_until <= timezone('utc', CURRENT_TIMESTAMP) RETURNING name";
    assert!(
        sql(&server, theirs).is_empty(),
        "a job runs beside palisade"
    );
    // Renewals keep it past its ttl.
    throughout(std::time::Duration::from_millis(1500), || {
        assert!(first.is_valid());
        assert!(
            sql(&server, theirs).is_empty(),
            "a job runs beside palisade"
        );
    })
    .await;
    let token = first.token();
    first.release().await.unwrap();

    assert_eq!(sql(&server, theirs), ["nightly"]);
    assert!(
        lock.try_lock().await.unwrap().is_none(),
        "palisade runs beside a job"
    );
    let name = Name::new("nightly").unwrap();
    let line = client
        .survey(Scope::Line(name.clone()))
        .await
        .unwrap()
        .remove(0);
    assert_eq!(line.holders[0].id, "job-host");
    // The statement with which ShedLock unlocks.
    sql(
        &server,
        "UPDATE shedlock SET lock_until = timezone('utc', CURRENT_TIMESTAMP) \
        WHERE name = 'nightly' AND locked_by = 'job-host'",
    );
    let second = soon(lock.lock()).await.unwrap();
    assert!(second.token() > token);
    let shown = client
        .survey(Scope::Line(name.clone()))
        .await
        .unwrap()
        .remove(0);
    assert_eq!(
        shown.holders[0].owner.as_ref().unwrap().pid,
        std::process::id()
    );
    assert!(
        client
            .evict(&name, palisade::Which::Holders, palisade::Eviction::Remove)
            .await
            .unwrap()
    );
    soon(second.lost()).await;
    let long = client.mutex("x".repeat(65)).try_lock().await.unwrap_err();
    assert_eq!(long.kind(), ErrorKind::InvalidName);
    assert_eq!(
        client.rwlock("r").read().await.unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}

/// A job that has run does not run again within its minimum time if its host dies: the row ensures
/// that.
#[tokio::test]
async fn a_minimum_hold_is_written_into_shedlocks_row() {
    let server = need!(server());
    let url = format!("{}?namespace=&layout=shedlock&ttl=1s", server.url());
    let client = connect(&url).await;
    let line = client.line("daily", Ask::Whole);
    let hour = std::time::Duration::from_secs(3600);
    let hold = line.at_least(hour).acquire(Patience::NoWait).await;
    let hold = hold.unwrap().unwrap();
    let lasts = || {
        let sql = sql(
            &server,
            "SELECT lock_until > timezone('utc', CURRENT_TIMESTAMP) + interval '55 minutes' \
             FROM shedlock WHERE name = 'daily'",
        );
        sql == ["t"]
    };
    assert!(lasts(), "when it was taken");
    // Renewals don't change it.
    throughout(std::time::Duration::from_millis(1500), || {
        assert!(hold.is_valid() && lasts(), "when it was renewed");
    })
    .await;
    let name = Name::new("daily").unwrap();
    assert!(
        client
            .evict(&name, palisade::Which::Holders, palisade::Eviction::Remove)
            .await
            .unwrap()
    );
    soon(hold.lost()).await;
}
