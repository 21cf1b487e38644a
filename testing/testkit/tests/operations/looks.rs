//! The appearance of the dashboard: light, dark, on a phone, with enough contrast; and the pictures
//! for the docs.

use std::path::Path;
use std::time::{Duration, Instant};

use palisade_testkit::lab::launch;
use serde_json::{Value, json};

use crate::serving::{Run, Served};
use crate::webdriver::{Browser, LIMIT};

/// Example locks of a shop: jobs, readers, permits, a line, and two that wait for each other.
struct Shop {
    served: Served,
    runs: Vec<Run>,
}

impl Shop {
    fn open() -> Self {
        let mut shop = Self {
            served: Served::start(),
            runs: Vec::new(),
        };
        for (name, label, args) in [
            ("billing/invoices", "invoice-run", ""),
            ("billing/dunning", "dunning", ""),
            ("search/index-eu", "reindex", ""),
            ("search/index-us", "reindex", "--ttl 60s"),
            ("mail/newsletter", "sender", ""),
            ("deploy/production", "release-4.2.1", "--ttl 20s"),
            ("backup/orders-db", "nightly", "--ttl 2m"),
            ("cron/rotate-keys", "cron", ""),
            ("warehouse/snapshot", "report-eu", "--shared"),
            ("warehouse/snapshot", "report-us", "--shared"),
            ("warehouse/snapshot", "report-jp", "--shared"),
            ("media/encoders", "thumbnails", "--permits 2/5"),
            ("media/encoders", "avatars", "--permits 1/5"),
            ("deploy/production", "release-4.2.2", ""),
            ("deploy/production", "hotfix-4.2.1-1", ""),
            ("deploy/production", "rollback", ""),
            ("billing/invoices", "late-invoices", ""),
            ("warehouse/snapshot", "restock", ""),
        ] {
            let args: Vec<&str> = args.split_whitespace().collect();
            let before = shop.claims();
            shop.runs.push(shop.served.hold(name, label, &args));
            shop.until_claims(before + 1);
        }
        let before = shop.claims();
        for (one, other) in [("stock/eu", "stock/us"), ("stock/us", "stock/eu")] {
            shop.runs.push(shop.served.cross(one, other));
        }
        shop.until_claims(before + 4);
        shop
    }

    fn claims(&self) -> usize {
        let (_, lines) = self.served.ask("operator", "GET", "/v1/lines", "", "");
        let lines: Value = serde_json::from_str(&lines).unwrap();
        let count = |line: &Value| {
            let many = |part: &str| line[part].as_array().unwrap().len();
            many("holders") + many("waiters")
        };
        lines["lines"].as_array().unwrap().iter().map(count).sum()
    }

    fn until_claims(&self, wanted: usize) {
        let look = || match self.claims() {
            found if found == wanted => Ok(()),
            found => Err(format!("{found} claims, not {wanted}")),
        };
        launch::until(LIMIT, look).unwrap();
    }
}

/// The pages, and what each shows when it is loaded.
const PAGES: &[(&str, &str, &str)] = &[
    (
        "locks",
        "locks",
        "document.querySelectorAll('.list-space .row:not([hidden])').length >= 12",
    ),
    (
        "lock",
        "lock/deploy%2Fproduction",
        "document.querySelectorAll('.claim').length === 4",
    ),
    (
        "waits",
        "waits",
        "document.querySelectorAll('.graph .edge.bad').length >= 4",
    ),
    (
        "engine",
        "engine",
        "document.querySelectorAll('.plot').length === 8",
    ),
];

/// Finds texts whose contrast to their background is below 4.5, or 3 for large ones.
const FAINT: &str = r#"
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const light = (colour) => {
  const [r, g, b] = colour.slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  for (let at = node; at !== null; at = at.parentElement) {
    const rect = at instanceof SVGElement ? at.querySelector(":scope > rect") : null;
    const colour = rgb(rect ? getComputedStyle(rect).fill : getComputedStyle(at).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255];
};
const faint = [];
for (const node of document.querySelectorAll("body *")) {
  const said = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data.trim()).join("");
  if (said === "" || !node.checkVisibility() || node.closest("title, option, defs")) continue;
  const style = getComputedStyle(node);
  const [one, other] = [light(rgb(node instanceof SVGElement ? style.fill : style.color)), light(behind(node))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5)) faint.push(`${ratio.toFixed(2)} ${said.slice(0, 40)}`);
}
return faint;
"#;

#[test]
fn it_is_legible_in_light_and_dark_and_on_a_phone() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let shop = Shop::open();
    browser.open(&shop.served.entry("operator"));
    let mut grounds = Vec::new();
    for scheme in ["light", "dark"] {
        browser.scheme(scheme);
        grounds.push(browser.js("return getComputedStyle(document.body).backgroundColor"));
        for (name, page, shown) in PAGES {
            for (width, height, phone) in [(1280, 800, false), (390, 844, true)] {
                browser.size(width, height, phone);
                browser.js(&format!("location.hash = '#/{page}'"));
                browser.until(shown);
                let wide = browser.js("return document.scrollingElement.scrollWidth - innerWidth");
                assert!(
                    wide.as_i64().unwrap() <= 0,
                    "{name} at {width} is {wide} too wide"
                );
                let faint = browser.js(FAINT);
                assert_eq!(faint, json!([]), "{name} at {width}, {scheme}");
            }
        }
    }
    assert_ne!(grounds[0], grounds[1]);
    // Chosen by hand, against the system's preference.
    browser.js("location.hash = '#/locks'; document.activeElement.blur()");
    browser.press("t");
    browser.until("getComputedStyle(document.body).backgroundColor !== getComputedStyle(document.documentElement).getPropertyValue('x')");
    let chosen = browser.js("return getComputedStyle(document.body).backgroundColor");
    assert_eq!(chosen, grounds[0]);
}

/// Claims and releases through the gateway, like clients, for as long as the plots need.
fn trade(shop: &Shop, time: Duration) {
    let open = |principal: &str, name: &str, ttl: &str| {
        let (status, opened) = shop.served.ask(
            principal,
            "POST",
            "/v1/sessions",
            "",
            &json!({"ttl": ttl}).to_string(),
        );
        assert_eq!(status, 201, "{opened}");
        let opened: Value = serde_json::from_str(&opened).unwrap();
        let session = format!(
            "palisade-session: {}\r\n",
            opened["secret"].as_str().unwrap()
        );
        let claim = json!({"name": name, "id": "kept", "label": "gateway client"}).to_string();
        let (status, said) = shop
            .served
            .ask(principal, "POST", "/v1/claims", &session, &claim);
        assert_eq!(status, 200, "{said}");
        session
    };
    let sessions = [
        ("operator", open("operator", "media/upload-7", "2m")),
        ("billing", open("billing", "billing/ledger", "90s")),
    ];
    let end = Instant::now() + time;
    let mut turn = 0_u32;
    while Instant::now() < end {
        let (principal, session) = &sessions[turn as usize % 2];
        let ask = |path: &str, body: Value| {
            shop.served
                .ask(principal, "POST", path, session, &body.to_string())
        };
        for _ in 0..(3 + (turn % 7) * 2) {
            let id = format!("{turn}-{:?}", Instant::now());
            ask("/v1/claims", json!({"name": "billing/counter", "id": id}));
            ask("/v1/claims/release", json!({"id": id}));
        }
        std::thread::sleep(Duration::from_millis(300));
        turn += 1;
    }
}

#[test]
#[ignore = "writes the pictures of the docs: just screenshots"]
fn screenshots() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images");
    std::fs::create_dir_all(&docs).unwrap();
    let shop = Shop::open();
    browser.size(1280, 800, false);
    browser.open(&shop.served.entry("operator"));
    // The page has taken the token from its address.
    browser.until("document.getElementById('where').textContent !== ''");
    browser.js("location.hash = '#/engine'");
    trade(&shop, Duration::from_secs(40));
    let take = |file: &str| {
        let path = docs.join(format!("dashboard-{file}.png"));
        browser.screenshot(&path);
        let bytes = path.metadata().unwrap().len();
        println!("{}: {bytes} bytes", path.display());
        assert!(bytes < 150_000);
    };
    for scheme in ["light", "dark"] {
        browser.scheme(scheme);
        for (name, page, shown) in PAGES {
            browser.js(&format!("location.hash = '#/{page}'"));
            browser.until(shown);
            match (scheme, *name) {
                ("light", name) => take(name),
                ("dark", "locks" | "waits") => take(&format!("{name}-dark")),
                _ => {}
            }
        }
    }
}
