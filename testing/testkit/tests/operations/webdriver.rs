//! A real browser: Debian's Chromium in headless mode, driven by the W3C WebDriver protocol, which
//! is JSON over HTTP.
//!
//! Each browser has its own chromedriver; both end with the test. User input (keys, clicks) is sent
//! as input events; the state of the page is read by scripts.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use palisade_testkit::lab::launch;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Far more than anything here takes; only a failing test reaches it.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The protocol's key for an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
    _folder: TempDir,
}

impl Browser {
    /// A browser, or `None` if none is available.
    pub(crate) fn start() -> Option<Self> {
        let chromium = launch::need_tool("chromium")?;
        let program = launch::need_tool("chromedriver")?;
        let folder = TempDir::new().unwrap();
        let port = launch::free_port();
        let driver = Command::new(program)
            .arg(format!("--port={port}"))
            .env("HOME", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut browser = Self {
            driver,
            port,
            session: String::new(),
            _folder: folder,
        };
        let ready = launch::until(LIMIT, || browser.ask("GET", "/status", None).map(drop));
        ready.unwrap();
        let profile = browser._folder.path().join("profile");
        // As root it has no sandbox, and it must not contact any external service.
        let arguments = json!([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--window-size=1280,800",
            "--force-device-scale-factor=1",
            format!("--user-data-dir={}", profile.display()),
        ]);
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"binary": chromium, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": 30_000},
        }}});
        let made = browser.ask("POST", "/session", Some(&wanted)).unwrap();
        browser.session = format!("/session/{}", made["sessionId"].as_str().unwrap());
        Some(browser)
    }

    /// Sends one command of the protocol.
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
        let failed = |error: std::io::Error| format!("chromedriver: {error}");
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).map_err(failed)?;
        stream.set_read_timeout(Some(LIMIT)).map_err(failed)?;
        let body = body.map_or_else(String::new, Value::to_string);
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let mut answer = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            answer.read_line(&mut line).map_err(failed)?;
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(text) = line.strip_prefix("content-length:") {
                length = text.trim().parse().map_err(|_| line.clone())?;
            }
        }
        let mut body = vec![0; length];
        answer.read_exact(&mut body).map_err(failed)?;
        let document: Value = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        match document["value"]["error"].as_str() {
            Some(error) => Err(format!("{error}: {}", document["value"]["message"])),
            None => Ok(document["value"].clone()),
        }
    }

    fn post(&self, path: &str, body: Value) -> Result<Value, String> {
        self.ask("POST", &format!("{}{path}", self.session), Some(&body))
    }

    /// Opens an address.
    pub(crate) fn open(&self, url: &str) {
        self.post("/url", json!({"url": url})).unwrap();
    }

    /// The current address.
    pub(crate) fn address(&self) -> String {
        let address = self.ask("GET", &format!("{}/url", self.session), None);
        address.unwrap().as_str().unwrap().to_owned()
    }

    /// The result of a script; a promise is awaited.
    pub(crate) fn js(&self, script: &str) -> Value {
        self.try_js(script).unwrap()
    }

    fn try_js(&self, script: &str) -> Result<Value, String> {
        self.post("/execute/sync", json!({"script": script, "args": []}))
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub(crate) fn until(&self, expression: &str) {
        let script = format!("return Boolean({expression})");
        let end = Instant::now() + LIMIT;
        loop {
            let found = self.try_js(&script);
            if found == Ok(Value::Bool(true)) {
                return;
            }
            if Instant::now() > end {
                let page = self.js("return document.body.innerText");
                panic!(
                    "never {expression}: {found:?}\n{}\n{:?}",
                    page.as_str().unwrap_or_default(),
                    self.log()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the page contains this text.
    #[track_caller]
    pub(crate) fn until_said(&self, text: &str) {
        self.until(&format!(
            "document.body.innerText.includes({})",
            json!(text)
        ));
    }

    #[track_caller]
    fn element(&self, css: &str) -> String {
        self.until(&format!("document.querySelector({})", json!(css)));
        let found = self.post("/element", json!({"using": "css selector", "value": css}));
        found.unwrap()[ELEMENT].as_str().unwrap().to_owned()
    }

    /// Clicks like a user: fails if the element is covered or out of view.
    #[track_caller]
    pub(crate) fn click(&self, css: &str) {
        let element = self.element(css);
        self.post(&format!("/element/{element}/click"), json!({}))
            .unwrap();
    }

    /// Types into a field.
    #[track_caller]
    pub(crate) fn type_into(&self, css: &str, text: &str) {
        let element = self.element(css);
        self.post(&format!("/element/{element}/value"), json!({"text": text}))
            .unwrap();
    }

    /// Presses keys in the focused element.
    pub(crate) fn press(&self, keys: &str) {
        let actions: Vec<Value> = keys
            .chars()
            .flat_map(|key| {
                let key = key.to_string();
                [
                    json!({"type": "keyDown", "value": key}),
                    json!({"type": "keyUp", "value": key}),
                ]
            })
            .collect();
        let keyboard = json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]});
        self.post("/actions", keyboard).unwrap();
    }

    fn cdp(&self, command: &str, parameters: Value) {
        let body = json!({"cmd": command, "params": parameters});
        self.post("/goog/cdp/execute", body).unwrap();
    }

    /// Sets the system's preference: `light` or `dark`.
    pub(crate) fn scheme(&self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.cdp("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Sets the size of the page; a phone has touch and a higher resolution.
    pub(crate) fn size(&self, width: u32, height: u32, phone: bool) {
        let scale = if phone { 2 } else { 1 };
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}),
        );
    }

    /// Saves a screenshot as PNG.
    pub(crate) fn screenshot(&self, path: &Path) {
        let shot = self
            .ask("GET", &format!("{}/screenshot", self.session), None)
            .unwrap();
        let png = BASE64_STANDARD.decode(shot.as_str().unwrap()).unwrap();
        std::fs::write(path, png).unwrap();
    }

    /// The browser's log messages since the last call.
    pub(crate) fn log(&self) -> Vec<String> {
        let entries = self
            .post("/se/log", json!({"type": "browser"}))
            .unwrap_or_default();
        let entries = entries.as_array().cloned().unwrap_or_default();
        entries
            .iter()
            .map(|entry| format!("{}: {}", entry["level"], entry["message"]))
            .collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.ask("DELETE", &self.session, None);
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
