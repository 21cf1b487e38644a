//! `Keys`: maps a name to the key of its advisory lock.
//!
//! The key is one that others use too: sqlx's derivation, `hashtext` as people write it in SQL, or
//! the name itself as a number. With an empty namespace it is derived from the name alone,
//! otherwise from `NAMESPACE/NAME`. Two names with the same key exclude each other, which is safe
//! and rare.

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use tokio_postgres::types::{ToSql, Type};

use palisade_core::engine::config_error;
use palisade_core::{Error, ErrorKind, Name, Result};

/// How the key is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Derivation {
    /// HKDF-SHA256 as sqlx's `PgAdvisoryLock::new`: 64 bits.
    Sqlx,
    /// `hashtext(name)`: 32 bits, computed by the server.
    Hashtext,
    /// The name is the number.
    Raw,
}

/// A key, or a text from which the server computes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Number(i64),
    Text(String),
}

impl Key {
    /// As a statement parameter.
    pub(super) fn sql(&self) -> &(dyn ToSql + Sync) {
        match self {
            Self::Number(number) => number,
            Self::Text(text) => text,
        }
    }
}

/// Derives keys in one namespace.
#[derive(Debug)]
pub(in super::super) struct Keys {
    derivation: Derivation,
    namespace: String,
}

impl Keys {
    /// Parses the option `key`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an unknown value, and for a namespace with `key=raw`.
    pub(in super::super) fn new(option: Option<&str>, namespace: &str) -> Result<Self> {
        let derivation = match option {
            None | Some("sqlx") => Derivation::Sqlx,
            Some("hashtext") => Derivation::Hashtext,
            Some("raw") => Derivation::Raw,
            Some(_) => return Err(config_error("option key must be sqlx, hashtext or raw")),
        };
        if derivation == Derivation::Raw && !namespace.is_empty() {
            return Err(config_error(
                "key=raw takes names as numbers; use it with namespace=",
            ));
        }
        if namespace.contains('/') {
            return Err(config_error("a namespace has no / on postgres+advisory:"));
        }
        Ok(Self {
            derivation,
            namespace: namespace.to_owned(),
        })
    }

    /// The key of `name`, as a parameter for [`Keys::sql`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] with `key=raw` for a name that is not a number.
    pub(super) fn of(&self, name: &Name) -> Result<Key> {
        let text = match self.namespace.as_str() {
            "" => name.to_string(),
            namespace => format!("{namespace}/{name}"),
        };
        match self.derivation {
            Derivation::Sqlx => Ok(Key::Number(sqlx(&text))),
            Derivation::Hashtext => Ok(Key::Text(text)),
            Derivation::Raw => match text.parse::<i64>() {
                Ok(number) => Ok(Key::Number(number)),
                Err(_) => Err(Error::new(
                    ErrorKind::InvalidName,
                    "name",
                    "with key=raw a name is a whole number of 64 bits, as in 4711",
                )),
            },
        }
    }

    /// The number of a name, where it is computed here.
    ///
    /// # Errors
    /// As [`Keys::of`]; [`ErrorKind::Unsupported`] where the server computes it.
    pub(in super::super) fn number(&self, name: &Name) -> Result<i64> {
        match self.of(name)? {
            Key::Number(number) => Ok(number),
            Key::Text(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "name",
                "key=hashtext leaves the number to the server",
            )),
        }
    }

    /// The number as in `pg_locks`; where the server computes it, the SQL expression.
    pub(super) fn shown(&self, name: &Name) -> Option<String> {
        match self.of(name).ok()? {
            Key::Number(number) => Some(number.to_string()),
            Key::Text(text) => Some(format!("hashtext('{}')", text.replace('\'', "''"))),
        }
    }

    /// The SQL expression that turns the first parameter into a bigint, and the parameter's type.
    pub(super) fn sql(&self) -> (&'static str, Type) {
        match self.derivation {
            Derivation::Hashtext => ("hashtext($1)::bigint", Type::TEXT),
            Derivation::Sqlx | Derivation::Raw => ("$1", Type::INT8),
        }
    }
}

struct Eight;

impl KeyType for Eight {
    fn len(&self) -> usize {
        8
    }
}

/// The key that sqlx derives from a name.
fn sqlx(name: &str) -> i64 {
    let key = Salt::new(HKDF_SHA256, &[]).extract(name.as_bytes());
    let mut bytes = [0; 8];
    let filled = key
        .expand(&[b"SQLx (Rust) Postgres advisory lock"], Eight)
        .and_then(|okm| okm.fill(&mut bytes));
    // HKDF fails only above 8160 bytes.
    debug_assert!(filled.is_ok());
    i64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_sqlx_s() {
        assert_eq!(
            sqlx("my first Postgres advisory lock!"),
            -5560419505042474287
        );
    }

    #[test]
    fn odd_keys_are_refused() {
        for (option, namespace) in [(Some("md5"), ""), (Some("raw"), "x"), (None, "a/b")] {
            let error = Keys::new(option, namespace).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
        }
        let raw = Keys::new(Some("raw"), "").unwrap();
        let key = |keys: &Keys, name| keys.of(&Name::new(name).unwrap());
        assert_eq!(key(&raw, "-7").unwrap(), Key::Number(-7));
        let bad = key(&raw, "x").unwrap_err();
        assert_eq!(bad.kind(), ErrorKind::InvalidName);
        let spaced = Keys::new(Some("hashtext"), "shop").unwrap();
        assert_eq!(key(&spaced, "x").unwrap(), Key::Text("shop/x".to_owned()));
    }
}
