//! `Names`: maps the names of a namespace to names at the gateway.
//!
//! A gateway has one namespace of its engine. `namespace=NS` puts names under `NS/` in it, in the
//! format of the prefixes in its access file; without it, names are the gateway's own.

use palisade_core::engine::MAX_NAME;
use palisade_core::report::{Agent, Owner};
use palisade_core::{Error, ErrorKind, Name, Result};

#[derive(Debug)]
pub(super) struct Names {
    prefix: String,
}

impl Names {
    /// `palisade`, the default namespace of every engine, means the gateway's own names.
    pub(super) fn new(namespace: &str) -> Self {
        Self {
            prefix: match namespace {
                "" | "palisade" => String::new(),
                own => format!("{own}/"),
            },
        }
    }

    /// The gateway's name for a line.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] when the name is too long with the namespace in front.
    pub(super) fn there(&self, name: &Name) -> Result<String> {
        let there = format!("{}{name}", self.prefix);
        if there.len() > MAX_NAME {
            let most = MAX_NAME.saturating_sub(self.prefix.len());
            let message = format!(
                "in this namespace a gateway has {most} bytes for a name; shorten or hash it"
            );
            return Err(Error::new(ErrorKind::InvalidName, "name", message));
        }
        Ok(there)
    }

    /// The gateway's prefix for names that begin with `prefix` here.
    pub(super) fn prefix(&self, prefix: &str) -> String {
        format!("{}{prefix}", self.prefix)
    }

    /// Our name for a name at the gateway; `None` when it is in another namespace.
    pub(super) fn here<'a>(&self, there: &'a str) -> Option<&'a str> {
        there.strip_prefix(&self.prefix)
    }

    /// The owner record with its agent's names as at the gateway.
    pub(super) fn owner_there(&self, owner: &Owner) -> Owner {
        renamed(owner, |name| *name = self.prefix(name))
    }

    /// The owner record with its agent's names as here. Names in other namespaces stay as they are.
    pub(super) fn owner_here(&self, owner: &Owner) -> Owner {
        let here = |name: &mut String| {
            if let Some(own) = self.here(name) {
                *name = own.to_owned();
            }
        };
        renamed(owner, here)
    }
}

fn renamed(owner: &Owner, rename: impl Fn(&mut String)) -> Owner {
    let mut owner = owner.clone();
    if let Some(Agent { holds, within, .. }) = &mut owner.agent {
        holds.iter_mut().for_each(&rename);
        within.iter_mut().for_each(|above| rename(&mut above.name));
    }
    owner
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::report::Ancestor;

    #[test]
    fn a_namespace_is_a_prefix_and_the_default_is_none() {
        let (name, own) = (Name::new("card").unwrap(), Names::new("billing"));
        assert_eq!(own.there(&name).unwrap(), "billing/card");
        assert_eq!(own.here("billing/card"), Some("card"));
        assert_eq!(own.here("billing-x/card"), None);
        for namespace in ["", "palisade"] {
            let names = Names::new(namespace);
            assert_eq!(names.there(&name).unwrap(), "card");
            assert_eq!(names.here("billing/card"), Some("billing/card"));
        }
        let long = Name::new("x".repeat(255 - 8)).unwrap();
        assert_eq!(own.there(&long).unwrap().len(), 255);
        let longer = Name::new("x".repeat(255 - 7)).unwrap();
        let error = own.there(&longer).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidName);
    }

    #[test]
    fn agents_say_the_names_of_their_namespace() {
        let names = Names::new("billing");
        let mut owner = Owner::here("me", None);
        owner.agent = Some(Agent {
            holds: vec!["a".into()],
            within: vec![Ancestor {
                claim: "1".into(),
                name: "b".into(),
            }],
            ..Agent::default()
        });
        let there = names.owner_there(&owner);
        let agent = there.agent.as_ref().unwrap();
        assert_eq!(agent.holds, ["billing/a"]);
        assert_eq!(agent.within[0].name, "billing/b");
        assert_eq!(names.owner_here(&there), owner);
    }
}
