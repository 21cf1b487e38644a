//! `Login`: who asks. From the URL, from options, or from files, so that a secret need not be in
//! a URL. Never shown.

use std::fmt;

use crate::core::error::{Error, Kind, Result};
use crate::core::url::Url;

/// A user and a password, as far as they are given.
#[derive(Clone, Default)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    /// A secret.
    pub(crate) password: Option<String>,
}

impl Login {
    /// Takes the login out of a URL: `user:password@`, or the options `user` and `password_file`.
    ///
    /// # Errors
    /// [`Kind::Config`] when one is given twice, or the file can't be read.
    pub(crate) fn take(url: &mut Url) -> Result<Self> {
        let twice = |what| {
            let message = format!("the URL gives the {what} twice; give it once");
            Error::new(Kind::Config, "connect", message)
        };
        let user = match (url.user.take(), url.take("user")) {
            (Some(_), Some(_)) => return Err(twice("user")),
            (user, option) => user.or(option),
        };
        let password = match (url.password.take(), secret_file(url, "password_file")?) {
            (Some(_), Some(_)) => return Err(twice("password")),
            (password, file) => password.or(file),
        };
        Ok(Self { user, password })
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login")
    }
}

/// Takes an option that names a file out, and reads the secret in it, without the end of its line.
///
/// # Errors
/// [`Kind::Config`] when it can't be read.
pub(crate) fn secret_file(url: &mut Url, option: &'static str) -> Result<Option<String>> {
    let Some(path) = url.take(option) else {
        return Ok(None);
    };
    let secret = std::fs::read_to_string(path).map_err(|error| {
        let message = format!("the file that option {option} names can't be read");
        Error::new(Kind::Config, "connect", message).because(error)
    })?;
    Ok(Some(secret.trim_end_matches(['\r', '\n']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_comes_from_the_url_or_from_files_but_not_from_both() {
        let file = std::env::temp_dir().join(format!("palisade-login-{}", std::process::id()));
        std::fs::write(&file, "hunter2\n").unwrap();
        let take = |text: String| Login::take(&mut Url::parse(&text).unwrap());
        let shown = file.display();
        let login = take(format!("x://h?user=me&password_file={shown}")).unwrap();
        assert_eq!(login.user.as_deref(), Some("me"));
        assert_eq!(login.password.as_deref(), Some("hunter2"));
        assert!(!format!("{login:?}").contains("hunter2"));
        let twice = take(format!("x://me:secret@h?password_file={shown}")).unwrap_err();
        assert_eq!(twice.kind(), Kind::Config);
        std::fs::remove_file(&file).unwrap();
        let absent = take(format!("x://h?password_file={shown}")).unwrap_err();
        assert_eq!(absent.kind(), Kind::Config);
    }
}
