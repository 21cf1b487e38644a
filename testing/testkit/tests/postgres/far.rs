//! A holder on another machine whose packets are dropped: in its own network namespace, because
//! with a proxy the kernel would still answer for it.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use palisade_testkit::lab::launch::{self, Running};
use palisade_testkit::taker::{Second, TakerArgs, What};

use super::{connect, server_with, sql};

/// A network namespace with one link to us, removed on drop.
struct Far {
    name: String,
    octet: u8,
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("ip: {error}")),
    }
}

impl Far {
    fn new() -> Result<Self, String> {
        let octet = rand::random_range(1..=254);
        let name = format!("plsd{:08x}", rand::random::<u32>());
        let far = Self { name, octet };
        let Self { name, .. } = &far;
        ip(&format!("netns add {name}"))?;
        ip(&format!(
            "link add {name} type veth peer name far netns {name}"
        ))?;
        ip(&format!("addr add 10.231.{octet}.1/24 dev {name}"))?;
        ip(&format!("link set {name} up"))?;
        ip(&format!("-n {name} addr add 10.231.{octet}.2/24 dev far"))?;
        ip(&format!("-n {name} link set far up"))?;
        Ok(far)
    }

    /// Drops all packets in both directions silently, by iptables. Without iptables, the link is
    /// taken down.
    fn cut(&self) -> Result<(), String> {
        let Some(iptables) = launch::need_tool("iptables") else {
            return ip(&format!("-n {} link set far down", self.name));
        };
        let iptables = iptables.display();
        ["INPUT", "OUTPUT"].into_iter().try_for_each(|chain| {
            ip(&format!(
                "netns exec {} {iptables} -w -A {chain} -j DROP",
                self.name
            ))
        })
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = ip(&format!("netns del {}", self.name));
        let _ = ip(&format!("link del {}", self.name));
    }
}

fn start() -> Option<(Running, Far)> {
    let server = server_with(&["-c", "listen_addresses=*"])?;
    let far = match Far::new() {
        Ok(far) => far,
        Err(why) => {
            launch::skip("network namespaces", &why);
            return None;
        }
    };
    let hba = server.nodes()[0].folder().join("data/pg_hba.conf");
    let rules = std::fs::read_to_string(&hba).unwrap();
    let rule = format!("host all all 10.231.{}.0/24 trust\n", far.octet);
    std::fs::write(&hba, format!("{rules}{rule}")).unwrap();
    sql(&server, "SELECT pg_reload_conf()");
    Some((server, far))
}

async fn is_told_before_the_next_grant(scheme: &str, limit: Duration) {
    let (server, far) = need!(start());
    let script = server.folder().join("far.sh");
    let program = env!("CARGO_BIN_EXE_palisade-testkit");
    let text = format!(
        "#!/bin/sh\nexec ip netns exec {} {program} \"$@\"\n",
        far.name
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let port = server.nodes()[0].port();
    let url = |host: &str| format!("{scheme}://palisade@{host}:{port}/postgres?tls=disable");
    let second = Second {
        program: script,
        engine: "",
    };
    let args = TakerArgs::ttl(Duration::from_secs(3));
    let there = url(&format!("10.231.{}.1", far.octet));
    let mut holder = second.taker(&there, "x", &args).unwrap();
    holder.until(What::Held, super::SOON).await;
    let client = connect(&url("127.0.0.1")).await;
    let lock = client.mutex("x");
    assert!(lock.try_lock().await.unwrap().is_none(), "held by two");
    far.cut().unwrap();
    let cut = palisade::BootTime::now();
    let next = tokio::time::timeout(limit, lock.lock()).await;
    let granted = palisade::BootTime::now();
    let next = next
        .expect("the lock of a holder that is cut off is not freed")
        .unwrap();
    let lost = holder.until(What::Lost, super::SOON).await;
    assert!(
        lost.at < granted.as_nanos(),
        "told after another was granted"
    );
    assert!(next.is_valid());
    println!(
        "{scheme}: freed {:?} after the cut",
        granted.saturating_since(cut)
    );
}

#[tokio::test]
async fn a_session_lock_whose_packets_vanish_is_lost_first_and_freed_then() {
    is_told_before_the_next_grant("postgres+advisory", Duration::from_secs(15)).await;
}

#[tokio::test]
async fn a_row_whose_holder_s_packets_vanish_is_lost_first_and_freed_then() {
    is_told_before_the_next_grant("postgres", Duration::from_secs(6)).await;
}
