//! `rooms!`: which room of an engine has which verb, as a table inside its `impl Engine`.
//!
//! Every engine has the same rooms. A verb in a room is a function that takes the engine's shared
//! state and the verb's arguments by reference. A room can also be a type with the verbs as methods.
//! A verb that needs another shape is written beside the table. If a verb is in neither place, the
//! engine does not compile.
//!
//! ```text
//! impl Engine for ConsulEngine {
//!     rooms! { self.0:
//!         acquire { enter wait }
//!         renew { renew audit }
//!         absent { queues }
//!         …
//!     }
//! ```

/// See the module's documentation.
#[macro_export]
macro_rules! rooms {
    (self: $($room:ident { $($verb:ident)+ })+) => {
        $($($crate::rooms! { @$verb [] $room })+)+
    };
    (self.$shared:tt: $($room:ident { $($verb:ident)+ })+) => {
        $($($crate::rooms! { @$verb [.$shared] $room })+)+
    };
    (@enter [$($of:tt)*] $room:ident) => {
        async fn enter(
            &self,
            claim: std::sync::Arc<palisade_core::engine::Claim>,
        ) -> palisade_core::Result<palisade_core::engine::Entered> {
            $room::enter(&self$($of)*, &claim).await
        }
    };
    (@wait [$($of:tt)*] $room:ident) => {
        async fn wait(
            &self,
            ticket: palisade_core::engine::Ticket,
            until: palisade_core::BootTime,
        ) -> palisade_core::Result<palisade_core::engine::Place> {
            $room::wait(&self$($of)*, &ticket, until).await
        }
    };
    (@renew [$($of:tt)*] $room:ident) => {
        async fn renew(
            &self,
            leases: Vec<palisade_core::engine::Lease>,
            within: std::time::Duration,
        ) -> Vec<palisade_core::engine::Renewal> {
            $room::renew(&self$($of)*, &leases, within).await
        }
    };
    (@audit [$($of:tt)*] $room:ident) => {
        async fn audit(
            &self,
            lease: palisade_core::engine::LeaseId,
        ) -> palisade_core::Result<Vec<palisade_core::engine::Audited>> {
            $room::audit(&self$($of)*, lease).await
        }
    };
    (@leave [$($of:tt)*] $room:ident) => {
        async fn leave(
            &self,
            ticket: palisade_core::engine::Ticket,
        ) -> palisade_core::Result<palisade_core::engine::Left> {
            $room::leave(&self$($of)*, &ticket).await
        }
    };
    (@amend [$($of:tt)*] $room:ident) => {
        async fn amend(
            &self,
            ticket: palisade_core::engine::Ticket,
            amendment: palisade_core::engine::Amendment,
        ) -> palisade_core::Result<palisade_core::engine::Amended> {
            $room::amend(&self$($of)*, &ticket, &amendment).await
        }
    };
    (@evict [$($of:tt)*] $room:ident) => {
        async fn evict(
            &self,
            name: palisade_core::Name,
            id: String,
            eviction: palisade_core::Eviction,
        ) -> palisade_core::Result<bool> {
            $room::evict(&self$($of)*, &name, &id, eviction).await
        }
    };
    (@resize [$($of:tt)*] $room:ident) => {
        async fn resize(
            &self,
            name: palisade_core::Name,
            capacity: u32,
        ) -> palisade_core::Result<bool> {
            $room::resize(&self$($of)*, &name, capacity).await
        }
    };
    (@alarms [$($of:tt)*] $room:ident) => {
        fn alarms(&self) -> palisade_core::engine::BoxStream<palisade_core::engine::Alarm> {
            $room::alarms(&self$($of)*)
        }
    };
    (@watch [$($of:tt)*] $room:ident) => {
        fn watch(
            &self,
            scope: palisade_core::report::Scope,
        ) -> palisade_core::engine::BoxStream<palisade_core::Result<()>> {
            $room::watch(&self$($of)*, &scope)
        }
    };
    (@survey [$($of:tt)*] $room:ident) => {
        async fn survey(
            &self,
            scope: palisade_core::report::Scope,
        ) -> palisade_core::Result<Vec<palisade_core::report::LineReport>> {
            $room::survey(&self$($of)*, &scope).await
        }
    };
    (@check [$($of:tt)*] $room:ident) => {
        async fn check(&self) -> palisade_core::Result<palisade_core::report::Checkup> {
            $room::check(&self$($of)*).await
        }
    };
    (@queues [$($of:tt)*] $room:ident) => {
        fn queues(&self) -> Option<palisade_core::queue::SharedQueueStore> {
            $room::queues(&self$($of)*)
        }
    };
}
