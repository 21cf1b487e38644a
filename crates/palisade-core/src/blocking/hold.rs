//! Holds for blocking code.

use std::convert::identity;
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

/// Generates a hold with the accessors of the async one, which `$seen` extracts, and with methods
/// that block on the async ones.
macro_rules! held {
    ($(#[$doc:meta])* $name:ident = $inner:path, $seen:path { $($look:ident -> $answer:ty;)* } $end:ident $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use = "dropping it lets go"]
        #[derive(Debug)]
        pub struct $name(pub(super) $inner);

        impl $name {
            $(
                #[doc = concat!("As `", stringify!($look), "` of the async one.")]
                pub fn $look(&self) -> $answer {
                    $seen(&self.0).$look()
                }
            )*

            /// Waits at most this long for a loss; `None` if there was none.
            ///
            /// # Errors
            /// [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
            pub fn lost_within(&self, limit: Duration) -> Result<Option<Loss>> {
                let lost = $seen(&self.0).lost();
                wait(async { tokio::time::timeout(limit, lost).await.ok() })
            }

            #[doc = concat!("As `", stringify!($end), "` of the async one, blocking.")]
            ///
            /// # Errors
            /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock); it is then
            /// released in the background.
            pub fn $end(self) -> Result<()> {
                wait(self.0.$end())?
            }

            $($rest)*
        }
    };
}

held!(
    /// A granted place; see [`palisade::Hold`](crate::Hold). Dropping it releases in the
    /// background.
    Hold = hold::Hold, identity {
        name -> &Name;
        token -> Token;
        write_token -> Result<WriteToken>;
        read_token -> Result<ReadToken>;
        is_valid -> bool;
        remaining -> Duration;
        deadline -> BootTime;
    }
    release
);

held!(
    /// A granted read or write; see [`palisade::RwHold`](crate::RwHold).
    RwHold = primitives::RwHold, identity {
        name -> &Name;
        token -> Token;
        write_token -> Result<WriteToken>;
        read_token -> Result<ReadToken>;
        is_valid -> bool;
        remaining -> Duration;
        deadline -> BootTime;
    }
    release

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
    /// Several locks held together; see [`palisade::MultiHold`](crate::MultiHold). The loss of one
    /// is the loss of all.
    MultiHold = primitives::MultiHold, identity {
        is_valid -> bool;
        deadline -> BootTime;
    }
    release

    /// The tokens, sorted by name.
    pub fn tokens(&self) -> Vec<(&Name, Token)> {
        let holds = self.0.holds().iter();
        holds.map(|hold| (hold.name(), hold.token())).collect()
    }
);

held!(
    /// One level of a reentrant lock; see [`palisade::ReentrantHold`](crate::ReentrantHold).
    ReentrantHold = primitives::ReentrantHold, identity {
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
);

held!(
    /// A won election; see [`palisade::Elected`](crate::Elected). Its token is the term, greater
    /// for every later leader. Dropping it resigns.
    Elected = primitives::Elected, primitives::Elected::hold {
        token -> Token;
        is_valid -> bool;
    }
    resign

    /// As [`proclaim`](crate::Elected::proclaim), blocking.
    ///
    /// # Errors
    /// As there, and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock).
    pub fn proclaim(&self, value: &str) -> Result<()> {
        wait(self.0.proclaim(value))?
    }
);
