//! The same API for code without a runtime.
//!
//! Every call blocks its thread. It works on plain threads, in `spawn_blocking`, and on the workers
//! of a multi-threaded tokio runtime (which moves its other tasks away first). On the only thread
//! of a current-thread runtime it would block all tasks, perhaps including the one that holds the
//! lock: there it fails with [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
//!
//! ```
//! fn main() -> palisade::Result<()> {
//!     let palisade = palisade::blocking::connect("memory:")?;
//!     let hold = palisade.mutex("nightly-report").lock()?;
//!     println!("token {}", hold.token());
//!     hold.release()
//! }
//! ```

mod client;
mod hold;
mod primitives;
mod runtime;

pub use client::Client;
pub use hold::{Elected, Hold, MultiHold, ReentrantHold, RwHold};
pub use primitives::{Election, Leaders, MultiLock, Mutex, ReentrantMutex, RwLock, Semaphore};
#[doc(hidden)]
pub use runtime::wait;
