//! `Watches`: the listeners for changes of znodes. A watch lives with one connection; when that
//! ends, all listeners are notified and read again.

use std::collections::HashMap;

use tokio::sync::{mpsc, oneshot};

use super::proto::event;

/// What a watch covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Watched {
    Node,
    Children,
}

/// The listeners. A dropped sender counts as a notification.
#[derive(Default)]
pub(super) struct Watches {
    once: HashMap<(String, Watched), Vec<oneshot::Sender<()>>>,
    trees: Vec<(String, mpsc::Sender<()>)>,
}

impl Watches {
    /// Notified when the znode or its children change.
    pub(super) fn once(&mut self, path: &str, what: Watched) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        let all = self.once.entry((path.to_owned(), what)).or_default();
        all.retain(|other| !other.is_closed());
        all.push(tell);
        told
    }

    /// Notified after changes at and below `path`.
    pub(super) fn tree(&mut self, path: &str) -> mpsc::Receiver<()> {
        let (tell, told) = mpsc::channel(1);
        self.trees.push((path.to_owned(), tell));
        told
    }

    /// Removes closed listeners; `true` when nobody listens to the tree any more.
    pub(super) fn is_unheard(&mut self, path: &str) -> bool {
        self.trees.retain(|(_, tell)| !tell.is_closed());
        let unheard = !self.trees.iter().any(|(other, _)| other == path);
        if unheard {
            // The request that removes the tree's watch also removes these.
            self.once.retain(|(other, _), _| other != path);
        }
        unheard
    }

    pub(super) fn tell(&mut self, kind: i32, path: &str) {
        let mut fire = |what| self.once.remove(&(path.to_owned(), what));
        match kind {
            event::CHILDREN => drop(fire(Watched::Children)),
            event::DELETED => drop((fire(Watched::Node), fire(Watched::Children))),
            _ => drop(fire(Watched::Node)),
        }
        let is_below = |tree: &str| {
            let rest = path.strip_prefix(tree.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        for (_, tell) in self.trees.iter().filter(|(tree, _)| is_below(tree)) {
            // A notification that is still pending covers this change, too.
            let _ = tell.try_send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_reach_those_who_watch() {
        let mut watches = Watches::default();
        let mut node = watches.once("/a/b", Watched::Node);
        let mut tree = watches.tree("/a");
        watches.tell(event::CHILDREN, "/a/b");
        assert!(node.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        assert!(tree.try_recv().is_ok());
        watches.tell(event::DELETED, "/a/b");
        assert!(node.try_recv() == Err(oneshot::error::TryRecvError::Closed));
        watches.tell(3, "/ab");
        assert_eq!(tree.try_recv(), Ok(()));
        assert!(tree.try_recv().is_err());
    }
}
