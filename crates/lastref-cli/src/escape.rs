//! Text from files, for people: what would move the cursor, hide or reorder text, or give orders to a
//! terminal is shown, not sent.
//!
//! All text that a file or a file's name decides comes through here on its way to a person: through
//! [`escaped`] where it is put into a line, and through [`escaped_lines`] in errors. Data (`--json`,
//! `--csv`, `export`) is for programs and stays as it is.

use std::borrow::Cow;

/// The text with every control character, line feeds too, and every invisible one that changes how
/// others are shown, as its escape in Rust.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    replace(text, is_unsafe)
}

/// As [`escaped`], of a text that may have several lines.
pub(crate) fn escaped_lines(text: &str) -> Cow<'_, str> {
    replace(text, |letter| letter != '\n' && is_unsafe(letter))
}

fn replace(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if is_unsafe(letter) {
            safe.extend(letter.escape_default());
        } else {
            safe.push(letter);
        }
    }
    Cow::Owned(safe)
}

fn is_unsafe(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{ad}'                     // soft hyphen
            | '\u{61c}'                  // direction mark
            | '\u{200b}'..='\u{200f}'    // zero width, direction marks
            | '\u{2028}'..='\u{202e}'    // line and paragraph separators, embedding and override
            | '\u{2060}'..='\u{206f}'    // invisible operators, isolates
            | '\u{feff}'                 // byte order mark
            | '\u{fff9}'..='\u{fffb}'    // annotations
            | '\u{e0000}'..='\u{e007f}' // tags
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gives_orders_is_shown() {
        for (text, wanted) in [
            ("train.py:7 ← größe 数 🎉", "train.py:7 ← größe 数 🎉"),
            ("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            ("a\nb\r\tc\x08\x7f", "a\\nb\\r\\tc\\u{8}\\u{7f}"),
            ("\u{9b}2J", "\\u{9b}2J"),
            (
                "a\u{202e}b\u{2066}c\u{feff}",
                "a\\u{202e}b\\u{2066}c\\u{feff}",
            ),
            ("\u{e0041}\u{200b}\u{ad}", "\\u{e0041}\\u{200b}\\u{ad}"),
        ] {
            assert_eq!(escaped(text), wanted);
        }
        assert!(matches!(escaped("train"), Cow::Borrowed(_)));
        assert_eq!(escaped_lines("a\n\x1bb"), "a\n\\u{1b}b");
    }
}
