//! Cases that only concern files. What every store promises is in `palisade_testkit::fences`.

use super::*;
use palisade_core::ErrorKind;

fn name() -> Name {
    Name::new("a/b c").unwrap()
}

fn files() -> (tempfile::TempDir, FileFence) {
    let dir = tempfile::tempdir().unwrap();
    let fence = FileFence::open(dir.path().join("fenced")).unwrap();
    (dir, fence)
}

#[tokio::test]
async fn the_data_is_a_plain_file() {
    let (_dir, fence) = files();
    fence
        .write(&name(), 5.into(), b"five".into())
        .await
        .unwrap();
    let data = fence.data_path(&name()).unwrap();
    assert_eq!(fs::read(data).unwrap(), b"five");
}

/// A crash between token and data: the new token and the old data stand, and anything older than
/// the token is refused.
#[tokio::test]
async fn a_crash_between_token_and_data_lets_nothing_stale_in() {
    let (_dir, fence) = files();
    fence
        .write(&name(), 5.into(), b"five".into())
        .await
        .unwrap();
    let data = fence.data_path(&name()).unwrap();
    // A directory that is not empty has the data file's name, so the data can't be put in place.
    fs::remove_file(&data).unwrap();
    fs::create_dir_all(data.join("in the way")).unwrap();
    let failed = fence
        .write(&name(), 8.into(), b"eight".into())
        .await
        .unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Unusable);
    let late = fence
        .write(&name(), 7.into(), b"seven".into())
        .await
        .unwrap();
    assert_eq!(late, Verdict::Stale { highest: Token(8) });
}

#[tokio::test]
async fn a_damaged_token_is_an_error_and_never_free() {
    for damage in ["", "palisade-fence 1 12", "palisade-fence 1 x\n", "garbage"] {
        let (_dir, fence) = files();
        fence.write(&name(), 5.into(), Vec::new()).await.unwrap();
        let token = fence.data_path(&name()).unwrap().with_extension("fence");
        fs::write(token, damage).unwrap();
        let error = fence
            .write(&name(), 9.into(), Vec::new())
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unusable, "{damage:?}");
    }
}

#[tokio::test]
async fn an_unusable_directory_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let error = FileFence::open(dir.path().join("file/below")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let (_dir, fence) = files();
    let long = Name::new("/".repeat(100)).unwrap();
    assert_eq!(
        fence.data_path(&long).unwrap_err().kind(),
        ErrorKind::InvalidName
    );
}

#[tokio::test]
async fn no_link_is_followed_and_no_directory_of_others_is_used() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (dir, fence) = files();
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let data = fence.data_path(&name()).unwrap();
    symlink(&victim, data.with_extension("new")).unwrap();
    let written = fence.write(&name(), 5.into(), b"five".into()).await;
    assert_eq!(written.unwrap(), Verdict::Accepted);
    fs::remove_file(data.with_extension("lock")).unwrap();
    symlink(&victim, data.with_extension("lock")).unwrap();
    let written = fence.write(&name(), 6.into(), b"six".into()).await;
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Unusable);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(dir.path(), open).unwrap();
    let error = FileFence::open(dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}
