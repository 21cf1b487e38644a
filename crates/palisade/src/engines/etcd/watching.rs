//! `Watcher`: all watches of one connection, on one stream.
//!
//! A watch begins at "now": one that begins at a revision in the past is served by etcd's sync
//! loop only, every 100 ms. So whoever watches looks once more after [`News::Begun`], for what
//! happened before. A push is never a grant: it says only that it is worth looking.
//!
//! The task that reads the stream belongs to the runtime of its connection and ends with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::rpc::Connection;
use super::wire::{
    Event, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse, Watching,
};

/// What a watch tells.
#[derive(Debug)]
pub(super) enum News {
    /// From here on every change is told.
    Begun,
    /// Something changed.
    Changed(Vec<Event>),
    /// Nothing more is told: the stream broke, or etcd has ended the watch.
    Over,
}

type Routes = Arc<Mutex<HashMap<i64, mpsc::UnboundedSender<News>>>>;

/// The watches of one connection.
pub(super) struct Watcher {
    questions: mpsc::UnboundedSender<WatchRequest>,
    routes: Routes,
    over: Arc<AtomicBool>,
    next: AtomicI64,
    reader: AbortHandle,
}

/// One watch. Ends when it is dropped.
pub(super) struct Watch {
    id: i64,
    news: mpsc::UnboundedReceiver<News>,
    watcher: Arc<Watcher>,
}

impl Watcher {
    /// Opens the stream in the background.
    pub(super) fn open(connection: Connection) -> Arc<Self> {
        let (questions, asked) = mpsc::unbounded_channel();
        let (routes, over) = (Routes::default(), Arc::new(AtomicBool::new(false)));
        let reading = read(connection, asked, Arc::clone(&routes), Arc::clone(&over));
        Arc::new(Self {
            questions,
            routes,
            over,
            next: AtomicI64::new(1),
            reader: tokio::spawn(reading).abort_handle(),
        })
    }

    /// Whether the stream has ended.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Watches `key`, or the range from it to `range_end`, from now on.
    pub(super) fn watch(self: &Arc<Self>, key: Vec<u8>, range_end: Vec<u8>) -> Watch {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (told, news) = mpsc::unbounded_channel();
        self.routes.lock().insert(id, told);
        let create = Watching::Create(WatchCreateRequest {
            key,
            range_end,
            watch_id: id,
        });
        self.send(create);
        // After the insert: whoever ends the stream tells all routes after it has said so.
        if self.is_over() {
            self.routes.lock().remove(&id);
        }
        Watch {
            id,
            news,
            watcher: Arc::clone(self),
        }
    }

    fn send(&self, watching: Watching) {
        // A stream that has ended tells its routes by itself.
        let _ = self.questions.send(WatchRequest {
            watching: Some(watching),
        });
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Watch {
    /// What is told next. Can be dropped and called again.
    pub(super) async fn next(&mut self) -> News {
        self.news.recv().await.unwrap_or(News::Over)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watcher.routes.lock().remove(&self.id);
        let cancel = Watching::Cancel(WatchCancelRequest { watch_id: self.id });
        self.watcher.send(cancel);
    }
}

async fn read(
    connection: Connection,
    asked: mpsc::UnboundedReceiver<WatchRequest>,
    routes: Routes,
    over: Arc<AtomicBool>,
) {
    let ended = Ended(Arc::clone(&routes), over);
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
        let mut routes = routes.lock();
        let id = answer.watch_id;
        let Some(route) = routes.get(&id) else {
            continue;
        };
        let news = match answer {
            WatchResponse { canceled: true, .. } => News::Over,
            WatchResponse { created: true, .. } => News::Begun,
            answer => News::Changed(answer.events),
        };
        let over = matches!(news, News::Over);
        // Nobody listening: the watch is being ended.
        let _ = route.send(news);
        if over {
            routes.remove(&id);
        }
    }
    drop(ended);
}

/// However the stream ends, every watch on it is told.
struct Ended(Routes, Arc<AtomicBool>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Release);
        self.0.lock().clear();
    }
}
