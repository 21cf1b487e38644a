//! The engines, one folder or file each, by feature. An engine knows the core and nothing else.

#[cfg(feature = "consul")]
pub mod consul;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
#[cfg(feature = "memory")]
pub use palisade_core::memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "redis")]
pub mod redlock;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;
