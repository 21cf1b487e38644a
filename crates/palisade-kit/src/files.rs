//! Reads the files that options name: passwords, tokens, certificates, kubeconfigs.
//!
//! A mistaken path may name anything: a disk image, a device that never ends, a FIFO that nobody
//! writes to. So no more is read than such a file can need, and no longer than it can take.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use palisade_core::engine::config_error;
use palisade_core::{Error, Result};

/// The most that a file with a password or a token may have: the longest tokens have a few
/// kilobytes.
pub const SECRET: usize = 64 << 10;

/// The most that a file with certificates or a kubeconfig may have: those of whole organizations
/// have a megabyte.
pub const DOCUMENT: usize = 8 << 20;

/// How long a FIFO may take, such as a shell's `<(…)` of a program that fetches a secret.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often a FIFO without content is read.
const GLANCE: Duration = Duration::from_millis(5);

/// Reads a file of at most `most` bytes. `what` names it in errors, with the option and never with
/// the path, which may be a secret by mistake.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when it can't be read or is larger.
pub fn read_file(what: &str, path: &Path, most: usize) -> Result<Vec<u8>> {
    read_at_most(path, most).map_err(|error| unread(what, most, error))
}

/// As [`read_file`], for text.
///
/// # Errors
/// The same, and for what is not UTF-8.
pub fn read_text(what: &str, path: &Path, most: usize) -> Result<String> {
    String::from_utf8(read_file(what, path, most)?)
        .map_err(|_| config_error(format!("{what} is no text (UTF-8)")))
}

/// The error for a file that was not read.
pub fn unread(what: &str, most: usize, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::FileTooLarge => config_error(format!(
            "{what} has more than {}; is it the right file?",
            shown(most)
        )),
        io::ErrorKind::TimedOut => config_error(format!(
            "{what} is a pipe that gives nothing within {PATIENCE:?}; does a program write to it?"
        )),
        _ => config_error(format!("{what} can't be read")).because(error),
    }
}

/// A size for people.
pub(crate) fn shown(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// Reads a file of at most `most` bytes; a larger one is [`io::ErrorKind::FileTooLarge`].
pub fn read_at_most(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let no_wait = OFlags::NONBLOCK.bits().cast_signed();
    // Opening a FIFO would otherwise wait for its writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(no_wait)
        .open(path)?;
    let begun = Instant::now();
    let mut content = Vec::new();
    loop {
        let room = most + 1 - content.len();
        match fill(&file, room, &mut content) {
            Ok(()) if content.len() > most => return Err(io::ErrorKind::FileTooLarge.into()),
            Ok(()) => return Ok(content),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if begun.elapsed() >= PATIENCE {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::sleep(GLANCE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reads at most `room` bytes, to the end of the file. What was read before an error is kept.
fn fill(file: &File, room: usize, content: &mut Vec<u8>) -> io::Result<()> {
    file.take(u64::try_from(room).unwrap_or(u64::MAX))
        .read_to_end(content)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_such_file_is_refused_soon_and_with_little_memory() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("fits"), "12345678").unwrap();
        assert_eq!(read_file("it", &at("fits"), 8).unwrap(), b"12345678");
        // A gigabyte without a block on the disk.
        File::create(at("huge")).unwrap().set_len(1 << 30).unwrap();
        let begun = Instant::now();
        for path in [at("fits"), at("huge"), "/dev/zero".into()] {
            let error = read_file("the file of option x", &path, 7).unwrap_err();
            let message = error.message();
            assert!(
                message.starts_with("the file of option x has more than"),
                "{message}"
            );
        }
        let error = read_text("it", &at("huge"), 64 << 10).unwrap_err();
        assert_eq!(
            error.message(),
            "it has more than 64 KiB; is it the right file?"
        );
        assert!(read_file("it", &at("absent"), 7).is_err());
        assert!(read_file("it", folder.path(), 7).is_err());
        // Nobody writes to it, or ever will.
        let fifo = at("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.unwrap().success());
        assert_eq!(read_file("it", &fifo, 7).unwrap(), b"");
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "{:?}",
            begun.elapsed()
        );
    }

    #[test]
    fn a_pipe_is_read_to_its_end_and_waited_for_a_while() {
        let (reader, writer) = io::pipe().unwrap();
        let path = |pipe: &dyn std::os::fd::AsFd| {
            use std::os::fd::AsRawFd;
            std::path::PathBuf::from(format!("/proc/self/fd/{}", pipe.as_fd().as_raw_fd()))
        };
        let writes = std::thread::spawn(move || {
            use std::io::Write;
            let mut writer = writer;
            for part in ["sec", "ret"] {
                std::thread::sleep(Duration::from_millis(20));
                writer.write_all(part.as_bytes()).unwrap();
            }
        });
        assert_eq!(read_text("it", &path(&reader), 9).unwrap(), "secret");
        writes.join().unwrap();
        // Someone has it open, and says nothing.
        let (reader, _writer) = io::pipe().unwrap();
        let error = read_text("it", &path(&reader), 9).unwrap_err();
        assert!(error.message().contains("pipe"), "{error}");
    }
}
