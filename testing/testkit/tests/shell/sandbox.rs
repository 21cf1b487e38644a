//! `Sandbox`: a directory that is home, state and runtime directory of one block, and the script
//! generated from it.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use palisade_testkit::lab::launch;
use palisade_testkit::lab::pages::{Block, Servers};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::output;

/// How long a block may take.
const LIMIT: Duration = Duration::from_secs(60);

/// A separator between parts of the output.
const MARK: &str = "\u{1}";

/// Waits for a gateway to start, since a script is faster than a reader who types.
const SERVING: &str = "until [ -S \"$XDG_RUNTIME_DIR/palisade/gateway.sock\" ] && \
    [ -s \"$XDG_RUNTIME_DIR/palisade/gateway.token\" ]; do sleep 0.02; done";

/// One block and its directory.
pub(crate) struct Sandbox<'a> {
    block: &'a Block,
    folder: tempfile::TempDir,
    /// The block with the URLs of this run's servers.
    text: String,
    port: u16,
    /// The port of PostgreSQL, for its own tools.
    database: Option<u16>,
}

impl<'a> Sandbox<'a> {
    /// `None` if a server is not available.
    pub(crate) fn new(
        block: &'a Block,
        servers: &Servers,
        databases: bool,
    ) -> Result<Option<Self>, String> {
        let port = launch::free_port();
        let here = format!("127.0.0.1:{port}");
        let Some(text) = servers.mapped(&block.text) else {
            return Ok(None);
        };
        let text = text
            .replace("https://locks.example.com", &format!("http://{here}"))
            .replace("127.0.0.1:7420", &here);
        let database = if databases {
            match servers.with("postgres", |running| running.nodes()[0].port()) {
                None => return Ok(None),
                some => some,
            }
        } else {
            None
        };
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let sandbox = Self {
            block,
            folder,
            text,
            port,
            database,
        };
        sandbox.furnish().map_err(|error| error.to_string())?;
        Ok(Some(sandbox))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn furnish(&self) -> std::io::Result<()> {
        for folder in ["bin", "home", "run", "work"] {
            fs::create_dir(self.path(folder))?;
            fs::set_permissions(self.path(folder), PermissionsExt::from_mode(0o700))?;
        }
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shell");
        for program in ["cargo", "palisade"] {
            std::os::unix::fs::symlink(tests.join(program), self.path("bin").join(program))?;
        }
        for program in self.programs() {
            let path = self.path("work").join(&program);
            fs::write(
                &path,
                format!(
                    "#!/bin/sh\necho {program} >>'{}'\n",
                    self.path("called").display()
                ),
            )?;
            fs::set_permissions(path, PermissionsExt::from_mode(0o755))?;
        }
        fs::write(self.path("called"), "")
    }

    /// The programs that the block calls as `./NAME`.
    fn programs(&self) -> Vec<String> {
        let name = |c: char| !c.is_ascii_alphanumeric() && !"._-".contains(c);
        let behind = self
            .text
            .match_indices("./")
            .filter(|(at, _)| !self.text[..*at].ends_with(['.', '/']));
        let names = behind.map(|(at, _)| &self.text[at + 2..]);
        names
            .map(|rest| rest[..rest.find(name).unwrap_or(rest.len())].to_owned())
            .collect()
    }

    /// Runs it, and compares its output.
    pub(crate) fn run(&self, shown: Option<&str>) -> Result<(), String> {
        let note = |word| self.block.note(word).unwrap_or("");
        let (setup, after) = (note("setup"), note("after"));
        let expected: i32 = self
            .block
            .note("exit")
            .map_or(0, |code| code.parse().unwrap());
        if self.block.note("each").is_some() {
            let lines = self
                .text
                .lines()
                .filter(|line| !line.is_empty() && !line.starts_with('#'));
            for line in lines {
                self.script(&[setup, line].join("\n"), &[0, 1])?;
            }
        } else if let Some(reader) = self.block.note("run") {
            fs::write(self.path("work").join("block"), &self.text)
                .map_err(|error| error.to_string())?;
            let printed = self.script(
                &format!("{setup}\nprintf '{MARK}'\n{{ {reader}\n}} <block 2>&1"),
                &[expected],
            )?;
            compare(shown, printed.rsplit(MARK).next().unwrap_or(""))?;
        } else {
            let (script, parts) = marked(&self.text);
            let whole = format!("{setup}\nprintf '{MARK}'\n{script}\nprintf '{MARK}'\n{after}");
            let whole = if after.is_empty() {
                format!("{setup}\nprintf '{MARK}'\n{script}")
            } else {
                whole
            };
            let printed = self.script(&whole, &[expected])?;
            let printed: Vec<&str> = printed.split(MARK).skip(1).collect();
            for (shown, seen) in parts.iter().zip(&printed) {
                if !output::ends_like(shown, seen) {
                    return Err(format!("shown:\n{shown}\nprinted:\n{seen}"));
                }
            }
            compare(shown, &printed.concat())?;
        }
        let called = fs::read_to_string(self.path("called")).map_err(|error| error.to_string())?;
        match self
            .programs()
            .into_iter()
            .find(|program| !called.lines().any(|line| line == program))
        {
            Some(program) => Err(format!("./{program} was never called")),
            None => Ok(()),
        }
    }

    /// The output of a script that must end with one of these codes.
    fn script(&self, script: &str, codes: &[i32]) -> Result<String, String> {
        let script = script.lines().map(|line| {
            if line.contains("palisade serve") && line.contains(" &") {
                let line = line.replacen("palisade serve", "PAGE_SECONDS=50 palisade serve", 1);
                format!("{line}\n{SERVING}\n")
            } else {
                format!("{line}\n")
            }
        });
        let script = script.collect::<String>();
        let (out, err) = (self.path("out"), self.path("err"));
        let create = |path| File::create(path).map_err(|error| error.to_string());
        let mut shell = Command::new("sh");
        let path = format!(
            "{}:{}",
            self.path("bin").display(),
            std::env::var("PATH").unwrap_or_default()
        );
        shell
            .args(["-ec", &script])
            .current_dir(self.path("work"))
            .process_group(0)
            .env_clear();
        shell
            .env("PATH", path)
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.folder.path());
        shell
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("XDG_STATE_HOME", self.path("state"));
        shell
            .env("LC_ALL", "C.UTF-8")
            .env("PAGE_TARGET", target())
            .env("PAGE_PORT", self.port.to_string());
        shell.env("PAGE_TESTS", concat!(env!("CARGO_MANIFEST_DIR"), "/tests"));
        if let Some(port) = self.database {
            shell
                .env("PGHOST", "127.0.0.1")
                .env("PGPORT", port.to_string())
                .env("PGUSER", "palisade");
        }
        shell
            .stdin(Stdio::null())
            .stdout(create(&out)?)
            .stderr(create(&err)?);
        let mut running = shell.spawn().map_err(|error| error.to_string())?;
        let group = Pid::from_child(&running);
        let end = Instant::now() + LIMIT;
        let status = loop {
            match running.try_wait().map_err(|error| error.to_string())? {
                Some(status) => break status.code(),
                None if Instant::now() > end => break None,
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        // Ends what it left in the background, and the script itself if it took too long.
        for signal in [Signal::TERM, Signal::KILL] {
            let _ = kill_process_group(group, signal);
            std::thread::sleep(Duration::from_millis(if signal == Signal::TERM {
                50
            } else {
                0
            }));
        }
        let _ = running.wait();
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let (out, err) = (read(out), read(err));
        match status {
            Some(ended) if codes.contains(&ended) => Ok(out),
            ended => Err(format!(
                "ended with {ended:?} and not {codes:?}:\n{script}\n--- out\n{out}\n--- err\n{err}"
            )),
        }
    }
}

fn compare(shown: Option<&str>, seen: &str) -> Result<(), String> {
    match shown.filter(|shown| !output::like(shown, seen)) {
        Some(shown) => Err(format!("shown:\n{shown}\nprinted:\n{seen}")),
        None => Ok(()),
    }
}

/// The script with a mark in its output after each part that is shown, and these parts.
fn marked(text: &str) -> (String, Vec<String>) {
    let (mut script, mut parts, mut part) = (String::new(), Vec::new(), String::new());
    for line in text.lines() {
        if let Some(shown) = line.strip_prefix("#> ") {
            part += &format!("{shown}\n");
            continue;
        }
        if !part.is_empty() {
            parts.push(std::mem::take(&mut part));
            script += &format!("printf '{MARK}'\n");
        }
        script += &format!("{line}\n");
    }
    if !part.is_empty() {
        parts.push(part);
    }
    (script, parts)
}

/// The directory of the programs that cargo has built.
fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    test.ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

/// Whether a program is on `PATH`.
pub(crate) fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).exists())
}
