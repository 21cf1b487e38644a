//! How the server plans our statements: by an index, however small a table was when it did, and
//! never compiled. With today's schema and with that of revision 6, which said nothing of it;
//! directly, and through a pooler, whose sessions are not ours to set up.

use palisade::engines::postgres::{PostgresMessage, PostgresQueue, Schema};
use palisade::queue::{Draft, Pick};
use palisade::report::Scope;
use palisade::{Client, Eviction, Name, Patience, Which};
use palisade_testkit::lab::launch::{self, Running};
use palisade_testkit::lab::trial::until;

use super::{Psql, connect, sql, started};

/// The schema of an earlier palisade, before it said how to plan.
const SCHEMA_6: &str = include_str!("schema_6.sql");

/// A database that has only what a test does: its statistics, and those of its statements, are of
/// nothing else. `None`, with the reason reported, if there is no pooler or no psql.
struct Lab {
    pooler: Running,
    psql: Psql,
}

impl Lab {
    fn with(settings: &[&str]) -> Option<Self> {
        let quiet = ["-c", "autovacuum=off"];
        let pooler = started("pgbouncer", &[&quiet[..], settings].concat())?;
        sql(&pooler, "CREATE DATABASE ours");
        let mut psql = Psql::open(&pooler)?;
        psql.ask(&format!("\\c {}", url(&pooler, 1)));
        Some(Self { pooler, psql })
    }

    /// A schema of revision 6 or of today, and the URL to it, directly or through the pooler.
    fn schema(&mut self, name: &str, today: bool, pooled: bool) -> String {
        let today = today.then(|| Schema::new(name).unwrap().sql());
        let six = || SCHEMA_6.replace("\"palisade\"", &format!("\"{name}\""));
        self.psql.ask("SET client_min_messages = error;");
        self.psql.ask(&today.unwrap_or_else(six));
        format!("{}?schema={name}", url(&self.pooler, usize::from(!pooled)))
    }

    /// Ends all other sessions, which then tell what they have counted.
    async fn others_have_ended(&self) {
        let others = "FROM pg_stat_activity WHERE datname = 'ours' AND pid <> pg_backend_pid() \
                      AND application_name <> 'psql'";
        until("no other session", async || {
            sql(
                &self.pooler,
                &format!("SELECT count(pg_terminate_backend(pid)) {others}"),
            );
            sql(&self.pooler, &format!("SELECT count(*) {others}")) == ["0"]
        })
        .await;
    }
}

/// The database, at the pooler (0) or the server (1).
fn url(pooler: &Running, node: usize) -> String {
    format!(
        "postgres://palisade@{}/ours",
        pooler.nodes()[node].address()
    )
}

/// Every verb of locks that there is in a table of ours.
async fn locks(client: &Client) {
    let (lock, other) = (client.mutex("lock"), client.mutex("lock"));
    let (line, prefix) = (
        Scope::Line(Name::new("lock").unwrap()),
        Scope::Prefix("lo".into()),
    );
    let hold = lock.lock().await.unwrap();
    let waiter = tokio::spawn(async move { other.lock().await });
    until("a waiter", async || {
        !client.survey(line.clone()).await.unwrap()[0]
            .waiters
            .is_empty()
    })
    .await;
    for scope in [line, prefix] {
        client.survey(scope.clone()).await.unwrap();
        let mut watch = client.engine().watch(scope);
        let change = futures_util::StreamExt::next(&mut watch).await;
        change.unwrap().unwrap();
    }
    let armed = hold.deadline();
    until("a renewal", async || hold.deadline() > armed).await;
    hold.release().await.unwrap();
    let hold = waiter.await.unwrap().unwrap();
    assert!(
        client
            .evict("lock", Which::Holders, Eviction::Remove)
            .await
            .unwrap()
    );
    drop(hold);
    let permits = client.semaphore("permits", 3).acquire().await.unwrap();
    assert!(client.resize("permits", 2).await.unwrap());
    permits.release().await.unwrap();
    let mut rw = client.rwlock("rw").write().await.unwrap();
    rw.downgrade().await.unwrap();
    assert!(rw.try_upgrade().await.unwrap());
    rw.release().await.unwrap();
}

/// Every verb of queues.
async fn messages(client: &Client) {
    let queue = client.queue("queue");
    assert!(queue.next_within(Patience::NoWait).await.unwrap().is_none());
    let sleeper = queue.clone();
    let sleeper = tokio::spawn(async move { sleeper.next().await });
    let keyed = |id: &str| Draft::new("x").key("k").id(id);
    queue
        .push_all([keyed("a"), keyed("b"), Draft::new("y")])
        .await
        .unwrap();
    let mut first = sleeper.await.unwrap().unwrap();
    first.extend(client.ttl() * 2).await.unwrap();
    let armed = first.deadline();
    until("a renewal", async || first.deadline() > armed).await;
    first.done().await.unwrap();
    for at in 0..2 {
        let message = queue.next().await.unwrap();
        match at {
            0 => drop(message.fail("no").await.unwrap()),
            _ => message.bury("no").await.unwrap(),
        }
    }
    queue.list(false, 10).await.unwrap();
    queue.read("b").await.unwrap().unwrap();
    client
        .survey_queues(Scope::Prefix(String::new()))
        .await
        .unwrap();
    queue.report().await.unwrap().unwrap();
    queue.retry(Pick::Dead).await.unwrap();
    queue.retry(Pick::Id("b".into())).await.unwrap();
    queue.next().await.unwrap().release().await.unwrap();
    queue.drop_messages(Pick::All, true).await.unwrap();
}

/// Statements of a session that we have set up: the first one finds out whether it is ours.
const OURS: &str = "AND query !~ 'pg_stat_statements|pg_backend_pid'";

/// Compiling a statement takes the server longer than anything that we ask of it. Here it would
/// compile everything; where a plan looks expensive to it, it does so by default.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_compiled() {
    let settings = [
        "shared_preload_libraries=pg_stat_statements",
        "pg_stat_statements.track=all",
        "jit_above_cost=0",
        "jit_inline_above_cost=-1",
        "jit_optimize_above_cost=-1",
    ];
    let settings = settings.iter().flat_map(|setting| ["-c", setting]);
    let mut lab = need!(Lab::with(&settings.collect::<Vec<_>>()));
    if lab.psql.ask("SELECT pg_jit_available();") != ["t"] {
        return launch::skip("llvm", "PostgreSQL is without it");
    }
    lab.psql.ask("CREATE EXTENSION pg_stat_statements;");
    let compiled = |lab: &mut Lab, which: &str| {
        let compiled = format!(
            "SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 150) FROM pg_stat_statements s \
             JOIN pg_database d ON d.oid = dbid WHERE datname = 'ours' AND jit_functions > 0 {which};"
        );
        lab.psql.ask(&compiled)
    };
    for (name, today, pooled) in [
        ("six", false, false),
        ("six_pooled", false, true),
        ("today", true, false),
        ("today_pooled", true, true),
    ] {
        let locks_url = lab.schema(name, today, pooled) + "&ttl=2s";
        lab.psql.ask("SELECT pg_stat_statements_reset();");
        let client = connect(&locks_url).await;
        locks(&client).await;
        messages(&client).await;
        client.close().await;
        // The functions' own statements; and ours, where the session is.
        let which = if pooled { "AND NOT toplevel" } else { OURS };
        assert_eq!(compiled(&mut lab, which), [""; 0], "{name}");
        let seen = "SELECT count(*) > 40 FROM pg_stat_statements WHERE NOT toplevel;";
        assert_eq!(lab.psql.ask(seen), ["t"], "the statements are not seen");
    }
    for options in ["?layout=shedlock&schema=today", "?schema=today"] {
        let engine = url(&lab.pooler, 1) + options;
        let engine = if options.contains("layout") {
            engine
        } else {
            engine.replacen("postgres:", "postgres+advisory:", 1)
        };
        lab.psql.ask("SELECT pg_stat_statements_reset();");
        let client = connect(&format!("{engine}&ttl=2s")).await;
        let hold = client.mutex("lock").lock().await.unwrap();
        let armed = hold.deadline();
        until("a renewal", async || hold.deadline() > armed).await;
        client.survey(Scope::Prefix(String::new())).await.unwrap();
        hold.release().await.unwrap();
        client.close().await;
        assert_eq!(compiled(&mut lab, OURS), [""; 0], "{engine}");
    }
    // In a transaction of the user's, whose own statements are none of our business.
    lab.psql.ask("SELECT pg_stat_statements_reset();");
    let queue = connect(url(&lab.pooler, 1) + "?schema=today")
        .await
        .queue("queue");
    let plain = tokio_postgres::NoTls;
    let (mut user, connection) = tokio_postgres::connect(&url(&lab.pooler, 1), plain)
        .await
        .unwrap();
    tokio::spawn(connection);
    let transaction = user.transaction().await.unwrap();
    for _ in 0..2 {
        queue
            .push_in(&transaction, Draft::new("x").key("k").id("i"))
            .await
            .unwrap();
    }
    transaction.commit().await.unwrap();
    let message = queue.next().await.unwrap();
    let transaction = user.transaction().await.unwrap();
    message.done_in(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    message.settled();
    assert_eq!(
        compiled(&mut lab, "AND NOT toplevel"),
        [""; 0],
        "in a transaction"
    );
    let seen = compiled(&mut lab, "AND toplevel AND query ~ 'queue_push'");
    assert_eq!(seen.len(), 1, "this server compiles nothing");
}

/// A plan that was made while a table had one page says to read all of it, and sessions keep plans:
/// about half of the rows would be read for each that is used. A few are always read, by those that
/// look for lines that nobody uses any more.
#[tokio::test(flavor = "multi_thread")]
async fn no_plan_of_a_small_table_is_kept() {
    const MANY: usize = 300;
    let mut lab = need!(Lab::with(&["pooler.default_pool_size = 2"]));
    for (name, today, pooled) in [
        ("six", false, false),
        ("six_pooled", false, true),
        ("today", true, false),
        ("today_pooled", true, true),
    ] {
        let client = connect(lab.schema(name, today, pooled) + "&ttl=60s").await;
        let (lock, queue) = (client.mutex("lock"), client.queue("queue"));
        let line = Scope::Line(Name::new("lock").unwrap());
        let use_it = async |times: usize| {
            for at in 0..times {
                lock.lock().await.unwrap().release().await.unwrap();
                client.survey(line.clone()).await.unwrap();
                let draft = Draft::new("x").key("k").id(format!("{times}/{at}"));
                queue.push(draft).await.unwrap();
                queue.next().await.unwrap().done().await.unwrap();
            }
        };
        use_it(1).await;
        let analyze = "SELECT format('VACUUM ANALYZE %s', c.oid::regclass) FROM pg_class c \
                       WHERE relkind = 'r' AND relnamespace =";
        lab.psql
            .ask(&format!("{analyze} '{name}'::regnamespace \\gexec"));
        // The server makes a plan to keep at the sixth call.
        use_it(10).await;
        let mut holds = Vec::new();
        for at in 0..MANY {
            let hold = client.mutex(format!("other {at}")).lock().await;
            holds.push(hold.unwrap());
            let draft = Draft::new("x")
                .key(format!("k{}", at % 7))
                .id(format!("{at}"));
            queue.push(draft).await.unwrap();
        }
        use_it(10).await;
        assert_eq!(queue.claim(MANY).await.unwrap().len(), 7);
        drop(holds);
        client.close().await;
        lab.others_have_ended().await;
        let read = format!(
            "SELECT relname || ' ' || seq_tup_read FROM pg_stat_user_tables \
             WHERE schemaname = '{name}' AND seq_tup_read > {MANY} * 20;"
        );
        assert_eq!(
            lab.psql.ask(&read),
            [""; 0],
            "rows were read that nobody needs: {name}"
        );
    }
}

/// What earlier clients send is planned as what ours do, once the schema is of today.
#[tokio::test]
async fn an_earlier_client_s_plans_are_not_kept_either() {
    let mut lab = need!(Lab::with(&[]));
    lab.schema("palisade", true, false);
    lab.psql.ask(
        "PREPARE enter AS SELECT set_config('lock_timeout', '3750', true), palisade.enter('palisade',
           $1, gen_random_uuid(), 0, 0, 30000000, true, 'm', '{}', NULL);
         CREATE FUNCTION more(f int, t int) RETURNS text LANGUAGE sql AS
           $$ SELECT string_agg(format('EXECUTE enter(%L);', i), ' ') FROM generate_series(f, t) i $$;",
    );
    let enter = |lab: &mut Lab, from: u32, to: u32| {
        lab.psql.ask(&format!("SELECT more({from}, {to}) \\gexec"));
    };
    enter(&mut lab, 1, 1);
    lab.psql.ask("VACUUM ANALYZE palisade.line;");
    for _ in 0..10 {
        enter(&mut lab, 1, 1);
    }
    enter(&mut lab, 2, 500);
    // A session tells what it has counted when it ends.
    let mut other = need!(Psql::open(&lab.pooler));
    other.ask(&format!("\\c {}", url(&lab.pooler, 1)));
    lab.psql = other;
    let counted = "SELECT n_tup_ins, seq_tup_read < 500 * 20 FROM pg_stat_user_tables \
                   WHERE relname = 'line' AND n_tup_ins > 0;";
    until("counts", async || !lab.psql.ask(counted).is_empty()).await;
    assert_eq!(lab.psql.ask(counted), ["500|t"]);
}
