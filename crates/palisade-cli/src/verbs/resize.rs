//! `palisade resize`: changes the capacity of permits while they are in use.
//!
//! Holders keep what they hold, even if it no longer fits; waiters are granted by the new capacity
//! at once. Later requests must name it.

use palisade::Name;
use serde_json::json;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::Verdict;
use crate::view::shown;

/// Change the number of permits while they are in use; exit code 1 if none are in use
///
/// Nobody loses a permit: if there are fewer now, the next is granted when enough came back. Later
/// requests must name the new number.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade resize downloads 8\n  \
    palisade resize downloads 8 && palisade run downloads --permits 1/8 -- ./fetch.sh")]
pub(crate) struct Resize {
    /// The name of the permits
    name: String,
    /// The new number of permits
    #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..i64::from(u32::MAX)))]
    capacity: u32,
}

impl Resize {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let capacity = self.capacity;
        let resized = match Target::find(global)?.connect_existing().await? {
            Some(client) => client.resize(name.as_str(), capacity).await?,
            None => false,
        };
        let answer = json!({"name": self.name, "capacity": capacity, "resized": resized});
        let text = |_: &_| match (resized, shown(&self.name)) {
            (true, name) => format!("{name} has {capacity} permits now\n"),
            (false, name) => {
                format!("no permits of {name} are in use: the next request sets their number\n")
            }
        };
        global.printer().reply(&answer, text, resized)
    }
}
