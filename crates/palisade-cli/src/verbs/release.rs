//! `palisade release`: releases a lock that `palisade acquire` took for the same shell.

use palisade::{Error, ErrorKind, Name};
use serde_json::json;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
use crate::holder::{Answer, Directory, Key, Shell};
use crate::view::shown;

/// Release a lock that this shell has acquired; exit code 1 if it has not
///
/// The exit code is 76 if the lock was lost meanwhile: another process may have held it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    palisade release nightly\n  \
    palisade release nightly || echo 'someone else may have been at it' >&2")]
pub(crate) struct Release {
    /// The name of the lock
    name: String,
    /// The process that was passed to `acquire --pid` [default: the calling shell]
    #[arg(long, value_name = "PID")]
    pid: Option<i32>,
}

impl Release {
    pub(crate) fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let directory = Directory::open()?;
        let own = Shell::own().filter(|_| self.pid.is_none());
        let shell = match own.filter(|own| !directory.find(*own, &name).is_empty()) {
            Some(own) => own,
            None => Shell::find(self.pid)?,
        };
        let mut found = directory.find(shell, &name);
        // The engine matters only if there are several.
        if found.len() > 1 || global.url.is_some() {
            let target = Target::find(global)?;
            let (name, url) = (&name, target.url());
            let meant = Key { shell, name, url }.file();
            if found.len() > 1 && !found.contains(&meant) {
                let why = "held on several engines; pass the --url that acquire was given";
                return Err(Failure::Usage(why.into()));
            }
            found.retain(|file| *file == meant);
        }
        let answer = match found.first() {
            None => return not_held(&self.name, shell, global),
            Some(file) => directory.ask(file).map_err(|error| {
                let why = "the process that holds it does not answer";
                Failure::Defect(format!("{}: {why}: {error}", shown(&self.name)))
            })?,
        };
        match answer {
            Some(Answer::Released) => {
                let answer = json!({"name": self.name, "released": true});
                global.printer().reply(&answer, |_| String::new(), true)
            }
            Some(Answer::Lost(why)) => Err(Failure::Lost(why)),
            Some(Answer::NotReleased(why)) => {
                let why = format!("not released; it ends with its ttl: {why}");
                Err(Error::new(ErrorKind::Unreachable, "release", why).into())
            }
            Some(Answer::NotHeld | Answer::Heard | Answer::Owner(_)) => {
                not_held(&self.name, shell, global)
            }
            None => Err(Failure::Lost(format!(
                "lost {}: the process that held it was killed",
                shown(&self.name)
            ))),
        }
    }
}

fn not_held(name: &str, shell: Shell, global: &Global) -> Verdict {
    let answer = json!({"name": name, "released": false});
    if global.json {
        global.printer().answer(&answer, |_| String::new())?;
    } else {
        let (name, pid) = (shown(name), shell.pid.as_raw_pid());
        let text = format!("{name} is not held for this shell (pid {pid})");
        global.printer().event(answer, || Some(text));
    }
    Ok(Outcome::No)
}
