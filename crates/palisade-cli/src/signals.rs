//! The signals that palisade handles: those that it passes on, and those of job control.
//!
//! A signal that was ignored when palisade was started stays ignored, for the child too, as `nohup`
//! requires.

use std::future::poll_fn;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::exit::{Failure, refused};
use crate::{sys, terminal};

/// Signals that end a process by default, sent by a person or a supervisor. A command may handle
/// each of them differently.
const ENDING: [Signal; 6] = [
    Signal::INT,
    Signal::TERM,
    Signal::HUP,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
];

/// Those that palisade handles: not the ones that were ignored when it was started.
pub(crate) fn endings() -> impl Iterator<Item = Signal> {
    ENDING
        .into_iter()
        .filter(|signal| !sys::is_ignored(*signal))
}

/// Signals that ask palisade to end. None is lost.
pub(crate) struct Endings(Vec<(Signal, Stream)>);

impl Endings {
    /// Starts listening.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let streams = endings().map(|signal| Ok((signal, stream(signal)?)));
        Ok(Self(streams.collect::<Result<_, Failure>>()?))
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (signal, stream) in &mut self.0 {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// What can happen to palisade while a child runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// To be passed on to the child.
    Ending(Signal),
    /// The terminal asks us to stop.
    Stop,
    /// We were resumed.
    Resumed,
    /// The size of the terminal has changed while we are in its foreground. The kernel signals only
    /// the foreground group: the child or us.
    Resized,
}

/// All signals of interest while a child runs.
pub(crate) struct Signals {
    endings: Endings,
    stop: Option<Stream>,
    resumed: Stream,
    resized: Stream,
}

impl Signals {
    pub(crate) fn listen() -> Result<Self, Failure> {
        let heard = !sys::is_ignored(Signal::TSTP);
        Ok(Self {
            endings: Endings::listen()?,
            stop: heard.then(|| stream(Signal::TSTP)).transpose()?,
            resumed: stream(Signal::CONT)?,
            resized: stream(Signal::WINCH)?,
        })
    }

    /// The next signal that asks us to end, while no child runs.
    pub(crate) async fn ending(&mut self) -> Signal {
        loop {
            match self.next().await {
                Event::Ending(signal) => return signal,
                Event::Stop => terminal::stop(terminal::Stop::Us),
                Event::Resumed | Event::Resized => {}
            }
        }
    }

    /// The next event.
    pub(crate) async fn next(&mut self) -> Event {
        let stop = async {
            match &mut self.stop {
                Some(stop) => stop.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            signal = self.endings.next() => Event::Ending(signal),
            _ = stop => Event::Stop,
            _ = self.resumed.recv() => Event::Resumed,
            _ = self.resized.recv() => Event::Resized,
        }
    }
}

fn stream(kind: Signal) -> Result<Stream, Failure> {
    signal(SignalKind::from_raw(kind.as_raw())).map_err(refused("can't listen to signals"))
}
