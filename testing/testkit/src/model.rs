//! A deliberately simple model of lines, written independently of the library to compare it with.
//!
//! A line is a bench of `capacity` seats. Claims come in order and take as many seats as they
//! weigh; the first one that does not fit blocks everyone behind it. The model sums no weights and
//! keeps no leases: time is an operation like any other.

use palisade::engine::{Amended, Ask, READERS};

/// How many claims at the front hold.
pub fn holders(asks: &[Ask]) -> usize {
    let capacity = capacity(asks).unwrap_or(1);
    if capacity == READERS {
        return holders_among_readers(asks);
    }
    let mut bench = vec![false; capacity as usize];
    for (index, ask) in asks.iter().enumerate() {
        for _ in 0..seats(*ask, capacity) {
            match bench.iter_mut().find(|taken| !**taken) {
                Some(seat) => *seat = true,
                None => return index,
            }
        }
    }
    asks.len()
}

/// For a bench too long to build: readers fit until a writer comes, a writer fits only in front.
fn holders_among_readers(asks: &[Ask]) -> usize {
    match asks.first() {
        Some(Ask::Whole) => 1,
        _ => asks.iter().take_while(|ask| **ask != Ask::Whole).count(),
    }
}

fn seats(ask: Ask, capacity: u32) -> u32 {
    match ask {
        Ask::Whole => capacity,
        Ask::Part { weight, .. } => weight,
    }
}

/// The capacity that a claim in the line names, if any.
pub fn capacity(asks: &[Ask]) -> Option<u32> {
    asks.iter().find_map(|ask| match ask {
        Ask::Part { capacity, .. } => Some(*capacity),
        Ask::Whole => None,
    })
}

/// A claim in a line of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sitter {
    /// The claim.
    pub id: u32,
    /// How much of the line it takes.
    pub ask: Ask,
    /// Whether it has been granted. It stays granted until it leaves.
    pub held: bool,
    /// Its value.
    pub value: Option<String>,
    /// Whether it is marked for eviction.
    pub evicted: bool,
    /// When it expires, in ticks.
    pub expires: u64,
    /// The number of ticks that a renewal adds.
    pub ttl: u64,
}

/// A line of the model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bench(pub Vec<Sitter>);

/// The result of entering a line of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// It holds.
    Held,
    /// It waits.
    Waiting,
    /// It does not queue and can't hold.
    Busy,
    /// The line has another capacity.
    Mismatch,
}

impl Bench {
    /// The claim `id`.
    pub fn get(&self, id: u32) -> Option<&Sitter> {
        self.0.iter().find(|sitter| sitter.id == id)
    }

    /// The claim `id`, to change.
    pub fn get_mut(&mut self, id: u32) -> Option<&mut Sitter> {
        self.0.iter_mut().find(|sitter| sitter.id == id)
    }

    fn asks(&self) -> Vec<Ask> {
        self.0.iter().map(|sitter| sitter.ask).collect()
    }

    /// Grants the claims at the front.
    pub fn settle(&mut self) {
        let holders = holders(&self.asks());
        self.0[..holders].iter_mut().for_each(|s| s.held = true);
    }

    /// Takes the last place.
    pub fn enter(&mut self, id: u32, ask: Ask, queue: bool, (now, ttl): (u64, u64)) -> Entry {
        let fits = match (ask, capacity(&self.asks())) {
            (Ask::Part { capacity, .. }, Some(live)) => capacity == live,
            _ => true,
        };
        if !fits {
            return Entry::Mismatch;
        }
        self.0.push(Sitter {
            id,
            ask,
            held: false,
            value: None,
            evicted: false,
            expires: now + ttl,
            ttl,
        });
        self.settle();
        match self.get(id).is_some_and(|sitter| sitter.held) {
            true => Entry::Held,
            false if queue => Entry::Waiting,
            false => {
                self.leave(id);
                Entry::Busy
            }
        }
    }

    /// Leaves; returns whether it was in the line.
    pub fn leave(&mut self, id: u32) -> bool {
        let before = self.0.len();
        self.0.retain(|sitter| sitter.id != id);
        self.settle();
        self.0.len() < before
    }

    /// Removes claims that have expired.
    pub fn expire(&mut self, now: u64) {
        self.0.retain(|sitter| sitter.expires > now);
        self.settle();
    }

    /// Changes the part of the line that a holder takes: a smaller one always, a greater one only
    /// if nobody else holds, and never one with another capacity than others name.
    pub fn reweigh(&mut self, id: u32, ask: Ask) -> Amended {
        let Some(me) = self.get(id).filter(|sitter| sitter.held).cloned() else {
            return Amended::Gone;
        };
        let others: Vec<&Sitter> = self.0.iter().filter(|sitter| sitter.id != id).collect();
        let theirs: Vec<Ask> = others.iter().map(|sitter| sitter.ask).collect();
        let foreign = match (capacity(&theirs), capacity(&[ask])) {
            (Some(live), Some(asked)) => live != asked,
            _ => false,
        };
        let grows = match (me.ask, ask) {
            (Ask::Whole, _) => false,
            (_, Ask::Whole) => true,
            (Ask::Part { weight: old, .. }, Ask::Part { weight: new, .. }) => new > old,
        };
        if foreign || (grows && others.iter().any(|sitter| sitter.held)) {
            return Amended::Busy;
        }
        if let Some(me) = self.get_mut(id) {
            me.ask = ask;
        }
        self.settle();
        Amended::Done
    }

    /// Changes the capacity of the permits: returns whether there are any, or `None` if that is not
    /// allowed.
    pub fn resize(&mut self, new: u32) -> Option<bool> {
        let live = capacity(&self.asks());
        let heavy = |ask: &Ask| matches!(ask, Ask::Part { weight, .. } if *weight > new);
        if live == Some(READERS) || self.asks().iter().any(heavy) {
            return None;
        }
        for sitter in &mut self.0 {
            if let Ask::Part { capacity, .. } = &mut sitter.ask {
                *capacity = new;
            }
        }
        self.settle();
        Some(live.is_some())
    }
}
