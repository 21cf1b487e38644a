//! `check`: what is known to be unsafe or in the way about this cluster.

use super::Inner;
use super::wire::{
    AlarmResponse, CORRUPT, Empty, LeaseGrantRequest, LeaseGrantResponse, LeaseRequest, NO_SPACE,
    StatusResponse,
};
use crate::core::error::{Kind, Result};
use crate::core::report::{Checkup, Finding, Severity};
use crate::engines::remote;

impl Inner {
    pub(super) async fn check(&self) -> Result<Checkup> {
        let path = "/etcdserverpb.Maintenance/Status";
        let status: StatusResponse = self.rpc.ask("check", path, Empty {}).await?;
        let mut findings = Vec::new();
        findings.extend(of_version(&status.version));
        if status.leader == 0 {
            findings.push(Finding {
                severity: Severity::Warning,
                code: "no_quorum",
                message: "the member that answers knows no leader".to_owned(),
                remedy: "start the members that are down; without a majority nothing is granted"
                    .to_owned(),
            });
        }
        if self.leases.epoch() > 0 {
            findings.push(Finding {
                severity: Severity::Danger,
                code: "cluster_replaced",
                message: "since this client connected, the cluster was restored from a snapshot \
                          or replaced by another: tokens can repeat"
                    .to_owned(),
                remedy: "raise era= in the URL of every client".to_owned(),
            });
        }
        findings.extend(self.alarms_raised().await?);
        findings.extend(self.ttl_floor().await);
        findings.extend(remote::plain_text(self.endpoints.hosts(), self.encrypted));
        Ok(Checkup {
            version: Some(status.version),
            clock_ahead_us: None,
            findings,
        })
    }

    async fn alarms_raised(&self) -> Result<Vec<Finding>> {
        let path = "/etcdserverpb.Maintenance/Alarm";
        let answer: AlarmResponse = match self.rpc.ask("check", path, Empty {}).await {
            Ok(answer) => answer,
            // Only an operator's role may ask; then an operator has to look.
            Err(error) if error.kind() == Kind::Denied => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let raised = |alarm| answer.alarms.iter().any(|raised| raised.alarm == alarm);
        let finding = |severity, code, message: &str, remedy: &str| Finding {
            severity,
            code,
            message: message.to_owned(),
            remedy: remedy.to_owned(),
        };
        let mut findings = Vec::new();
        if raised(NO_SPACE) {
            findings.push(finding(
                Severity::Warning,
                "quota_alarm",
                "etcd has used up its quota: no lock can be taken",
                "etcdctl compact, etcdctl defrag, etcdctl alarm disarm; then raise the quota",
            ));
        }
        if raised(CORRUPT) {
            findings.push(finding(
                Severity::Danger,
                "corrupt_alarm",
                "the data of the members differ",
                "stop using this cluster and restore the member that is wrong",
            ));
        }
        Ok(findings)
    }

    /// Asks for a lease of one second and sees what is granted.
    async fn ttl_floor(&self) -> Option<Finding> {
        let request = LeaseGrantRequest {
            ttl: 1,
            id: rand::random_range(1..i64::MAX),
        };
        let path = "/etcdserverpb.Lease/LeaseGrant";
        let granted: LeaseGrantResponse = self.rpc.ask("check", path, request).await.ok()?;
        let path = "/etcdserverpb.Lease/LeaseRevoke";
        // Without an answer it ends by itself.
        let revoke = LeaseRequest { id: granted.id };
        let _: Result<Empty> = self.rpc.ask("check", path, revoke).await;
        let floor = u64::try_from(granted.ttl).unwrap_or(0);
        (floor > super::offer::CAPABILITY.ttl.min.as_secs()).then(|| Finding {
            severity: Severity::Info,
            code: "ttl_floor",
            message: format!("a shorter ttl is granted as {floor} s: 1.5 election timeouts"),
            remedy: "reckon with it: a lock whose holder died is free after that time".to_owned(),
        })
    }
}

/// What is known of a version, by the issue that tells it.
fn of_version(version: &str) -> Option<Finding> {
    let number = |part: &str| -> Option<u32> {
        let digits = part
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(part.len());
        part[..digits].parse().ok()
    };
    let parts: Vec<u32> = version.split('.').map_while(number).collect();
    let &[major, minor, patch, ..] = parts.as_slice() else {
        return None;
    };
    let finding = |severity, code, message: &str, remedy: &str| {
        Some(Finding {
            severity,
            code,
            message: format!("etcd {version} {message}"),
            remedy: remedy.to_owned(),
        })
    };
    match (major, minor, patch) {
        (..3, ..) | (3, ..4, _) => finding(
            Severity::Warning,
            "too_old",
            "is older than what palisade is tested with",
            "run 3.4 or newer",
        ),
        (3, 5, 0..=2) => finding(
            Severity::Danger,
            "loses_data",
            "can lose writes when a member is killed (etcd #13766)",
            "run a newer 3.5",
        ),
        (3, 4, ..=20) | (3, 5, ..=4) => finding(
            Severity::Danger,
            "loses_data",
            "can lose acknowledged writes on a cluster of one member (etcd #14370)",
            "run the newest release of the same line",
        ),
        (3, 4, ..=41) | (3, 5, ..=27) | (3, 6, ..=8) => finding(
            Severity::Info,
            "stale_reads",
            "can answer with stale data while its leader changes (etcd #20418); locks don't \
             depend on it, your own reads may",
            "run 3.4.42, 3.5.28, 3.6.9 or newer",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_judged_by_what_is_known_of_them() {
        let code = |version| of_version(version).map(|finding| finding.code);
        assert_eq!(code("3.3.25"), Some("too_old"));
        assert_eq!(code("3.5.1"), Some("loses_data"));
        assert_eq!(code("3.4.23"), Some("stale_reads"));
        assert_eq!(code("3.5.16-k3s1"), Some("stale_reads"));
        assert_eq!(code("3.5.28"), None);
        assert_eq!(code("3.7.0"), None);
        assert_eq!(code("3.7.0-alpha.0"), None);
        assert_eq!(code("unknown"), None);
    }
}
