//! The timeline of a snapshot as SVG: memory in use over the history, by the places that hold most of
//! it at its peak; what is reserved above it; failures and the program's own marks.
//!
//! One file without scripts or fonts of its own, for light and dark grounds. Hovering over an area, a row
//! of the legend or a mark shows what it is. It has at most [`COLUMNS`] columns, however long the history
//! is: a column shows the moment in it with the most memory in use, as the page of `lastref view` does.

use std::collections::HashMap;
use std::io::{self, Write};

use lastref::alloc::Bytes;
use lastref_snapshot::Dump;
use lastref_snapshot::dump::StackId;
use lastref_snapshot::explain::place;
use lastref_snapshot::timeline::{MarkKind, Timeline};

use super::svg::escaped;
use crate::numbers::grouped;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 20.0;
/// Of what is drawn of a device, without its legend.
const HEIGHT: f64 = 300.0;
/// Above the areas, for the title.
const TOP: f64 = 40.0;
/// Below them, for the axis.
const BOTTOM: f64 = 34.0;
const ROW: f64 = 18.0;
const COLUMNS: u32 = 600;
/// Places with an area of their own.
const PLACES: usize = 8;
/// Letters of a place in the legend.
const LETTERS: usize = 150;
/// Letters of a place or a mark at all.
const MOST_LETTERS: usize = 2000;
/// Marks of a device that are drawn; failures go first.
const MARKS: usize = 200;

/// Hues of Okabe and Ito (2008), which can be told apart without red and green.
const COLOURS: [&str; PLACES] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f6fc7",
];

/// Whether there is anything to draw.
pub(super) fn has_history(dump: &Dump) -> bool {
    dump.histories()
        .iter()
        .any(|history| !history.entries.is_empty())
}

/// Draws the devices that have a history, one below the other.
pub(super) fn draw(dump: &Dump, out: &mut impl Write) -> io::Result<()> {
    let timelines = Timeline::all(dump).into_iter();
    let figures: Vec<_> = timelines
        .filter(|timeline| timeline.entries() > 0)
        .map(|timeline| Figure::new(dump, timeline))
        .collect();
    let height: f64 = figures.iter().map(Figure::height).sum();
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n<style>\
         .ground{{fill:#fff}}text{{fill:#222}}.rule{{stroke:#ccc}}.reserved{{stroke:#222}}\
         .rest{{fill:#999}}.failed{{stroke:#c00}}.named{{stroke:#888}}\
         @media (prefers-color-scheme:dark){{.ground{{fill:#181818}}text{{fill:#ddd}}\
         .rule{{stroke:#444}}.reserved{{stroke:#eee}}.rest{{fill:#777}}.failed{{stroke:#f66}}}}\
         </style>\n<rect class=\"ground\" width=\"100%\" height=\"100%\"/>"
    )?;
    let mut y = 0.0;
    for figure in &figures {
        writeln!(out, "<g transform=\"translate(0 {y})\">")?;
        figure.draw(out)?;
        writeln!(out, "</g>")?;
        y += figure.height();
    }
    writeln!(out, "</svg>")
}

/// What one place holds, by column.
struct Area {
    name: String,
    at_peak: u64,
    bytes: Vec<u64>,
}

struct Figure {
    timeline: Timeline,
    moments: Vec<u32>,
    live: Vec<u64>,
    reserved: Vec<u64>,
    /// The heaviest at the peak first, the lowest in the drawing.
    areas: Vec<Area>,
}

impl Figure {
    fn new(dump: &Dump, timeline: Timeline) -> Self {
        let level = (0..timeline.levels())
            .find(|level| timeline.entries() >> level < COLUMNS)
            .unwrap_or(timeline.levels() - 1);
        let (mut moments, mut live, mut reserved) = (Vec::new(), Vec::new(), Vec::new());
        for tile in (0..timeline.tiles(level)).filter_map(|index| timeline.tile(level, index)) {
            moments.extend(tile.moment);
            live.extend(tile.live);
            reserved.extend(tile.reserved);
        }
        let areas = areas(dump, &timeline, &moments);
        Self {
            timeline,
            moments,
            live,
            reserved,
            areas,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "rows of a legend")]
    fn height(&self) -> f64 {
        TOP + HEIGHT + BOTTOM + (self.areas.len() + 2) as f64 * ROW + 10.0
    }

    fn top_bytes(&self) -> u64 {
        let all = self.live.iter().chain(&self.reserved);
        all.copied().max().unwrap_or(0).max(1)
    }

    fn x(&self, moment: u32) -> f64 {
        let entries = self.timeline.entries().max(1);
        LEFT + (WIDTH - LEFT - RIGHT) * f64::from(moment) / f64::from(entries)
    }

    #[expect(clippy::cast_precision_loss, reason = "pixels")]
    fn y(&self, bytes: u64) -> f64 {
        TOP + HEIGHT * (1.0 - bytes as f64 / self.top_bytes() as f64)
    }

    fn draw(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { timeline, .. } = self;
        let peak = timeline.peak();
        writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"24\" font-size=\"15\">device {}: {} in use at the peak, after {} of {} \
             entries</text>",
            timeline.device(),
            Bytes(timeline.live_bytes(peak)),
            grouped(u64::from(peak)),
            grouped(u64::from(timeline.entries())),
        )?;
        self.draw_axes(out)?;
        let mut below = vec![0u64; self.moments.len()];
        for (number, area) in self.areas.iter().enumerate() {
            let above: Vec<u64> = below
                .iter()
                .zip(&area.bytes)
                .map(|(below, bytes)| below.saturating_add(*bytes))
                .collect();
            let fill = format!("fill=\"{}\"", COLOURS[number % PLACES]);
            self.draw_area(out, &fill, &area.name, &below, &above)?;
            below = above;
        }
        self.draw_area(out, "class=\"rest\"", "all others", &below, &self.live)?;
        let reserved = self.line(&self.reserved);
        writeln!(
            out,
            "<path class=\"reserved\" fill=\"none\" stroke-width=\"1.2\" d=\"M{reserved}\"><title>reserved, {} \
             at most</title></path>",
            Bytes(timeline.peak_reserved_bytes())
        )?;
        self.draw_marks(out)?;
        self.draw_legend(out)
    }

    fn draw_axes(&self, out: &mut impl Write) -> io::Result<()> {
        const PARTS: u64 = 4;
        for part in 0..=PARTS {
            let bytes = self.top_bytes() / PARTS * part;
            let y = self.y(bytes);
            writeln!(
                out,
                "<line class=\"rule\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0,
                Bytes(bytes)
            )?;
        }
        let entries = self.timeline.entries();
        for (entry, anchor) in [(0, "start"), (entries / 2, "middle"), (entries, "end")] {
            let unit = if entry == entries { " entries" } else { "" };
            writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{}{unit}</text>",
                self.x(entry),
                TOP + HEIGHT + 18.0,
                grouped(u64::from(entry))
            )?;
        }
        Ok(())
    }

    /// A line through the columns. Where it goes on level, only its ends are named.
    fn line(&self, bytes: &[u64]) -> String {
        let mut line = String::new();
        for (at, (moment, level)) in self.moments.iter().zip(bytes).enumerate() {
            let same = |other: Option<&u64>| other == Some(level);
            if at > 0 && same(bytes.get(at - 1)) && same(bytes.get(at + 1)) {
                continue;
            }
            line += &format!("{:.1},{:.1} ", self.x(*moment), self.y(*level));
        }
        line
    }

    fn draw_area(
        &self,
        out: &mut impl Write,
        fill: &str,
        place: &str,
        below: &[u64],
        above: &[u64],
    ) -> io::Result<()> {
        if below == above {
            return Ok(());
        }
        let back = self.line(below);
        let back: Vec<&str> = back.split_whitespace().rev().collect();
        writeln!(
            out,
            "<path {fill} d=\"M{}L{}Z\"><title>{}</title></path>",
            self.line(above),
            back.join(" "),
            escaped(place)
        )
    }

    fn draw_marks(&self, out: &mut impl Write) -> io::Result<()> {
        let marks = self.timeline.marks().iter();
        let (failed, named): (Vec<_>, Vec<_>) =
            marks.partition(|mark| mark.kind == MarkKind::OutOfMemory);
        for mark in failed.into_iter().chain(named).take(MARKS) {
            let (class, dashes) = match mark.kind {
                MarkKind::OutOfMemory => ("failed", ""),
                MarkKind::Annotation => ("named", " stroke-dasharray=\"3 3\""),
            };
            let x = self.x(mark.entry);
            writeln!(
                out,
                "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{}\" \
                 stroke-width=\"1.5\"{dashes}><title>{}</title></line>",
                TOP + HEIGHT,
                escaped(&mark.text.chars().take(MOST_LETTERS).collect::<String>())
            )?;
        }
        Ok(())
    }

    fn draw_legend(&self, out: &mut impl Write) -> io::Result<()> {
        let mut y = TOP + HEIGHT + BOTTOM + ROW;
        let at_peak = self.areas.iter().map(|area| area.at_peak);
        let named = at_peak.fold(0, u64::saturating_add);
        let rest = self.timeline.live_bytes(self.timeline.peak());
        let rest = rest.saturating_sub(named);
        let areas = self.areas.iter().enumerate().map(|(number, area)| {
            let fill = format!("fill=\"{}\"", COLOURS[number % PLACES]);
            (fill, area.at_peak, area.name.as_str())
        });
        let rest = ("class=\"rest\"".to_owned(), rest, "all others");
        for (fill, bytes, place) in areas.chain([rest]) {
            let short: String = place.chars().take(LETTERS).collect();
            writeln!(
                out,
                "<g><title>{}</title><rect {fill} x=\"{LEFT}\" y=\"{}\" width=\"12\" height=\"12\"/>\
                 <text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{}</text><text x=\"{}\" y=\"{y}\">{}</text></g>",
                escaped(place),
                y - 10.0,
                LEFT + 100.0,
                Bytes(bytes),
                LEFT + 110.0,
                escaped(&short)
            )?;
            y += ROW;
        }
        writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"{y}\">at the peak; the line above: {} reserved at most</text>",
            Bytes(self.timeline.peak_reserved_bytes())
        )
    }
}

/// What the places hold that hold most at the peak, by column.
fn areas(dump: &Dump, timeline: &Timeline, moments: &[u32]) -> Vec<Area> {
    let mut names: HashMap<StackId, String> = HashMap::new();
    let mut at_peak: HashMap<String, u64> = HashMap::new();
    for (stack, bytes, _) in timeline.stacks_at(timeline.peak()) {
        let name = names.entry(stack).or_insert_with(|| name(dump, stack));
        let sum = at_peak.entry(name.clone()).or_default();
        *sum = sum.saturating_add(bytes);
    }
    let mut heaviest: Vec<_> = at_peak
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    heaviest.sort_unstable_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    heaviest.truncate(PLACES);
    let numbers: HashMap<&str, usize> = heaviest
        .iter()
        .enumerate()
        .map(|(number, (name, _))| (name.as_str(), number))
        .collect();
    // By how much each column differs from the one before it.
    let mut changes = vec![vec![0_i128; moments.len() + 1]; heaviest.len()];
    for span in timeline.allocations() {
        let name = names
            .entry(span.stack)
            .or_insert_with(|| name(dump, span.stack));
        let Some(number) = numbers.get(name.as_str()) else {
            continue;
        };
        let column = |moment| moments.partition_point(|column| *column < moment);
        changes[*number][column(span.start)] += i128::from(span.bytes);
        changes[*number][column(span.end)] -= i128::from(span.bytes);
    }
    heaviest
        .iter()
        .zip(changes)
        .map(|((name, at_peak), changes)| {
            let mut level = 0;
            let bytes = changes[..moments.len()].iter().map(|change| {
                level += change;
                u64::try_from(level).unwrap_or(0)
            });
            Area {
                name: name.clone(),
                at_peak: *at_peak,
                bytes: bytes.collect(),
            }
        })
        .collect()
}

fn name(dump: &Dump, stack: StackId) -> String {
    let frames = place(dump, stack).into_iter();
    let frames: Vec<_> = frames
        .map(|frame| dump.frame_text(frame).to_string())
        .collect();
    if frames.is_empty() {
        return "no stack recorded".to_owned();
    }
    // What is hovered over is longer than what is written beside a colour, but bounded too.
    frames.join(" ← ").chars().take(MOST_LETTERS).collect()
}
