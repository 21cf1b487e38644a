//! `typed_config!`: an engine's configuration in Rust. Each setter sets the option of its name in a
//! [`Url`], so that both ways to connect go through the same checks.
//!
//! [`Url`]: palisade_core::engine::Url

/// Declares a typed configuration: its hosts if it has several, its own setters, the common ones,
/// and optionally those of a login and of TLS. `$encrypt` changes a URL so that its connections are
/// encrypted.
#[macro_export]
macro_rules! typed_config {
    (
        $(#[$about:meta])* $name:ident
        $($(#[$hosts_doc:meta])* hosts of $scheme:literal)?
        $(texts { $($(#[$text_doc:meta])* $text:ident)* })?
        $(durations { $($(#[$duration_doc:meta])* $duration:ident)* })?
        $(numbers { $($(#[$number_doc:meta])* $number:ident: $kind:ty)* })?
        $(login { $user:ident })?
        $(tls { $encrypt:expr })?
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        #[must_use = "a configuration does nothing until it is connected with"]
        pub struct $name(palisade_core::engine::Url);

        impl $name {
            $($(#[$hosts_doc])*
            pub fn new(hosts: impl IntoIterator<Item = impl Into<String>>) -> Self {
                let hosts = hosts.into_iter().map(Into::into).collect();
                Self(palisade_core::engine::Url::new($scheme, hosts))
            })?

            $($($(#[$text_doc])*
            pub fn $text(mut self, $text: impl Into<String>) -> Self {
                self.0.set(stringify!($text), $text.into());
                self
            })*)?

            $($($(#[$duration_doc])*
            pub fn $duration(mut self, $duration: std::time::Duration) -> Self {
                self.0.set_duration(stringify!($duration), $duration);
                self
            })*)?

            $($($(#[$number_doc])*
            pub fn $number(mut self, $number: $kind) -> Self {
                self.0.set(stringify!($number), $number);
                self
            })*)?

            /// The namespace of the locks: the same name in another namespace is another lock.
            pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
                self.0.set("namespace", namespace.into());
                self
            }

            /// How long a lock outlives a holder that died or is partitioned.
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.0.set_duration("ttl", ttl);
                self
            }

            /// How long one request to the engine may take.
            pub fn timeout(mut self, timeout: std::time::Duration) -> Self {
                self.0.set_duration("timeout", timeout);
                self
            }

            /// How long connecting may take.
            pub fn connect_timeout(mut self, timeout: std::time::Duration) -> Self {
                self.0.set_duration("connect_timeout", timeout);
                self
            }

            /// The era of the tokens, 0 to 127.
            pub fn era(mut self, era: u64) -> Self {
                self.0.set("era", era);
                self
            }

            /// A description of this client, for people.
            pub fn label(mut self, label: impl Into<String>) -> Self {
                self.0.set("label", label.into());
                self
            }

            $(
            /// The user to log in as.
            pub fn $user(mut self, user: impl Into<String>) -> Self {
                self.0.user = Some(user.into());
                self
            }

            /// The password. It is never shown.
            pub fn password(mut self, password: impl Into<String>) -> Self {
                self.0.password = Some(password.into());
                self
            }

            /// A file with the password, which is read at each connect.
            pub fn password_file(mut self, path: impl Into<String>) -> Self {
                self.0.set("password_file", path.into());
                self
            })?

            $(
            /// Encrypts connections, and trusts the system's certificate authorities.
            pub fn tls(mut self) -> Self {
                let encrypt: fn(&mut palisade_core::engine::Url) = $encrypt;
                encrypt(&mut self.0);
                self
            }

            /// Encrypts connections, and trusts the authorities in this PEM file.
            pub fn tls_ca(mut self, path: impl Into<String>) -> Self {
                self.0.set("tls_ca", path.into());
                self.tls()
            }

            /// Encrypts connections, and presents this certificate to the server: two PEM files.
            pub fn tls_identity(mut self, cert: impl Into<String>, key: impl Into<String>) -> Self {
                self.0.set("tls_cert", cert.into());
                self.0.set("tls_key", key.into());
                self.tls()
            }

            /// Encrypts connections with the program's own configuration.
            pub fn tls_config(mut self, config: $crate::rustls::ClientConfig) -> Self {
                self.0.give(config);
                self.tls()
            })?
        }

        impl palisade_core::engine::IntoUrl for $name {
            fn into_url(self) -> palisade_core::Result<palisade_core::engine::Url> {
                Ok(self.0)
            }
        }
    };
}
