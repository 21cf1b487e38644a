//! `Tls`: certificates for connections to a server. `tls_ca`, `tls_cert` and `tls_key` name PEM
//! files; without `tls_ca` the system's authorities are trusted. The crypto provider (ring) is set
//! explicitly, because with two in one program the first handshake panics.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use super::files::{DOCUMENT, read_file};
use palisade_core::Result;
use palisade_core::engine::{Url, config_error};

/// The contents of the PEM files that a URL names.
#[derive(Clone, Default)]
pub struct Tls {
    /// The authorities to trust, in place of the system's.
    pub ca: Option<Vec<u8>>,
    /// The client's certificate and its key: both or none.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    files: Files,
    /// The program's own configuration, which replaces all of the above.
    given: Option<ClientConfig>,
}

/// The paths of the PEM files.
#[derive(Clone, Default)]
struct Files {
    ca: Option<String>,
    cert: Option<String>,
    key: Option<String>,
}

impl Tls {
    /// Takes the options out; `None` if the scheme has no TLS.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for an unreadable file, half an identity, or TLS options without TLS.
    pub fn take(url: &mut Url, encrypted: bool) -> Result<Option<Self>> {
        let files = Files {
            ca: url.take("tls_ca"),
            cert: url.take("tls_cert"),
            key: url.take("tls_key"),
        };
        let given = url.take_given::<ClientConfig>();
        if !encrypted {
            if files.any() {
                return Err(config_error(format!(
                    "{}: is not encrypted, so tls_ca, tls_cert and tls_key can't be used; use the scheme for TLS",
                    url.scheme
                )));
            }
            return Ok(None);
        }
        if given.is_some() && files.any() {
            return Err(config_error(
                "tls_config has its own certificates; omit tls_ca, tls_cert and tls_key",
            ));
        }
        let read = files.read()?;
        Ok(Some(Self { given, ..read }))
    }

    /// Uses certificates that don't come from a URL's options.
    pub fn of(ca: Option<Vec<u8>>, identity: Option<(Vec<u8>, Vec<u8>)>) -> Self {
        Self {
            ca,
            identity,
            ..Self::default()
        }
    }

    /// The same with the current contents of the files: certificates are rotated, so each connect
    /// reads them again.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for a file that can't be read.
    pub fn fresh(&self) -> Result<Self> {
        let read = self.files.read()?;
        Ok(Self {
            given: self.given.clone(),
            ..read
        })
    }

    /// The configuration for rustls.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when a file is not PEM of the right kind.
    pub fn client_config(&self) -> Result<ClientConfig> {
        if let Some(given) = &self.given {
            return Ok(given.clone());
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| config_error("TLS can't be set up").because(error))?
            .with_root_certificates(self.roots()?);
        let Some((cert, key)) = &self.identity else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = certificates(cert, "tls_cert")?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
            config_error("the file that option tls_key names contains no private key in PEM")
        })?;
        builder
            .with_client_auth_cert(chain, key)
            .map_err(|error| config_error("tls_cert and tls_key don't match").because(error))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(pem) => {
                for certificate in certificates(pem, "tls_ca")? {
                    roots.add(certificate).map_err(|error| {
                        config_error(
                            "the file that option tls_ca names contains an unusable certificate",
                        )
                        .because(error)
                    })?;
                }
            }
            None => {
                let system = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(system.certs);
                if roots.is_empty() {
                    return Err(config_error(
                        "this system has no certificate authorities; name yours with tls_ca",
                    ));
                }
            }
        }
        Ok(roots)
    }
}

impl Files {
    fn any(&self) -> bool {
        self.ca.is_some() || self.cert.is_some() || self.key.is_some()
    }

    fn read(&self) -> Result<Tls> {
        let file = |option: &str, path: &Option<String>| {
            let what = format!("the file that option {option} names");
            let read = |path: &String| read_file(&what, path.as_ref(), DOCUMENT);
            path.as_ref().map(read).transpose()
        };
        let cert = file("tls_cert", &self.cert)?;
        let identity = match (cert, file("tls_key", &self.key)?) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => return Err(config_error("tls_cert and tls_key must be given together")),
        };
        Ok(Tls {
            ca: file("tls_ca", &self.ca)?,
            identity,
            files: self.clone(),
            given: None,
        })
    }
}

fn certificates(pem: &[u8], option: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(config_error(format!(
            "the file that option {option} names contains no certificate in PEM"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use palisade_core::ErrorKind;

    use super::*;

    #[test]
    fn options_without_tls_and_half_an_identity_are_refused() {
        let file = std::env::temp_dir().join(format!("palisade-tls-{}", std::process::id()));
        std::fs::write(&file, "no pem").unwrap();
        let shown = file.display();
        let mut plain = Url::parse(&format!("x://h?tls_ca={shown}")).unwrap();
        assert_eq!(
            Tls::take(&mut plain, false).err().unwrap().kind(),
            ErrorKind::Config
        );
        let mut half = Url::parse(&format!("x://h?tls_cert={shown}")).unwrap();
        assert_eq!(
            Tls::take(&mut half, true).err().unwrap().kind(),
            ErrorKind::Config
        );
        let mut bad = Url::parse(&format!("x://h?tls_ca={shown}")).unwrap();
        let tls = Tls::take(&mut bad, true).unwrap().unwrap();
        assert_eq!(tls.client_config().err().unwrap().kind(), ErrorKind::Config);
        std::fs::remove_file(&file).unwrap();
    }
}
