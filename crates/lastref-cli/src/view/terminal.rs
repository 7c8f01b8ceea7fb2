//! The timeline in a terminal, in Braille dots.

use std::io::Write;

use console::Term;
use lastref::alloc::Bytes;
use lastref_snapshot::timeline::Timeline;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};

use super::answers::File;
use crate::Failure;
use crate::escape::escaped;
use crate::numbers::grouped;

/// The width where nothing says how wide the terminal is, as in a pipe.
const COLUMNS: u16 = 80;
const LINES: u16 = 18;

/// Marks that are listed for a device.
const MOST_MARKS: usize = 20;

pub(super) fn draw(files: &[File], out: &mut impl Write) -> Result<(), Failure> {
    let columns = Term::stdout()
        .size_checked()
        .map_or(COLUMNS, |(_, columns)| columns)
        .max(40);
    for file in files {
        for timeline in &file.timelines {
            let peak = timeline.peak();
            writeln!(
                out,
                "{}, device {}: peak {} after {} of {} entries, {} reserved at most",
                escaped(&file.name),
                timeline.device(),
                Bytes(timeline.live_bytes(peak)),
                grouped(u64::from(peak)),
                grouped(u64::from(timeline.entries())),
                Bytes(timeline.peak_reserved_bytes()),
            )?;
            for note in timeline.notes() {
                writeln!(out, "  {note}")?;
            }
            if timeline.entries() > 1 {
                write!(out, "{}", plot(timeline, columns))?;
                writeln!(out, "the line: reserved; the area: in use; across: entries")?;
            }
            for mark in timeline.marks().iter().take(MOST_MARKS) {
                let entry = grouped(u64::from(mark.entry));
                writeln!(out, "  after {entry} entries: {}", escaped(&mark.text))?;
            }
            let more = timeline.marks().len().saturating_sub(MOST_MARKS);
            if more > 0 {
                writeln!(out, "  and {more} more")?;
            }
        }
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a dot is larger than the error")]
fn plot(timeline: &Timeline, columns: u16) -> String {
    // A character has two dots across.
    let dots = u32::from(columns) * 2;
    let level = (0..timeline.levels())
        .find(|level| timeline.entries() >> level < 2 * dots)
        .unwrap_or(timeline.levels() - 1);
    let (mut live, mut reserved) = (Vec::new(), Vec::new());
    let tiles = (0..timeline.tiles(level)).filter_map(|index| timeline.tile(level, index));
    for tile in tiles {
        for column in 0..tile.live.len() {
            let x = f64::from(tile.moment[column]);
            live.push((x, tile.live[column] as f64));
            reserved.push((x, tile.reserved[column] as f64));
        }
    }
    let peak = timeline.live_bytes(timeline.peak());
    let top = timeline.peak_reserved_bytes().max(peak).max(1);
    let area = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Bar)
        .data(&live);
    let line = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .data(&reserved);
    let entries = u64::from(timeline.entries());
    let across = Axis::default().bounds([0.0, entries as f64]).labels([
        "0".to_owned(),
        grouped(entries / 2),
        grouped(entries),
    ]);
    let upward = Axis::default()
        .bounds([0.0, top as f64])
        .labels([Bytes(0), Bytes(top / 2), Bytes(top)].map(|bytes| bytes.to_string()));
    let space = Rect::new(0, 0, columns, LINES);
    let mut buffer = Buffer::empty(space);
    Chart::new(vec![area, line])
        .x_axis(across)
        .y_axis(upward)
        .render(space, &mut buffer);
    let mut text = String::new();
    for row in buffer.content.chunks(usize::from(columns)) {
        let row: String = row.iter().map(|cell| cell.symbol()).collect();
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}
