//! `palisade serve` as a process: access, and the state after it is killed.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::*;

/// A gateway in front of the store.
struct Serving {
    running: Running,
    socket: PathBuf,
    said: Value,
}

impl Serving {
    fn start(store: &Store, args: &str) -> Self {
        let socket = store.path("run/gateway.sock");
        let args = format!("serve --json --listen 127.0.0.1:0 --drain 100ms {args}");
        let mut command = store.palisade(&args);
        command.arg("--socket").arg(&socket);
        let mut running = Running::start(command);
        let said = serde_json::from_str(&running.stderr_line()).unwrap();
        Self {
            running,
            socket,
            said,
        }
    }

    /// The body of what is at `path`.
    fn get(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let text = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// Asks by the socket; the status and the document.
    fn ask(&self, path: &str, session: Option<&str>, body: &Value) -> (u16, Value) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let body = body.to_string();
        let session = session.map_or(String::new(), |secret| {
            format!("palisade-session: {secret}\r\n")
        });
        let text = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{session}\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body.trim()).unwrap())
    }

    /// Opens a session; its secret.
    fn session(&self, ttl: &str) -> String {
        let (status, opened) = self.ask("/v1/sessions", None, &json!({"ttl": ttl}));
        assert_eq!(status, 201, "{opened}");
        opened["secret"].as_str().unwrap().to_owned()
    }
}

#[test]
fn it_serves_this_user_and_drains() {
    let store = Store::new();
    let serving = Serving::start(&store, "");
    assert_eq!(serving.said["event"], "serving");
    let token_file = PathBuf::from(serving.said["token_file"].as_str().unwrap());
    let mode = token_file.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (status, held) = serving.ask("/v1/claims", None, &json!({"name": "x", "id": "me"}));
    assert_eq!((status, &held["state"]), (200, &json!("held")), "{held}");
    assert_eq!(store.lines()[0]["holders"][0]["token"], held["token"]);
    let metrics = serving.get("/metrics");
    for line in [
        "palisade_gateway_claims 1",
        "palisade_gateway_sessions 1",
        r#"palisade_gateway_requests_total{route="/v1/claims",status="200"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    let held_line = metrics
        .lines()
        .find(|line| line.starts_with("palisade_held{"));
    assert!(
        held_line.is_some_and(|line| line.ends_with(" 1")),
        "{metrics}"
    );
    // Together with the command's own locks.
    assert_eq!(store.code("run x --no-wait -- true"), Some(75));
    serving.running.signal("TERM");
    let secret = held["session"]["secret"].as_str();
    let (status, released) = serving.ask("/v1/claims/release", secret, &json!({"id": "me"}));
    assert_eq!(status, 200, "{released}");
    let ended = serving.running.end();
    ended.is(0);
    let log = ended.err();
    assert!(log.contains("draining"), "{log}");
    let secret = secret.unwrap();
    assert!(!log.contains(secret), "{log}");
    assert!(!token_file.exists());
    store.assert_empty();
}

#[test]
fn a_port_beyond_this_machine_needs_tls_and_access() {
    let store = Store::new();
    let socket = store.path("run/gateway.sock");
    let refused = |args: &str| {
        let mut command = store.palisade(args);
        command.arg("--socket").arg(&socket);
        finish(command).is(78).err()
    };
    assert!(refused("serve --listen 0.0.0.0:0").contains("--access"));
    assert!(refused("serve --listen 192.0.2.1:0 --access /none").contains("--tls-cert"));
    assert!(refused("serve --listen 127.0.0.1:0 --access /none").contains("access file"));
    assert!(!socket.exists());
}

#[test]
fn a_token_is_printed_once_with_its_hash() {
    let store = Store::new();
    let text = store.ran("serve token billing").is(0).out();
    assert!(text.contains("name = \"billing\"") && text.contains("token_sha256 = \""));
    let json: Value = serde_json::from_str(&store.ran("serve token billing --json").out()).unwrap();
    let (token, hash) = (json["token"].as_str().unwrap(), &json["token_sha256"]);
    assert_eq!(token.len(), 64);
    assert_ne!(hash, token);
    assert!(!text.contains(token), "another one each time");
}

/// If the gateway is killed, the holder's validity ends before the engine's lease; a waiter of the
/// dead gateway, granted at that moment or not, does not block others for long.
#[test]
fn a_killed_gateway_leaves_nobody_believing_too_long() {
    let ttl = Duration::from_millis(1500);
    for round in 0..rounds() {
        let store = Store::new();
        let mut serving = Serving::start(&store, "");
        let secret = serving.session("1500ms");
        let claim = |name: &str, id: &str| json!({"name": name, "id": id, "queue": true});
        let sent = Instant::now();
        let (status, held) = serving.ask("/v1/claims", Some(&secret), &claim("x", "held"));
        assert_eq!(status, 200, "{held}");
        let (status, waiting) = serving.ask("/v1/claims", Some(&secret), &claim("x", "waits"));
        assert_eq!(status, 202, "{waiting}");
        let mut believed = sent + Duration::from_millis(held["valid_ms"].as_u64().unwrap());
        if round % 2 == 1 {
            // The waiter is granted at about the moment of the kill.
            let release = json!({"id": "held"});
            let (status, _) = serving.ask("/v1/claims/release", Some(&secret), &release);
            assert_eq!(status, 200);
            let sent = Instant::now();
            let wait = json!({"id": "waits"});
            let (status, granted) = serving.ask("/v1/claims/wait", Some(&secret), &wait);
            believed = match granted["valid_ms"].as_u64() {
                Some(valid) if status == 200 => sent + Duration::from_millis(valid),
                _ => Instant::now(),
            };
        }
        serving.running.process.kill().unwrap();
        serving.running.process.wait().unwrap();
        let killed = Instant::now();
        assert_eq!(store.code("run x --wait 20s -- true"), Some(0));
        let granted = Instant::now();
        assert!(
            granted >= believed,
            "round {round}: granted within a promise"
        );
        // Generous: the machine may be busy.
        let took = granted - killed;
        assert!(
            took < ttl + Duration::from_secs(10),
            "round {round}: {took:?}"
        );
    }
}

#[test]
fn a_client_that_is_gone_loses_all_by_its_ttl() {
    let store = Store::new();
    let serving = Serving::start(&store, "");
    let secret = serving.session("1s");
    for id in 0..10 {
        let claim = json!({"name": format!("x{id}"), "id": id.to_string()});
        assert_eq!(serving.ask("/v1/claims", Some(&secret), &claim).0, 200);
    }
    assert_eq!(store.lines().len(), 10);
    until("all are released", || store.lines().is_empty());
}

/// Whoever fails to start changes nothing for the one that serves.
#[test]
fn a_second_gateway_leaves_the_token_of_the_first() {
    let store = Store::new();
    let serving = Serving::start(&store, "");
    let file = PathBuf::from(serving.said["token_file"].as_str().unwrap());
    let token = std::fs::read_to_string(&file).unwrap();
    let mut second = store.palisade("serve --listen 127.0.0.1:0");
    second.arg("--socket").arg(&serving.socket);
    assert!(finish(second).is(78).err().contains("another gateway"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), token);
    // The same if its port is taken.
    let url = serving.said["url"].as_str().unwrap();
    let taken = url.strip_prefix("http://").unwrap();
    let mut second = store.palisade(&format!("serve --listen {taken}"));
    second
        .arg("--socket")
        .arg(file.with_file_name("other.sock"));
    assert!(finish(second).is(78).err().contains("another gateway"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), token);
}

/// A client may hold something for a day; its operator need not wait for that.
#[test]
fn a_second_signal_ends_it_and_says_what_stays() {
    let store = Store::new();
    let serving = Serving::start(&store, "--max-ttl 24h");
    let secret = serving.session("24h");
    let claim = |name: &str, id: &str| json!({"name": name, "id": id, "queue": true});
    assert_eq!(
        serving
            .ask("/v1/claims", Some(&secret), &claim("x", "held"))
            .0,
        200
    );
    assert_eq!(
        serving
            .ask("/v1/claims", Some(&secret), &claim("x", "waits"))
            .0,
        202
    );
    serving.running.signal("TERM");
    until("it drains", || {
        serving.ask("/v1/sessions", None, &json!({})).0 == 503
    });
    let began = Instant::now();
    serving.running.signal("TERM");
    let ended = serving.running.end();
    assert!(began.elapsed() < Duration::from_secs(10));
    ended.is(0);
    let log = ended.err();
    let said: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    // The audit event, and that for whoever sent the signal.
    let stays: Vec<_> = said
        .iter()
        .filter(|said| said["event"] == "ended_at_once")
        .collect();
    assert_eq!(stays.len(), 2, "{log}");
    let holds = stays[1]["holds"].as_array().unwrap();
    assert_eq!(holds.len(), 1, "{log}");
    assert_eq!(
        (&holds[0]["name"], &holds[0]["principal"]),
        (&json!("x"), &json!("local"))
    );
    assert!(
        holds[0]["until"].as_str().unwrap().starts_with("20"),
        "{log}"
    );
    // Its client believes in the hold, so it is still there; who only waited is not.
    let lines = store.lines();
    assert_eq!(lines[0]["holders"].as_array().unwrap().len(), 1);
    assert_eq!(lines[0]["waiters"], json!([]));
    assert_eq!(lines[0]["holders"][0]["id"], holds[0]["claim"]);
}

#[test]
fn files_that_others_may_write_are_refused() {
    let store = Store::new();
    let mode = |name: &str, mode: u32| {
        let rights = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(store.path(name), rights).unwrap();
    };
    let refused = |args: &str, config: Option<&str>| {
        let mut command = store.palisade(args);
        if let Some(config) = config {
            command.env("PALISADE_CONFIG", store.path(config));
        }
        command.arg("--socket").arg(store.path("run/gateway.sock"));
        finish(command).is(78).err()
    };
    for name in ["access.toml", "config.toml"] {
        std::fs::write(store.path(name), "").unwrap();
        mode(name, 0o646);
    }
    let access = store.path("access.toml");
    let serve = format!("serve --no-port --access {}", access.display());
    assert!(refused(&serve, None).contains("chmod o-w"));
    assert!(refused("serve --no-port", Some("config.toml")).contains("chmod o-w"));
    if rustix::process::getuid().is_root() {
        for name in ["access.toml", "config.toml"] {
            mode(name, 0o644);
            std::os::unix::fs::chown(store.path(name), Some(4711), None).unwrap();
        }
        assert!(refused(&serve, None).contains("uid 4711"));
        assert!(refused("serve --no-port", Some("config.toml")).contains("uid 4711"));
    }
}

/// Far more connections than there are descriptors, none with a token, each with answers that nobody
/// reads.
#[test]
fn a_crowd_without_tokens_shuts_out_nobody() {
    let store = Store::new();
    for per_peer in ["--max-per-peer 0", ""] {
        let socket = store.path("run/gateway.sock");
        let mut command = std::process::Command::new("sh");
        let program = palisade();
        let serve = format!(
            "ulimit -n 1024; exec {} serve --json --listen 127.0.0.1:0 {per_peer} --socket {}",
            program.get_program().to_str().unwrap(),
            socket.display()
        );
        command
            .args(["-c", &serve])
            .env("PALISADE_URL", store.url())
            .env("PALISADE_CONFIG", "/dev/null");
        let mut running = Running::start(command);
        let said: Value = serde_json::from_str(&running.stderr_line()).unwrap();
        let mut serving = Serving {
            running,
            socket,
            said,
        };
        let addr = serving.said["url"]
            .as_str()
            .unwrap()
            .strip_prefix("http://")
            .unwrap();
        let token = std::fs::read_to_string(serving.said["token_file"].as_str().unwrap()).unwrap();
        let token = token.trim();
        let get = |path: &str| {
            let mut stream = std::net::TcpStream::connect(addr).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_secs(5)))
                .unwrap();
            let text = format!(
                "GET {path} HTTP/1.1\r\nhost: {addr}\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.write_all(text.as_bytes());
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer)
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        let request = format!("GET /openapi.json HTTP/1.1\r\nhost: {addr}\r\n\r\n");
        let mut crowd = Vec::new();
        for round in 0..3 {
            for _ in 0..200 {
                let stream = std::net::TcpStream::connect(addr).unwrap();
                stream.set_nonblocking(true).unwrap();
                for _ in 0..20 {
                    if (&stream).write_all(request.as_bytes()).is_err() {
                        break;
                    }
                }
                crowd.push(stream);
            }
            for path in ["/healthz", "/v1/lines"] {
                assert_eq!(get(path), "HTTP/1.1 200 OK", "{per_peer} {round} {path}");
            }
            let (status, held) = serving.ask(
                "/v1/claims",
                None,
                &json!({"name": format!("{per_peer}{round}")}),
            );
            assert_eq!(status, 200, "{held}");
        }
        // Its claims last for a while, and nobody waits for them.
        serving.running.process.kill().unwrap();
    }
}
