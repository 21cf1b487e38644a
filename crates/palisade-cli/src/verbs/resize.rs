//! `palisade resize`: gives the permits of a line that is in use another capacity.
//!
//! Holders keep what they hold, even if it is more than fits now; waiters are granted by the new
//! capacity at once. Whoever asks from now on must name it.

use palisade::Name;
use serde::Serialize;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Outcome, Verdict};
use crate::view::shown;

/// Change how many permits there are, while they are in use; exit code 1 when none are
///
/// Nobody loses a permit: when there are fewer now, the next is granted when enough came back.
/// Commands that ask from now on must name the new number.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade resize downloads 8\n  \
    palisade resize downloads 8 && palisade run downloads --permits 1/8 -- ./fetch.sh")]
pub(crate) struct Resize {
    /// The name of the permits
    name: String,
    /// How many there are from now on
    #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..i64::from(u32::MAX)))]
    capacity: u32,
}

/// What was done.
#[derive(Serialize)]
struct Resized {
    name: String,
    capacity: u32,
    resized: bool,
}

impl Resize {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let answer = Resized {
            resized: match Target::find(global)?.connect_existing().await? {
                Some(client) => client.resize(name.as_str(), self.capacity).await?,
                None => false,
            },
            name: self.name,
            capacity: self.capacity,
        };
        global.printer().answer(&answer, Resized::text)?;
        Ok(match answer.resized {
            true => Outcome::Done,
            false => Outcome::No,
        })
    }
}

impl Resized {
    fn text(&self) -> String {
        let (name, capacity) = (shown(&self.name), self.capacity);
        if self.resized {
            format!("{name} has {capacity} permits now\n")
        } else {
            format!("no permits of {name} are in use: the next to ask names their number\n")
        }
    }
}
