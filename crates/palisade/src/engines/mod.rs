//! The engines, one folder or file each, by feature. An engine knows the core and nothing else.

#[cfg(feature = "consul")]
#[allow(refining_impl_trait)]
pub mod consul;
#[cfg(feature = "etcd")]
#[allow(refining_impl_trait)]
pub mod etcd;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "http")]
#[allow(refining_impl_trait)]
pub mod http;
pub(crate) mod kit;
#[cfg(feature = "kubernetes")]
#[allow(refining_impl_trait)]
pub mod kubernetes;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "redis")]
pub mod redlock;
#[cfg(feature = "zookeeper")]
#[allow(refining_impl_trait)]
pub mod zookeeper;
