//! Numbers, for people. Sizes are written by [`lastref::alloc::Bytes`] and read by
//! [`lastref::sim::Spec`].

/// Writes a number with a comma after each group of three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_numbers_are_grouped() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_186_648, "1,186,648"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }
}
