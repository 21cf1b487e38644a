//! `survey` and `check`: reports for people. No decision depends on them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Inner;
use super::error;
use super::keys::{Child, Record, is_marked};
use super::proto::{Acl, Answer, READ, Request, Stat, code};
use super::snapshot::{Place, Snapshot};
use palisade_core::engine::{DEFAULT_TTL, Seat};
use palisade_core::report::{Checkup, ClaimReport, Finding, LineReport, Scope, Severity};
use palisade_core::{BootTime, Result};
use palisade_kit as kit;

/// How many requests are pipelined.
const TOGETHER: usize = 256;

/// The most znodes that are searched for lines with `namespace=`.
const MOST_NODES: usize = 10_000;

/// The most lines that are checked for sequences close to their wrap.
const LINES_CHECKED: usize = 64;

/// The cversion from which a line is close to its wrap: some ten million locks before it.
const NEAR_WRAP: i32 = i32::MAX - 20_000_000;

/// Reads after a `sync` with the leader.
async fn read(
    engine: &Inner,
    operation: &'static str,
    requests: Vec<Request>,
) -> Result<Vec<Answer>> {
    let mut answers = Vec::new();
    let sync = Request::Sync(engine.keys.base().to_owned());
    for some in requests.chunks(TOGETHER) {
        let together: Vec<Request> = std::iter::once(&sync).chain(some).cloned().collect();
        let all = engine.client.read(operation, &together).await?;
        answers.extend(all.into_iter().skip(1));
    }
    Ok(answers)
}

/// The children of those znodes that exist.
async fn read_children(
    engine: &Inner,
    operation: &'static str,
    paths: Vec<String>,
) -> Result<Vec<(String, Vec<String>, Stat)>> {
    let list = |path: &String| Request::Children(path.clone(), false);
    let answers = read(engine, operation, paths.iter().map(list).collect()).await?;
    let mut found = Vec::new();
    for (path, answer) in paths.into_iter().zip(answers) {
        match answer {
            Ok(listed) => found.push((path, listed.names, listed.stat)),
            Err(refused) if refused.is(code::NO_NODE) => {}
            Err(refused) => return Err(error::refused(operation, refused)),
        }
    }
    Ok(found)
}

/// Lines with their places, the data of each, and who holds.
pub(super) async fn read_lines(
    engine: &Inner,
    operation: &'static str,
    lines: Vec<String>,
) -> Result<Vec<(String, Snapshot)>> {
    let lines = read_children(engine, operation, lines).await?;
    let mut paths = Vec::new();
    for (line, names, _) in &lines {
        let tickets = names.iter().filter(|name| Child::read(name).is_some());
        paths.extend(tickets.map(|name| format!("{line}/{name}")));
    }
    let look = paths.iter().map(|path| Request::Data(path.clone(), false));
    let answers = read(engine, operation, look.collect()).await?;
    let mut said: HashMap<String, (Vec<u8>, Stat)> = HashMap::new();
    for (path, answer) in paths.into_iter().zip(answers) {
        match answer {
            Ok(read) => drop(said.insert(path, (read.data, read.stat))),
            // Deleted in between.
            Err(refused) if refused.is(code::NO_NODE) => {}
            Err(refused) => return Err(error::refused(operation, refused)),
        }
    }
    let mut read = Vec::new();
    for (line, mut names, _) in lines {
        names.retain(|name| said.contains_key(&format!("{line}/{name}")));
        let mut snapshot = Snapshot::new(&names);
        snapshot.settle();
        for seat in &mut snapshot.line.seats {
            let place = &mut seat.extra;
            let path = format!("{line}/{}", place.child.name);
            if let Some((data, stat)) = said.remove(&path) {
                tell(place, &data, stat);
                seat.evicted = place.child.claim.is_some() && is_marked(&data);
            }
        }
        read.push((line, snapshot));
    }
    Ok(read)
}

fn tell(place: &mut Place, data: &[u8], stat: Stat) {
    (place.version, place.session) = (stat.version, stat.owner);
    place.token = stat.created;
    match place.child.claim.and_then(|_| Record::read(data)) {
        Some(record) => {
            place.token = record.token.unwrap_or(stat.created);
            place.record = Some(record);
        }
        None if data.is_empty() => {}
        None => place.text = Some(String::from_utf8_lossy(data).into_owned()),
    }
}

pub(super) async fn survey(engine: &Inner, scope: &Scope) -> Result<Vec<LineReport>> {
    let keys = &engine.keys;
    let lines = match scope {
        Scope::Line(name) => vec![keys.line(name)?],
        Scope::Prefix(prefix) if keys.is_bare() => walk(engine, prefix).await?,
        Scope::Prefix(prefix) => all_lines(engine, "survey", prefix).await?,
    };
    let mut reports = BTreeMap::new();
    let mut lines = read_lines(engine, "survey", lines).await?;
    see_renewals(engine, &mut lines).await?;
    for (line, snapshot) in lines {
        let seats = snapshot.line.seats.iter();
        let is_ours = |seat: &Seat<Place>| seat.extra.record.is_some();
        // With `namespace=` only lines with our records, unless the line is surveyed by name.
        let shown = match scope {
            Scope::Line(_) => !snapshot.line.seats.is_empty(),
            Scope::Prefix(_) => seats.clone().any(is_ours) || !keys.is_bare(),
        };
        let name = match scope {
            Scope::Line(name) => Some(name.to_string()),
            Scope::Prefix(_) => keys.name(&line),
        };
        if let Some(name) = name.filter(|_| shown && !snapshot.line.seats.is_empty()) {
            reports.insert(name.clone(), report(name, snapshot));
        }
    }
    Ok(reports.into_values().collect())
}

/// Adds to the claims of agents when their sessions were last renewed.
async fn see_renewals(engine: &Inner, lines: &mut [(String, Snapshot)]) -> Result<()> {
    let seats = lines
        .iter_mut()
        .flat_map(|(_, found)| &mut found.line.seats);
    let mut places: Vec<&mut Place> = seats.map(|seat| &mut seat.extra).collect();
    places.retain(|place| {
        let record = place.record.as_ref();
        record.is_some_and(|record| record.owner.agent.is_some())
    });
    let sessions: BTreeSet<i64> = places.iter().map(|place| place.session).collect();
    let look = sessions
        .iter()
        .map(|id| Request::Exists(engine.keys.session(*id)));
    let answers = read(engine, "survey", look.collect()).await?;
    let now = BootTime::now();
    let renewed = sessions.into_iter().zip(&answers).map(|(session, answer)| {
        let version = answer.as_ref().ok().map(|found| found.stat.version);
        (session, engine.renewals.saw(session, version, now))
    });
    let renewed: HashMap<i64, BootTime> = renewed.collect();
    for place in places {
        place.renewed = renewed.get(&place.session).copied();
    }
    Ok(())
}

fn report(name: String, snapshot: Snapshot) -> LineReport {
    let capacity = snapshot.line.named_capacity();
    let mut seen = HashSet::new();
    // A claim that is being amended has two znodes for a moment.
    let mut is_first = |seat: &Seat<Place>| {
        let claim = seat.extra.child.claim;
        claim.is_none_or(|claim| seen.insert(claim))
    };
    let seats = snapshot.line.seats.into_iter();
    let seats = seats.filter(|seat| is_first(seat));
    let (holders, waiters): (Vec<_>, Vec<_>) = seats.partition(Seat::is_held);
    let mut line = LineReport::empty(name);
    line.capacity = capacity;
    line.holders = holders.into_iter().map(claim).collect();
    line.waiters = waiters.into_iter().map(claim).collect();
    line
}

fn claim(seat: Seat<Place>) -> ClaimReport {
    let (is_held, place) = (seat.is_held(), seat.extra);
    let mut claim = ClaimReport::new(place.child.id(), seat.ask);
    claim.value = match &place.record {
        Some(record) => record.value.clone(),
        None => place.text,
    };
    // At most: only the servers know when it was last renewed.
    claim.expires_in = place.record.as_ref().map(|record| {
        let since = place.renewed.map_or(Duration::ZERO, |renewed| {
            BootTime::now().saturating_since(renewed)
        });
        Duration::from_millis(record.ttl).saturating_sub(since)
    });
    claim.owner = place.record.map(|record| record.owner);
    claim.sequence = is_held.then(|| u64::try_from(place.token).unwrap_or(0));
    claim.evicted = seat.evicted;
    claim
}

/// The lines of a namespace.
async fn all_lines(engine: &Inner, operation: &'static str, prefix: &str) -> Result<Vec<String>> {
    let base = engine.keys.base().to_owned();
    let mut lines = Vec::new();
    for (base, names, _) in read_children(engine, operation, vec![base]).await? {
        let paths = names.into_iter().map(|name| format!("{base}/{name}"));
        let named = |line: &String| {
            let name = engine.keys.name(line);
            name.is_some_and(|name| name.starts_with(prefix))
        };
        lines.extend(paths.filter(named));
    }
    Ok(lines)
}

/// The znodes that have tickets of ours, in the subtree of `prefix`.
async fn walk(engine: &Inner, prefix: &str) -> Result<Vec<String>> {
    let keys = &engine.keys;
    let prefix = prefix.trim_start_matches('/');
    let mut lines = Vec::new();
    let mut next = VecDeque::from([keys.above(prefix)]);
    let mut looked = 0;
    while !next.is_empty() && looked < MOST_NODES {
        let some: Vec<String> = next.drain(..next.len().min(TOGETHER)).collect();
        looked += some.len();
        for (path, names, _) in read_children(engine, "survey", some).await? {
            let children: Vec<Option<Child>> = names.iter().map(|n| Child::read(n)).collect();
            let is_ours = |child: &Child| child.claim.is_some();
            let is_line = children.iter().flatten().any(is_ours);
            let name = keys.name(&path).unwrap_or_default();
            if is_line && name.starts_with(prefix) {
                lines.push(path.clone());
            }
            let folder = path.trim_end_matches('/');
            let below = names
                .iter()
                .zip(&children)
                .filter(|(_, child)| child.is_none());
            let below = below.map(|(name, _)| format!("{folder}/{name}"));
            next.extend(below.filter(|path| !keys.is_reserved(path)));
        }
    }
    Ok(lines)
}

/// Findings about what is unsafe or broken in this ensemble.
pub(super) async fn check(engine: &Inner) -> Result<Checkup> {
    let base = engine.keys.base();
    let requests = vec![
        Request::Acl(base.to_owned()),
        Request::Data("/zookeeper/config".to_owned(), false),
    ];
    let answers = read(engine, "check", requests).await?;
    let [acl, config] = answers.as_slice() else {
        return Err(error::missing());
    };
    let mut findings = Vec::new();
    let mut find = |severity, code, message: String, remedy: &str| {
        findings.push(Finding::new(severity, code, message, remedy));
    };
    let version = version(engine).await;
    if version.as_deref().is_some_and(is_old) {
        let message = "this server is older than what palisade is tested with".to_owned();
        find(Severity::Warning, "too_old", message, "run 3.6 or newer");
    }
    let mut alone = false;
    if let Ok(config) = config {
        let config = String::from_utf8_lossy(&config.data);
        let servers = config
            .lines()
            .filter(|line| line.starts_with("server.") && !line.contains(":observer"));
        let servers = servers.count();
        alone = servers < 2;
        match servers {
            0 | 1 => find(
                Severity::Warning,
                "one_server",
                "one server alone: nothing is granted while it is down, and what its disk loses \
                 is lost"
                    .to_owned(),
                "run three servers, or five",
            ),
            even if even % 2 == 0 => find(
                Severity::Info,
                "even_ensemble",
                format!(
                    "{even} servers tolerate no more failures than {} do",
                    even - 1
                ),
                "run an odd number of voting servers",
            ),
            _ => {}
        }
    }
    let world = |(rights, scheme): &(i32, String)| scheme == "world" && rights & !READ != 0;
    let is_open = acl.as_ref().is_ok_and(|found| found.acl.iter().any(world));
    if is_open || engine.client.acl == Acl::Open {
        find(
            Severity::Warning,
            "open_acl",
            format!("everyone who reaches the servers may change what is under {base}"),
            "log in with user= and password_file=, so that new nodes are their maker's alone, \
             and set the ACL of the nodes that are there",
        );
    }
    let range = engine.ttl;
    if range.max < DEFAULT_TTL {
        let (max, min) = (range.max, range.min);
        let message = format!(
            "the servers allow a ttl of {min:.1?} to {max:.1?}: two thirds of their session \
             timeouts"
        );
        let remedy = "plan for it, or raise maxSessionTimeout";
        find(Severity::Info, "ttl_range", message, remedy);
    }
    let mut lines = Vec::new();
    if !engine.keys.is_bare() {
        lines = all_lines(engine, "check", "").await?;
        lines.truncate(LINES_CHECKED);
    }
    for (line, _, stat) in read_children(engine, "check", lines).await? {
        if stat.children_version > NEAR_WRAP || stat.children_version < 0 {
            find(
                Severity::Warning,
                "sequence_wraps",
                format!(
                    "the sequence of {line} is near or past 2^31, where Curator and kazoo sort \
                     the newest first; palisade does not"
                ),
                "remove the node while nobody holds: sequences begin again",
            );
        }
    }
    if !alone {
        findings.extend(of_the_leader(engine).await);
    }
    let endpoints = &engine.client.endpoints;
    findings.extend(kit::plain_text(&endpoints.hosts, endpoints.is_encrypted()));
    Ok({
        let mut checkup = Checkup::default();
        checkup.version = version;
        checkup.findings = findings;
        checkup
    })
}

/// The most that a server answers to a word.
const WORDS: u64 = 64 << 10;

/// What the first server answers to a four-letter word, where that is allowed
/// (`4lw.commands.whitelist`).
async fn ask_word(engine: &Inner, word: &str) -> Option<String> {
    let endpoints = &engine.client.endpoints;
    let host = endpoints.hosts.first()?;
    let ask = async {
        let mut stream = endpoints.dial(host).await.ok()?;
        stream.write_all(word.as_bytes()).await.ok()?;
        stream.flush().await.ok()?;
        let mut answer = String::new();
        stream.take(WORDS).read_to_string(&mut answer).await.ok()?;
        Some(answer)
    };
    let limit = engine.client.timeout.min(Duration::from_secs(2));
    tokio::time::timeout(limit, ask).await.ok().flatten()
}

/// The version that a server reports.
async fn version(engine: &Inner) -> Option<String> {
    let answer = ask_word(engine, "srvr").await?;
    let line = answer.lines().next()?;
    let version = line.strip_prefix("Zookeeper version: ")?;
    let end = version.find(['-', ',']).unwrap_or(version.len());
    Some(version[..end].to_owned())
}

/// How long an ensemble takes to elect a leader once it is without one, and a client to find out.
const ELECTION: Duration = Duration::from_secs(2);

/// The part of a ttl that a hold certainly has left when its leader stops: a tenth of it may have
/// passed since the last renewal, a tenth is the margin, and the rest is for a busy machine.
fn left_of(ttl: Duration) -> Duration {
    ttl * 3 / 4
}

/// Warns about a ttl that ends before the servers notice that their leader hangs.
async fn of_the_leader(engine: &Inner) -> Option<Finding> {
    let conf = ask_word(engine, "conf").await.unwrap_or_default();
    let number = |name: &str| {
        let mut lines = conf.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        line.trim().parse::<u32>().ok()
    };
    let said = number("tickTime").zip(number("syncLimit"));
    // What the servers grant at least is two ticks, unless they are configured otherwise; the limit
    // is the one of the configuration that ZooKeeper comes with.
    let (notices, supposed) = match said {
        Some((tick, limit)) => (Duration::from_millis(tick.into()) * limit, ""),
        None => (
            engine.ttl.min * 3 / 2 / 2 * 5,
            " (supposing a syncLimit of 5; the servers don't say, for lack of conf in \
             4lw.commands.whitelist)",
        ),
    };
    let ttl = engine.default_ttl;
    (left_of(ttl) < notices + ELECTION).then(|| {
        let least = (notices + ELECTION) * 4 / 3;
        Finding::new(
            Severity::Warning,
            "leader_hangs",
            format!(
                "holds with the ttl of {ttl:.1?} are lost when the leader hangs: the servers notice \
                 that after syncLimit x tickTime = {notices:.1?}{supposed}"
            ),
            format!("take a ttl of {least:.1?} or more, or lower syncLimit on the servers"),
        )
    })
}

fn is_old(version: &str) -> bool {
    let mut numbers = version
        .split('.')
        .map_while(|part| part.parse::<u32>().ok());
    let numbers = (numbers.next(), numbers.next());
    matches!(numbers, (Some(..3), _) | (Some(3), Some(..6)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_told() {
        for (version, old) in [("3.4.14", true), ("3.5.9", true), ("3.6.0", false)] {
            assert_eq!(is_old(version), old, "{version}");
        }
        assert!(!is_old("4.0.0") && !is_old("unknown"));
    }
}
