//! Passwords on the command line: every user of the machine can read them. A password in a URL is
//! therefore overwritten as soon as it is read, in the memory that `ps` shows. The guardian, which
//! is forked later, inherits the overwritten memory.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

use serde_json::json;

use crate::args::arguments;
use crate::print::Printer;
use crate::proc::stat;

/// Overwrites the passwords in our command line, or warns that they can be read there.
pub(crate) fn hide_passwords(printer: Printer) {
    let arguments = arguments();
    let own = arguments.iter().position(|arg| arg == "--");
    let own = &arguments[..own.unwrap_or(arguments.len())];
    let secret: Vec<_> = own.iter().map(|arg| password(arg.as_bytes())).collect();
    if secret.iter().all(Option::is_none) || overwrite(arguments, &secret).is_ok() {
        return;
    }
    let message = "the password in the URL is visible in the list of processes; put it into a \
                   file and pass password_file=";
    printer.event(
        json!({"event": "visible_password", "message": message}),
        || Some(message.to_owned()),
    );
}

/// The position of the password in a URL: from the first colon after `//` to the last `@`,
/// whatever is in between.
fn password(argument: &[u8]) -> Option<Range<usize>> {
    let scheme = argument.windows(3).position(|part| part == b"://")?;
    let login = scheme + 3;
    let end = argument.iter().rposition(|byte| *byte == b'@')?;
    let colon = argument
        .get(login..end)?
        .iter()
        .position(|byte| *byte == b':')?;
    Some(login + colon + 1..end).filter(|range| !range.is_empty())
}

fn overwrite(arguments: &[OsString], secret: &[Option<Range<usize>>]) -> io::Result<()> {
    let other = || io::Error::from(io::ErrorKind::InvalidData);
    let fields = stat("self").ok_or_else(other)?;
    let field = |at: usize| fields.get(at)?.parse::<u64>().ok();
    // `arg_start` and `arg_end` of proc(5).
    let (start, end) = field(45).zip(field(46)).ok_or_else(other)?;
    let memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/proc/self/mem")?;
    let length = usize::try_from(end.saturating_sub(start)).map_err(|_| other())?;
    let mut bytes = vec![0; length];
    memory.read_exact_at(&mut bytes, start)?;
    // Only memory that is known to be our arguments is changed, and no length changes.
    let mut at = 0;
    for (argument, secret) in arguments
        .iter()
        .zip(secret.iter().chain(std::iter::repeat(&None)))
    {
        let argument = argument.as_bytes();
        let here = bytes.get_mut(at..at + argument.len()).ok_or_else(other)?;
        if here != argument {
            return Err(other());
        }
        if let Some(secret) = secret {
            here[secret.clone()].fill(b'*');
            memory.write_all_at(&here[secret.clone()], start + (at + secret.start) as u64)?;
        }
        at += argument.len() + 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_found_whatever_it_holds() {
        for (url, secret) in [
            ("redis://me:hunter2@h/0", Some("hunter2")),
            ("--url=redis://:hun@ter2@h", Some("hun@ter2")),
            ("redis://me:hun/t?e#r2@h", Some("hun/t?e#r2")),
            ("redis://me@h", None),
            ("redis://h:6379/0", None),
            ("file:/home/me@work", None),
            ("redis://me:@h", None),
        ] {
            let found = password(url.as_bytes()).map(|range| &url[range]);
            assert_eq!(found, secret, "{url}");
        }
    }
}
