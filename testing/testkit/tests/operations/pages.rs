//! How a person uses the dashboard, and what it shows.

use std::time::{Duration, Instant};

use palisade_testkit::lab::launch;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::serving::Served;
use crate::webdriver::Browser;

const DOWN: &str = "\u{e015}";
const ENTER: &str = "\u{e007}";
const ESCAPE: &str = "\u{e00c}";

/// The row of a lock, as a JavaScript expression.
fn row(name: &str) -> String {
    format!(
        "[...document.querySelectorAll('.list-space .row:not([hidden])')]\
         .find((row) => row.querySelector('a').textContent === {})",
        json!(name)
    )
}

#[test]
fn the_token_is_taken_from_the_address_or_asked_for_once_and_kept_for_the_tab() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    browser.open(&served.page("locks"));
    browser.until("document.querySelector('dialog.token[open]')");
    browser.type_into("#token", "wrong");
    browser.press(ENTER);
    browser.until_said("does not know this token");
    browser.type_into("#token", served.token("viewer"));
    browser.press(ENTER);
    browser.until("document.getElementById('state').textContent === 'live'");
    browser.until("document.querySelector('dialog') === null");
    browser.js("location.reload()");
    browser.until("document.getElementById('state')?.textContent === 'live'");
    assert_eq!(
        browser.js("return document.querySelector('dialog')"),
        Value::Null
    );
    // The token is only in the session's storage, which another tab does not have.
    browser.js("sessionStorage.clear(); location.reload()");
    browser.until("document.querySelector('dialog.token[open]')");
    let kept = browser.js("return JSON.stringify(localStorage) + document.cookie");
    assert!(!kept.as_str().unwrap().contains(served.token("viewer")));
    browser.open(&served.entry("operator"));
    browser.until("document.getElementById('state')?.textContent === 'live'");
    assert_eq!(browser.address(), served.page("locks"));
    // A link does not replace it: whoever made the link could have chosen its token.
    let token = "return sessionStorage.getItem('palisade-token')";
    browser.open(&served.entry("viewer"));
    browser.until("location.hash === '#/locks'");
    assert_eq!(browser.js(token), served.token("operator"));
    // Only if it is not valid any more, and then whoever sees the page decides.
    browser.js("sessionStorage.setItem('palisade-token', 'gone')");
    browser.open(&served.entry("viewer"));
    browser.until("document.querySelector('dialog.token[open] #token')?.value.length === 64");
    assert_eq!(browser.js(token), "gone");
    browser.js("document.querySelector('dialog.token button.primary').click()");
    browser.until("document.getElementById('state')?.textContent === 'live'");
    assert_eq!(browser.js(token), served.token("viewer"));
    assert!(!served.audit().contains(served.token("operator")));
}

#[test]
fn a_lock_appears_within_a_second_and_its_release_removes_it() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    browser.open(&served.entry("operator"));
    browser.until_said("Nobody holds or waits");
    let hold = served.hold("billing/card-4711", "nightly", &[]);
    launch::until(crate::webdriver::LIMIT, || {
        let (_, lines) = served.ask("operator", "GET", "/v1/lines", "", "");
        lines.contains("card-4711").then_some(()).ok_or(lines)
    })
    .unwrap();
    let held = Instant::now();
    browser.until(&row("billing/card-4711"));
    let took = held.elapsed();
    println!("a lock was shown {took:?} after it was held");
    if std::env::var_os("PALISADE_TEST_FULL").is_some() {
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
    let text = browser.js(&format!("return {}.textContent", row("billing/card-4711")));
    let pid = hold.child.id().to_string();
    for shown in ["nightly", &pid, "lock"] {
        assert!(text.as_str().unwrap().contains(shown), "{shown} in {text}");
    }
    assert_eq!(hold.end(), Some(0));
    browser.until(&format!("!({})", row("billing/card-4711")));
    // All of that may have come from polling, which is disabled after the next poll.
    browser.js("const real = window.setTimeout; \
         window.setTimeout = (call, ms) => real(call, [1000, 5000].includes(ms) ? 1e9 : ms)");
    let _looked = served.hold("looked", "nightly", &[]);
    browser.until(&row("looked"));
    let hinted = served.hold("hinted", "nightly", &[]);
    browser.until(&row("hinted"));
    assert_eq!(hinted.end(), Some(0));
    browser.until(&format!("!({})", row("hinted")));
    let severe: Vec<String> = browser
        .log()
        .into_iter()
        .filter(|it| it.contains("SEVERE"))
        .collect();
    assert_eq!(severe, Vec::<String>::new());
    let elsewhere = "return performance.getEntriesByType('resource').map((one) => one.name)\
                     .filter((name) => !name.startsWith(location.origin))";
    assert_eq!(browser.js(elsewhere), json!([]));
}

#[test]
fn a_bar_shows_what_is_left_of_a_lease_once_its_length_is_known() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    let holds = [("long", "60s"), ("short", "3s")];
    let _holds = holds.map(|(name, ttl)| served.hold(name, "nightly", &["--ttl", ttl]));
    launch::until(crate::webdriver::LIMIT, || {
        let (_, lines) = served.ask("operator", "GET", "/v1/lines", "", "");
        let both = lines.contains("long") && lines.contains("short");
        both.then_some(()).ok_or(lines)
    })
    .unwrap();
    browser.open(&served.entry("operator"));
    let track = |name: &str| format!("{}?.querySelector('.bar-track')", row(name));
    browser.until(&track("long"));
    // The page has seen neither its beginning nor a renewal: it may be of any length.
    let bar = format!(
        "const track = {}; \
         return [track.classList.contains('unknown'), track.firstElementChild.style.width]",
        track("long")
    );
    assert_eq!(browser.js(&bar), json!([true, "0%"]));
    let known = |name: &str| format!("{}?.classList.contains('unknown') === false", track(name));
    browser.until(&known("short"));
    let _new = served.hold("new", "nightly", &["--ttl", "60s"]);
    browser.until(&known("new"));
}

#[test]
fn a_name_stays_text_whatever_it_is() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    let name = "<img src=x onerror=alert(1)>";
    let _hold = served.hold(name, name, &[]);
    let _wait = served.hold(name, "<script>alert(2)</script>", &[]);
    browser.open(&served.entry("operator"));
    browser.until(&row(name));
    let markup = "document.querySelector('main img, main script') === null";
    browser.until(markup);
    browser.js(&format!("{}.querySelector('a').click()", row(name)));
    browser.until(&format!(
        "document.querySelector('h1').textContent === {}",
        json!(name)
    ));
    browser.until("document.querySelectorAll('.queue .claim').length === 1");
    browser.until(markup);
    browser.click(".claim button.danger");
    browser.until("document.querySelector('dialog.evict img') === null");
    browser.press(ESCAPE);
    browser.js("location.hash = '#/waits'");
    browser.until("document.querySelector('.graph svg')");
    browser.until_said("<img src=x onerror=alert(1)>");
    browser.until(markup);
    // The page itself forbids turning text into markup.
    let refused = "try { document.querySelector('main').innerHTML = '<b>x</b>'; return false } \
                   catch { return true }";
    assert_eq!(browser.js(refused), true);
    let inline = "const script = document.createElement('script'); window.ran = false; \
                  try { script.text = 'window.ran = true'; document.body.append(script) } catch {} \
                  return window.ran";
    assert_eq!(browser.js(inline), false);
}

#[test]
fn evicting_ends_the_holder_and_is_audited() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    let mut hold = served.hold("billing/card-4711", "job", &["--ttl", "3s"]);
    browser.open(&served.entry("operator"));
    browser.until(&row("billing/card-4711"));
    // Started only now, because it must not be the first.
    let _wait = served.hold("billing/card-4711", "job", &[]);
    browser.js("location.hash = '#/lock/billing%2Fcard-4711'");
    browser.until("document.querySelectorAll('.claim').length === 2");
    browser.click(".stage .claim button.danger");
    browser.until_said("The holder is notified at its next renewal");
    browser.click("dialog.evict input[value=force]");
    browser.until_said("Only storage that checks fencing tokens");
    browser.click("dialog.evict input[value=ask]");
    // Without a reason nothing is sent: otherwise it would be in progress, refused, or done.
    browser.click("dialog.evict button[type=submit]");
    let untouched = "const dialog = document.querySelector('dialog.evict'); \
                     return dialog.querySelector('.failed').textContent === '' \
                     && !dialog.querySelector('button[type=submit]').disabled";
    assert_eq!(browser.js(untouched), true);
    assert!(!served.audit().contains("eviction"));
    browser.type_into("#reason", "it hangs since monday");
    browser.click("dialog.evict button[type=submit]");
    assert_eq!(hold.ended(), Some(76));
    browser.until("document.querySelector('dialog') === null");
    browser.until_said("Evicted from billing/card-4711.");
    browser.until("document.querySelectorAll('.stage .claim').length === 1");
    browser.until_said("was granted it");
    assert!(served.audit().contains("it hangs since monday"));
}

#[test]
fn a_principal_without_operate_has_no_button_and_is_refused() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    let _hold = served.hold("billing/card-4711", "job", &[]);
    let _other = served.hold("elsewhere", "job", &[]);
    let open = |principal: &str, lock: &str| {
        // A link does not replace the token of a tab.
        browser.js("try { sessionStorage.clear() } catch {}");
        browser.open("about:blank");
        browser.open(&served.entry(principal));
        browser.until("document.getElementById('where').textContent !== ''");
        browser.js(&format!("location.hash = '#/lock/{lock}'"));
        browser.until("document.querySelectorAll('.claim').length === 1");
    };
    let buttons = "return document.querySelectorAll('main button.danger').length";
    open("viewer", "elsewhere");
    assert_eq!(browser.js(buttons), 0);
    let evict = "return fetch('v1/evictions', {method: 'POST', headers: {'content-type': 'application/json', \
                 authorization: 'Bearer ' + sessionStorage.getItem('palisade-token')}, \
                 body: JSON.stringify({name: 'elsewhere', how: 'force', reason: 'x'})})\
                 .then((answer) => answer.status)";
    assert_eq!(browser.js(evict), 403);
    open("operator", "elsewhere");
    browser.until("document.querySelectorAll('main button.danger').length === 1");
    open("billing", "billing%2Fcard-4711");
    browser.until("document.querySelectorAll('main button.danger').length === 1");
    // It sees only its own prefix.
    browser.js("location.hash = '#/locks'");
    browser.until(&row("billing/card-4711"));
    assert_eq!(
        browser.js(&format!("return {} === undefined", row("elsewhere"))),
        true
    );
}

#[test]
fn a_planted_circle_turns_red() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    browser.open(&served.entry("operator"));
    // The page has taken the token from its address.
    browser.until("document.getElementById('where').textContent !== ''");
    browser.js("location.hash = '#/waits'");
    browser.until_said("Nobody waits for a lock.");
    // Neither gives way, since they are not configured to.
    let (_one, _other) = (served.cross("a", "b"), served.cross("b", "a"));
    browser.until_said("wait for each other");
    browser.until("document.querySelectorAll('.graph .node.lock.bad').length === 2");
    browser.until("document.querySelectorAll('.graph .edge.bad').length >= 4");
    browser.until("document.querySelector('#count-waits.bad')");
    let red = browser.js("return getComputedStyle(document.querySelector('.edge.bad')).stroke");
    assert_eq!(red, "rgb(179, 38, 30)");
}

#[test]
fn a_stopped_or_killed_gateway_is_shown_and_heals() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let mut served = Served::start();
    let _hold = served.hold("first", "job", &[]);
    browser.open(&served.entry("operator"));
    browser.until(&row("first"));
    served.signal(Signal::STOP);
    browser.until_said("Cut off from the gateway since");
    browser.until("document.getElementById('state').textContent === 'cut off'");
    served.signal(Signal::CONT);
    browser.until("document.getElementById('state').textContent === 'live'");
    browser.until("document.getElementById('banner').hidden");
    served.kill();
    browser.until_said("Cut off from the gateway since");
    let _second = served.hold("second", "job", &[]);
    served.serve();
    browser.until("document.getElementById('state').textContent === 'live'");
    browser.until(&row("second"));
    // The stream of hints works again too: a change is seen before the next poll.
    let _third = served.hold("third", "job", &[]);
    browser.until(&row("third"));
}

#[test]
fn it_can_be_used_by_keys_alone() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    let _holds: Vec<_> = ["a", "needle", "z"]
        .map(|name| served.hold(name, "job", &[]))
        .into();
    browser.open(&served.entry("operator"));
    browser.until(&row("z"));
    browser.press("/");
    browser.until("document.activeElement.id === 'filter'");
    browser.press("needle");
    browser.until(&format!("!({})", row("a")));
    browser.press(DOWN);
    browser.until("document.querySelector('.list').getAttribute('aria-activedescendant')");
    browser.press(ENTER);
    browser.until("document.querySelector('h1').textContent === 'needle'");
    browser.press(ESCAPE);
    browser.until("location.hash === '#/locks'");
    browser.press("2");
    browser.until("document.querySelector('h1').textContent === 'Waits'");
    browser.press("3");
    browser.until("document.querySelector('h1').textContent === 'Engine'");
    browser.until_said("Fencing tokens never go back.");
    browser.until_said("You are operator.");
    browser.press("?");
    browser.until("document.querySelector('dialog.keys[open]')");
    browser.press(ESCAPE);
    browser.until("document.querySelector('dialog') === null");
    browser.press("1");
    browser.until("document.querySelector('h1').textContent === 'Locks'");
}

#[test]
fn ten_thousand_locks_are_no_trouble() {
    let Some(browser) = Browser::start() else {
        return;
    };
    let served = Served::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let count = 10_000;
    let client = runtime.block_on(palisade::connect(&served.url())).unwrap();
    let holds: Vec<_> = (0..count)
        .map(|number| {
            let mutex = client.mutex(format!("many/{number:05}"));
            runtime
                .block_on(mutex.ttl(Duration::from_secs(300)).lock())
                .unwrap()
        })
        .collect();
    browser.open(&served.entry("operator"));
    browser.until("document.querySelector('.summary').textContent.includes('10,000 locks')");
    browser.until(&row("many/00000"));
    let nodes = browser.js("return document.querySelectorAll('*').length");
    assert!(nodes.as_u64().unwrap() < 2_000, "{nodes} nodes");
    browser.js("document.querySelector('.list').scrollTop = 1e9");
    browser.until(&row("many/09999"));
    let drawing = "const began = performance.now(); \
                   document.querySelector('.row.head .age button').click(); \
                   document.querySelector('.list').scrollTop = 0; document.body.offsetHeight; \
                   return performance.now() - began";
    println!(
        "10,000 locks are ordered and drawn in {} ms",
        browser.js(drawing)
    );
    browser.type_into("#filter", "many/04711");
    browser.until("document.querySelector('.summary').textContent.includes('1 of 10,000 locks')");
    browser.until(&row("many/04711"));
    runtime.block_on(async {
        drop(holds);
        client.close().await;
    });
}
