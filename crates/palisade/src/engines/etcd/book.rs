//! `Book`: who listens to which watch of one connection, and what each watch has told.
//!
//! A standing watch stays for a while when nobody listens any more: keys are used again, and the
//! same one is soon ahead again. Whoever waits for it then needs neither a new watch nor a look,
//! as long as what it has seen is not older than what the watch tells.

use std::collections::HashMap;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::wire::Event;

/// How many standing watches are kept that nobody listens to.
const MOST_IDLE: usize = 16;

/// How many changes an idle watch may tell to nobody before it is ended: each costs a message.
const MOST_UNHEARD: u32 = 8;

/// What a watch tells.
#[derive(Debug, Clone)]
pub(super) enum News {
    /// From here on every change is told.
    Begun(Begun),
    /// Something changed, the last of it at this revision.
    Changed(i64, Vec<Event>),
    /// Nothing more is told: the stream broke, or etcd has ended the watch.
    Over,
}

/// From where on a watch tells everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Begun {
    /// What happened up to this revision is not told.
    since: i64,
    /// The revision of the last change that was told, to whomever.
    last: i64,
}

impl Begun {
    /// Whether what was seen at `revision` may have changed without being told from here on.
    pub(super) fn may_have_missed(self, revision: i64) -> bool {
        revision < self.since.max(self.last)
    }
}

/// What is watched.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Range {
    pub(super) key: Vec<u8>,
    /// Empty for one key.
    pub(super) end: Vec<u8>,
    /// Whether only the ends of keys are told.
    pub(super) deletes: bool,
}

/// The watches of one connection.
#[derive(Default)]
pub(super) struct Book {
    /// Counts watches and listeners.
    count: i64,
    routes: HashMap<i64, Route>,
    /// Watches that are found by what they watch.
    standing: HashMap<Range, i64>,
    /// Standing watches that nobody listens to, the longest idle first.
    idle: Vec<i64>,
}

/// One watch, as etcd knows it.
#[derive(Default)]
struct Route {
    /// `None` for one that is not shared, and ends with its listener.
    standing: Option<Range>,
    begun: Option<Begun>,
    listeners: Vec<(i64, UnboundedSender<News>)>,
    unheard: u32,
}

/// Somebody who listens.
pub(super) struct Listener {
    pub(super) watch: i64,
    number: i64,
    pub(super) news: UnboundedReceiver<News>,
}

impl Book {
    /// Listens to a standing watch, if there is one.
    pub(super) fn join(&mut self, range: &Range) -> Option<Listener> {
        let watch = *self.standing.get(range)?;
        self.idle.retain(|idle| *idle != watch);
        self.listen(watch)
    }

    /// Takes a new watch down, which etcd is to be asked for.
    pub(super) fn begin(&mut self, standing: Option<Range>) -> Option<Listener> {
        self.count += 1;
        let watch = self.count;
        if let Some(range) = &standing {
            self.standing.insert(range.clone(), watch);
        }
        let route = Route {
            standing,
            ..Default::default()
        };
        self.routes.insert(watch, route);
        self.listen(watch)
    }

    fn listen(&mut self, watch: i64) -> Option<Listener> {
        self.count += 1;
        let number = self.count;
        let route = self.routes.get_mut(&watch)?;
        let (told, news) = unbounded_channel();
        if let Some(begun) = route.begun {
            // The other end is in our hands.
            let _ = told.send(News::Begun(begun));
        }
        route.unheard = 0;
        route.listeners.push((number, told));
        Some(Listener {
            watch,
            number,
            news,
        })
    }

    /// Lets somebody go; answers which watch is of no use any more.
    pub(super) fn part(&mut self, listener: &Listener) -> Option<i64> {
        let watch = listener.watch;
        let route = self.routes.get_mut(&watch)?;
        let is_other = |(number, _): &(i64, _)| *number != listener.number;
        route.listeners.retain(is_other);
        if !route.listeners.is_empty() {
            return None;
        }
        if route.standing.is_none() {
            self.forget(watch);
            return Some(watch);
        }
        self.idle.push(watch);
        let oldest = (self.idle.len() > MOST_IDLE).then(|| self.idle[0])?;
        self.forget(oldest);
        Some(oldest)
    }

    /// Tells whoever listens; answers whether the watch is of no use any more.
    pub(super) fn tell(&mut self, watch: i64, news: News) -> bool {
        let Some(route) = self.routes.get_mut(&watch) else {
            return false;
        };
        for (_, told) in &route.listeners {
            // Nobody listening: it is about to part.
            let _ = told.send(news.clone());
        }
        match news {
            News::Begun(begun) => route.begun = Some(begun),
            News::Changed(revision, _) => {
                if let Some(begun) = &mut route.begun {
                    begun.last = begun.last.max(revision);
                }
                if route.listeners.is_empty() {
                    route.unheard += 1;
                }
                if route.unheard > MOST_UNHEARD {
                    self.forget(watch);
                    return true;
                }
            }
            News::Over => self.forget(watch),
        }
        false
    }

    /// Ends all of them.
    pub(super) fn clear(&mut self) {
        *self = Self {
            count: self.count,
            ..Self::default()
        };
    }

    fn forget(&mut self, watch: i64) {
        self.idle.retain(|idle| *idle != watch);
        let route = self.routes.remove(&watch);
        if let Some(range) = route.and_then(|route| route.standing)
            && self.standing.get(&range) == Some(&watch)
        {
            self.standing.remove(&range);
        }
    }
}

/// What etcd says when a watch begins: what happened up to this revision is not told.
pub(super) fn begun(since: i64) -> News {
    News::Begun(Begun { since, last: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(key: &str) -> Range {
        Range {
            key: key.into(),
            end: Vec::new(),
            deletes: true,
        }
    }

    fn changed(revision: i64) -> News {
        News::Changed(revision, Vec::new())
    }

    #[test]
    fn whoever_joins_later_knows_what_was_told_before() {
        let mut book = Book::default();
        let mut first = book.begin(Some(range("a"))).unwrap();
        book.tell(first.watch, begun(10));
        book.tell(first.watch, changed(12));
        assert!(matches!(first.news.try_recv(), Ok(News::Begun(_))));
        assert!(matches!(first.news.try_recv(), Ok(News::Changed(12, _))));
        assert_eq!(book.part(&first), None, "it stands");
        book.tell(first.watch, changed(14));
        let mut second = book.join(&range("a")).unwrap();
        let Ok(News::Begun(begun)) = second.news.try_recv() else {
            panic!("not begun")
        };
        assert!(begun.may_have_missed(13), "the change at 14");
        assert!(!begun.may_have_missed(14));
        book.tell(second.watch, changed(15));
        assert!(matches!(second.news.try_recv(), Ok(News::Changed(15, _))));
        assert!(book.join(&range("b")).is_none());
    }

    #[test]
    fn what_happened_before_it_began_may_have_been_missed() {
        let begun = Begun { since: 10, last: 0 };
        assert!(begun.may_have_missed(9));
        assert!(!begun.may_have_missed(10));
    }

    #[test]
    fn idle_watches_are_ended_when_there_are_many_or_when_they_talk_to_nobody() {
        let mut book = Book::default();
        let mut ended = Vec::new();
        for number in 0..MOST_IDLE + 3 {
            let listener = book.begin(Some(range(&number.to_string()))).unwrap();
            ended.extend(book.part(&listener));
        }
        assert_eq!(ended.len(), 3);
        assert!(book.join(&range("0")).is_none(), "the longest idle goes");
        let kept = book.standing[&range("5")];
        let told = (0..=MOST_UNHEARD).map(|at| book.tell(kept, changed(i64::from(at))));
        assert_eq!(told.filter(|over| *over).count(), 1);
        assert!(book.join(&range("5")).is_none());
        // One that is not shared goes with its listener.
        let alone = book.begin(None).unwrap();
        assert_eq!(book.part(&alone), Some(alone.watch));
        assert_eq!(book.routes.len(), book.standing.len());
    }

    #[test]
    fn the_end_is_told_to_everyone_and_nobody_joins_after_it() {
        let mut book = Book::default();
        let mut one = book.begin(Some(range("a"))).unwrap();
        let mut two = book.join(&range("a")).unwrap();
        book.tell(one.watch, News::Over);
        assert!(matches!(one.news.try_recv(), Ok(News::Over)));
        assert!(matches!(two.news.try_recv(), Ok(News::Over)));
        assert!(book.join(&range("a")).is_none());
        let mut three = book.begin(Some(range("a"))).unwrap();
        assert_eq!(book.part(&one), None, "a late goodbye to another");
        book.clear();
        assert!(three.news.try_recv().is_err());
    }
}
