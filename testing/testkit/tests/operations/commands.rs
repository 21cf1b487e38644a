//! Spans that `run`, `elect` and `queue work` send to a collector.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::trace::v1::Span;
use palisade::Name;
use palisade::report::Scope;
use palisade_testkit::lab::launch;
use palisade_testkit::lab::trial::certificates;
use tempfile::TempDir;

use crate::collector::{Collector, PARENT, TRACE, hex, text};
use crate::serving::command;

/// A store, and where its spans go.
struct Traced {
    dir: TempDir,
    variables: Vec<(&'static str, String)>,
}

impl Traced {
    /// Spans that only the end of a process sends.
    fn to(endpoint: &str) -> Self {
        let variables = vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.to_owned()),
            ("OTEL_BSP_SCHEDULE_DELAY", "600000".to_owned()),
        ];
        let dir = TempDir::new().unwrap();
        Self { dir, variables }
    }

    fn url(&self) -> String {
        format!("file:{}", self.dir.path().join("store").display())
    }

    /// The same with one more variable.
    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    /// palisade with these arguments, of which the last are a script.
    fn palisade(&self, args: &[&str]) -> Command {
        let mut palisade = command();
        let path = std::env::var("PATH").unwrap_or_default();
        let own = Path::new(palisade.get_program()).parent().unwrap();
        let path = format!("{}:{path}", own.display());
        palisade
            .args(args)
            .env("PATH", path)
            .env("PALISADE_URL", self.url())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        palisade
    }

    /// Runs it to its end; what it said.
    #[track_caller]
    fn ran(&self, args: &[&str], code: i32) -> Output {
        let ran = self.palisade(args).output().unwrap();
        assert_eq!(ran.status.code(), Some(code), "{ran:?}");
        ran
    }

    /// Starts it with a pipe as its stdin, and waits for a line of its command.
    fn started(&self, args: &[&str]) -> (Child, impl BufRead + use<>) {
        let mut child = self.palisade(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut String::new()).unwrap();
        (child, said)
    }
}

/// Waits for the end of a command that is not asked to end; the code.
fn ended(child: &mut Child) -> Option<i32> {
    // A wait would close it.
    let _open = child.stdin.take();
    child.wait().unwrap().code()
}

fn stdout(ran: &Output) -> &str {
    str::from_utf8(&ran.stdout).unwrap()
}

/// `palisade run NAME -- sh -c SCRIPT`.
fn run<'a>(name: &'a str, script: &'a str) -> [&'a str; 6] {
    ["run", name, "--", "sh", "-c", script]
}

fn hold(collector: &Collector, name: &str) -> Span {
    collector.span("hold", ("palisade.lock", name))
}

const ERROR: i32 = 2;

fn status(span: &Span) -> i32 {
    span.status.as_ref().map_or(0, |status| status.code)
}

#[test]
fn a_run_is_a_wait_and_a_hold_below_the_span_that_it_was_started_in() {
    let collector = Collector::start();
    let state = "vendor=1, other@x=t61rcWkgMzE";
    let traced = Traced::to(&collector.url)
        .with("TRACEPARENT", format!("00-{TRACE}-{PARENT}-01"))
        .with("TRACESTATE", state);
    let script = "echo $PALISADE_TOKEN $PALISADE_ENGINE $TRACEPARENT; echo \"$TRACESTATE\"; \
                  palisade run inner -- true; exit 7";
    let ran = traced.ran(&run("outer", script), 7);
    let said: Vec<&str> = stdout(&ran).lines().collect();
    let words: Vec<&str> = said[0].split(' ').collect();
    let hold = hold(&collector, "outer");
    let wait = collector.span("acquire", ("palisade.lock", "outer"));
    for span in [&wait, &hold] {
        assert_eq!(hex(&span.trace_id), TRACE);
        assert_eq!(hex(&span.parent_span_id), PARENT);
        assert_eq!(span.trace_state, "vendor=1,other@x=t61rcWkgMzE");
        assert_eq!(status(span), 0);
    }
    assert_eq!(text(&wait, "palisade.outcome"), "held");
    assert_eq!(text(&hold, "palisade.outcome"), "released");
    assert_eq!(text(&hold, "process.exit.code"), "7");
    assert_eq!(text(&hold, "palisade.token"), words[0]);
    assert_eq!(text(&hold, "palisade.engine"), words[1]);
    assert!(wait.start_time_unix_nano <= hold.start_time_unix_nano);
    assert!(hold.start_time_unix_nano < hold.end_time_unix_nano);

    // The command is below the hold, and so is what it runs.
    assert_eq!(words[2], format!("00-{TRACE}-{}-01", hex(&hold.span_id)));
    assert_eq!(said[1], state, "as it came");
    for name in ["acquire", "hold"] {
        let inner = collector.span(name, ("palisade.lock", "inner"));
        assert_eq!(hex(&inner.trace_id), TRACE);
        assert_eq!(inner.parent_span_id, hold.span_id);
    }
    assert_eq!(collector.spans().len(), 4);
}

#[test]
fn without_a_trace_a_wait_begins_one_and_without_a_collector_nothing_changes() {
    let collector = Collector::start();
    let traced = Traced::to(&collector.url).with("TRACESTATE", "of=another");
    let ran = traced.ran(&run("a", "echo \"$TRACEPARENT <$TRACESTATE>\""), 0);
    let wait = collector.span("acquire", ("palisade.lock", "a"));
    let hold = hold(&collector, "a");
    assert!(wait.parent_span_id.is_empty());
    assert_eq!(hold.parent_span_id, wait.span_id);
    assert_eq!(hold.trace_id, wait.trace_id);
    let (trace, span) = (hex(&hold.trace_id), hex(&hold.span_id));
    assert_eq!(stdout(&ran), format!("00-{trace}-{span}-01 <>\n"));

    // What is not sampled is not sent, and its trace goes on.
    let unsampled =
        Traced::to(&collector.url).with("TRACEPARENT", format!("00-{TRACE}-{PARENT}-00"));
    let ran = unsampled.ran(&run("b", "echo $TRACEPARENT"), 0);
    assert!(stdout(&ran).starts_with(&format!("00-{TRACE}-")), "{ran:?}");
    assert!(stdout(&ran).ends_with("-00\n"), "{ran:?}");
    assert_eq!(collector.spans().len(), 2);

    let parent = format!("00-{TRACE}-{PARENT}-01");
    let mut off = Traced::to(&collector.url).with("TRACEPARENT", &parent);
    off.variables.retain(|(name, _)| *name == "TRACEPARENT");
    let ran = off.ran(&run("c", "echo $TRACEPARENT"), 0);
    assert_eq!(stdout(&ran), format!("{parent}\n"));
    assert_eq!(collector.spans().len(), 2);
}

#[tokio::test]
async fn the_owner_record_names_the_wait() {
    let collector = Collector::start();
    let traced = Traced::to(&collector.url);
    let (mut holder, _said) = traced.started(&run("a", "echo ready; cat >/dev/null"));
    let client = palisade::connect(&traced.url()).await.unwrap();
    let lines = client
        .survey(Scope::Line(Name::new("a").unwrap()))
        .await
        .unwrap();
    drop(holder.stdin.take());
    assert_eq!(holder.wait().unwrap().code(), Some(0));
    let wait = collector.span("acquire", ("palisade.lock", "a"));
    let (trace, span) = (hex(&wait.trace_id), hex(&wait.span_id));
    let owner = lines[0].holders[0].owner.as_ref().unwrap();
    assert_eq!(owner.traceparent, Some(format!("00-{trace}-{span}-01")));
}

#[test]
fn spans_say_how_a_wait_and_a_hold_ended() {
    let collector = Collector::start();
    let traced = Traced::to(&collector.url);
    let (mut holder, _said) = traced.started(&run("a", "echo ready; cat >/dev/null"));
    traced.ran(&["run", "a", "--no-wait", "--", "true"], 75);
    let busy = collector.span("acquire", ("palisade.outcome", "busy"));
    assert_eq!(text(&busy, "palisade.lock"), "a");
    assert_eq!(status(&busy), 0);
    traced.ran(&["evict", "a"], 0);
    assert_eq!(ended(&mut holder), Some(76));
    let evicted = hold(&collector, "a");
    assert_eq!(text(&evicted, "palisade.outcome"), "evicted");
    assert_eq!(status(&evicted), ERROR);

    let (mut holder, _said) = traced.started(&run("b", "echo ready; cat >/dev/null"));
    traced.ran(&["evict", "b", "--force"], 0);
    assert_eq!(ended(&mut holder), Some(76));
    let lost = hold(&collector, "b");
    assert_eq!(text(&lost, "palisade.outcome"), "lost");
    assert_eq!(text(&lost, "error.type"), "taken");
    assert_eq!(status(&lost), ERROR);

    traced.ran(&["run", "c", "--", "/no/such/command"], 127);
    let unused = hold(&collector, "c");
    assert_eq!(text(&unused, "palisade.outcome"), "released");
    assert_eq!(text(&unused, "error.type"), "command_not_found");

    let url = format!("redis://127.0.0.1:{}", launch::free_port());
    traced.ran(&["run", "d", "--no-wait", "--url", &url, "--", "true"], 69);
    let failed = collector.span("acquire", ("palisade.lock", "d"));
    assert_eq!(text(&failed, "palisade.outcome"), "failed");
    assert_eq!(text(&failed, "error.type"), "unreachable");
    assert_eq!(status(&failed), ERROR);
}

#[test]
fn each_term_of_a_leader_is_a_span() {
    let collector = Collector::start();
    let traced = Traced::to(&collector.url).with("TRACEPARENT", format!("00-{TRACE}-{PARENT}-01"));
    let elect = [
        "elect",
        "boss",
        "--",
        "sh",
        "-c",
        "echo ready; cat >/dev/null",
    ];
    let (mut leader, mut said) = traced.started(&elect);
    traced.ran(&["evict", "boss"], 0);
    said.read_line(&mut String::new()).unwrap();
    drop(leader.stdin.take());
    assert_eq!(leader.wait().unwrap().code(), Some(0));
    for outcome in ["evicted", "released"] {
        let term = collector.span("hold", ("palisade.outcome", outcome));
        assert_eq!(text(&term, "palisade.lock"), "boss");
        assert_eq!(hex(&term.parent_span_id), PARENT);
    }
    let waits = collector.spans();
    assert_eq!(waits.iter().filter(|it| it.name == "acquire").count(), 2);
}

#[test]
fn each_message_is_a_span() {
    let collector = Collector::start();
    let traced = Traced::to(&collector.url);
    for (id, exit) in [("good", "0"), ("bad", "3")] {
        let body = traced.dir.path().join("body");
        std::fs::write(&body, exit).unwrap();
        traced.ran(
            &["queue", "push", "mail", body.to_str().unwrap(), "--id", id],
            0,
        );
    }
    let script = "echo $PALISADE_MESSAGE $TRACEPARENT; exit $(cat)";
    let work = ["queue", "work", "mail", "--drain", "--attempts", "1", "--"];
    let ran = traced.ran(&[&work[..], &["sh", "-c", script]].concat(), 1);
    for (id, outcome, code) in [("good", "done", "0"), ("bad", "dead", "3")] {
        let span = collector.span("message", ("palisade.message", id));
        assert_eq!(text(&span, "palisade.queue"), "mail");
        assert_eq!(text(&span, "palisade.attempt"), "1");
        assert_eq!(text(&span, "palisade.outcome"), outcome);
        assert_eq!(text(&span, "process.exit.code"), code);
        let told = format!(
            "{id} 00-{}-{}-01\n",
            hex(&span.trace_id),
            hex(&span.span_id)
        );
        assert!(stdout(&ran).contains(&told), "{ran:?}");
    }
}

/// Less than the collector's own timeout of 10 s.
const SOON: Duration = Duration::from_secs(8);

#[test]
fn a_collector_that_is_away_changes_no_code_and_is_told_once() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let refusing = format!("http://127.0.0.1:{}", launch::free_port());
    for endpoint in [silent, refusing] {
        let traced = Traced::to(&endpoint).with("OTEL_BSP_SCHEDULE_DELAY", "1");
        let began = Instant::now();
        let ran = traced.ran(&run("a", "exit 7"), 7);
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        let said = str::from_utf8(&ran.stderr).unwrap();
        let told = said
            .lines()
            .filter(|line| line.contains("traces are not exported"));
        assert_eq!(told.count(), 1, "{said}");
        let ran = traced.ran(&["run", "-q", "a", "--", "true"], 0);
        assert_eq!(str::from_utf8(&ran.stderr), Ok(""));
    }
}

#[test]
fn a_collector_is_reached_by_tls_and_its_certificate_counts() {
    let folder = TempDir::new().unwrap();
    if let Err(why) = certificates(folder.path(), "DNS:localhost,IP:127.0.0.1") {
        launch::skip("openssl", &why);
        return;
    }
    let file = |name: &str| folder.path().join(name).display().to_string();
    let collector = Collector::start_tls(folder.path());
    let to = |authority: &str| {
        Traced::to(&collector.url).with("OTEL_EXPORTER_OTLP_CERTIFICATE", file(authority))
    };
    let identified = |traced: Traced| {
        traced
            .with("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", file("client.pem"))
            .with("OTEL_EXPORTER_OTLP_CLIENT_KEY", file("client.key"))
    };
    identified(to("ca.pem")).ran(&run("a", "true"), 0);
    hold(&collector, "a");
    // Another authority's, and who shows none of its own.
    for traced in [identified(to("other.pem")), to("ca.pem")] {
        let ran = traced.ran(&run("b", "exit 7"), 7);
        let said = str::from_utf8(&ran.stderr).unwrap();
        assert!(said.contains("traces are not exported"), "{said}");
    }
    assert_eq!(collector.spans().len(), 2);
}
