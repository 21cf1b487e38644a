//! `Login`: user and password, from the URL, from options, or from a file, so that a secret need
//! not be in a URL. Never shown.

use std::fmt;
use std::path::PathBuf;

use super::files::{SECRET, read_text};
use palisade_core::Result;
use palisade_core::engine::{Url, config_error};

/// A user and a password, each optional.
#[derive(Clone, Default)]
pub struct Login {
    /// Shown to people.
    pub user: Option<String>,
    /// A secret.
    pub password: Option<String>,
    /// The file of the password, if it is in one.
    file: Option<SecretFile>,
}

impl Login {
    /// Takes the login out of a URL: `user:password@`, or the options `user` and `password_file`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when one is given twice, or the file can't be read.
    pub fn take(url: &mut Url) -> Result<Self> {
        let twice = |what| {
            let message = format!("the URL gives the {what} twice; give it once");
            config_error(message)
        };
        let user = match (url.user.take(), url.take("user")) {
            (Some(_), Some(_)) => return Err(twice("user")),
            (user, option) => user.or(option),
        };
        let file = SecretFile::take(url, "password_file");
        let password = url.password.take();
        if password.is_some() && file.is_some() {
            return Err(twice("password"));
        }
        let login = Self {
            user,
            password,
            file,
        };
        login.fresh()
    }

    /// Takes a login out of other options, for servers other than those of the URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when the file can't be read.
    pub fn take_apart(
        url: &mut Url,
        user: &'static str,
        password_file: &'static str,
    ) -> Result<Self> {
        let login = Self {
            user: url.take(user),
            password: None,
            file: SecretFile::take(url, password_file),
        };
        login.fresh()
    }

    /// The same login with the current content of the password file: passwords are rotated, so each
    /// connect reads it again.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when the file can't be read or is empty.
    pub fn fresh(&self) -> Result<Self> {
        let mut login = self.clone();
        if let Some(file) = &self.file {
            login.password = Some(file.read()?);
        }
        Ok(login)
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login")
    }
}

/// A file with a secret in it, and the option that names it.
#[derive(Clone)]
pub struct SecretFile {
    option: &'static str,
    path: PathBuf,
}

impl SecretFile {
    /// Takes out an option that names such a file.
    pub fn take(url: &mut Url, option: &'static str) -> Option<Self> {
        let path = url.take(option)?.into();
        Some(Self { option, path })
    }

    /// Reads the secret, without a trailing newline.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when the file can't be read, is empty, or too large to be a secret.
    pub fn read(&self) -> Result<String> {
        let option = self.option;
        let what = format!("the file that option {option} names");
        let secret = read_text(&what, &self.path, SECRET)?;
        let secret = secret.trim_end_matches(['\r', '\n']);
        if secret.is_empty() {
            return Err(config_error(format!("{what} is empty")));
        }
        Ok(secret.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use palisade_core::ErrorKind;

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
        assert_eq!(twice.kind(), ErrorKind::Config);
        std::fs::write(&file, "hunter3\n").unwrap();
        assert_eq!(login.fresh().unwrap().password.as_deref(), Some("hunter3"));
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(login.fresh().unwrap_err().kind(), ErrorKind::Config);
        std::fs::remove_file(&file).unwrap();
        let absent = take(format!("x://h?password_file={shown}")).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::Config);
    }
}
