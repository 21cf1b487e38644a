//! `leave`, `amend`, `evict` and `resize`.

use redis::Cmd;

use super::client::{Client, Script};
use super::inspect::foreign_value;
use palisade_core::engine::{Amended, Amendment, Left, READERS, Ticket, capacity_mismatch};
use palisade_core::{Error, ErrorKind, Eviction, Name, Result};

impl Client {
    pub(crate) async fn leave(&self, ticket: &Ticket) -> Result<Left> {
        self.hub.forget(ticket.claim);
        let keys = self.keys.line(&ticket.name)?;
        let mut link = self.link(Some(&keys)).await?;
        let id = ticket.claim.to_string();
        let arguments = |command: &mut Cmd| {
            let doubt = if ticket.in_doubt { "?" } else { "" };
            command.arg(&id).arg(format!("{}{doubt}", ticket.sequence));
        };
        let answer = self.run_for(&mut link, Script::Leave, &keys, &id, arguments);
        Ok(match answer.await?.as_str() {
            "left" => Left::Done,
            _ => Left::Absent,
        })
    }

    pub(crate) async fn amend(&self, ticket: &Ticket, amendment: &Amendment) -> Result<Amended> {
        let keys = self.keys.line(&ticket.name)?;
        let mut link = self.link(Some(&keys)).await?;
        let arguments = |command: &mut Cmd| {
            command.arg(ticket.claim.to_string()).arg(ticket.sequence);
            match amendment {
                Amendment::Value(value) => command.arg("value").arg(value),
                Amendment::Ask(ask) => {
                    let (weight, capacity) = ask.numbers();
                    command.arg("ask").arg(weight).arg(capacity)
                }
            };
        };
        let answer: String = self.run(&mut link, Script::Amend, &keys, arguments).await?;
        Ok(match answer.as_str() {
            "done" => {
                self.replicated("amend", &link).await?;
                Amended::Done
            }
            "busy" => Amended::Busy,
            _ => Amended::Gone,
        })
    }

    pub(crate) async fn evict(&self, name: &Name, id: &str, eviction: Eviction) -> Result<bool> {
        let keys = self.keys.line(name)?;
        let mut link = self.link(Some(&keys)).await?;
        let how = match eviction {
            Eviction::Mark => "mark",
            Eviction::Remove => "remove",
        };
        let arguments = |command: &mut Cmd| {
            command.arg(foreign_value(id)).arg(how);
        };
        let answer: String = self.run(&mut link, Script::Evict, &keys, arguments).await?;
        match answer.as_str() {
            "done" => Ok(true),
            "foreign" => Err(Error::new(
                ErrorKind::Unsupported,
                "evict",
                "another tool holds this lock and can't be asked to let go; it can only be removed by force",
            )),
            _ => Ok(false),
        }
    }

    pub(crate) async fn resize(&self, name: &Name, capacity: u32) -> Result<bool> {
        let keys = self.keys.line(name)?;
        let mut link = self.link(Some(&keys)).await?;
        let arguments = |command: &mut Cmd| {
            command.arg(capacity).arg(READERS);
        };
        let answer: String = self
            .run(&mut link, Script::Resize, &keys, arguments)
            .await?;
        match answer.as_str() {
            "done" => {
                self.replicated("resize", &link).await?;
                Ok(true)
            }
            "none" => Ok(false),
            "readers" => Err(capacity_mismatch(READERS, capacity)),
            heavy => {
                let weight = heavy.trim_start_matches("heavy ");
                let message =
                    format!("a claim in this line takes {weight} permits, more than {capacity}");
                Err(Error::new(ErrorKind::InvalidArgument, "resize", message))
            }
        }
    }
}
