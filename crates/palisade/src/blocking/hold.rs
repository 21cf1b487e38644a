//! What is held, for blocking code.

use std::time::Duration;

use super::runtime::wait;
use crate::core::clock::BootTime;
use crate::core::error::Result;
use crate::core::hold;
use crate::core::name::Name;
use crate::core::token::Token;
use crate::core::validity::Loss;
use crate::fence::{ReadToken, WriteToken};
use crate::primitives;

/// Writes a hold that is looked at like the async one, and whose verbs wait for it. `$looks` are
/// forwarded as they are.
macro_rules! held {
    ($(#[$doc:meta])* $name:ident = $inner:path { $($look:ident -> $seen:ty;)* } $end:ident $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use = "dropping it lets go"]
        #[derive(Debug)]
        pub struct $name(pub(super) $inner);

        impl $name {
            $(
                #[doc = concat!("As `", stringify!($look), "` of the async one.")]
                pub fn $look(&self) -> $seen {
                    self.0.$look()
                }
            )*

            #[doc = concat!("As `", stringify!($end), "` of the async one, blocking.")]
            ///
            /// # Errors
            /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock), when it is given up in
            /// the background.
            pub fn $end(self) -> Result<()> {
                wait(self.0.$end())?
            }

            $($rest)*
        }
    };
}

/// Waits at most this long for a loss; `None` when there was none.
fn lost_within(lost: impl Future<Output = Loss>, limit: Duration) -> Result<Option<Loss>> {
    wait(async { tokio::time::timeout(limit, lost).await.ok() })
}

held!(
    /// A granted place; see [`palisade::Hold`](crate::Hold). Dropping it releases in the
    /// background.
    Hold = hold::Hold {
        name -> &Name;
        token -> Token;
        write_token -> Result<WriteToken>;
        read_token -> Result<ReadToken>;
        is_valid -> bool;
        remaining -> Duration;
        deadline -> BootTime;
    }
    release

    /// Waits at most this long for a loss; `None` when there was none.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
        lost_within(self.0.lost(), limit)
    }
);

held!(
    /// A granted read or write; see [`palisade::RwHold`](crate::RwHold).
    RwHold = primitives::RwHold {
        name -> &Name;
        token -> Token;
        write_token -> Result<WriteToken>;
        read_token -> Result<ReadToken>;
        is_valid -> bool;
        remaining -> Duration;
        deadline -> BootTime;
    }
    release

    /// Waits at most this long for a loss; `None` when there was none.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
        lost_within(self.0.lost(), limit)
    }

    /// As [`downgrade`](crate::RwHold::downgrade), blocking.
    ///
    /// # Errors
    /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn downgrade(&mut self) -> Result<()> {
        wait(self.0.downgrade())?
    }

    /// As [`try_upgrade`](crate::RwHold::try_upgrade), blocking.
    ///
    /// # Errors
    /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn try_upgrade(&mut self) -> Result<bool> {
        wait(self.0.try_upgrade())?
    }
);

held!(
    /// Several locks held together; see [`palisade::MultiHold`](crate::MultiHold).
    MultiHold = primitives::MultiHold {
        is_valid -> bool;
        deadline -> BootTime;
    }
    release

    /// The tokens, sorted by name.
    pub fn tokens(&self) -> Vec<(&Name, Token)> {
        let holds = self.0.holds().iter();
        holds.map(|hold| (hold.name(), hold.token())).collect()
    }

    /// Waits at most this long for the loss of one; `None` when there was none.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
        lost_within(self.0.lost(), limit)
    }
);

held!(
    /// One taking of a reentrant lock; see [`palisade::ReentrantHold`](crate::ReentrantHold).
    ReentrantHold = primitives::ReentrantHold {
        name -> &Name;
        token -> Token;
        write_token -> Result<WriteToken>;
        read_token -> Result<ReadToken>;
        is_valid -> bool;
        remaining -> Duration;
        deadline -> BootTime;
        depth -> usize;
    }
    release

    /// Waits at most this long for a loss; `None` when there was none.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
        lost_within(self.0.lost(), limit)
    }
);

held!(
    /// A won election; see [`palisade::Elected`](crate::Elected). Dropping it resigns.
    Elected = primitives::Elected {
    }
    resign

    /// The term: greater for every later leader.
    pub fn token(&self) -> Token {
        self.0.hold().token()
    }

    /// Whether it leads now.
    pub fn is_valid(&self) -> bool {
        self.0.hold().is_valid()
    }

    /// Waits at most this long for a loss; `None` when there was none.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
        lost_within(self.0.hold().lost(), limit)
    }

    /// As [`proclaim`](crate::Elected::proclaim), blocking.
    ///
    /// # Errors
    /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn proclaim(&self, value: &str) -> Result<()> {
        wait(self.0.proclaim(value))?
    }
);
