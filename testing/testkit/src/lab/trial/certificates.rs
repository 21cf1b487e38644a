//! Certificates for a server and a client, made with openssl.

use std::path::Path;
use std::process::Command;

/// Creates two authorities, `ca` and `other`, and certificates of the first for `server` and
/// `client`: each as NAME.pem and NAME.key in `folder`. `names` are the subject names of the
/// certificates, as in `DNS:localhost,IP:127.0.0.1`.
///
/// # Errors
/// A message if openssl is missing or fails.
pub fn certificates(folder: &Path, names: &str) -> Result<(), String> {
    let file = folder.join("names");
    std::fs::write(&file, format!("subjectAltName={names}")).map_err(|error| error.to_string())?;
    let openssl = |arguments: String| openssl(folder, &arguments);
    let key = "-nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1";
    for who in ["ca", "other"] {
        openssl(format!(
            "req -x509 {key} -days 2 -subj /CN=authority -keyout {who}.key -out {who}.pem"
        ))?;
    }
    for who in ["server", "client"] {
        openssl(format!(
            "req {key} -subj /CN={who} -keyout {who}.key -out {who}.csr"
        ))?;
        openssl(format!(
            "x509 -req -in {who}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {who}.pem"
        ))?;
    }
    Ok(())
}

/// Replaces the certificate of `who` by one that expired yesterday.
///
/// # Errors
/// As [`certificates`], which must have created the others.
pub fn expired(folder: &Path, who: &str) -> Result<(), String> {
    openssl(
        folder,
        &format!(
            "x509 -req -in {who}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days -1 -extfile names -out {who}.pem"
        ),
    )
}

fn openssl(folder: &Path, arguments: &str) -> Result<(), String> {
    let made = Command::new("openssl")
        .args(arguments.split(' '))
        .current_dir(folder)
        .output()
        .map_err(|error| format!("openssl: {error}"))?;
    if made.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&made.stderr).into_owned())
    }
}
