//! An error of the file system is no answer: whoever can't look takes nothing from anyone. And
//! whoever was taken for dead by mistake is told.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use palisade::{ErrorKind, Eviction};
use rustix::process::{Resource, Rlimit, Signal};

use super::child::Second;
use super::damage::reboot;
use super::*;

/// The ttl of the role "hold shortly".
const TTL: Duration = Duration::from_secs(1);

/// The one other process's file in `procs` or `leases`.
fn file_in(dir: &Path, folder: &str) -> PathBuf {
    let files = std::fs::read_dir(dir.join(folder)).unwrap();
    let mut files = files.map(|file| file.unwrap().path());
    files.find(|file| file.extension().is_none()).unwrap()
}

/// The number of the next file that a process opens.
fn next_file(second: &Second) -> u64 {
    let open = PathBuf::from(format!("/proc/{}/fd", second.pid().as_raw_nonzero()));
    let free = |number: &u64| open.join(number.to_string()).symlink_metadata().is_err();
    (0..).find(free).unwrap()
}

fn limit_files(second: &Second, to: u64) {
    let limit = Rlimit {
        current: Some(to),
        maximum: Some(4096),
    };
    rustix::process::prlimit(Some(second.pid()), Resource::Nofile, limit).unwrap();
}

#[tokio::test]
async fn whoever_has_no_file_descriptors_left_takes_nothing_from_a_live_holder() {
    let dir = tempfile::tempdir().unwrap();
    let holder = Second::start(dir.path(), "hold shortly");
    assert_eq!(holder.says(), "held");
    let waiter = Second::start(dir.path(), "wait and tell");
    assert_eq!(waiter.says(), "waiting");
    limit_files(&waiter, next_file(&waiter));
    // Once the lease has ended by what the line says, its renewals must be read.
    let told = waiter.says();
    assert!(told.starts_with("Unreachable"), "{told}");
    let leases = file_in(dir.path(), "leases");
    let folder = leases.parent().unwrap().display().to_string();
    assert!(told.contains(&folder), "{told}");
    assert!(told.contains("Too many open files"), "{told}");
    std::thread::sleep(3 * TTL);
    assert_eq!(holder.has_said(), Vec::<String>::new(), "it still holds");
    assert!(!waiter.has_said().contains(&"held".to_owned()));
    // When it can look again, all is as before.
    limit_files(&waiter, 1024);
    drop(holder);
    let until = BootTime::now() + PATIENCE;
    while waiter.says() != "held" {
        assert!(!until.has_passed());
    }
}

/// However few it has, at each step of joining, entering and judging.
#[tokio::test]
async fn no_limit_on_files_makes_a_newcomer_take_what_another_holds() {
    for booted in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let holder = Second::start(dir.path(), "hold shortly");
        assert_eq!(holder.says(), "held");
        std::thread::sleep(TTL);
        if booted {
            reboot(dir.path());
        }
        let limits = (5..40).step_by(rounds(2, 1) as usize);
        let newcomers = limits.map(|limit| Second::start_with_files(dir.path(), "try", limit));
        // Those that can't even start say nothing.
        let said: Vec<String> = newcomers.map(Second::says_all).collect();
        let taken = said.iter().any(|said| said == "in");
        assert!(!taken, "{said:?}");
        let last = said.last().unwrap();
        let expected = if booted {
            "in use by processes"
        } else {
            "busy"
        };
        assert!(last.contains(expected), "{said:?}");
        assert!(
            said.iter().any(|said| said.contains("ulimit -n")),
            "{said:?}"
        );
        assert_eq!(holder.has_said(), Vec::<String>::new(), "it still holds");
    }
}

/// A file that others could have written is not read.
fn spoil(file: &Path, mode: u32) {
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn renewals_that_cant_be_read_are_told_and_death_is_seen_without_them() {
    let dir = tempfile::tempdir().unwrap();
    let holder = Second::start(dir.path(), "hold shortly");
    assert_eq!(holder.says(), "held");
    let leases = file_in(dir.path(), "leases");
    let engine = open(dir.path()).await;
    let (ticket, _) = enter(&engine, claim("door", Ask::Whole)).await;
    spoil(&leases, 0o666);
    std::thread::sleep(TTL);
    let until = BootTime::now() + Duration::from_secs(5);
    let error = engine.wait(ticket.clone(), until).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(
        error.to_string().contains(leases.to_str().unwrap()),
        "{error}"
    );
    let impatient = Claim {
        queue: false,
        ..claim("door", Ask::READ)
    };
    let error = engine.enter(Arc::new(impatient)).await.unwrap_err();
    assert!(error.to_string().contains("leases/"), "{error}");
    // Evicting it would never be told to its owner.
    let lines = engine.survey(palisade::report::Scope::Line(ticket.name.clone()));
    let id = lines.await.unwrap()[0].holders[0].id.clone();
    for how in [Eviction::Mark, Eviction::Remove] {
        let evicted = engine.evict(ticket.name.clone(), id.clone(), how).await;
        let error = evicted.unwrap_err();
        assert!(error.to_string().contains("leases/"), "{error}");
    }
    assert_eq!(holder.has_said(), Vec::<String>::new(), "it still holds");
    holder.signal(Signal::KILL);
    let place = loop {
        match engine.wait(ticket.clone(), until + PATIENCE).await {
            Ok(place) => break place,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
}

/// Restores part of a store as from a backup, on top of what is there.
fn restore(dir: &Path, folders: &[&str]) {
    let backup = dir.join("backup.tar");
    for how in ["-cf", "-xf"] {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(dir).arg(how).arg(&backup).args(folders);
        assert!(tar.status().unwrap().success());
    }
    std::fs::remove_file(backup).unwrap();
}

#[tokio::test]
async fn a_sign_of_life_that_was_restored_from_a_backup_ends_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let holder = Second::start(dir.path(), "hold shortly");
    assert_eq!(holder.says(), "held");
    let sign = file_in(dir.path(), "procs");
    let inode = || sign.symlink_metadata().unwrap().ino();
    let before = inode();
    let waiter = Second::start(dir.path(), "wait and tell");
    assert_eq!(waiter.says(), "waiting");
    restore(dir.path(), &["procs"]);
    let newcomer = Second::start(dir.path(), "try");
    assert_eq!(newcomer.says(), "busy");
    std::thread::sleep(3 * TTL);
    assert_eq!(waiter.has_said(), Vec::<String>::new(), "no second grant");
    assert_eq!(holder.has_said(), Vec::<String>::new(), "it still holds");
    assert_eq!(inode(), before, "its own is back");
    // And its death is seen by its own sign, at once.
    restore(dir.path(), &["procs"]);
    drop(holder);
    assert_eq!(waiter.says(), "held");
}

/// With its renewals replaced as well, a holder is told before another is granted.
#[tokio::test]
async fn a_holder_is_told_before_a_restored_store_is_granted_anew() {
    let dir = tempfile::tempdir().unwrap();
    let holder = Second::start(dir.path(), "hold shortly");
    assert_eq!(holder.says(), "held");
    let waiter = Second::start(dir.path(), "wait and tell");
    assert_eq!(waiter.says(), "waiting");
    restore(dir.path(), &["procs", "leases"]);
    assert_eq!(waiter.says(), "held");
    let told = holder.has_said();
    assert!(
        told.concat().contains("moved, deleted or replaced"),
        "{told:?}"
    );
}

#[tokio::test]
async fn a_reader_that_is_stopped_does_not_stop_renewals() {
    let (dir, engine) = store().await;
    let held = hold(&engine, "door").await;
    let reader = Second::start(dir.path(), "read the leases and stop");
    assert_eq!(reader.says(), "locked");
    reader.wait_stopped();
    for _ in 0..3 {
        assert!(matches!(renew(&engine, &held).await, Renewal::Held(_)));
    }
    // Others read the renewal.
    let third = Second::start(dir.path(), "try");
    assert_eq!(third.says(), "busy");
    reader.signal(Signal::CONT);
    reader.end();
}

/// Whatever misjudges a process: it is told at its next renewal, and only those who lost a seat.
#[tokio::test]
async fn whoever_is_no_longer_in_line_is_told_at_the_next_renewal() {
    let (dir, engine) = store().await;
    let path = dir.path().join("lines/palisade,door");
    let (stays, _) = enter(&engine, claim("door", Ask::READ)).await;
    let other = hold(&engine, "other").await;
    let short = std::fs::read(&path).unwrap();
    let (taken, _) = enter(&engine, claim("door", Ask::READ)).await;
    let leases = || [&stays, &other, &taken].map(Lease::in_a_test).to_vec();
    let within = Duration::from_secs(2);
    let renewed = engine.renew(leases(), within).await;
    assert!(
        renewed
            .iter()
            .all(|renewal| matches!(renewal, Renewal::Held(_)))
    );
    // An unreadable line decides nothing.
    let whole = std::fs::read(&path).unwrap();
    let mut torn = whole.clone();
    torn[130] ^= 1;
    for bytes in [&torn, &whole] {
        std::fs::write(&path, bytes).unwrap();
        let renewed = engine.renew(leases(), within).await;
        assert!(
            renewed
                .iter()
                .all(|renewal| matches!(renewal, Renewal::Held(_)))
        );
    }
    std::fs::write(&path, &short).unwrap();
    let renewed = engine.renew(leases(), within).await;
    let [Renewal::Held(_), Renewal::Held(_), Renewal::Revoked(error)] = &renewed[..] else {
        panic!("{renewed:?}");
    };
    assert!(
        error.to_string().contains("no longer in its line"),
        "{error}"
    );
    let renewed = engine.renew(leases(), within).await;
    assert!(matches!(renewed[2], Renewal::Lost), "{renewed:?}");
}

/// Who was counted as an orphan while its renewals were hidden, and renews, stays.
#[tokio::test]
async fn an_orphan_that_renews_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let holder = Second::start(dir.path(), "hold shortly");
    assert_eq!(holder.says(), "held");
    let (leases, hidden) = (
        file_in(dir.path(), "leases"),
        dir.path().join("leases/hidden"),
    );
    std::thread::sleep(TTL);
    holder.signal(Signal::STOP);
    holder.wait_stopped();
    std::fs::rename(&leases, &hidden).unwrap();
    let newcomer = Second::start(dir.path(), "try");
    assert_eq!(newcomer.says(), "busy", "it is given a ttl");
    std::fs::rename(&hidden, &leases).unwrap();
    holder.signal(Signal::CONT);
    let orphaned = BootTime::now();
    while BootTime::now().saturating_since(orphaned) < 2 * TTL {
        let newcomer = Second::start(dir.path(), "try");
        assert_eq!(newcomer.says(), "busy", "it renews");
    }
    assert_eq!(holder.has_said(), Vec::<String>::new(), "it still holds");
}

/// What a process says that can't sync any file. The file system has the data, but not on disk.
fn without_sync(dir: &Path, role: &str) -> Option<String> {
    // A seccomp filter that answers EIO to fsync and fdatasync.
    let script = r#"
import ctypes, os, platform, struct, sys
libc = ctypes.CDLL(None)
numbers = {"x86_64": (74, 75), "aarch64": (82, 83)}[platform.machine()]
code = [(0x20, 0, 0, 0), (0x15, 1, 0, numbers[0]), (0x15, 0, 1, numbers[1]),
        (0x06, 0, 0, 0x00050005), (0x06, 0, 0, 0x7fff0000)]
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
if libc.prctl(22, 2, ctypes.byref(Filter(len(code), ctypes.addressof(text)))):
    sys.exit("no filter")
os.execv(sys.argv[1], sys.argv[1:])
"#;
    let works = Command::new("python3")
        .args(["-c", script, "/bin/true"])
        .status();
    if !works.is_ok_and(|status| status.success()) {
        println!("skipped: no python3, or no seccomp filters");
        return None;
    }
    let mut command = Command::new("python3");
    command
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap());
    Some(Second::spawn(command, dir, role, "").says_all())
}

/// A ceiling that was written but not synced is not on disk, whoever reads it.
#[tokio::test]
async fn nobody_is_granted_below_a_ceiling_that_was_not_synced() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).await);
    for round in 0..3 {
        let Some(said) = without_sync(dir.path(), "try") else {
            return;
        };
        assert!(said.contains("ceiling"), "round {round}: {said}");
    }
    let before = hold(&open(dir.path()).await, "door").await.sequence;
    // Now it is on disk, for everyone, and after a boot tokens start above it.
    assert_eq!(without_sync(dir.path(), "try").unwrap(), "in");
    reboot(dir.path());
    assert!(hold(&open(dir.path()).await, "door").await.sequence > before);
}

/// A file system mounted for one test.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(options: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let root = rustix::process::geteuid().is_root();
        let mut mount = Command::new("mount");
        mount.args(options).arg(dir.path());
        let mounted = root && mount.status().is_ok_and(|status| status.success());
        if !mounted {
            println!("skipped: no file system can be mounted");
        }
        mounted.then(|| Self(dir))
    }

    fn store(&self) -> PathBuf {
        self.0.path().join("store")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Nobody knows whether locks exclude there.
#[tokio::test]
async fn a_file_system_that_is_not_known_to_be_local_is_refused() {
    let Some(disk) = Mounted::new(&["-t", "hugetlbfs", "none"]) else {
        return;
    };
    let error = try_open(&disk.store(), "").await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Config);
    for part in ["0x958458f6", "allow_network_fs=true"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// Nothing is printed about a store that can't be found.
#[tokio::test]
async fn a_relative_path_in_a_removed_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("sh");
    let script = r#"cd "$1" && rmdir "$1" && shift && exec "$@""#;
    command.args(["-c", script, "sh"]).arg(dir.path());
    command.arg(std::env::current_exe().unwrap());
    let said = Second::spawn(command, Path::new("rel"), "look for a store", "").says_all();
    assert!(said.starts_with("Config: "), "{said}");
    assert!(said.contains("current directory was removed"), "{said}");
}

/// One that can't reserve space, such as ramfs or some versions of ZFS.
#[tokio::test]
async fn many_are_held_where_no_space_can_be_reserved() {
    let Some(disk) = Mounted::new(&["-t", "ramfs", "none"]) else {
        return;
    };
    let engine = open(&disk.store()).await;
    let mut held = Vec::new();
    for number in 0..500 {
        held.push(hold(&engine, &format!("name-{number}")).await);
    }
    let leases = held.iter().map(Lease::in_a_test).collect();
    let renewed = engine.renew(leases, Duration::from_secs(2)).await;
    assert!(
        renewed
            .iter()
            .all(|renewal| matches!(renewal, Renewal::Held(_)))
    );
}

/// The keeper is free to report a deadline while a renewal hangs in the file system.
#[tokio::test]
async fn a_file_system_that_hangs_delays_no_deadline() {
    let image = tempfile::tempdir().unwrap();
    let image = image.path().join("disk");
    let mkfs = Command::new("mkfs.ext4")
        .args(["-q", "-F"])
        .arg(&image)
        .arg("16M")
        .status();
    if !mkfs.is_ok_and(|status| status.success()) {
        println!("skipped: no file system can be made");
        return;
    }
    let Some(disk) = Mounted::new(&["-o", "loop", image.to_str().unwrap()]) else {
        return;
    };
    let url = format!("file:{}?ttl=1s", disk.store().display());
    let client = palisade::connect(&url).await.unwrap();
    let hold = client.mutex("door").lock().await.unwrap();
    // It renews.
    tokio::time::sleep(TTL / 2).await;
    let frozen = Frozen::new(disk.0.path());
    let before = BootTime::now();
    let lost = tokio::time::timeout(3 * TTL, hold.lost()).await;
    assert!(lost.is_ok(), "nobody is told while it hangs");
    let took = BootTime::now().saturating_since(before);
    assert!(took <= TTL, "told after {took:?}");
    drop(frozen);
    drop(hold);
    client.close().await;
}

/// Everything that writes to it hangs until this is dropped, and by a timer even if the test hangs.
struct Frozen<'a>(&'a Path, std::process::Child);

impl<'a> Frozen<'a> {
    fn new(at: &'a Path) -> Self {
        let script = "sleep 20; fsfreeze -u \"$0\" 2>/dev/null";
        let timer = Command::new("sh")
            .args(["-c", script])
            .arg(at)
            .spawn()
            .unwrap();
        assert!(
            Command::new("fsfreeze")
                .arg("-f")
                .arg(at)
                .status()
                .unwrap()
                .success()
        );
        Self(at, timer)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(self.0).status();
        let _ = self.1.kill();
        let _ = self.1.wait();
    }
}

/// A queue on a small disk, filled by pushes until one is refused, and then to the last byte by
/// something else. Nobody has it open.
async fn full_queue() -> Option<(Mounted, String, u64)> {
    let disk = Mounted::new(&["-t", "tmpfs", "-o", "size=4m,mode=0700", "none"])?;
    let url = format!("file:{}", disk.store().display());
    let client = palisade::connect(&url).await.unwrap();
    let queue = client.queue("work");
    let mut pushed = 0;
    let error = loop {
        match queue.push(vec![b'x'; 3000]).await {
            Ok(_) => pushed += 1,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("full"), "{error}");
    drop(queue);
    client.close().await;
    for size in [1 << 20, 1 << 16, 1 << 12, 1] {
        for number in 0.. {
            let name = disk.0.path().join(format!("fill-{size}-{number}"));
            if std::fs::write(name, vec![1; size]).is_err() {
                break;
            }
        }
    }
    Some((disk, url, pushed))
}

fn size(disk: &Mounted) -> u64 {
    let database = disk.store().join("queues/palisade,work.db");
    std::fs::metadata(database).unwrap().len()
}

#[tokio::test]
async fn a_queue_that_filled_its_disk_can_be_worked() {
    let Some((disk, url, pushed)) = full_queue().await else {
        return;
    };
    let before = size(&disk);
    assert!(pushed > 300 && before > 1 << 20, "{pushed} in {before}");
    let client = palisade::connect(&url).await.unwrap();
    let queue = client.queue("work");
    let again = queue.push(vec![b'x'; 3000]).await;
    assert!(again.is_err(), "it is full");
    for _ in 0..pushed {
        queue.next().await.unwrap().done().await.unwrap();
    }
    assert!(queue.claim(1).await.unwrap().is_empty());
    client.close().await;
    assert!(size(&disk) < before / 2, "{} of {before}", size(&disk));
    // What was given up is kept anew.
    let client = palisade::connect(&url).await.unwrap();
    client.queue("work").push("x").await.unwrap();
    client.close().await;
}

#[tokio::test]
async fn a_queue_that_filled_its_disk_can_be_dropped_and_its_file_shrinks() {
    use palisade::queue::Pick;
    let Some((disk, url, pushed)) = full_queue().await else {
        return;
    };
    let client = palisade::connect(&url).await.unwrap();
    let dropped = client.queue("work").drop_messages(Pick::All, false).await;
    assert_eq!(dropped.unwrap(), pushed);
    client.close().await;
    assert!(size(&disk) < 200_000, "{}", size(&disk));
}
