//! `Tls`: certificates for connections to a server: `tls_ca`, `tls_cert` and `tls_key` name PEM
//! files; without `tls_ca` the system's authorities are trusted. One crypto provider (ring),
//! given by hand, because two in one program panic at the first handshake.

use std::error::Error as Cause;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, SignatureScheme};

use crate::core::error::{Error, Kind, Result};
use crate::core::url::Url;

/// The contents of the PEM files that a URL names.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    pub(crate) ca: Option<Vec<u8>>,
    /// Our own certificate and its key: both or none.
    pub(crate) identity: Option<(Vec<u8>, Vec<u8>)>,
}

fn config(message: impl Into<String>) -> Error {
    Error::new(Kind::Config, "connect", message)
}

impl Tls {
    /// Takes the options out; `None` when the scheme is one without TLS.
    ///
    /// # Errors
    /// [`Kind::Config`] for a file that can't be read, half an identity, or options without TLS.
    pub(crate) fn take(url: &mut Url, encrypted: bool) -> Result<Option<Self>> {
        let mut file = |option: &'static str| {
            let read = |path| {
                std::fs::read(path).map_err(|error| {
                    let message = format!("the file that option {option} names can't be read");
                    config(message).because(error)
                })
            };
            url.take(option).map(read).transpose()
        };
        let (ca, cert, key) = (file("tls_ca")?, file("tls_cert")?, file("tls_key")?);
        if !encrypted {
            return match (&ca, &cert, &key) {
                (None, None, None) => Ok(None),
                _ => Err(config(format!(
                    "{}: is not encrypted, so tls_ca, tls_cert and tls_key can't be used; take the scheme for TLS",
                    url.scheme
                ))),
            };
        }
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => return Err(config("tls_cert and tls_key must be given together")),
        };
        Ok(Some(Self { ca, identity }))
    }

    /// A configuration for rustls.
    ///
    /// # Errors
    /// [`Kind::Config`] when a file is no PEM of the right kind.
    pub(crate) fn client_config(&self) -> Result<ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| config("TLS can't be set up").because(error))?
            .with_root_certificates(self.roots()?);
        let Some((cert, key)) = &self.identity else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = certificates(cert, "tls_cert")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
            config("the file that option tls_key names holds no private key in PEM")
        })?;
        builder
            .with_client_auth_cert(chain, key)
            .map_err(|error| config("tls_cert and tls_key don't fit together").because(error))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(pem) => {
                for certificate in certificates(pem, "tls_ca")? {
                    roots.add(certificate).map_err(|error| {
                        config("the file that option tls_ca names holds an unusable certificate")
                            .because(error)
                    })?;
                }
            }
            None => {
                let system = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(system.certs);
                if roots.is_empty() {
                    return Err(config(
                        "this system has no certificate authorities; name yours with tls_ca",
                    ));
                }
            }
        }
        Ok(roots)
    }
}

/// Whether a server asks for a certificate that we don't have, and has not served us without.
///
/// In TLS 1.3 our side is through before the server refuses it, and the server's alert is lost
/// when the close of the connection overtakes it: a bare break then means the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked(Arc<State>);

#[derive(Debug, Default)]
struct State {
    asked: AtomicBool,
    served: AtomicBool,
}

impl Asked {
    /// Listens to connections that are made with `config`.
    pub(crate) fn watch(&self, config: &mut ClientConfig) {
        if !config.client_auth_cert_resolver.has_certs() {
            config.client_auth_cert_resolver = Arc::new(self.clone());
        }
    }

    /// A server answered: it can do without.
    pub(crate) fn served(&self) {
        self.0.served.store(true, Ordering::Relaxed);
    }

    pub(crate) fn in_vain(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed) && !self.0.served.load(Ordering::Relaxed)
    }
}

impl ResolvesClientCert for Asked {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.asked.store(true, Ordering::Relaxed);
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// What a server that is called `who` and has `plain` as its scheme without TLS means by `error`.
pub(crate) fn about_tls(who: &str, plain: &str, error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidMessage(_) => format!(
            "this port of {who} does not speak TLS; use {plain}: in place of {plain}s:, or the port for TLS"
        ),
        rustls::Error::AlertReceived(_) => refuses_ours(who),
        _ => format!(
            "TLS can't be agreed on; is tls_ca the authority of the certificate of {who}, and does the certificate name this host?"
        ),
    }
}

/// A server closed the connection over what we showed it, or did not.
pub(crate) fn refuses_ours(who: &str) -> String {
    format!(
        "{who} refuses our side of TLS; does it ask for a certificate of ours? Give tls_cert and tls_key"
    )
}

/// The first cause of this type. An I/O error, and one that is shared, hides what it was made of.
pub(crate) fn cause<'a, T: Cause + 'static>(error: &'a (dyn Cause + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        next = if let Some(shared) = error.downcast_ref::<Arc<dyn Cause + Send + Sync>>() {
            Some(&**shared)
        } else if let Some(inside) = error.downcast_ref().and_then(io::Error::get_ref) {
            Some(inside)
        } else {
            error.source()
        };
    }
    None
}

fn certificates(pem: &[u8], option: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(config(format!(
            "the file that option {option} names holds no certificate in PEM"
        ))),
    }
}

/// Makes ring the provider of the process unless it has one: for client libraries that ask for
/// the process's provider instead of taking ours.
pub(crate) fn provide() {
    // An error says that the program has chosen one before, which is just as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_without_tls_and_half_an_identity_are_refused() {
        let file = std::env::temp_dir().join(format!("palisade-tls-{}", std::process::id()));
        std::fs::write(&file, "no pem").unwrap();
        let shown = file.display();
        let mut plain = Url::parse(&format!("x://h?tls_ca={shown}")).unwrap();
        assert_eq!(
            Tls::take(&mut plain, false).err().unwrap().kind(),
            Kind::Config
        );
        let mut half = Url::parse(&format!("x://h?tls_cert={shown}")).unwrap();
        assert_eq!(
            Tls::take(&mut half, true).err().unwrap().kind(),
            Kind::Config
        );
        let mut bad = Url::parse(&format!("x://h?tls_ca={shown}")).unwrap();
        let tls = Tls::take(&mut bad, true).unwrap().unwrap();
        assert_eq!(tls.client_config().err().unwrap().kind(), Kind::Config);
        std::fs::remove_file(&file).unwrap();
    }
}
