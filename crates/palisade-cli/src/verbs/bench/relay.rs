//! Hand-over: several take one name from each other, and note when they got it and let go.
//!
//! With a true pass, whoever let go stays away until another has it: that is what the board is
//! for, a file of eight bytes with the time of the last grant, the same for tasks and processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use palisade::BootTime;

use super::figure::Round;
use super::lane::Door;
use super::refused;
use crate::exit::Failure;

/// How long each holds in a true pass: all others sleep in the line by then.
const HOLD: Duration = Duration::from_millis(10);

/// Between two looks at the board: far below the time that the next one holds.
const LOOK: Duration = Duration::from_millis(1);

/// When it was got and let go, in nanoseconds of the boot-time clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    pub(super) granted: u64,
    pub(super) released: u64,
}

/// Where those who pass the lock on see that another has it.
pub(super) struct Board(File);

impl Board {
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let file = File::options().read(true).write(true).open(path);
        Ok(Self(
            file.map_err(refused("can't open the board of the waiters"))?,
        ))
    }

    fn post(&self, granted: u64) -> io::Result<()> {
        self.0.write_all_at(&granted.to_le_bytes(), 0)
    }

    async fn other_than(&self, mine: u64, until: BootTime) -> io::Result<()> {
        let mut last = [0; 8];
        while !until.has_passed() {
            tokio::time::sleep(LOOK).await;
            self.0.read_exact_at(&mut last, 0)?;
            if u64::from_le_bytes(last) != mine {
                break;
            }
        }
        Ok(())
    }
}

/// Takes turns until then, and once more: nobody is left waiting for someone who went away.
pub(super) async fn take_turns(
    door: &Door,
    board: Option<&Board>,
    until: BootTime,
) -> Result<Vec<Turn>, Failure> {
    let unseen = refused("can't use the board of the waiters");
    let mut turns = Vec::new();
    loop {
        let taken = door.take().await?;
        let granted = BootTime::now().as_nanos();
        if let Some(board) = board {
            board.post(granted).map_err(&unseen)?;
            // What comes after the end does not count and need not take long.
            if !until.has_passed() {
                tokio::time::sleep(HOLD).await;
            }
        }
        let released = BootTime::now().as_nanos();
        taken.give().await?;
        turns.push(Turn { granted, released });
        if until.has_passed() {
            return Ok(turns);
        }
        match board {
            Some(board) => board.other_than(granted, until).await.map_err(&unseen)?,
            None => tokio::task::yield_now().await,
        }
    }
}

/// What the turns of all come to: from grant to grant, or, in a true pass, from the release of
/// one to the grant of another.
pub(super) fn round(all: Vec<Vec<Turn>>, pass: bool, until: BootTime) -> Round {
    let turns = all.into_iter().enumerate();
    let mut turns: Vec<(Turn, usize)> = turns
        .flat_map(|(who, turns)| turns.into_iter().map(move |turn| (turn, who)))
        .filter(|(turn, _)| turn.granted <= until.as_nanos())
        .collect();
    turns.sort_unstable();
    let (Some((first, _)), Some((last, _))) = (turns.first(), turns.last()) else {
        return Round::default();
    };
    let took = Duration::from_nanos(last.granted - first.granted);
    let times = turns.windows(2).filter_map(|pair| {
        let [(before, giver), (after, taker)] = pair else {
            return None;
        };
        match pass {
            false => Some(after.granted - before.granted),
            true => (giver != taker).then(|| after.granted.saturating_sub(before.released)),
        }
    });
    let times = times.collect();
    Round { times, took }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(granted: u64, released: u64) -> Turn {
        Turn { granted, released }
    }

    #[test]
    fn a_pass_is_from_release_to_the_grant_of_another() {
        let one = vec![turn(0, 10), turn(30, 40), turn(42, 50)];
        let two = vec![turn(13, 20), turn(90, 99)];
        let until = BootTime::from_nanos(80);
        let pass = round(vec![one.clone(), two.clone()], true, until);
        assert_eq!(
            pass.times,
            [3, 10],
            "30 to 42 was no hand-over, 90 came too late"
        );
        assert_eq!(pass.took, Duration::from_nanos(42));
        let handoff = round(vec![one, two], false, until);
        assert_eq!(handoff.times, [13, 17, 12]);
        assert!(round(vec![Vec::new()], true, until).times.is_empty());
    }
}
