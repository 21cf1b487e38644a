//! Debian's Prometheus with a real gateway, and with the rules and the queries of `deploy/`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use palisade_testkit::lab::launch::{self, wire};
use serde_json::{Value, json};

use crate::serving::Served;
use crate::webdriver::LIMIT;

struct Prometheus {
    child: Child,
    port: u16,
}

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy")
        .join(file)
}

impl Prometheus {
    /// Scrapes the gateway as `viewer`, every second.
    fn start(served: &Served) -> Option<Self> {
        let program = launch::need_tool("prometheus")?;
        let port = launch::free_port();
        let token = served.path("viewer.token");
        std::fs::write(&token, served.token("viewer")).unwrap();
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [deploy("prometheus-rules.yml")],
            "scrape_configs": [{
                "job_name": "palisade",
                "authorization": {"credentials_file": token},
                "static_configs": [{"targets": [format!("127.0.0.1:{}", served.port)]}],
            }],
        });
        // JSON is valid YAML.
        let file = served.path("prometheus.yml");
        std::fs::write(&file, config.to_string()).unwrap();
        let child = Command::new(program)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                served.path("tsdb").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let prometheus = Self { child, port };
        prometheus.until("up", |found| found == "1");
        Some(prometheus)
    }

    fn get(&self, path: &str) -> Result<Value, String> {
        let (status, body) = wire::http(self.port, "GET", path, "")?;
        let body: Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
        match (status, body["status"].as_str()) {
            (200, Some("success")) => Ok(body["data"].clone()),
            _ => Err(format!("{status} {body}")),
        }
    }

    fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let encoded: String = expression
            .bytes()
            .map(|byte| format!("%{byte:02X}"))
            .collect();
        let found = self.get(&format!("/api/v1/query?query={encoded}"))?;
        Ok(found["result"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until the first value of a query satisfies `wanted`.
    #[track_caller]
    fn until(&self, expression: &str, wanted: impl Fn(&str) -> bool) {
        let look = || {
            let found = self.query(expression)?;
            let value = found.first().and_then(|one| one["value"][1].as_str());
            value
                .filter(|value| wanted(value))
                .map(drop)
                .ok_or_else(|| format!("{found:?}"))
        };
        launch::until(LIMIT, look).unwrap();
    }

    /// The firing alerts, as name and reason.
    fn firing(&self) -> Result<Vec<(String, String)>, String> {
        let alerts = self.get("/api/v1/alerts")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let alerts = alerts["alerts"].as_array().unwrap().iter();
        Ok(alerts
            .filter(|alert| alert["state"] == "firing")
            .map(|alert| {
                (
                    text(&alert["labels"]["alertname"]),
                    text(&alert["labels"]["reason"]),
                )
            })
            .collect())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn prometheus_scrapes_a_gateway_and_an_alert_fires_when_a_lock_is_lost() {
    let served = Served::start();
    let Some(prometheus) = Prometheus::start(&served) else {
        return;
    };
    let claim = |name: &str, ttl: &str| {
        let opened = json!({"ttl": ttl}).to_string();
        let opened = served.ask("operator", "POST", "/v1/sessions", "", &opened);
        let opened: Value = serde_json::from_str(&opened.1).unwrap();
        let secret = opened["secret"].as_str().unwrap();
        let session = format!("palisade-session: {secret}\r\n");
        let body = json!({"name": name, "id": "one"}).to_string();
        let (status, said) = served.ask("operator", "POST", "/v1/claims", &session, &body);
        assert_eq!(status, 200, "{said}");
        session
    };
    let evict = |name: &str, how: &str| {
        let body = json!({"name": name, "how": how, "reason": "test"}).to_string();
        let (status, said) = served.ask("operator", "POST", "/v1/evictions", "", &body);
        assert_eq!(status, 200, "{said}");
    };
    // One that is released, and one that releases when it is evicted: neither raises an alert.
    let session = claim("released", "30s");
    let body = json!({"id": "one"}).to_string();
    served.ask("operator", "POST", "/v1/claims/release", &session, &body);
    claim("evicted", "5s");
    evict("evicted", "ask");
    prometheus.until("sum(palisade_acquire_total{outcome=\"held\"})", |it| {
        it == "2"
    });
    prometheus.until("sum(palisade_lost_total{reason=\"evicted\"})", |it| {
        it == "1"
    });
    assert_eq!(prometheus.firing().unwrap(), []);
    // It is removed at once, as by an engine that has lost its data.
    claim("lost", "30s");
    evict("lost", "force");
    let look = || match prometheus.firing()? {
        firing
            if firing
                .iter()
                .any(|(name, reason)| name == "PalisadeLockLost" && reason != "evicted") =>
        {
            Ok(firing)
        }
        firing => Err(format!("{firing:?}")),
    };
    let firing = launch::until(LIMIT, look).unwrap();
    println!("fires: {firing:?}");
    assert!(firing.iter().all(|(_, reason)| reason != "evicted"));

    names_are_documented(&prometheus);
    names_are_described(&served);
    panels_can_be_asked_for(&prometheus);
}

/// All metrics of a real gateway are documented.
fn names_are_documented(prometheus: &Prometheus) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/observability.md");
    let page = std::fs::read_to_string(page).unwrap();
    let names = prometheus.get("/api/v1/label/__name__/values").unwrap();
    let names: BTreeSet<&str> = names
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .filter(|name| name.starts_with("palisade_"))
        .collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        let ends = ["_bucket", "_sum", "_count"];
        let name = ends
            .into_iter()
            .find_map(|end| name.strip_suffix(end))
            .unwrap_or(name);
        assert!(
            page.contains(&format!("`{name}`")),
            "{name} is not on the page"
        );
    }
}

/// Every metric of a real gateway says what it counts.
fn names_are_described(served: &Served) {
    let (_, text) = served.ask("viewer", "GET", "/metrics", "", "");
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names: Vec<&str> = types.filter_map(|line| line.split(' ').next()).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(
            text.contains(&format!("# HELP {name} ")),
            "{name} in {text}"
        );
    }
}

/// Prometheus accepts every query of Grafana's dashboard, and most of them have a result.
fn panels_can_be_asked_for(prometheus: &Prometheus) {
    let dashboard = std::fs::read_to_string(deploy("grafana-dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut empty = Vec::new();
    for panel in panels {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let query = query
                .replace("$__rate_interval", "1m")
                .replace("$instance", ".*");
            assert!(!query.contains('$'), "{query}");
            if prometheus.query(&query).unwrap().is_empty() {
                empty.push(query);
            }
        }
    }
    // There are no deadlocks and no fences here.
    assert!(empty.len() <= 2, "{empty:#?}");
}
