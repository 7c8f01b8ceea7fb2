//! The timeline in a terminal, in Braille dots.

use std::io::Write;

use console::Term;
use lastref::alloc::Bytes;
use lastref_snapshot::timeline::Timeline;
use textplots::{Chart, Plot, Shape};

use super::answers::File;
use crate::Failure;
use crate::numbers::grouped;

/// The width where nothing says how wide the terminal is, as in a pipe.
const COLUMNS: u16 = 80;

/// Columns that the plot leaves to its marks of bytes.
const MARGIN: u16 = 14;

pub(super) fn draw(files: &[File], out: &mut impl Write) -> Result<(), Failure> {
    let columns = Term::stdout().size_checked().map_or(COLUMNS, |(_, columns)| columns);
    // A character has two dots across and four down.
    let dots = u32::from(columns.saturating_sub(MARGIN).max(20)) * 2;
    for file in files {
        for timeline in &file.timelines {
            let peak = timeline.peak();
            writeln!(
                out,
                "{}, device {}: peak {} at entry {} of {}, {} reserved at most",
                file.name,
                timeline.device(),
                Bytes(timeline.live_bytes(peak)),
                grouped(u64::from(peak)),
                grouped(u64::from(timeline.entries())),
                Bytes(timeline.peak_reserved_bytes()),
            )?;
            for note in timeline.notes() {
                writeln!(out, "  {note}")?;
            }
            if timeline.entries() > 0 {
                write!(out, "{}", plot(timeline, dots))?;
                writeln!(out, "  upper line: GiB reserved; below it: GiB in use; across: entries")?;
            }
            for mark in timeline.marks().iter().take(20) {
                writeln!(out, "  at entry {}: {}", grouped(u64::from(mark.entry)), mark.text)?;
            }
        }
    }
    Ok(())
}

fn plot(timeline: &Timeline, dots: u32) -> String {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a dot is larger than the error"
    )]
    let gib = |bytes: u64| bytes as f32 / (1_u64 << 30) as f32;
    let level = (0..timeline.levels())
        .find(|level| timeline.entries() >> level < 2 * dots)
        .unwrap_or(0);
    let mut live = Vec::new();
    let mut reserved = Vec::new();
    for index in 0..timeline.tiles(level) {
        let Some(tile) = timeline.tile(level, index) else {
            continue;
        };
        for column in 0..tile.live.len() {
            #[expect(clippy::cast_precision_loss, reason = "as above")]
            let x = tile.moment[column] as f32;
            live.push((x, gib(tile.live[column])));
            reserved.push((x, gib(tile.reserved[column])));
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "as above")]
    let last = timeline.entries() as f32;
    let top = gib(timeline.peak_reserved_bytes().max(timeline.live_bytes(timeline.peak())));
    let (upper, lower) = (Shape::Lines(&reserved), Shape::Bars(&live));
    let mut chart = Chart::new_with_y_range(dots, 60, 0.0, last, 0.0, top.max(f32::MIN_POSITIVE));
    let chart = chart.lineplot(&upper).lineplot(&lower);
    chart.borders();
    chart.axis();
    chart.figures();
    chart.to_string()
}
