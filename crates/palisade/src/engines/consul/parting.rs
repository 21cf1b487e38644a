//! Giving places up in a line as it was read, and changing them: the operations alone.
//!
//! Pure. A reader or a permit counts only while its own key is held, so that taking that key out
//! is all there is to it, and refuses nobody else; what the last one leaves behind is tidied up,
//! guarded by the index that whoever comes would move.

use super::keys::Line;
use super::plan::{Asker, gate};
use super::view::{Spot, View};
use super::wire::{LOCK, Op, Pair, READERS, SEMAPHORE};
use crate::core::claim::ClaimId;

impl View {
    /// Takes a claim out, if its key was last written at `index`.
    pub(super) fn without(
        &self,
        line: &Line,
        (spot, index): (Spot, u64),
        claim: ClaimId,
        session: &str,
    ) -> Vec<Op> {
        let key = spot.key(line, claim, session);
        let mut ops = vec![Op::check_index(&key, index)];
        match spot {
            // The readers inside stay, and others may come again. An unlock takes the flags away.
            Spot::Gate => ops.extend([Op::unlock(&key, session), gate(line)]),
            Spot::Whole | Spot::Reader | Spot::Permit => ops.push(Op::delete(&key)),
        }
        ops
    }

    /// Removes what is left of a line in which nobody is; `None` when somebody is, or nothing.
    pub(super) fn tidy(&self, line: &Line) -> Option<Vec<Op>> {
        if self.is_gate() {
            return (!self.is_locked() && !self.is_read(line)).then(|| {
                let mut ops = vec![Op::unchanged(&line.lock, self.lock.as_ref())];
                ops.push(Op::delete(&line.lock));
                ops.extend(self.dead_readers(line));
                ops
            });
        }
        let semaphore = self.semaphore(line).filter(|pair| pair.flags == SEMAPHORE);
        (semaphore.is_some() && self.holders(line).is_none()).then(|| self.no_permits(line))
    }

    /// Removes what is left of a line in which nobody lives: by holders that died, their sessions
    /// with them. `None` when somebody lives, when nothing is left, or when it is not ours.
    pub(super) fn remains(&self, line: &Line) -> Option<Vec<Op>> {
        let semaphore = self.semaphore(line);
        let foreign = |pair: &&Pair| match pair.flags {
            LOCK => pair.record().is_none(),
            flags => flags != READERS,
        };
        let lives = |pair: &Pair| pair.holder().is_some();
        if self.lock.iter().chain(&self.tree).any(lives)
            || self.lock.as_ref().filter(foreign).is_some()
            || semaphore.is_some_and(|pair| pair.flags != SEMAPHORE)
        {
            return None;
        }
        let values = format!("{}/.value/", line.lock);
        let mut left: Vec<Op> = Vec::new();
        left.extend(self.lock.as_ref().map(|lock| Op::delete(&lock.key)));
        left.extend(semaphore.map(|pair| Op::delete(&pair.key)));
        left.extend(self.dead_permits(line));
        left.extend(self.dead_readers(line));
        let values = self
            .tree
            .iter()
            .filter(|pair| pair.key.starts_with(&values));
        left.extend(values.take(8).map(|pair| Op::delete(&pair.key)));
        if left.is_empty() {
            return None;
        }
        // Whoever comes moves one of these.
        let mut ops = vec![
            Op::unchanged(&line.lock, self.lock.as_ref()),
            Op::unchanged(&line.semaphore(), semaphore),
        ];
        ops.extend(left);
        Some(ops)
    }

    /// Makes a whole line a reader's, with the count that it has.
    pub(super) fn downgrade(&self, line: &Line, asker: &Asker) -> Vec<Op> {
        let key = line.reader(asker.claim);
        vec![
            Op::unchanged(&line.lock, self.lock.as_ref()),
            Op::unlock(&line.lock, &asker.session),
            gate(line),
            Op::lock(&key, &asker.session, READERS, &asker.record.to_json()),
        ]
    }

    /// Makes the one reader the holder of the whole line; `None` when others read, or a writer
    /// waits.
    pub(super) fn upgrade(&self, line: &Line, asker: &Asker) -> Option<Vec<Op>> {
        let own = line.reader(asker.claim);
        let mut others = self.readers(line).filter(|pair| pair.key != own);
        if self.is_locked() || others.any(|pair| pair.holder().is_some()) {
            return None;
        }
        let mut ops = vec![
            Op::unchanged(&line.lock, self.lock.as_ref()),
            Op::check_session(&own, &asker.session),
            Op::delete(&own),
        ];
        ops.extend(self.dead_readers(line));
        let record = asker.record.to_json();
        ops.push(Op::lock(&line.lock, &asker.session, LOCK, &record));
        Some(ops)
    }
}
