//! Installs packages: by apt into the system, or unpacked from another suite into a cache
//! directory.
//!
//! A lock on a file in the cache directory allows one installation at a time across parallel tests.
//! An unpacked package appears complete, by a rename, or not at all. apt runs with its own archive
//! directory and without the hooks of the machine's configuration: some of these delete the common
//! directory, including the archives that another apt is about to unpack.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FlockOperation;
use tempfile::TempDir;

/// The environment variable that names the cache directory.
const CACHE: &str = "PALISADE_TEST_CACHE";

/// The settings for every apt call. Hooks can only be cleared by a file, not by an option.
const SETTINGS: &str = "#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
DPkg::Lock::Timeout \"120\";
Acquire::Retries \"2\";
Acquire::http::Timeout \"30\";
Acquire::https::Timeout \"30\";
Acquire::Languages \"none\";
Acquire::Check-Valid-Until \"false\";
Quiet \"2\";
";

/// Packages call this to ask whether services may start; exit code 101 forbids it.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// The content of our own policy. It identifies one that a killed process has left.
const FORBID: &str = "#!/bin/sh\n# palisade-testkit, while it installs packages\nexit 101\n";

/// Debian's keys for all suites, in Debian.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The prefix of incomplete directories.
const UNFINISHED: &str = ".unfinished-";

/// The cache directory.
fn cache() -> Result<PathBuf, String> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|it| !it.is_empty())
            .map(PathBuf::from)
    };
    let common = || {
        let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        Some(cache?.join("palisade-testkit"))
    };
    set(CACHE)
        .or_else(common)
        .ok_or_else(|| format!("no cache folder: set {CACHE}"))
}

/// The directory of an unpacked package.
pub(super) fn place(suite: &str, package: &str) -> Result<PathBuf, String> {
    Ok(cache()?.join(format!("{suite}-{package}")))
}

/// The cache directory, locked against other installations.
struct Turn {
    cache: PathBuf,
    _lock: File,
}

impl Turn {
    fn wait() -> Result<Self, String> {
        let cache = cache()?;
        let open = || {
            std::fs::create_dir_all(&cache)?;
            let lock = File::create(cache.join("lock"))?;
            rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
            // Processes that created these were killed, since otherwise they would have the lock.
            for entry in std::fs::read_dir(&cache)?.flatten() {
                if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                    // An apt that outlived its starter may still write there; then it is removed
                    // next time.
                    let _ = std::fs::remove_dir_all(entry.path());
                }
            }
            Ok(lock)
        };
        let lock =
            open().map_err(|error: std::io::Error| format!("{}: {error}", cache.display()))?;
        Ok(Self { cache, _lock: lock })
    }

    /// A working directory, and an apt that is configured to use it.
    fn work(&self) -> Result<Apt, String> {
        let make = || {
            let folder = tempfile::Builder::new()
                .prefix(UNFINISHED)
                .tempdir_in(&self.cache)?;
            for part in ["archives/partial", "lists/partial", "parts", "cache"] {
                std::fs::create_dir_all(folder.path().join(part))?;
            }
            std::fs::write(folder.path().join("apt.conf"), SETTINGS)?;
            std::fs::write(folder.path().join("status"), "")?;
            Ok(Apt {
                folder,
                options: Vec::new(),
            })
        };
        make().map_err(|error: std::io::Error| format!("{}: {error}", self.cache.display()))
    }
}

/// apt-get with our own settings.
struct Apt {
    folder: TempDir,
    options: Vec<String>,
}

impl Apt {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Result<(), String> {
        let mut command = Command::new("apt-get");
        command
            .current_dir(self.folder.path())
            .env("DEBIAN_FRONTEND", "noninteractive")
            .arg("-c")
            .arg(self.path("apt.conf"))
            .arg(format!(
                "-oDir::Cache::archives={}",
                self.path("archives").display()
            ))
            .args(&self.options)
            .args(arguments);
        output(&mut command).map(drop)
    }

    /// Uses only another suite, and does not touch the system.
    fn only(&mut self, suite: &str) -> Result<(), String> {
        let keys = if Path::new(KEYS).exists() {
            format!("[signed-by={KEYS}] ")
        } else {
            String::new()
        };
        let source = format!("deb {keys}{} {suite} main\n", mirror()?);
        std::fs::write(self.path("sources.list"), source).map_err(|error| error.to_string())?;
        for (option, name) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "parts"),
            ("Dir::State::lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
        ] {
            self.options
                .push(format!("-o{option}={}", self.path(name).display()));
        }
        // The user that apt downloads as can't write here.
        self.options.push("-oAPT::Sandbox::User=root".to_owned());
        self.options
            .push("-oAcquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned());
        Ok(())
    }
}

/// The mirror of the distribution's packages on this machine.
fn mirror() -> Result<String, String> {
    let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let release = system
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let release = release
        .map(|name| name.trim_matches('"'))
        .unwrap_or_default();
    let format = "$(CREATED_BY) $(RELEASE) $(REPO_URI)";
    let listed = output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
    let wanted = format!("Packages {release} ");
    let uri = listed.lines().find_map(|line| line.strip_prefix(&wanted));
    uri.map(str::to_owned)
        .ok_or_else(|| format!("apt has no source for {release:?}"))
}

/// Runs a command; the error is its error output.
fn output(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("E: "))
        .collect();
    let said = if errors.is_empty() {
        said.trim().to_owned()
    } else {
        errors.join("; ")
    };
    Err(format!("{program}: {}: {said}", output.status))
}

/// Prevents services from starting as long as it lives.
struct NoServices {
    policy: PathBuf,
    ours: bool,
}

impl NoServices {
    fn forbid(policy: &Path) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", policy.display());
        let forbidding = |ours| Self {
            policy: policy.to_owned(),
            ours,
        };
        match std::fs::read_to_string(policy) {
            Ok(said) => Ok(forbidding(said == FORBID)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                std::fs::write(policy, FORBID).map_err(failed)?;
                let ours = forbidding(true);
                let executable = PermissionsExt::from_mode(0o755);
                std::fs::set_permissions(policy, executable).map_err(failed)?;
                Ok(ours)
            }
            Err(error) => Err(failed(error)),
        }
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours {
            let _ = std::fs::remove_file(&self.policy);
        }
    }
}

/// Installs packages of the distribution, unless `there` returns `true` once we have the lock.
pub(super) fn packages(packages: &[&str], there: impl Fn() -> bool) -> Result<(), String> {
    let list = packages.join(" ");
    if super::find::on_path("apt-get").is_none() {
        return Err(format!(
            "there is no apt to install it with (Debian: {list})"
        ));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(format!("only root can install it: apt-get install {list}"));
    }
    let turn = Turn::wait()?;
    if there() {
        return Ok(());
    }
    eprintln!("installing {list}");
    let apt = turn.work()?;
    let _quiet = NoServices::forbid(Path::new(POLICY))?;
    let install = ["install", "-y", "--no-install-recommends", "--no-remove"];
    let install = [&install[..], packages].concat();
    apt.run(&install).or_else(|_| {
        // A new machine has no package lists, an old one outdated ones.
        apt.run(&["update"])?;
        apt.run(&install)
    })
}

/// Installs missing packages of libraries.
pub(super) fn libraries(names: &[&str]) -> Result<(), String> {
    let installed = |name: &&str| {
        let mut query = Command::new("dpkg-query");
        let status = output(query.args(["-W", "-f", "${db:Status-Status}", *name]));
        status.is_ok_and(|status| status == "installed")
    };
    let missing = || names.iter().filter(|name| !installed(name)).copied();
    let wanted: Vec<&str> = missing().collect();
    if wanted.is_empty() {
        Ok(())
    } else {
        packages(&wanted, || missing().next().is_none())
    }
}

/// Unpacks a package of another suite into the cache directory, with a second name for a program.
pub(super) fn unpack(suite: &str, package: &str, link: (&str, &str)) -> Result<(), String> {
    let place = place(suite, package)?;
    for program in ["apt-get", "dpkg"] {
        if super::find::on_path(program).is_none() {
            return Err(format!(
                "there is no {program} to get {package} of {suite} with"
            ));
        }
    }
    let turn = Turn::wait()?;
    if place.exists() {
        return Ok(());
    }
    eprintln!("getting {package} of {suite}");
    let mut apt = turn.work()?;
    apt.only(suite)?;
    apt.run(&["update"])?;
    apt.run(&["download", package])?;
    let failed = |error: std::io::Error| format!("{package} of {suite}: {error}");
    let archive = std::fs::read_dir(apt.folder.path())
        .map_err(failed)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "deb"))
        .ok_or_else(|| format!("apt did not download {package} of {suite}"))?;
    let root = apt.path("root");
    output(Command::new("dpkg").arg("-x").args([&archive, &root]))?;
    let (program, really) = link;
    let program = root.join(program);
    if !program.exists() {
        std::os::unix::fs::symlink(really, &program).map_err(failed)?;
    }
    std::fs::rename(&root, &place).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_forbidden_while_we_install_and_by_whoever_did_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let policy = folder.path().join("policy-rc.d");
        let forbids = || {
            Command::new(&policy)
                .status()
                .ok()
                .and_then(|status| status.code())
        };
        let guard = NoServices::forbid(&policy).expect("a policy");
        assert_eq!(forbids(), Some(101));
        // A killed process leaves it like this.
        std::mem::forget(guard);
        drop(NoServices::forbid(&policy).expect("the policy that is there"));
        assert!(!policy.exists());
        std::fs::write(&policy, "#!/bin/sh\nexit 104\n").expect("another's policy");
        drop(NoServices::forbid(&policy).expect("another's policy"));
        assert!(policy.exists());
    }
}
