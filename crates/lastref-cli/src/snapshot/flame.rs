//! Flame graphs as SVG: a box for each frame, as wide as the bytes that its stacks hold.
//!
//! One file without scripts or fonts of its own; hovering over a box shows the frame, its bytes and its
//! share. Boxes narrower than half a pixel are left out.

use std::io::{self, Write};

use lastref::alloc::Bytes;

use super::svg::escaped;

const WIDTH: f64 = 1200.0;
const ROW: usize = 18;
/// How wide a letter is, about.
const LETTER: f64 = 6.6;
const NARROWEST: f64 = 0.5;

/// Draws stacks: outermost frame first, sorted, each with its bytes.
#[expect(clippy::cast_precision_loss, reason = "pixels")]
pub(super) fn draw(stacks: &[(Vec<String>, u64)], out: &mut impl Write) -> io::Result<()> {
    let sum = |stacks: &[(Vec<String>, u64)]| {
        let add = |sum: u64, stack: &(Vec<String>, u64)| sum.saturating_add(stack.1);
        stacks.iter().fold(0, add)
    };
    let total = sum(stacks);
    let depth = stacks
        .iter()
        .map(|(stack, _)| stack.len())
        .max()
        .unwrap_or(0);
    let height = (depth + 2) * ROW;
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"monospace\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"4\" y=\"13\">{} held, by stack</text>",
        Bytes(total)
    )?;
    for level in 0..depth {
        let y = (level + 1) * ROW;
        let mut before = 0u64;
        let mut rest = stacks;
        while let Some((first, _)) = rest.first() {
            let same =
                |(stack, _): &&(Vec<String>, u64)| stack.get(..=level) == first.get(..=level);
            // Those that end above this level are passed one by one: they have no box.
            let count = match first.get(level) {
                Some(_) => rest.iter().take_while(same).count(),
                None => 1,
            };
            let bytes = sum(&rest[..count]);
            if let Some(frame) = first.get(level) {
                let scale = WIDTH / total.max(1) as f64;
                let (x, width) = (before as f64 * scale, bytes as f64 * scale);
                if width >= NARROWEST {
                    write_box(out, frame, (x, y, width), bytes, total)?;
                }
            }
            before = before.saturating_add(bytes);
            rest = &rest[count..];
        }
    }
    writeln!(out, "</svg>")
}

#[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
fn write_box(
    out: &mut impl Write,
    frame: &str,
    (x, y, width): (f64, usize, f64),
    bytes: u64,
    total: u64,
) -> io::Result<()> {
    let share = bytes as f64 * 100.0 / total.max(1) as f64;
    let hue = frame.bytes().fold(7u32, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });
    let hue = 20 + hue % 40;
    let letters = letters(width);
    let label: String = if letters < 4 {
        String::new()
    } else if frame.chars().count() <= letters {
        frame.to_owned()
    } else {
        frame.chars().take(letters - 1).chain(['…']).collect()
    };
    writeln!(
        out,
        "<g><title>{}: {}, {share:.1} %</title><rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" \
         height=\"{}\" fill=\"hsl({hue},80%,70%)\" stroke=\"#ffffff\" stroke-width=\"0.5\"/>\
         <text x=\"{:.1}\" y=\"{}\">{}</text></g>",
        escaped(frame),
        Bytes(bytes),
        ROW - 1,
        x + 3.0,
        y + 13,
        escaped(&label)
    )
}

/// How many letters fit.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "at most 200, never below 0"
)]
fn letters(width: f64) -> usize {
    ((width - 6.0) / LETTER).max(0.0) as usize
}
