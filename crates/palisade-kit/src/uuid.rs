//! The text form of a UUID, in which other tools write their ids.

/// Writes a UUID.
pub fn uuid(id: u128) -> String {
    let hex = format!("{id:032x}");
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    parts.join("-")
}

/// Parses what [`uuid`] writes, and nothing else.
pub fn read_uuid(text: &str) -> Option<u128> {
    let id = u128::from_str_radix(&text.replace('-', ""), 16).ok()?;
    (uuid(id) == text).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_go_there_and_back() {
        let text = "908f61f1-c6d0-694b-bd48-93ec3cf46853";
        assert_eq!(read_uuid(text).map(uuid).as_deref(), Some(text));
        let bad = "908f61f1-c6d0-694b-bd48-93ec3cf4685x";
        for bad in ["", ".lock", "908f61f1", bad] {
            assert_eq!(read_uuid(bad), None, "{bad}");
        }
    }
}
