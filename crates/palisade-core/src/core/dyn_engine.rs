//! `DynEngine`: the object-safe form of [`Engine`], generated from it. `Layer`: an engine around an
//! engine that overrides only some methods.
//!
//! The list of methods at the end of this file is the only place that forwards them. A method that
//! is added to `Engine` but not to the list is a compile error.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::capability::Capability;
use super::claim::Claim;
use super::clock::BootTime;
use super::engine::{
    Alarm, Amended, Amendment, Audited, BoxStream, Engine, Entered, Eviction, Left, Place, Renewal,
};
use super::error::Result;
use super::name::Name;
use super::queue::SharedQueueStore;
use super::report::{Checkup, LineReport, Scope};
use super::ticket::{Lease, LeaseId, Ticket};

/// An engine of any kind, shared by all its users. It is an [`Engine`] itself.
pub type SharedEngine = Arc<dyn DynEngine>;

macro_rules! forward {
    (
        plain { $($plain:ident($($p:ident: $P:ty),*) -> $plain_answer:ty;)* }
        future { $($verb:ident($($a:ident: $A:ty),*) -> $answer:ty;)* }
    ) => {
        /// An [`Engine`] as a trait object. Every `Engine` is one: implement `Engine` instead.
        pub trait DynEngine: Send + Sync + 'static {
            $(
                #[doc = concat!("See [`Engine::", stringify!($plain), "`].")]
                fn $plain(&self, $($p: $P),*) -> $plain_answer;
            )*
            $(
                #[doc = concat!("See [`Engine::", stringify!($verb), "`].")]
                fn $verb(&self, $($a: $A),*) -> BoxFuture<'_, $answer>;
            )*
        }

        impl<E: Engine> DynEngine for E {
            $(fn $plain(&self, $($p: $P),*) -> $plain_answer {
                Engine::$plain(self, $($p),*)
            })*
            $(fn $verb(&self, $($a: $A),*) -> BoxFuture<'_, $answer> {
                Box::pin(Engine::$verb(self, $($a),*))
            })*
        }

        impl Engine for SharedEngine {
            $(fn $plain(&self, $($p: $P),*) -> $plain_answer {
                DynEngine::$plain(&**self, $($p),*)
            })*
            $(fn $verb(&self, $($a: $A),*) -> impl Future<Output = $answer> + Send {
                DynEngine::$verb(&**self, $($a),*)
            })*
        }

        /// An engine around an engine: every method goes to [`Layer::inner`] unless it is
        /// overridden. Every layer is an [`Engine`].
        pub trait Layer: Send + Sync + 'static {
            /// The wrapped engine.
            fn inner(&self) -> &SharedEngine;
            $(
                #[doc = concat!("See [`Engine::", stringify!($plain), "`].")]
                fn $plain(&self, $($p: $P),*) -> $plain_answer {
                    DynEngine::$plain(&**self.inner(), $($p),*)
                }
            )*
            $(
                #[doc = concat!("See [`Engine::", stringify!($verb), "`].")]
                fn $verb(&self, $($a: $A),*) -> impl Future<Output = $answer> + Send {
                    DynEngine::$verb(&**self.inner(), $($a),*)
                }
            )*
        }

        impl<L: Layer> Engine for L {
            $(fn $plain(&self, $($p: $P),*) -> $plain_answer {
                Layer::$plain(self, $($p),*)
            })*
            $(fn $verb(&self, $($a: $A),*) -> impl Future<Output = $answer> + Send {
                Layer::$verb(self, $($a),*)
            })*
        }
    };
}

forward! {
    plain {
        capability() -> Capability;
        describe() -> String;
        alarms() -> BoxStream<Alarm>;
        watch(scope: Scope) -> BoxStream<Result<()>>;
        key(ticket: &Ticket) -> Option<String>;
        queues() -> Option<SharedQueueStore>;
    }
    future {
        enter(claim: Arc<Claim>) -> Result<Entered>;
        wait(ticket: Ticket, until: BootTime) -> Result<Place>;
        renew(leases: Vec<Lease>, within: Duration) -> Vec<Renewal>;
        amend(ticket: Ticket, amendment: Amendment) -> Result<Amended>;
        leave(ticket: Ticket) -> Result<Left>;
        audit(lease: LeaseId) -> Result<Vec<Audited>>;
        survey(scope: Scope) -> Result<Vec<LineReport>>;
        evict(name: Name, id: String, eviction: Eviction) -> Result<bool>;
        resize(name: Name, capacity: u32) -> Result<bool>;
        check() -> Result<Checkup>;
        close() -> ();
    }
}
