//! Both stores against the same behaviours, and what only files can suffer.

use super::*;
use crate::core::error::ErrorKind;

fn name() -> Name {
    Name::new("a/b c").unwrap()
}

async fn refuses_what_is_older(fence: &dyn Fence) {
    let write = |token, data: &str| fence.write(&name(), Token(token), data.into());
    assert_eq!(fence.read(&name()).await.unwrap(), None);
    assert_eq!(write(5, "five").await.unwrap(), Verdict::Accepted);
    assert_eq!(write(5, "five again").await.unwrap(), Verdict::Accepted);
    assert_eq!(write(7, "seven").await.unwrap(), Verdict::Accepted);
    let stale = Verdict::Stale { highest: Token(7) };
    assert_eq!(write(6, "six").await.unwrap(), stale);
    assert_eq!(fence.check(&name(), Token(6)).await.unwrap(), stale);
    assert_eq!(
        fence.check(&name(), Token(9)).await.unwrap(),
        Verdict::Accepted
    );
    assert_eq!(
        write(7, "seven again").await.unwrap(),
        Verdict::Accepted,
        "a check is no write"
    );
    let kept = fence.read(&name()).await.unwrap().unwrap();
    assert_eq!(
        (kept.token, kept.data.as_slice()),
        (Token(7), b"seven again".as_slice())
    );
}

async fn takes_each_token_once(fence: &dyn Fence) {
    let write = |token| fence.write(&name(), Token(token), Vec::new());
    assert_eq!(write(5).await.unwrap(), Verdict::Accepted);
    assert_eq!(
        write(5).await.unwrap(),
        Verdict::Stale { highest: Token(5) }
    );
    assert_eq!(write(6).await.unwrap(), Verdict::Accepted);
}

fn files() -> (tempfile::TempDir, FileFence) {
    let dir = tempfile::tempdir().unwrap();
    let fence = FileFence::open(dir.path().join("fenced")).unwrap();
    (dir, fence)
}

#[tokio::test]
async fn memory_refuses_what_is_older() {
    refuses_what_is_older(&MemoryFence::default()).await;
    takes_each_token_once(&MemoryFence::strict()).await;
}

#[tokio::test]
async fn files_refuse_what_is_older_also_when_opened_again() {
    let (dir, fence) = files();
    refuses_what_is_older(&fence).await;
    assert_eq!(
        std::fs::read(fence.data_path(&name()).unwrap()).unwrap(),
        b"seven again"
    );
    let again = FileFence::open(dir.path().join("fenced")).unwrap();
    let verdict = again.write(&name(), Token(6), b"six".into()).await.unwrap();
    assert_eq!(verdict, Verdict::Stale { highest: Token(7) });
}

#[tokio::test]
async fn a_token_is_remembered_without_data_and_leaves_data_alone() {
    let (dir, fence) = files();
    let accept = |token| fence.accept(&name(), Token(token));
    assert_eq!(accept(5).await.unwrap(), Verdict::Accepted);
    assert_eq!(accept(5).await.unwrap(), Verdict::Accepted);
    let stale = Verdict::Stale { highest: Token(5) };
    assert_eq!(accept(4).await.unwrap(), stale);
    assert!(!fence.data_path(&name()).unwrap().exists());
    let again = FileFence::open(dir.path().join("fenced")).unwrap();
    assert_eq!(again.check(&name(), Token(4)).await.unwrap(), stale);

    fence.write(&name(), Token(6), b"six".into()).await.unwrap();
    assert_eq!(accept(7).await.unwrap(), Verdict::Accepted);
    let kept = fence.read(&name()).await.unwrap().unwrap();
    assert_eq!((kept.token, kept.data), (Token(7), b"six".to_vec()));
}

#[cfg(all(feature = "file", feature = "memory"))]
#[tokio::test]
async fn the_fence_of_a_store_is_kept_beside_it_for_each_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let url = |more: &str| format!("file:{}/store{more}", dir.path().display());
    let fence = open(&url("")).unwrap();
    fence.accept(&name(), Token(5)).await.unwrap();
    let check = async |url: &str| {
        let fence = open(url).unwrap();
        fence.check(&name(), Token(4)).await.unwrap()
    };
    let stale = Verdict::Stale { highest: Token(5) };
    assert_eq!(check(&url("?ttl=5s")).await, stale);
    assert_eq!(check(&url("?namespace=other")).await, Verdict::Accepted);
    assert_eq!(check(&url("?namespace=")).await, Verdict::Accepted);
    // The store is as good as before.
    crate::connect(&url("")).await.unwrap();

    let kind = |url: &str| open(url).unwrap_err().kind();
    assert_eq!(kind("memory:"), ErrorKind::Unsupported);
    assert_eq!(kind("bananas:"), ErrorKind::Config);
    assert_eq!(kind(&url("?tll=5s")), ErrorKind::Config);
}

#[tokio::test]
async fn strict_files_take_each_token_once() {
    let (_dir, fence) = files();
    takes_each_token_once(&fence.strict()).await;
}

/// The crash between token and data: the new token stands, the old data too, and what is older
/// than the token stays out.
#[tokio::test]
async fn a_crash_between_token_and_data_lets_nothing_stale_in() {
    let (_dir, fence) = files();
    fence
        .write(&name(), Token(5), b"five".into())
        .await
        .unwrap();
    let data = fence.data_path(&name()).unwrap();
    // The data can't be put in place: a directory that is not empty has its name.
    std::fs::remove_file(&data).unwrap();
    std::fs::create_dir_all(data.join("in the way")).unwrap();
    let failed = fence
        .write(&name(), Token(8), b"eight".into())
        .await
        .unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Unusable);
    let late = fence
        .write(&name(), Token(7), b"seven".into())
        .await
        .unwrap();
    assert_eq!(late, Verdict::Stale { highest: Token(8) });
}

#[tokio::test]
async fn a_damaged_token_is_an_error_and_never_free() {
    for damage in ["", "palisade-fence 1 12", "palisade-fence 1 x\n", "garbage"] {
        let (_dir, fence) = files();
        fence.write(&name(), Token(5), Vec::new()).await.unwrap();
        let token = fence.data_path(&name()).unwrap().with_extension("fence");
        std::fs::write(token, damage).unwrap();
        let error = fence
            .write(&name(), Token(9), Vec::new())
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unusable, "{damage:?}");
    }
}

#[tokio::test]
async fn concurrent_writers_leave_the_data_of_the_highest_token() {
    let (_dir, fence) = files();
    let writers = (1..=20u64).rev().map(|token| {
        let fence = fence.clone();
        tokio::spawn(async move {
            let data = token.to_string().into_bytes();
            fence.write(&name(), Token(token), data).await.unwrap()
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let kept = fence.read(&name()).await.unwrap().unwrap();
    assert_eq!((kept.token, kept.data), (Token(20), b"20".to_vec()));
}

#[tokio::test]
async fn an_unusable_directory_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
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
    std::fs::write(&victim, "precious").unwrap();
    let data = fence.data_path(&name()).unwrap();
    symlink(&victim, data.with_extension("new")).unwrap();
    let written = fence.write(&name(), Token(5), b"five".into()).await;
    assert_eq!(written.unwrap(), Verdict::Accepted);
    std::fs::remove_file(data.with_extension("lock")).unwrap();
    symlink(&victim, data.with_extension("lock")).unwrap();
    let written = fence.write(&name(), Token(6), b"six".into()).await;
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Unusable);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(dir.path(), open).unwrap();
    let error = FileFence::open(dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}
