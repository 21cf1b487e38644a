//! The files of `deploy/`: a gateway starts with their arguments in folders like those of a pod, and
//! nothing runs as root, from a floating tag or with rights that it does not need.

use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use palisade_testkit::lab::launch;
use palisade_testkit::lab::trial::certificates;
use tempfile::TempDir;

use crate::serving::command;

const CONTAINERS: &[&str] = &["Dockerfile", "deploy/Dockerfile"];
const MANIFESTS: &[&str] = &[
    "deploy/kubernetes/elect.yaml",
    "deploy/kubernetes/gateway.yaml",
];

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap()
}

/// The values of `key: value` in a manifest, and of list items `- key: value`.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    let lines = text
        .lines()
        .map(|line| line.trim().trim_start_matches("- "));
    lines
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
        .collect()
}

#[test]
fn the_gateway_starts_with_the_arguments_of_its_container_and_pod() {
    let container = read("deploy/Dockerfile").replace("\\\n", "");
    let entry = container
        .lines()
        .find_map(|line| line.strip_prefix("ENTRYPOINT "));
    let mut arguments: Vec<String> = serde_json::from_str(entry.unwrap()).unwrap();
    assert_eq!(arguments.remove(0), "palisade");
    let manifest = read("deploy/kubernetes/gateway.yaml");
    let more = manifest.lines().map(str::trim);
    let more = more.filter_map(|line| line.strip_prefix("- --"));
    arguments.extend(more.map(|argument| format!("--{argument}")));
    assert!(arguments.len() > 8, "{arguments:?}");

    let pod = TempDir::new().unwrap();
    let (run, config) = (pod.path().join("run"), pod.path().join("etc"));
    std::fs::create_dir(&run).unwrap();
    std::fs::create_dir(&config).unwrap();
    // An emptyDir, which any user of the pod may write to.
    std::fs::set_permissions(&run, PermissionsExt::from_mode(0o777)).unwrap();
    certificates(&config, "DNS:localhost").unwrap();
    for (from, to) in [("server.pem", "tls.crt"), ("server.key", "tls.key")] {
        std::fs::copy(config.join(from), config.join(to)).unwrap();
    }
    std::fs::write(config.join("access.toml"), "").unwrap();
    let port = launch::free_port();
    let arguments = arguments.iter().map(|argument| {
        argument
            .replace("/run/palisade", &run.display().to_string())
            .replace("/etc/palisade", &config.display().to_string())
            .replace("0.0.0.0:7420", &format!("127.0.0.1:{port}"))
            .replace("$(POD)", "palisade-gateway-0")
            .replace("$(NAMESPACE)", "default")
    });
    let mut gateway = command()
        .arg("--json")
        .args(arguments)
        .env("PALISADE_URL", "memory:")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut out = BufReader::new(gateway.stderr.take().unwrap());
    out.read_line(&mut said).unwrap();
    let _ = gateway.kill();
    let _ = gateway.wait();
    assert!(said.contains("\"serving\""), "{said}");
    assert!(said.contains("palisade-gateway-0"), "{said}");
}

#[test]
fn containers_name_releases_and_run_without_root() {
    let version = env!("CARGO_PKG_VERSION");
    for name in CONTAINERS {
        let text = read(name);
        let of = |word: &str| -> Vec<&str> {
            let lines = text.lines();
            lines.filter_map(|line| line.strip_prefix(word)).collect()
        };
        let images = of("ARG ")
            .into_iter()
            .map(|one| one.split_once('=').unwrap().1);
        for image in images {
            let tag = image.split_once(':').map_or("", |(_, tag)| tag);
            assert!(
                tag.matches('.').count() >= 1,
                "{name}: {image} is not a release"
            );
        }
        for from in of("FROM ") {
            assert!(from.starts_with("${"), "{name}: {from} is none of its ARGs");
        }
        assert_eq!(of("USER ").last(), Some(&"65532:65532"), "{name}");
        for image in ["palisade:", "palisade-gateway:"] {
            for (at, _) in text.match_indices(image) {
                let is_path = text[..at].ends_with('/');
                let tag = &text[at + image.len()..];
                assert!(
                    is_path || tag.starts_with(version),
                    "{name}: not {version} at {tag}"
                );
            }
        }
    }
    for name in MANIFESTS {
        let text = read(name);
        for image in values(&text, "image") {
            let tag = image.split_once(':').map_or("", |(_, tag)| tag);
            assert!(tag.contains('.'), "{name}: {image} is not a release");
            let ours = image.starts_with("palisade");
            assert!(!ours || tag == version, "{name}: {image} is not {version}");
        }
        for (key, value) in [
            ("runAsNonRoot", "true"),
            ("allowPrivilegeEscalation", "false"),
            ("readOnlyRootFilesystem", "true"),
            ("capabilities", "{drop: [ALL]}"),
            ("seccompProfile", "{type: RuntimeDefault}"),
        ] {
            assert_eq!(values(&text, key), [value], "{name}: {key}");
        }
    }
}

#[test]
fn the_unit_has_no_rights_that_it_does_not_need() {
    let unit = file("deploy/palisade-gateway.service");
    let judged = Command::new("systemd-analyze")
        .args(["security", "--offline=yes", "--threshold=30", "--no-pager"])
        .arg(unit)
        .output();
    match judged {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("skipped: there is no systemd-analyze here");
        }
        judged => {
            let judged = judged.unwrap();
            let said = String::from_utf8_lossy(&judged.stdout);
            assert!(judged.status.success(), "{said}");
            assert!(said.contains("Overall exposure level"), "{said}");
        }
    }
}
