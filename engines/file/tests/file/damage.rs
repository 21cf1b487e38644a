//! Stores of another boot, damaged, or where none can be.

use std::os::unix::fs::PermissionsExt;

use palisade::engine::Left;
use palisade::report::Scope;
use palisade::{Error, ErrorKind};

use super::child::Second;
use super::*;

async fn refused(dir: &Path) -> Error {
    match try_open(dir, "").await {
        Ok(_) => panic!("it can't be used"),
        Err(error) => error,
    }
}

fn edit(dir: &Path, file: &str, change: impl FnOnce(String) -> String) {
    let path = dir.join(file);
    std::fs::write(&path, change(std::fs::read_to_string(&path).unwrap())).unwrap();
}

/// What the owner is told.
async fn revoked(engine: &SharedEngine, ticket: &Ticket) -> String {
    match renew(engine, ticket).await {
        Renewal::Revoked(error) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// The greater of the two that the file has.
fn ceiling(dir: &Path) -> u64 {
    let bytes = std::fs::read(dir.join("ceiling")).unwrap();
    let slot = |at: usize| {
        let text = String::from_utf8_lossy(&bytes[at..]).into_owned();
        text.split_once(' ').unwrap().0.parse::<u64>().unwrap()
    };
    slot(0).max(slot(512))
}

/// Pretends that the machine was booted since.
pub(crate) fn reboot(dir: &Path) {
    edit(dir, "boot", |boot| {
        let mut lines: Vec<_> = boot.lines().collect();
        lines[1] = "00000000-0000-0000-0000-000000000000";
        lines.join("\n")
    });
}

#[tokio::test]
async fn all_is_for_its_owner_only() {
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("a/b");
    let engine = open(&dir).await;
    hold(&engine, "a").await;
    for (file, mode) in [
        ("", 0o700),
        ("../", 0o700),
        ("lines", 0o700),
        ("procs", 0o700),
        ("lock", 0o600),
        ("boot", 0o600),
        ("ceiling", 0o600),
        ("leases", 0o700),
        ("lines/palisade,a", 0o600),
    ] {
        let found = dir.join(file).metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{file}");
    }
    let sign = std::fs::read_dir(dir.join("procs"))
        .unwrap()
        .next()
        .unwrap();
    let mode = sign.unwrap().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn after_a_reboot_lines_are_empty_and_tokens_above_the_ceiling() {
    let (dir, engine) = store().await;
    let before = hold(&engine, "a").await.sequence;
    drop(engine);
    let old = ceiling(dir.path());
    assert!(old > before && old < before + AN_HOUR, "some minutes ahead");
    reboot(dir.path());
    let engine = open(dir.path()).await;
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines, []);
    let after = hold(&engine, "a").await.sequence;
    assert!(after > old, "{after} is above {old}");
    assert!(after < old + AN_HOUR, "not far above");
    assert!(ceiling(dir.path()) > after);
}

/// In microseconds.
const AN_HOUR: u64 = 3_600_000_000;

#[tokio::test]
async fn tokens_go_on_when_a_file_or_the_directory_is_lost() {
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("store");
    let engine = open(&dir).await;
    let before = hold(&engine, "a").await;
    drop(engine);
    std::fs::remove_file(dir.join("lines/palisade,a")).unwrap();
    let engine = open(&dir).await;
    let after = hold(&engine, "a").await.sequence;
    assert!(after > before.sequence);
    drop(engine);
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(hold(&open(&dir).await, "a").await.sequence > after);
}

#[tokio::test]
async fn a_store_of_live_processes_of_another_boot_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "hold");
    second.says();
    reboot(dir.path());
    assert_eq!(refused(dir.path()).await.kind(), ErrorKind::Config);
    drop(second);
    hold(&open(dir.path()).await, "door").await;
}

#[tokio::test]
async fn another_layout_is_refused_and_a_bad_ceiling_is_never_reset() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).await);
    let good = std::fs::read_to_string(dir.path().join("boot")).unwrap();
    edit(dir.path(), "boot", |boot| {
        boot.replace("store 2", "store 3")
    });
    let error = refused(dir.path()).await;
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("layout 3"), "{error}");
    edit(dir.path(), "boot", |boot| {
        boot.replace("store 3", "store 1")
    });
    let error = refused(dir.path()).await;
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("older palisade"), "{error}");
    edit(dir.path(), "boot", |_| "garbage".into());
    assert_eq!(refused(dir.path()).await.kind(), ErrorKind::Unusable);
    edit(dir.path(), "boot", |_| good);
    reboot(dir.path());
    edit(dir.path(), "ceiling", |ceiling| ceiling.replace(' ', "9 "));
    assert_eq!(refused(dir.path()).await.kind(), ErrorKind::Unusable);
    std::fs::remove_file(dir.path().join("ceiling")).unwrap();
    assert_eq!(refused(dir.path()).await.kind(), ErrorKind::Unusable);
}

/// Whatever becomes of a file beside a live holder, it is never read as a free line.
#[tokio::test]
async fn a_damaged_line_is_unusable_and_never_free() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "hold");
    second.says();
    let engine = open(dir.path()).await;
    let waiter = enter(&engine, claim("door", Ask::Whole)).await.0;
    let path = dir.path().join("lines/palisade,door");
    let good = std::fs::read(&path).unwrap();
    let mut seen = 0;
    for round in 0..400 {
        let mut bad = good.clone();
        match round % 4 {
            0 => bad.truncate(rand_below(bad.len())),
            1 => bad.fill(0xa5),
            2 => {
                let at = rand_below(bad.len());
                bad[at] ^= 1 << rand_below(8);
            }
            _ => {
                let at = rand_below(bad.len());
                let end = (at + 1 + rand_below(64)).min(bad.len());
                bad[at..end].fill(0);
            }
        }
        // In place, as a failing disk would.
        std::fs::write(&path, &bad).unwrap();
        let asked = Claim {
            queue: false,
            ..claim("door", Ask::Whole)
        };
        match engine.enter(Arc::new(asked)).await {
            // Nothing of what counts was hit.
            Ok(Entered::Busy) => {}
            Ok(other) => panic!("{other:?} in round {round}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unusable, "{error}"),
        }
        // A survey reads all of it.
        match engine.survey(Scope::Line(waiter.name.clone())).await {
            Ok(lines) => assert_eq!(lines[0].holders.len(), 1),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unusable, "{error}");
                assert!(error.to_string().contains("palisade,door"), "{error}");
                seen += 1;
            }
        }
        let place = engine.wait(waiter.clone(), BootTime::now()).await;
        assert!(!matches!(place, Ok(Place::Held { .. })), "{place:?}");
    }
    assert!(seen > 200, "{seen}");
    // Other lines are fine.
    hold(&engine, "other").await;
}

fn rand_below(end: usize) -> usize {
    use std::hash::{BuildHasher, Hasher};
    let random = std::collections::hash_map::RandomState::new();
    random.build_hasher().finish() as usize % end
}

#[tokio::test]
async fn a_process_killed_at_work_leaves_a_good_store() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 0..rounds(12, 1000) {
        let second = Second::start(dir.path(), "churn");
        assert_eq!(second.says(), "busy");
        std::thread::sleep(Duration::from_micros(rand_below(12_000) as u64));
        drop(second);
        let engine = open(dir.path()).await;
        let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
        assert_eq!(lines, [], "round {round}");
        let sequence = hold(&engine, "mine").await.sequence;
        assert!(sequence > last);
        last = sequence;
    }
}

#[tokio::test]
async fn a_holder_is_told_when_its_file_is_emptied_replaced_or_deleted() {
    let (dir, engine) = store().await;
    let path = dir.path().join("lines/palisade,a");
    let replace = || {
        let copy = dir.path().join("lines/copy");
        std::fs::copy(&path, &copy).unwrap();
        std::fs::rename(&copy, &path).unwrap();
    };
    let empty = || std::fs::write(&path, "").unwrap();
    let delete = || std::fs::remove_file(&path).unwrap();
    let ways: [(&str, &dyn Fn()); 3] = [
        ("deleted", &delete),
        ("replaced", &replace),
        ("emptied", &empty),
    ];
    for (what, harm) in ways {
        let held = hold(&engine, "a").await;
        assert!(matches!(renew(&engine, &held).await, Renewal::Held(_)));
        harm();
        let said = revoked(&engine, &held).await;
        assert!(said.contains("deleted, replaced or emptied"), "{said}");
        assert!(matches!(renew(&engine, &held).await, Renewal::Lost));
        engine.leave(held).await.ok();
        // An emptied one is no free line.
        let entered = engine.enter(Arc::new(claim("a", Ask::Whole))).await;
        assert_eq!(entered.is_err(), what == "emptied", "{what}: {entered:?}");
        if what == "emptied" {
            assert_eq!(entered.unwrap_err().kind(), ErrorKind::Unusable);
        }
        std::fs::remove_file(&path).ok();
    }
}

/// The old holder is told why at its next renewal; nothing is granted in the old place.
#[tokio::test]
async fn a_store_moved_deleted_or_made_again_in_use_is_lost() {
    for what in ["moved", "deleted", "made again", "without its lines"] {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("store");
        let engine = open(&dir).await;
        let held = hold(&engine, "a").await;
        match what {
            "moved" => std::fs::rename(&dir, outer.path().join("old")).unwrap(),
            "without its lines" => {
                std::fs::rename(dir.join("lines"), outer.path().join("old")).unwrap();
            }
            _ => std::fs::remove_dir_all(&dir).unwrap(),
        }
        if what == "made again" {
            // Another process starts afresh there.
            Second::start(&dir, "hold").says();
        }
        let said = revoked(&engine, &held).await;
        assert!(said.contains("moved, deleted or replaced"), "{said}");
        for name in ["a", "b"] {
            let entered = engine.enter(Arc::new(claim(name, Ask::Whole))).await;
            let error = entered.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unusable, "{what}: {error}");
        }
        // A new client of this process is in the new place.
        drop(engine);
        hold(&open(&dir).await, "a").await;
    }
}

/// A sign of life that is not there proves nothing: its owner's holds last by their ttl, as long
/// as they are renewed.
#[tokio::test]
async fn nobody_is_dead_because_a_sign_of_life_was_deleted() {
    let (dir, engine) = store().await;
    let second = Second::start(dir.path(), "hold");
    second.says();
    let mine = hold(&engine, "mine").await;
    for sign in std::fs::read_dir(dir.path().join("procs")).unwrap() {
        std::fs::remove_file(sign.unwrap().path()).unwrap();
    }
    let impatient = |name: &str| Claim {
        queue: false,
        ..claim(name, Ask::Whole)
    };
    let entered = engine.enter(Arc::new(impatient("door"))).await.unwrap();
    assert!(matches!(entered, Entered::Busy), "{entered:?}");
    assert!(matches!(renew(&engine, &mine).await, Renewal::Held(_)));
    let back = std::fs::read_dir(dir.path().join("procs")).unwrap().count();
    assert_eq!(back, 1, "the sign of whoever renews is back");
    // What is taken afterwards holds too, for newcomers.
    let after = hold(&engine, "after").await;
    let third = Second::start(dir.path(), "try mine and after");
    assert_eq!(third.says(), "busy busy");
    assert_eq!(engine.leave(after).await.unwrap(), Left::Done);
    assert_eq!(engine.leave(mine).await.unwrap(), Left::Done);
}

/// Renewals that are not there prove nothing for a ttl; then the claim ends.
#[tokio::test]
async fn a_holder_whose_renewals_were_deleted_ends_by_its_ttl_and_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "hold shortly");
    second.says();
    let engine = open(dir.path()).await;
    let (ticket, _) = enter(&engine, claim("door", Ask::Whole)).await;
    for leases in std::fs::read_dir(dir.path().join("leases")).unwrap() {
        std::fs::remove_file(leases.unwrap().path()).unwrap();
    }
    let place = pushed(&engine, &ticket).await;
    assert!(matches!(place, Place::Held { .. }), "{place:?}");
    assert!(second.says().contains("moved, deleted or replaced"));
}

#[tokio::test]
async fn a_place_where_no_store_can_be_is_a_matter_of_configuration() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    for path in [dir.path().join("file"), dir.path().join("file/below")] {
        let error = refused(&path).await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error:?}");
    }
    // Even root can't write there.
    assert_eq!(
        refused(Path::new("/proc/palisade")).await.kind(),
        ErrorKind::Config
    );
    for url in ["file://host/x", "file:/x?bogus=1"] {
        let mut url = Url::parse(url).unwrap();
        let settings = url.take_settings().unwrap();
        let refused = palisade::engines::file::open(url, &settings).await;
        assert_eq!(refused.err().unwrap().kind(), ErrorKind::Config);
    }
}

#[tokio::test]
async fn a_directory_is_one_store_under_all_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("link");
    let real = dir.path().join("real");
    let engine = open(&real).await;
    std::os::unix::fs::symlink(&real, &link).unwrap();
    hold(&engine, "a").await;
    let (_, sequence) = enter(&open(&link).await, claim("a", Ask::Whole)).await;
    assert_eq!(sequence, None);
}
