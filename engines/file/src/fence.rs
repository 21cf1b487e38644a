//! `FileFence`: fenced files. Each resource is a plain data file that any program can read, with
//! its token in a file beside it.
//!
//! The token is made durable **before** the data is put in place. A crash between the two leaves
//! the old data under the new token, so that nothing stale can follow. Writers of one resource are
//! serialised by an flock, which the kernel releases when one dies. If a writer is stopped inside a
//! write, the others fail as unreachable and never overtake it. A write that was dropped before its
//! turn is not started: it can't land over a later one of the same holder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use palisade_core::engine::BoxFuture;
use palisade_core::fence::{Fence, Fenced, Rule, Taken, Verdict, WriteToken};
use palisade_core::{BootTime, Error, ErrorKind, Name, Result, Token};
use palisade_kit::asked::Asked;

/// How long to wait for another writer of the same resource.
const TURN: Duration = Duration::from_secs(2);

/// Fenced files in one directory.
#[derive(Debug, Clone)]
pub struct FileFence {
    dir: PathBuf,
    rule: Rule,
}

impl FileFence {
    /// A fence over the files in `dir`, which is created if it does not exist.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when the directory can't be created, or when another user could change
    /// its content.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        let dir = dir.into();
        let refuse = |message: &str| {
            Error::new(ErrorKind::Config, "fence", message).with("dir", dir.display())
        };
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir);
        let found = made.and_then(|()| fs::metadata(&dir)).map_err(|error| {
            refuse("the directory of the fence can't be created").because(error)
        })?;
        let ours = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
        if !ours || found.mode() & 0o002 != 0 {
            return Err(refuse(
                "another user can change the directory of the fence; use one of your own",
            ));
        }
        Ok(Self {
            dir,
            rule: Rule::default(),
        })
    }

    /// The same fence, but it accepts each token only once.
    #[must_use]
    pub fn strict(self) -> Self {
        Self {
            rule: Rule::Strict,
            ..self
        }
    }

    /// The plain file with a resource's data.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] for a name that is too long for a file name once encoded.
    pub fn data_path(&self, resource: &Name) -> Result<PathBuf> {
        Ok(self.files(resource)?.data)
    }

    fn files(&self, resource: &Name) -> Result<Files> {
        let stem = encode(resource.as_str());
        if stem.len() > 240 {
            let message = "this name is too long for a file once it is encoded; use a shorter one";
            return Err(Error::new(ErrorKind::InvalidName, "fence", message));
        }
        Ok(Files {
            dir: self.dir.clone(),
            data: self.dir.join(format!("{stem}.data")),
            token: self.dir.join(format!("{stem}.fence")),
            turn: self.dir.join(format!("{stem}.lock")),
            asked: Asked::default(),
        })
    }

    /// Runs file operations on a thread that may block.
    fn blocking<T: Send + 'static>(
        &self,
        resource: &Name,
        work: impl FnOnce(Files, Rule) -> Result<T> + Send + 'static,
    ) -> BoxFuture<Result<T>> {
        let (files, rule) = (self.files(resource), self.rule);
        Box::pin(async move {
            let mut files = files?;
            let (_asking, asked) = Asked::new();
            files.asked = asked;
            let joined = tokio::task::spawn_blocking(move || work(files, rule)).await;
            joined.unwrap_or_else(|error| {
                Err(Error::new(
                    ErrorKind::Internal,
                    "fence",
                    "the task for the file was aborted",
                )
                .maybe_applied()
                .because(error))
            })
        })
    }
}

#[deny(clippy::missing_trait_methods)]
impl Fence for FileFence {
    fn write(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Vec<u8>,
    ) -> BoxFuture<Result<Verdict>> {
        self.blocking(resource, move |files, rule| {
            let _turn = files.take_turn()?;
            let verdict = files.accept(rule, token, Some(token.stored()?))?;
            if verdict == Verdict::Accepted {
                files.put(&files.data, &data)?;
            }
            Ok(verdict)
        })
    }

    fn accept(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Verdict>> {
        self.blocking(resource, move |files, rule| {
            let _turn = files.take_turn()?;
            files.accept(rule, token, Some(token.stored()?))
        })
    }

    fn take(&self, resource: &Name, token: WriteToken) -> BoxFuture<Result<Taken>> {
        self.blocking(resource, move |files, rule| {
            let mark = rule.mark_of_take(token)?;
            let _turn = files.take_turn()?;
            if let Verdict::Stale { highest } = files.accept(rule, token, mark)? {
                return Ok(Taken::Stale { highest });
            }
            let data = read(&files.data).map_err(broken("read"))?;
            Ok(Taken::Accepted { data })
        })
    }

    fn read(&self, resource: &Name) -> BoxFuture<Result<Option<Fenced>>> {
        self.blocking(resource, |files, _| {
            let _turn = files.take_turn()?;
            let Some(token) = files.highest()? else {
                return Ok(None);
            };
            let data = read(&files.data)
                .map_err(broken("read"))?
                .unwrap_or_default();
            Ok(Some(Fenced { token, data }))
        })
    }

    fn highest(&self, resource: &Name) -> BoxFuture<Result<Option<Token>>> {
        self.blocking(resource, move |files, _| files.highest())
    }

    fn forget(&self, resource: &Name) -> BoxFuture<Result<bool>> {
        self.blocking(resource, |files, _| {
            let _turn = files.take_turn()?;
            // Remove the data first, so that what is left after a crash is still fenced. Keep the
            // lock file, so that all writers lock the same inode.
            files.remove(&files.data)?;
            files.remove(&files.token)
        })
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

/// The files of one resource.
struct Files {
    dir: PathBuf,
    data: PathBuf,
    token: PathBuf,
    turn: PathBuf,
    asked: Asked,
}

impl Files {
    /// Waits for the other writers. The lock file is never removed, so that all lock the same
    /// inode.
    fn take_turn(&self) -> Result<File> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .custom_flags(NO_LINKS)
            .open(&self.turn);
        let file = file.map_err(broken("lock"))?;
        let deadline = BootTime::now() + TURN;
        loop {
            match file.try_lock() {
                Ok(()) if self.asked.is_dropped() => {
                    let message = "the caller is gone, and this was not started";
                    return Err(Error::new(ErrorKind::Internal, "fence", message));
                }
                Ok(()) => return Ok(file),
                Err(fs::TryLockError::WouldBlock) if !deadline.has_passed() => {
                    // A write takes a few syncs, so polling every millisecond adds little delay.
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(fs::TryLockError::WouldBlock) => {
                    let message = "another writer is stuck inside a write of this resource";
                    return Err(Error::new(ErrorKind::Unreachable, "fence", message));
                }
                Err(fs::TryLockError::Error(error)) => return Err(broken("lock")(error)),
            }
        }
    }

    /// Judges a token, and records `mark` as the highest if it is accepted. The caller holds the
    /// lock.
    fn accept(&self, rule: Rule, token: WriteToken, mark: Option<i64>) -> Result<Verdict> {
        let highest = self.highest()?;
        let verdict = rule.judge(highest, token);
        let mark = mark.map(|mark| Token(mark.unsigned_abs()));
        if let Some(mark) = mark.filter(|mark| highest != Some(*mark))
            && verdict == Verdict::Accepted
        {
            self.put(&self.token, token_line(mark).as_bytes())?;
        }
        Ok(verdict)
    }

    fn highest(&self) -> Result<Option<Token>> {
        let Some(line) = read(&self.token).map_err(broken("read"))? else {
            return Ok(None);
        };
        let token = std::str::from_utf8(&line).ok().and_then(parse_token);
        token.map(Some).ok_or_else(|| {
            let message = "the token file is damaged; restore it, or set a token above all before";
            Error::new(ErrorKind::Unusable, "fence", message).with("file", self.token.display())
        })
    }

    /// Removes a file durably; `false` if there is none.
    fn remove(&self, path: &Path) -> Result<bool> {
        let removed = fs::remove_file(path).and_then(|()| File::open(&self.dir)?.sync_all());
        match removed {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(broken("remove")(error).maybe_applied()),
        }
    }

    /// Replaces the file durably and atomically: readers see the old or the new content, never a
    /// part.
    fn put(&self, path: &Path, content: &[u8]) -> Result<()> {
        let temporary = path.with_extension("new");
        let write = || -> io::Result<()> {
            // A leftover of a crash, or a link that someone placed.
            if let Err(error) = fs::remove_file(&temporary)
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
            let mut file = File::create_new(&temporary)?;
            file.write_all(content)?;
            file.sync_all()?;
            fs::rename(&temporary, path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|error| broken("write")(error).maybe_applied())
    }
}

const HEADER: &str = "palisade-fence 1 ";

fn token_line(token: Token) -> String {
    format!("{HEADER}{token}\n")
}

fn parse_token(line: &str) -> Option<Token> {
    line.strip_prefix(HEADER)?
        .strip_suffix('\n')?
        .parse()
        .ok()
        .map(Token)
}

/// Don't follow links, and don't block on a FIFO.
const NO_LINKS: i32 = (OFlags::NOFOLLOW.bits() | OFlags::NONBLOCK.bits()) as i32;

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(NO_LINKS)
        .open(path);
    let mut content = Vec::new();
    match file.and_then(|mut file| file.read_to_end(&mut content)) {
        Ok(_) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn broken(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| {
        let kind = match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                ErrorKind::Denied
            }
            _ => ErrorKind::Unusable,
        };
        Error::new(
            kind,
            "fence",
            format!("can't {what} the fenced file: {error}"),
        )
        .because(error)
    }
}

/// A name as a file name.
pub fn encode(name: &str) -> String {
    let mut file = String::with_capacity(name.len());
    encode_to(&mut file, name);
    file
}

/// Keeps letters, digits, `-` and `_`; encodes every other byte as `%` and two hex digits.
pub(crate) fn encode_to(file: &mut String, name: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) {
            file.push(char::from(byte));
        } else {
            file.push('%');
            file.push(char::from(HEX[usize::from(byte >> 4)]));
            file.push(char::from(HEX[usize::from(byte & 15)]));
        }
    }
}

#[cfg(test)]
#[path = "fence_tests.rs"]
mod tests;
