//! `Watcher`: all watches of one connection, on one stream.
//!
//! A watch begins at "now": one that begins at a revision in the past is served by etcd's sync
//! loop only, every 100 ms. So whoever watches looks once more for what happened before
//! [`News::Begun`], unless what it has seen is not older. A push is never a grant: it says only
//! that it is worth looking.
//!
//! The task that reads the stream belongs to the runtime of its connection and ends with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::book::{self, Book, Listener, News, Range};
use super::rpc::{Connection, revision};
use super::wire::{
    Event, NO_PUT, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse, Watching,
};

type Questions = mpsc::UnboundedSender<WatchRequest>;

/// The watches of one connection.
pub(super) struct Watcher {
    questions: Questions,
    book: Arc<Mutex<Book>>,
    over: Arc<AtomicBool>,
    reader: AbortHandle,
}

/// One who watches. What is not a standing watch ends when it is dropped.
pub(super) struct Watch {
    listener: Option<Listener>,
    watcher: Arc<Watcher>,
}

impl Watcher {
    /// Opens the stream in the background.
    pub(super) fn open(connection: Connection) -> Arc<Self> {
        let (questions, asked) = mpsc::unbounded_channel();
        let (book, over) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let reading = Reading {
            book: Arc::clone(&book),
            over: Arc::clone(&over),
            questions: questions.downgrade(),
        };
        Arc::new(Self {
            questions,
            book,
            over,
            reader: tokio::spawn(reading.read(connection, asked)).abort_handle(),
        })
    }

    /// Whether the stream has ended.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Watches a range from now on, with a watch of its own.
    pub(super) fn watch(self: &Arc<Self>, range: Range) -> Watch {
        self.begin(range, false)
    }

    /// Watches a range with a watch that stays for whoever needs it next.
    pub(super) fn stand(self: &Arc<Self>, range: Range) -> Watch {
        let joined = self.book.lock().join(&range);
        match joined {
            Some(listener) => self.listening(Some(listener)),
            None => self.begin(range, true),
        }
    }

    fn begin(self: &Arc<Self>, range: Range, standing: bool) -> Watch {
        let mut book = self.book.lock();
        let listener = book.begin(standing.then(|| range.clone()));
        if let Some(listener) = &listener {
            let create = WatchCreateRequest {
                key: range.key,
                range_end: range.end,
                filters: range.deletes.then_some(NO_PUT).into_iter().collect(),
                watch_id: listener.watch,
            };
            send(&self.questions, Watching::Create(create));
        }
        // After it was taken down: whoever ends the stream clears the book after it has said so.
        if self.is_over() {
            book.clear();
        }
        drop(book);
        self.listening(listener)
    }

    fn listening(self: &Arc<Self>, listener: Option<Listener>) -> Watch {
        Watch {
            listener,
            watcher: Arc::clone(self),
        }
    }
}

fn send(questions: &Questions, watching: Watching) {
    // A stream that has ended tells its listeners by itself.
    let _ = questions.send(WatchRequest {
        watching: Some(watching),
    });
}

fn cancel(questions: &Questions, watch_id: i64) {
    send(questions, Watching::Cancel(WatchCancelRequest { watch_id }));
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Watch {
    /// What is told next. Can be dropped and called again.
    pub(super) async fn next(&mut self) -> News {
        match &mut self.listener {
            Some(listener) => listener.news.recv().await.unwrap_or(News::Over),
            None => News::Over,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        let useless = self.watcher.book.lock().part(listener);
        if let Some(watch) = useless {
            cancel(&self.watcher.questions, watch);
        }
    }
}

/// The task that reads the stream. However it ends, everyone who listens is told.
struct Reading {
    book: Arc<Mutex<Book>>,
    over: Arc<AtomicBool>,
    questions: mpsc::WeakUnboundedSender<WatchRequest>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.book.lock().clear();
    }
}

impl Reading {
    async fn read(self, connection: Connection, asked: mpsc::UnboundedReceiver<WatchRequest>) {
        let questions = stream::unfold(asked, |mut asked| async move {
            asked.recv().await.map(|question| (question, asked))
        });
        let Ok(mut answers) = connection
            .stream::<_, WatchResponse>("/etcdserverpb.Watch/Watch", questions)
            .await
        else {
            return;
        };
        drop(connection);
        while let Some(Ok(answer)) = answers.next().await {
            let at = revision(answer.header.as_ref());
            let news = match answer {
                WatchResponse { canceled: true, .. } => News::Over,
                WatchResponse { created: true, .. } => book::begun(at),
                // Of its own progress only.
                WatchResponse { events, .. } if events.is_empty() => continue,
                WatchResponse { events, .. } => News::Changed(last(&events), events),
            };
            let useless = self.book.lock().tell(answer.watch_id, news);
            if let Some(questions) = self.questions.upgrade().filter(|_| useless) {
                cancel(&questions, answer.watch_id);
            }
        }
    }
}

/// The revision of the last of these changes.
fn last(events: &[Event]) -> i64 {
    let revisions = events.iter().filter_map(|event| event.kv.as_ref());
    revisions.map(|kv| kv.mod_revision).max().unwrap_or(0)
}
