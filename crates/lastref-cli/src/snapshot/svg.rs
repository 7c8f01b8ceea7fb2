//! What the drawings share.

/// Text as XML has it.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // Not allowed in XML, not even escaped.
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_that_xml_forbids() {
        let text = "a<b>&\"c\u{7}\u{fffe}\u{ffff}\u{85}é";
        let wanted = "a&lt;b&gt;&amp;&quot;c\u{fffd}\u{fffd}\u{fffd}\u{fffd}é";
        assert_eq!(escaped(text), wanted);
    }
}
