//! Whose directory it is, what else may be in it, and what a full disk does.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Command;

use palisade::engine::{Lease, Left, Renewal};
use palisade::report::Severity;
use palisade::{Error, ErrorKind};

use super::child::Second;
use super::*;

/// A user who is not this one.
const OTHER: u32 = 65534;

async fn refused(dir: &Path, options: &str) -> Error {
    match try_open(dir, options).await {
        Ok(_) => panic!("it can't be used"),
        Err(error) => error,
    }
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Only root can be two users.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: this needs root");
    }
    root
}

#[tokio::test]
async fn no_link_is_followed_and_nothing_but_files_is_opened() {
    let outer = tempfile::tempdir().unwrap();
    let victim = outer.path().join("victim");
    for (round, name) in [
        "lock", "boot", "boot.new", "ceiling", "lines", "procs", "leases",
    ]
    .into_iter()
    .enumerate()
    {
        let dir = outer.path().join(format!("store-{round}"));
        std::fs::create_dir(&dir).unwrap();
        mode(&dir, 0o700);
        std::fs::write(&victim, "precious").unwrap();
        symlink(&victim, dir.join(name)).unwrap();
        match try_open(&dir, "").await {
            // A leftover of that name is removed, not written through.
            Ok(_) => assert_eq!(name, "boot.new"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{name}: {error}"),
        }
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
    // A FIFO where a file belongs does not hang.
    for (round, name) in ["lock", "boot", "ceiling"].into_iter().enumerate() {
        let dir = outer.path().join(format!("fifo-{round}"));
        std::fs::create_dir(&dir).unwrap();
        mode(&dir, 0o700);
        let made = Command::new("mkfifo").arg(dir.join(name)).status();
        assert!(made.unwrap().success());
        assert_eq!(refused(&dir, "").await.kind(), ErrorKind::Config, "{name}");
    }
    let dir = outer.path().join("line");
    let engine = open(&dir).await;
    let line = dir.join("lines/palisade,door");
    symlink(&victim, &line).unwrap();
    let entered = engine.enter(Arc::new(claim("door", Ask::Whole))).await;
    assert_eq!(entered.unwrap_err().kind(), ErrorKind::Unusable);
    std::fs::remove_file(&line).unwrap();
    assert!(
        Command::new("mkfifo")
            .arg(&line)
            .status()
            .unwrap()
            .success()
    );
    let entered = engine.enter(Arc::new(claim("door", Ask::Whole))).await;
    assert_eq!(entered.unwrap_err().kind(), ErrorKind::Unusable);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[tokio::test]
async fn a_folder_of_somebody_elses_files_is_left_alone() {
    for name in ["notes.txt", "lines/data.mdb"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "precious").unwrap();
        let before = std::fs::read_dir(dir.path()).unwrap().count();
        let error = refused(dir.path(), "").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), before);
    }
}

#[tokio::test]
async fn a_directory_that_others_can_write_to_is_refused() {
    for bits in [0o770, 0o707, 0o777, 0o1777, 0o2770] {
        let dir = tempfile::tempdir().unwrap();
        mode(dir.path(), bits);
        let error = refused(dir.path(), "").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{bits:o}: {error}");
        let told = error.to_string();
        let hint = bits & 0o2000 != 0;
        assert_eq!(told.contains("shared=group"), hint, "{bits:o}: {told}");
    }
    for bits in [0o700, 0o770, 0o2777] {
        let dir = tempfile::tempdir().unwrap();
        mode(dir.path(), bits);
        let error = refused(dir.path(), "shared=group").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{bits:o}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let error = refused(dir.path(), "shared=everyone").await;
    assert_eq!(error.kind(), ErrorKind::Config);
}

#[tokio::test]
async fn a_directory_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(dir.path(), Some(OTHER), Some(OTHER)).unwrap();
    let error = refused(dir.path(), "").await;
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("another user"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn two_users_exclude_each_other_in_a_store_of_their_group() {
    if !is_root() {
        return;
    }
    let outer = tempfile::tempdir().unwrap();
    mode(outer.path(), 0o755);
    let dir = outer.path().join("shared");
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, None, Some(OTHER)).unwrap();
    mode(&dir, 0o2770);
    let options = "shared=group";
    for first in [None, Some(OTHER)] {
        let engine = try_open(&dir, options).await.unwrap();
        let second = Second::start_as(&dir, "hold", Some(OTHER), options);
        let theirs: u64 = second.says().parse().unwrap();
        let (ticket, sequence) = enter(&engine, claim("door", Ask::Whole)).await;
        assert_eq!(sequence, None, "{first:?}");
        // Another user's death is noticed at once, too.
        drop(second);
        let Place::Held { sequence } = pushed(&engine, &ticket).await else {
            panic!("granted");
        };
        assert!(sequence > theirs);
        let held = Ticket { sequence, ..ticket };
        let lease = Lease::in_a_test(&held);
        let renewed = engine.renew(vec![lease], Duration::from_secs(2)).await;
        assert!(matches!(renewed[..], [Renewal::Held(_)]));
        let findings = engine.check().await.unwrap().findings;
        assert!(findings.iter().any(|found| found.code == "covers_group"));
        assert!(
            findings
                .iter()
                .all(|found| found.severity != Severity::Danger)
        );
        assert_eq!(engine.leave(held).await.unwrap(), Left::Done);
    }
    // Without the option it is refused, with a text that names it.
    let told = refused(&dir, "").await.to_string();
    assert!(told.contains("shared=group"), "{told}");
    // Who is not in the group is refused.
    let third = Second::start_as(&dir, "hold", Some(OTHER - 1), options);
    assert!(third.says().starts_with("Config"), "permission");
    for entry in std::fs::read_dir(&dir).unwrap() {
        let meta = entry.unwrap().metadata().unwrap();
        let expected = if meta.is_dir() { 0o2770 } else { 0o660 };
        assert_eq!(meta.mode() & 0o7777, expected);
    }
}

#[tokio::test]
async fn what_another_user_left_before_a_boot_is_in_nobodys_way() {
    if !is_root() {
        return;
    }
    let (dir, engine) = store().await;
    hold(&engine, "door").await;
    drop(engine);
    damage::reboot(dir.path());
    let left = dir.path().join("procs/00000000000000aa");
    assert!(
        Command::new("mkfifo")
            .arg(&left)
            .status()
            .unwrap()
            .success()
    );
    std::os::unix::fs::chown(&left, Some(OTHER), Some(OTHER)).unwrap();
    mode(&left, 0);
    hold(&open(dir.path()).await, "door").await;
}

/// A small file system of its own, gone with this.
struct Disk(tempfile::TempDir);

impl Disk {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=512k,mode=0700", "none"]);
        let mounted = is_root() && mount.arg(dir.path()).status().is_ok_and(|s| s.success());
        if !mounted {
            println!("skipped: no file system can be mounted");
        }
        mounted.then(|| Self(dir))
    }

    fn fill(&self) {
        let mut size = 512 << 10;
        while size > 0 {
            let name = format!("fill-{}", rand_name());
            if std::fs::write(self.0.path().join(name), vec![1; size]).is_err() {
                size /= 2;
            }
        }
    }
}

fn rand_name() -> String {
    ClaimId::random().to_string()
}

impl Drop for Disk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(self.0.path()).status();
        assert!(unmounted.unwrap().success());
    }
}

#[tokio::test]
async fn a_full_disk_ends_nobody_and_grants_nobody() {
    let Some(disk) = Disk::mount() else { return };
    let store = disk.0.path().join("store");
    let engine = open(&store).await;
    let mut held = Vec::new();
    for name in 0..5 {
        held.push(hold(&engine, &format!("name-{name}")).await);
    }
    let (waiter, _) = enter(&engine, claim("name-0", Ask::Whole)).await;
    disk.fill();
    for name in 0..3 {
        let entered = engine.enter(Arc::new(claim(&format!("new-{name}"), Ask::Whole)));
        let error = entered.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unusable, "{error}");
        assert!(error.to_string().contains("full"), "{error}");
    }
    let leases = held.iter().map(Lease::in_a_test);
    let renewed = engine.renew(leases.collect(), Duration::from_secs(2)).await;
    assert!(
        renewed.iter().all(|r| matches!(r, Renewal::Held(_))),
        "{renewed:?}"
    );
    let (place, left) = tokio::join!(pushed(&engine, &waiter), engine.leave(held.remove(0)));
    assert_eq!(left.unwrap(), Left::Done);
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
    for ticket in held {
        assert_eq!(engine.leave(ticket).await.unwrap(), Left::Done);
    }
}

#[tokio::test]
async fn a_check_says_whom_the_store_covers() {
    let (_dir, engine) = store().await;
    let findings = engine.check().await.unwrap().findings;
    let found = findings.iter().find(|found| found.code == "covers_user");
    assert_eq!(found.unwrap().severity, Severity::Info);
}

#[tokio::test]
async fn a_file_that_others_can_write_to_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).await);
    for name in ["lock", "boot", "ceiling"] {
        mode(&dir.path().join(name), 0o666);
        let error = refused(dir.path(), "").await;
        assert_eq!(error.kind(), ErrorKind::Config, "{name}: {error}");
        mode(&dir.path().join(name), 0o600);
    }
    open(dir.path()).await;
}

#[tokio::test]
async fn a_lock_that_was_replaced_while_it_was_waited_for_is_worth_nothing() {
    use rustix::fs::{FlockOperation, flock};
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).await);
    let path = dir.path().join("lock");
    let locked = |path: &Path| {
        let file = std::fs::File::create(path).unwrap();
        mode(path, 0o600);
        flock(&file, FlockOperation::LockExclusive).unwrap();
        file
    };
    // How often this process has a file open by its name.
    let opened = |inode: u64| {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let same = |fd: &std::fs::DirEntry| {
            std::fs::metadata(fd.path()).is_ok_and(|meta| meta.ino() == inode)
        };
        open.filter_map(std::result::Result::ok)
            .filter(same)
            .count()
    };
    let until = |what: &str, test: &dyn Fn() -> bool| {
        let deadline = BootTime::now() + PATIENCE;
        while !test() {
            assert!(!deadline.has_passed(), "{what}");
            std::thread::yield_now();
        }
    };
    let first = locked(&path);
    let url = format!("{}?connect_timeout=30s", dir.path().display());
    let joining = std::thread::spawn(move || {
        let url = format!("file:{url}");
        palisade::blocking::connect(&url).unwrap()
    });
    let inode = first.metadata().unwrap().ino();
    until("it waits for the first", &|| opened(inode) == 2);
    let other = dir.path().join("other");
    let second = locked(&other);
    std::fs::rename(&other, &path).unwrap();
    drop(first);
    let inode = second.metadata().unwrap().ino();
    until("it waits for the second", &|| {
        assert!(!joining.is_finished(), "joined under a lock that is gone");
        opened(inode) == 2
    });
    drop(second);
    drop(joining.join().unwrap());
}
