//! `Tls`: the certificate and its key, which are read again when they change.
//!
//! A pair that can't be used is refused, and the one before stays: whoever renews a certificate
//! replaces two files, one after the other.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use palisade::report::{Finding, Severity};
use palisade::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::files::{Seen, read_trusted};

/// See the module's documentation.
pub(crate) struct Tls {
    cert: PathBuf,
    key: PathBuf,
    current: Mutex<Current>,
}

struct Current {
    acceptor: TlsAcceptor,
    /// Whether other users may read the key.
    exposed: bool,
    seen: [Seen; 2],
}

fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, "serve", message)
}

impl Tls {
    /// Reads both files.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when they can't be used.
    pub(crate) fn read(cert: PathBuf, key: PathBuf) -> Result<Self> {
        let seen = [&cert, &key].map(|path| Seen::look(path));
        let (acceptor, exposed) = load(&cert, &key)?;
        let current = Mutex::new(Current {
            acceptor,
            exposed,
            seen,
        });
        Ok(Self { cert, key, current })
    }

    /// For a new connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        self.current.lock().acceptor.clone()
    }

    /// Reads the files again if one has changed. Returns the result, if they were read.
    pub(crate) fn refresh(&self) -> Option<Result<()>> {
        let seen = [&self.cert, &self.key].map(|path| Seen::look(path));
        if self.current.lock().seen == seen {
            return None;
        }
        let loaded = load(&self.cert, &self.key);
        let mut current = self.current.lock();
        current.seen = seen;
        Some(loaded.map(|(acceptor, exposed)| {
            (current.acceptor, current.exposed) = (acceptor, exposed);
        }))
    }

    /// What is unsafe about them.
    pub(crate) fn finding(&self) -> Option<Finding> {
        let key = self.key.display();
        self.current.lock().exposed.then(|| {
            Finding::new(
                Severity::Warning,
                "key_readable",
                format!("other users may read the key of the certificate, {key}"),
                "use chmod o-r on it; in Kubernetes, set the volume's defaultMode to 0440",
            )
        })
    }
}

fn load(cert: &Path, key: &Path) -> Result<(TlsAcceptor, bool)> {
    let refuse =
        |path: &Path, why: &str| config(format!("{} can't be used for TLS: {why}", path.display()));
    let no_pem = "it must be PEM";
    let text = std::fs::read(cert).map_err(|error| refuse(cert, &error.to_string()))?;
    let chain: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| refuse(cert, no_pem).because(error.to_string()))?;
    if chain.is_empty() {
        return Err(refuse(cert, "there is no certificate in it"));
    }
    let (text, found) = read_trusted(key).map_err(|why| refuse(key, &why))?;
    let secret = PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| refuse(key, no_pem).because(error.to_string()))?;
    // The crypto provider is passed explicitly: with two in one program, rustls panics at the first
    // handshake.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, secret)
        })
        .map_err(|error| config("the certificate and the key don't fit").because(error))?;
    let exposed = std::os::unix::fs::MetadataExt::mode(&found) & 0o004 != 0;
    Ok((TlsAcceptor::from(Arc::new(tls)), exposed))
}
