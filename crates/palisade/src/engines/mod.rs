//! The engines of this build, by feature. Each is a crate of its own (`engines/…`).

#[cfg(feature = "consul")]
pub use palisade_consul as consul;
#[cfg(feature = "memory")]
pub use palisade_core::memory;
#[cfg(feature = "etcd")]
pub use palisade_etcd as etcd;
#[cfg(feature = "file")]
pub use palisade_file as file;
#[cfg(feature = "http")]
pub use palisade_http as http;
#[cfg(feature = "kubernetes")]
pub use palisade_kubernetes as kubernetes;
#[cfg(feature = "postgres")]
pub use palisade_postgres as postgres;
#[cfg(feature = "redis")]
pub use palisade_redis as redis;
#[cfg(feature = "redis")]
pub use palisade_redis::redlock;
#[cfg(feature = "zookeeper")]
pub use palisade_zookeeper as zookeeper;
