//! Many processes that start together: on a new store, and as the first after a boot.

use super::child::Second;
use super::damage::reboot;
use super::*;

/// As many start at once.
const CROWD: usize = 20;

fn all_run(dir: &Path) {
    let seconds: Vec<_> = (0..CROWD).map(|_| Second::start(dir, "run")).collect();
    for second in &seconds {
        assert_eq!(second.says(), "ran");
    }
    seconds.into_iter().for_each(Second::end);
}

#[test]
fn a_crowd_makes_a_store_and_everyone_runs() {
    for _ in 0..rounds(3, 200) {
        let dir = tempfile::tempdir().unwrap();
        all_run(&dir.path().join("made/by/them"));
    }
}

#[tokio::test]
async fn a_crowd_is_first_after_a_boot_and_everyone_runs() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..rounds(3, 200) {
        // Somebody died while holding, before the boot.
        Second::start(dir.path(), "hold").says();
        reboot(dir.path());
        all_run(dir.path());
        let old = |name: &String| name.starts_with("old-");
        let names = std::fs::read_dir(dir.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert_eq!(names.filter(old).collect::<Vec<_>>(), [""; 0]);
    }
}
