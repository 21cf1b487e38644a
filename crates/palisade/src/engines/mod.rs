//! The engines, one folder or file each, by feature. An engine knows the core and nothing else.

#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "consul")]
pub mod consul;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "remote")]
pub(crate) mod remote;
