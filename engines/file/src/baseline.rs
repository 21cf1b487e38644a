//! The raw operations to compare with `file:`: `flock` on separate files in the store's directory.
//!
//! A file that nobody has locked is an available baton. A blocking `flock` runs on a blocking
//! thread, as an async program requires. The files are removed when the baseline is dropped.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;

use super::config::Config;
use super::dir::Dir;
use super::error::unusable_dir;
use palisade_core::engine::{Baseline, BoxFuture, Url};
use palisade_core::{Error, ErrorKind, Result};

/// Opens the raw operations beside the store that `url` names.
pub(super) fn open_baseline(url: Url) -> Result<Arc<dyn Baseline>> {
    let dir = Dir::open(&Config::from_url(url)?)?;
    Ok(Arc::new(Flock(Arc::new(Files {
        dir: dir.path,
        known: Mutex::default(),
    }))))
}

struct Flock(Arc<Files>);

struct Files {
    dir: PathBuf,
    /// The files that were locked so far, and the lock on each that is held now.
    known: Mutex<HashMap<String, Option<OwnedFd>>>,
}

impl Files {
    fn path(&self, key: &str) -> PathBuf {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        self.dir
            .join(format!("raw-{}", key.replace(|c| !plain(c), "_")))
    }

    /// Sleeps until the file is locked.
    fn lock(&self, key: &str) -> Result<OwnedFd> {
        let path = self.path(key);
        let lock = || -> rustix::io::Result<OwnedFd> {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
            while let Err(error) = flock(&file, FlockOperation::LockExclusive) {
                if error != Errno::INTR {
                    return Err(error);
                }
            }
            Ok(file)
        };
        let locked = lock().map_err(|error| unusable_dir(&path, error))?;
        let mut known = self.known.lock();
        if !known.contains_key(key) {
            known.insert(key.to_owned(), None);
        }
        Ok(locked)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for key in self.known.lock().keys() {
            let _ = std::fs::remove_file(self.path(key));
        }
    }
}

impl Baseline for Flock {
    fn describe(&self) -> String {
        "open, flock, close; hand-over: a blocking flock on a thread".to_owned()
    }

    fn cycle(&self, key: String) -> BoxFuture<Result<()>> {
        let files = Arc::clone(&self.0);
        Box::pin(async move { files.lock(&key).map(drop) })
    }

    fn take(&self, key: String) -> BoxFuture<Result<()>> {
        let files = Arc::clone(&self.0);
        Box::pin(async move {
            let taken = tokio::task::spawn_blocking(move || {
                let lock = files.lock(&key)?;
                files.known.lock().insert(key, Some(lock));
                Ok(())
            });
            taken.await.unwrap_or_else(|error| {
                let message = "the thread that waits for the file ended";
                Err(Error::new(ErrorKind::Internal, "baseline", message).because(error))
            })
        })
    }

    fn give(&self, key: String) -> BoxFuture<Result<()>> {
        let files = Arc::clone(&self.0);
        Box::pin(async move {
            // Dropping it closes the file and so unlocks it, after the map's own lock is released.
            let lock = files.known.lock().get_mut(&key).and_then(Option::take);
            drop(lock);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Two baselines are two open files: one waits for what the other has locked.
    #[tokio::test]
    async fn a_baton_is_had_by_one_at_a_time_and_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("file:{}", dir.path().display());
        let open = || open_baseline(Url::parse(&url).unwrap()).unwrap();
        let (one, two) = (open(), open());
        one.cycle("a/b".into()).await.unwrap();
        one.give("k".into()).await.unwrap();
        one.take("k".into()).await.unwrap();
        let mut waits = two.take("k".into());
        let early = tokio::time::timeout(Duration::from_millis(50), &mut waits).await;
        assert!(early.is_err(), "both have it");
        one.give("k".into()).await.unwrap();
        waits.await.unwrap();
        drop((one, two));
        let left = std::fs::read_dir(dir.path()).unwrap();
        let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let raw: Vec<String> = left.filter(|name| name.starts_with("raw")).collect();
        assert_eq!(raw, Vec::<String>::new());
    }
}
