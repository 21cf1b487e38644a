//! Stores of another boot, damaged, or where none can be.

use std::os::unix::fs::PermissionsExt;

use palisade::core::error::{Error, Kind};
use palisade::core::report::Scope;

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

fn ceiling(dir: &Path) -> u64 {
    let text = std::fs::read_to_string(dir.join("ceiling")).unwrap();
    text.split_once(' ').unwrap().0.parse().unwrap()
}

/// Pretends that the machine was booted since.
fn reboot(dir: &Path) {
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
        ("lines/data.mdb", 0o600),
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
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path()).await;
    let before = hold(&engine, "a").await.counted;
    drop(engine);
    let old = ceiling(dir.path());
    assert!(old >= before + 3_600_000_000, "an hour ahead");
    reboot(dir.path());
    let engine = open(dir.path()).await;
    let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
    assert_eq!(lines, []);
    let after = hold(&engine, "a").await.counted;
    assert!(after > old, "{after} is above {old}");
    assert!(ceiling(dir.path()) >= after + 3_600_000_000);
}

#[tokio::test]
async fn tokens_go_on_when_the_data_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path()).await;
    let before = hold(&engine, "a").await.counted;
    drop(engine);
    std::fs::remove_file(dir.path().join("lines/data.mdb")).unwrap();
    let engine = open(dir.path()).await;
    assert!(hold(&engine, "a").await.counted > before);
}

#[tokio::test]
async fn a_store_of_live_processes_of_another_boot_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let second = Second::start(dir.path(), "hold");
    second.says();
    reboot(dir.path());
    assert_eq!(refused(dir.path()).await.kind(), Kind::Config);
    drop(second);
    hold(&open(dir.path()).await, "door").await;
}

#[tokio::test]
async fn another_layout_is_refused_and_a_bad_ceiling_is_never_reset() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).await);
    let good = std::fs::read_to_string(dir.path().join("boot")).unwrap();
    edit(dir.path(), "boot", |boot| {
        boot.replace("store 1", "store 2")
    });
    let error = refused(dir.path()).await;
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.to_string().contains("layout 2"), "{error}");
    edit(dir.path(), "boot", |_| "garbage".into());
    assert_eq!(refused(dir.path()).await.kind(), Kind::Unusable);
    edit(dir.path(), "boot", |_| good);
    reboot(dir.path());
    edit(dir.path(), "ceiling", |ceiling| format!("9{ceiling}"));
    assert_eq!(refused(dir.path()).await.kind(), Kind::Unusable);
    std::fs::remove_file(dir.path().join("ceiling")).unwrap();
    assert_eq!(refused(dir.path()).await.kind(), Kind::Unusable);
}

#[tokio::test]
async fn a_damaged_data_file_is_unusable() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path()).await;
    for name in 0..200 {
        hold(&engine, &format!("line-{name}")).await;
    }
    drop(engine);
    let data = dir.path().join("lines/data.mdb");
    let good = std::fs::read(&data).unwrap();
    let mut garbage = good.clone();
    garbage.fill(0xa5);
    for bad in [
        &good[..100],
        &good[..5000],
        &good[..good.len() / 2],
        &garbage,
    ] {
        std::fs::write(&data, bad).unwrap();
        let error = refused(dir.path()).await;
        assert_eq!(error.kind(), Kind::Unusable, "{error}");
    }
}

#[tokio::test]
async fn a_damaged_page_is_found_before_it_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path()).await;
    for name in 0..200 {
        hold(&engine, &format!("line-{name}")).await;
    }
    drop(engine);
    let data = dir.path().join("lines/data.mdb");
    let good = std::fs::read(&data).unwrap();
    let mut found = 0;
    for page in 2..good.len() / 4096 {
        for at in [0, 10, 14, 16, 40, 3000] {
            let mut bad = good.clone();
            bad[page * 4096 + at..][..64].fill(0xa5);
            std::fs::write(&data, bad).unwrap();
            match try_open(dir.path(), "").await {
                // A free page, or an owner's name: nothing that anyone trips over.
                Ok(engine) => drop(engine.survey(Scope::Prefix(String::new())).await),
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Unusable);
                    found += 1;
                }
            }
        }
    }
    assert!(found > 20, "{found}");
}

#[tokio::test]
async fn a_process_killed_at_work_leaves_a_good_store() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 0..12 {
        let second = Second::start(dir.path(), "churn");
        assert_eq!(second.says(), "busy");
        std::thread::sleep(Duration::from_millis(round));
        drop(second);
        // Opening checks every page.
        let engine = open(dir.path()).await;
        let lines = engine.survey(Scope::Prefix(String::new())).await.unwrap();
        assert_eq!(lines, [], "round {round}");
        let counted = hold(&engine, "mine").await.counted;
        assert!(counted > last);
        last = counted;
    }
}

#[tokio::test]
async fn a_file_cut_short_or_deleted_in_use_is_unusable() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path()).await;
    for name in 0..200 {
        hold(&engine, &format!("line-{name}")).await;
    }
    let data = std::fs::OpenOptions::new()
        .write(true)
        .open(dir.path().join("lines/data.mdb"))
        .unwrap();
    for length in [20_000, 4096, 0] {
        data.set_len(length).unwrap();
        let entered = engine.enter(Arc::new(claim("a", Ask::Whole))).await;
        assert_eq!(entered.unwrap_err().kind(), Kind::Unusable);
    }
    drop(engine);
}

#[tokio::test]
async fn a_store_deleted_in_use_is_lost() {
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("store");
    let engine = open(&dir).await;
    let held = hold(&engine, "a").await;
    std::fs::remove_dir_all(&dir).unwrap();
    let entered = engine.enter(Arc::new(claim("a", Ask::Whole))).await;
    assert_eq!(entered.unwrap_err().kind(), Kind::Unusable);
    let lease = palisade::core::ticket::Lease {
        id: held.lease,
        ticket: Some(held),
    };
    let renewed = engine.renew(vec![lease], Duration::from_secs(2)).await;
    assert!(matches!(
        renewed[..],
        [palisade::core::engine::Renewal::Lost]
    ));
    // Another process starts afresh there.
    let second = Second::start(&dir, "hold");
    second.says();
}

#[tokio::test]
async fn nobody_joins_live_processes_with_another_lock_or_data_file() {
    for file in ["lock", "boot", "lines/data.mdb"] {
        let dir = tempfile::tempdir().unwrap();
        let second = Second::start(dir.path(), "hold");
        second.says();
        std::fs::remove_file(dir.path().join(file)).unwrap();
        for _ in 0..2 {
            let error = refused(dir.path()).await;
            assert_eq!(error.kind(), Kind::Unusable, "{file}: {error}");
        }
        drop(second);
        hold(&open(dir.path()).await, "door").await;
    }
}

#[tokio::test]
async fn a_place_where_no_store_can_be_is_a_matter_of_configuration() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    for path in [dir.path().join("file"), dir.path().join("file/below")] {
        let error = refused(&path).await;
        assert_eq!(error.kind(), Kind::Config, "{error:?}");
    }
    // Even root can't write there.
    assert_eq!(
        refused(Path::new("/proc/palisade")).await.kind(),
        Kind::Config
    );
    for url in ["file://host/x", "file:/x?bogus=1"] {
        let mut url = Url::parse(url).unwrap();
        let settings = url.take_settings().unwrap();
        let refused = palisade::engines::file::open(url, &settings).await;
        assert_eq!(refused.err().unwrap().kind(), Kind::Config);
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
    let (_, counted) = enter(&open(&link).await, claim("a", Ask::Whole)).await;
    assert_eq!(counted, None);
}

/// Every page is checked when a store is opened: one that was once large must not make every
/// start slow when nobody is in it any more, and tokens go on all the same.
#[tokio::test]
async fn a_large_store_of_nobody_who_lives_starts_small() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("lines/data.mdb");
    let size = || data.metadata().unwrap().len();
    let second = Second::start(dir.path(), "hold");
    let engine = open(dir.path()).await;
    let big = Claim {
        value: Some("v".repeat(1 << 20)),
        ..claim("big", Ask::Whole)
    };
    let (_, counted) = enter(&engine, big).await;
    let held: u64 = second.says().parse().unwrap();
    drop(engine);
    // Somebody lives, and holds.
    let engine = open(dir.path()).await;
    assert!(size() > 1 << 20);
    let (_, busy) = enter(&engine, claim("door", Ask::Whole)).await;
    assert_eq!(busy, None);
    drop(engine);
    drop(second);
    let engine = open(dir.path()).await;
    assert!(size() < 256 << 10, "{} bytes", size());
    let (_, now) = enter(&engine, claim("big", Ask::Whole)).await;
    assert!(now > counted && now > Some(held), "{now:?}");
}
