//! `--permits K/N`: how many permits are asked for, out of how many.

use palisade::Ask;

/// Reads `K/N`.
pub(super) fn parse_permits(text: &str) -> Result<Ask, String> {
    let wrong = || "write it like 1/4: K permits out of N, 1 <= K <= N < 4294967295".to_owned();
    let (weight, capacity) = text.split_once('/').ok_or_else(wrong)?;
    let number = |digits: &str| match digits.bytes().all(|b| b.is_ascii_digit()) {
        true => digits.parse::<u32>().map_err(|_| wrong()),
        false => Err(wrong()),
    };
    let (weight, capacity) = (number(weight)?, number(capacity)?);
    if weight == 0 || weight > capacity || capacity == u32::MAX {
        return Err(wrong());
    }
    Ok(Ask::Part { weight, capacity })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_k_of_n() {
        let part = |weight, capacity| Ok(Ask::Part { weight, capacity });
        assert_eq!(parse_permits("1/4"), part(1, 4));
        assert_eq!(
            parse_permits("4294967294/4294967294"),
            part(u32::MAX - 1, u32::MAX - 1)
        );
        for bad in [
            "",
            "1",
            "/",
            "1/",
            "/4",
            "0/4",
            "5/4",
            "1/4294967295",
            "1/4294967296",
            "-1/4",
            "+1/4",
            "1/4/2",
            " 1/4",
        ] {
            assert!(parse_permits(bad).is_err(), "{bad:?}");
        }
    }
}
