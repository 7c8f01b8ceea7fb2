//! A device's history as pictures want it: every allocation and segment as a span of moments, and
//! tiles of columns at every level of detail.
//!
//! A *moment* is the number of entries of the history that have happened: 0 is before the first
//! entry, and a history of n entries has n + 1 moments. At level L a *column* stands for 2^L
//! moments and shows the one of them at which most memory was in use; a [`Tile`] has
//! [`COLUMNS_PER_TILE`] columns. In a tile the large allocations are spans of columns, and those
//! that could not be seen are summed up by column.
//!
//! Invariants:
//!
//! 1. Spans are sorted by `start`; those of allocations that were there before the history start
//!    at 0, and what was never freed in it ends at [`NEVER`].
//! 2. `live[m]` is the sum of the allocations whose span has moment `m`.
//! 3. `fullest[L - 1][c]` is the moment of column `c` at level `L`: the first of those with the
//!    most bytes in use.
//! 4. No segment reaches past the last address: what a file says beyond it is left out. Sums of
//!    bytes that pass 2^64 are 2^64 - 1.

use hashbrown::HashMap;
use serde::Serialize;

use crate::dump::{Action, Dump, Entry, History, StackId};

/// The end of a span that the history does not end.
pub const NEVER: u32 = u32::MAX;

/// Columns of a [`Tile`]; the last tile of a level has fewer.
pub const COLUMNS_PER_TILE: usize = 512;

/// An allocation smaller than this share of what a tile shows at most is not drawn by itself.
const SMALL_SHARE: u64 = 1024;

/// Allocations drawn by themselves in one tile; beyond it the smallest go into the band.
const MOST_SPANS: usize = 40_000;

/// Moments between two lists of what is alive, where few things are.
const CHECKPOINT_EVERY: usize = 4096;

/// Memory from one moment to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Where it is.
    pub address: u64,
    /// How long it is, as asked for.
    pub bytes: u64,
    /// The first moment at which it is there.
    pub start: u32,
    /// The first moment at which its owner has given it back, though a stream may still use it.
    pub given: u32,
    /// The first moment at which it is gone.
    pub end: u32,
    /// Where it was allocated.
    pub stack: StackId,
    /// The stream it was allocated for.
    pub stream: u64,
    /// Whether it is mapped into a range that can grow; only segments are.
    pub growable: bool,
}

impl Span {
    /// Whether it is there at a moment.
    #[must_use]
    pub const fn is_there(&self, moment: u32) -> bool {
        self.start <= moment && moment < self.end
    }
}

/// Something to be marked on the axis of time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Mark {
    /// The moment.
    pub entry: u32,
    /// What it is.
    pub kind: MarkKind,
    /// What to write beside it.
    pub text: String,
}

/// What a [`Mark`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// An allocation failed.
    OutOfMemory,
    /// The program named this moment.
    Annotation,
}

/// The history of one device. See the [module](self).
#[derive(Clone, Debug)]
pub struct Timeline {
    device: u32,
    entries: u32,
    allocations: Vec<Span>,
    segments: Vec<Span>,
    live: Vec<u64>,
    /// Reserved bytes from each moment on, until the next.
    reserved: Vec<(u32, u64)>,
    fullest: Vec<Vec<u32>>,
    /// Every so many moments, which allocations are there.
    checkpoints: Vec<Vec<u32>>,
    checkpoint_every: usize,
    marks: Vec<Mark>,
    notes: Vec<String>,
}

/// A stretch of a [`Timeline`] at one level of detail. See the [module](self).
#[derive(Clone, PartialEq, Debug)]
pub struct Tile {
    /// The level: a column stands for `2^level` moments.
    pub level: u32,
    /// The first moment of the first column.
    pub first_entry: u64,
    /// Allocations under so many bytes are in `small`.
    pub small_below: u64,
    /// By column: bytes in use at its moment.
    pub live: Vec<u64>,
    /// By column: those of them in allocations that are not drawn by themselves.
    pub small: Vec<u64>,
    /// By column: the most bytes reserved in it.
    pub reserved: Vec<u64>,
    /// By column: its moment.
    pub moment: Vec<u32>,
    /// What is drawn by itself, in the order of `start`.
    pub spans: Vec<TileSpan>,
}

/// An allocation in a [`Tile`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileSpan {
    /// Its position in [`Timeline::allocations`].
    pub id: u32,
    /// The first column that shows it.
    pub start_column: u16,
    /// The first column that does not any more.
    pub end_column: u16,
}

impl Timeline {
    /// The timelines of every device that has a history or segments.
    #[must_use]
    pub fn all(dump: &Dump) -> Vec<Self> {
        dump.devices()
            .into_iter()
            .map(|device| Self::new(dump, device))
            .collect()
    }

    /// The timeline of one device. Of a dump without a history for it, what its segments hold, at
    /// one moment.
    #[must_use]
    pub fn new(dump: &Dump, device: u32) -> Self {
        let history = dump
            .histories()
            .iter()
            .find(|history| history.device == device);
        let no_entries: &[Entry] = &[];
        let entries = history.map_or(no_entries, |history| dump.entries_of(history));
        // A moment is a u32 everywhere; a history longer than that would be a file of 200 GB.
        let entries = &entries[..entries.len().min(NEVER as usize - 1)];

        let mut build = Build::default();
        for (at, entry) in (1_u32..).zip(entries) {
            build.apply(entry, at);
        }
        for segment in dump.segments_of(device) {
            for block in dump.blocks_of(segment).iter().filter(|b| b.is_active()) {
                if !build.open.contains_key(&block.address) {
                    // Blocks say what was asked for only in files that are new enough.
                    let asked = block.requested_bytes;
                    let bytes = if asked == 0 { block.bytes } else { asked };
                    build.allocations.push(Span {
                        address: block.address,
                        bytes,
                        start: 0,
                        given: NEVER,
                        end: NEVER,
                        stack: block.stack,
                        stream: segment.stream,
                        growable: false,
                    });
                }
            }
            build.add_what_was_reserved_before(
                segment.address,
                segment.total_bytes,
                segment.stream,
                segment.is_expandable,
            );
        }
        build.finish(dump, device, history, entries)
    }

    /// The index of the device.
    #[must_use]
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Entries of the history; moments are from 0 to this.
    #[must_use]
    pub const fn entries(&self) -> u32 {
        self.entries
    }

    /// Every allocation, in the order of their beginnings.
    #[must_use]
    pub fn allocations(&self) -> &[Span] {
        &self.allocations
    }

    /// What was reserved: segments, and stretches of ranges that can grow.
    #[must_use]
    pub fn segments(&self) -> &[Span] {
        &self.segments
    }

    /// Moments to be marked.
    #[must_use]
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// What the history cannot tell, in sentences.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Bytes in use at a moment.
    ///
    /// # Panics
    ///
    /// Panics if `moment` is greater than [`entries`](Self::entries).
    #[must_use]
    pub fn live_bytes(&self, moment: u32) -> u64 {
        self.live[moment as usize]
    }

    /// Bytes reserved at a moment.
    #[must_use]
    pub fn reserved_bytes(&self, moment: u32) -> u64 {
        let next = self.reserved.partition_point(|(from, _)| *from <= moment);
        next.checked_sub(1).map_or(0, |step| self.reserved[step].1)
    }

    /// The first moment with the most bytes in use.
    #[must_use]
    pub fn peak(&self) -> u32 {
        self.fullest
            .last()
            .and_then(|columns| columns.first().copied())
            .unwrap_or(0)
    }

    /// The most bytes ever reserved.
    #[must_use]
    pub fn peak_reserved_bytes(&self) -> u64 {
        let steps = self.reserved.iter().map(|(_, bytes)| *bytes);
        steps.max().unwrap_or(0)
    }

    /// Levels of detail; the last one is a single tile.
    #[must_use]
    pub fn levels(&self) -> u32 {
        let mut levels = 1;
        while (self.live.len() - 1) >> (levels - 1) >= COLUMNS_PER_TILE {
            levels += 1;
        }
        levels
    }

    /// Tiles of a level.
    #[must_use]
    pub fn tiles(&self, level: u32) -> usize {
        self.columns(level).div_ceil(COLUMNS_PER_TILE)
    }

    fn columns(&self, level: u32) -> usize {
        ((self.live.len() - 1) >> level) + 1
    }

    fn moment(&self, level: u32, column: usize) -> u32 {
        match (level as usize).checked_sub(1) {
            None => u32::try_from(column).unwrap_or(NEVER),
            Some(below) => self.fullest[below][column],
        }
    }

    /// One tile; `None` where there is no such level or tile.
    #[must_use]
    pub fn tile(&self, level: u32, index: usize) -> Option<Tile> {
        if level >= self.levels() || index >= self.tiles(level) {
            return None;
        }
        let first = index * COLUMNS_PER_TILE;
        let last = (first + COLUMNS_PER_TILE).min(self.columns(level));
        let moment: Vec<u32> = (first..last).map(|c| self.moment(level, c)).collect();
        let live: Vec<u64> = moment.iter().map(|m| self.live[*m as usize]).collect();
        let most = live.iter().copied().max().unwrap_or(0);
        let mut small_below = most / SMALL_SHARE;

        let (from, to) = (*moment.first()?, *moment.last()?);
        let column_of = |at: u32| {
            let column = moment.partition_point(|m| *m < at);
            u16::try_from(column).unwrap_or(u16::MAX)
        };
        let mut spans = Vec::new();
        for id in self.alive_or_beginning(from, to) {
            let span = &self.allocations[id as usize];
            if span.bytes < small_below {
                continue;
            }
            let (start_column, end_column) = (column_of(span.start), column_of(span.end));
            if start_column < end_column {
                spans.push(TileSpan {
                    id,
                    start_column,
                    end_column,
                });
            }
        }
        let bytes_of = |span: &TileSpan| self.allocations[span.id as usize].bytes;
        if spans.len() > MOST_SPANS {
            let mut sizes: Vec<u64> = spans.iter().map(bytes_of).collect();
            let (_, kept, _) = sizes.select_nth_unstable_by(MOST_SPANS, |a, b| b.cmp(a));
            // All of the size that did not fit whole go, so that what is small does not depend on
            // the order.
            small_below = kept.saturating_add(1);
            spans.retain(|span| bytes_of(span) >= small_below);
        }
        // What is not drawn by itself, by difference.
        let mut change = vec![0_i128; live.len() + 1];
        for span in &spans {
            let bytes = i128::from(bytes_of(span));
            change[usize::from(span.start_column)] += bytes;
            change[usize::from(span.end_column)] -= bytes;
        }
        let mut drawn = 0_i128;
        let small = live
            .iter()
            .zip(&change)
            .map(|(live, change)| {
                drawn += change;
                u64::try_from(i128::from(*live) - drawn).unwrap_or(0)
            })
            .collect();
        Some(Tile {
            level,
            first_entry: (first as u64) << level,
            small_below,
            small,
            reserved: self.reserved_by_column(level, first, last),
            live,
            moment,
            spans,
        })
    }

    fn reserved_by_column(&self, level: u32, first: usize, last: usize) -> Vec<u64> {
        let moment = |column: usize| u32::try_from(column << level).unwrap_or(NEVER);
        let mut step = self
            .reserved
            .partition_point(|(from, _)| *from < moment(first));
        let mut now = step.checked_sub(1).map_or(0, |at| self.reserved[at].1);
        (first..last)
            .map(|column| {
                let end = moment(column + 1);
                let mut most = None;
                while let Some((_, bytes)) = self.reserved.get(step).filter(|(at, _)| *at < end) {
                    // What was reserved before a change counts, but where it changed at once.
                    let before = if self.reserved[step].0 == moment(column) {
                        0
                    } else {
                        now
                    };
                    now = *bytes;
                    most = Some(most.unwrap_or(before).max(now));
                    step += 1;
                }
                most.unwrap_or(now)
            })
            .collect()
    }

    /// Positions of the allocations there at `from`, and of those that begin after it and up to
    /// `to`, in order.
    fn alive_or_beginning(&self, from: u32, to: u32) -> impl Iterator<Item = u32> {
        let begun = self.allocations.partition_point(|span| span.start <= to);
        self.alive(from)
            .chain((self.begun_by(from)..begun).map(|id| u32::try_from(id).unwrap_or(NEVER)))
    }

    fn begun_by(&self, moment: u32) -> usize {
        self.allocations
            .partition_point(|span| span.start <= moment)
    }

    /// Positions of the allocations that are there at a moment, in order.
    pub fn alive(&self, moment: u32) -> impl Iterator<Item = u32> {
        let at = (moment as usize / self.checkpoint_every).min(self.checkpoints.len() - 1);
        let then = u32::try_from(at * self.checkpoint_every).unwrap_or(NEVER);
        let since = self.begun_by(then)..self.begun_by(moment);
        self.checkpoints[at]
            .iter()
            .copied()
            .chain(since.map(|id| u32::try_from(id).unwrap_or(NEVER)))
            .filter(move |id| self.allocations[*id as usize].is_there(moment))
    }

    /// What is reserved at a moment, by address; stretches of a range that can grow are one where
    /// they touch.
    #[must_use]
    pub fn reserved_at(&self, moment: u32) -> Vec<Span> {
        let mut there: Vec<Span> = self
            .segments
            .iter()
            .filter(|span| span.is_there(moment))
            .copied()
            .collect();
        there.sort_by_key(|span| span.address);
        there.dedup_by(|next, span| {
            let touch = span.address.checked_add(span.bytes) == Some(next.address);
            let one = touch && span.growable && next.growable;
            if one {
                span.bytes += next.bytes;
            }
            one
        });
        there
    }

    /// Who held how much at a moment: stack, bytes and blocks, the heaviest first.
    #[must_use]
    pub fn stacks_at(&self, moment: u32) -> Vec<(StackId, u64, u64)> {
        let mut sums: HashMap<StackId, (u64, u64)> = HashMap::new();
        for id in self.alive(moment) {
            let span = &self.allocations[id as usize];
            let sum = sums.entry(span.stack).or_default();
            sum.0 = sum.0.saturating_add(span.bytes);
            sum.1 += 1;
        }
        let mut rows: Vec<_> = sums.into_iter().map(|(s, (b, n))| (s, b, n)).collect();
        rows.sort_unstable_by_key(|(stack, bytes, _)| (std::cmp::Reverse(*bytes), *stack));
        rows
    }
}

/// A timeline in the making.
#[derive(Default)]
struct Build {
    allocations: Vec<Span>,
    segments: Vec<Span>,
    /// By address: the allocation there that has not ended.
    open: HashMap<u64, u32>,
    /// By address: the segment there that has not ended.
    open_segments: std::collections::BTreeMap<u64, u32>,
    /// Entries that free what is not there, in a way that no earlier life explains.
    strange: u64,
}

impl Build {
    fn apply(&mut self, entry: &Entry, at: u32) {
        let span = Span {
            address: entry.address,
            bytes: entry.bytes,
            start: at,
            given: NEVER,
            end: NEVER,
            stack: entry.stack,
            stream: entry.stream,
            growable: entry.action == Action::SegmentMap,
        };
        match entry.action {
            Action::Alloc => {
                let id = u32::try_from(self.allocations.len()).unwrap_or(NEVER);
                if let Some(old) = self.open.insert(entry.address, id) {
                    // Its end is missing: entries were lost, or two threads raced for the log.
                    let old = &mut self.allocations[old as usize];
                    old.given = old.given.min(at);
                    old.end = at;
                    self.strange += 1;
                }
                self.allocations.push(span);
            }
            Action::FreeRequested => {
                if let Some(id) = self.open.get(&entry.address) {
                    self.allocations[*id as usize].given = at;
                } else {
                    self.begun_before(span, at, NEVER);
                }
            }
            Action::FreeCompleted => {
                if let Some(id) = self.open.remove(&entry.address) {
                    let ended = &mut self.allocations[id as usize];
                    ended.given = ended.given.min(at);
                    ended.end = at;
                } else {
                    self.begun_before(span, 0, at);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => self.reserve(span),
            Action::SegmentFree | Action::SegmentUnmap => {
                self.release(&Span {
                    growable: entry.action == Action::SegmentUnmap,
                    ..span
                });
            }
            Action::Snapshot | Action::Oom | Action::Annotate | Action::Other => {}
        }
    }

    /// Something that is freed here and was allocated before the history began.
    fn begun_before(&mut self, span: Span, given: u32, end: u32) {
        let id = u32::try_from(self.allocations.len()).unwrap_or(NEVER);
        self.allocations.push(Span {
            start: 0,
            given,
            end,
            ..span
        });
        if end == NEVER {
            self.open.insert(span.address, id);
        }
    }

    fn reserve(&mut self, mut span: Span) {
        span.bytes = span.bytes.min(u64::MAX - span.address);
        if span.bytes == 0 {
            return;
        }
        let id = u32::try_from(self.segments.len()).unwrap_or(NEVER);
        self.segments.push(span);
        if let Some(old) = self.open_segments.insert(span.address, id) {
            self.segments[old as usize].end = span.start;
            self.strange += 1;
        }
    }

    /// Ends what is reserved in a range. What was reserved before the history began, and is no
    /// longer there at its end, shows here for the first time.
    fn release(&mut self, range: &Span) {
        let (address, at) = (range.address, range.start);
        let end = address.saturating_add(range.bytes);
        let touched: Vec<(u64, u32)> = self
            .open_segments
            .range(..end)
            .rev()
            .map(|(from, id)| (*from, *id))
            .take_while(|(from, id)| from + self.segments[*id as usize].bytes > address)
            .collect();
        // What none of them covers, from the highest down: they are in that order.
        let mut uncovered = Vec::new();
        let mut covered_from = end;
        for (from, id) in touched {
            let old = self.segments[id as usize];
            let old_end = from + old.bytes;
            self.segments[id as usize].end = at;
            self.open_segments.remove(&from);
            // The parts outside the range stay.
            for (from, to) in [(from, address.min(old_end)), (end.max(from), old_end)] {
                if from < to {
                    self.reserve(Span {
                        address: from,
                        bytes: to - from,
                        start: at,
                        ..old
                    });
                }
            }
            uncovered.push((old_end.max(address), covered_from));
            covered_from = covered_from.min(from);
        }
        uncovered.push((address, covered_from));
        uncovered.retain(|(from, to)| from < to);
        for (from, to) in uncovered {
            self.reserved_before(from, to, range.stream, range.growable, at);
        }
    }

    /// Adds what was reserved before the history began, up to the moment `end`.
    fn reserved_before(&mut self, from: u64, to: u64, stream: u64, growable: bool, end: u32) {
        self.segments.push(Span {
            address: from,
            bytes: to - from,
            start: 0,
            given: NEVER,
            end,
            stack: StackId::default(),
            stream,
            growable,
        });
    }

    /// The parts of a segment that is there at the end, and that no entry reserved.
    fn add_what_was_reserved_before(
        &mut self,
        address: u64,
        bytes: u64,
        stream: u64,
        growable: bool,
    ) {
        let end = address.saturating_add(bytes);
        let mut from = address;
        let mut gaps = Vec::new();
        let known = self.open_segments.range(..address).next_back();
        let inside = self.open_segments.range(address..end);
        for (start, id) in known.into_iter().chain(inside) {
            let known_end = start + self.segments[*id as usize].bytes;
            if from < *start {
                gaps.push((from, *start));
            }
            from = from.max(known_end);
        }
        if from < end {
            gaps.push((from, end));
        }
        for (from, to) in gaps {
            self.reserved_before(from, to, stream, growable, NEVER);
        }
    }

    fn finish(
        mut self,
        dump: &Dump,
        device: u32,
        history: Option<&History>,
        entries: &[Entry],
    ) -> Timeline {
        self.allocations.sort_by_key(|span| span.start);
        self.segments.sort_by_key(|span| (span.start, span.address));
        let last = u32::try_from(entries.len()).unwrap_or(NEVER - 1);
        let live = sums(&self.allocations, last);
        let mut reserved: Vec<(u32, u64)> = Vec::new();
        for (moment, bytes) in (0..).zip(sums(&self.segments, last)) {
            if reserved.last().is_none_or(|(_, before)| *before != bytes) {
                reserved.push((moment, bytes));
            }
        }
        let mut timeline = Timeline {
            device,
            entries: last,
            fullest: fullest(&live),
            live,
            reserved,
            checkpoint_every: CHECKPOINT_EVERY,
            checkpoints: Vec::new(),
            marks: marks(dump, device, entries),
            notes: Vec::new(),
            allocations: self.allocations,
            segments: self.segments,
        };
        timeline.note(history.is_some(), self.strange);
        timeline.set_checkpoints();
        timeline
    }
}

/// Bytes by moment, up to `last`.
fn sums(spans: &[Span], last: u32) -> Vec<u64> {
    let mut change = vec![0_i128; last as usize + 2];
    for span in spans {
        change[span.start as usize] += i128::from(span.bytes);
        if span.end <= last {
            change[span.end as usize] -= i128::from(span.bytes);
        }
    }
    change.pop();
    let mut now = 0_i128;
    change
        .into_iter()
        .map(|change| {
            now += change;
            u64::try_from(now).unwrap_or(u64::MAX)
        })
        .collect()
}

/// By level from 1 on: the moment of each column, up to the level with one column.
fn fullest(live: &[u64]) -> Vec<Vec<u32>> {
    let moments = u32::try_from(live.len()).unwrap_or(NEVER);
    let fuller = |below: &[u32]| -> Vec<u32> {
        let fullest = |pair: &[u32]| match *pair {
            [a, b] if live[b as usize] > live[a as usize] => b,
            _ => pair[0],
        };
        below.chunks(2).map(fullest).collect()
    };
    let mut levels = Vec::new();
    let mut columns = fuller(&(0..moments).collect::<Vec<_>>());
    while columns.len() > 1 {
        let above = fuller(&columns);
        levels.push(columns);
        columns = above;
    }
    levels.push(columns);
    levels
}

fn marks(dump: &Dump, device: u32, entries: &[Entry]) -> Vec<Mark> {
    let mut marks: Vec<Mark> = (1_u32..)
        .zip(entries)
        .filter_map(|(entry, what)| {
            let text = match what.action {
                Action::Oom => format!(
                    "{} B asked for, {} B free on the device",
                    what.bytes, what.address
                ),
                Action::Annotate => dump.text(dump.notes(what.notes).user_metadata).to_owned(),
                _ => return None,
            };
            let kind = if what.action == Action::Oom {
                MarkKind::OutOfMemory
            } else {
                MarkKind::Annotation
            };
            Some(Mark { entry, kind, text })
        })
        .collect();
    // Annotations have times, and are marked where the first entry is that is not older.
    if entries.iter().any(|entry| entry.time_us != 0) {
        for annotation in dump.annotations() {
            if annotation.device != device {
                continue;
            }
            let at = entries.partition_point(|entry| entry.time_us < annotation.time_us);
            let (name, stage) = (dump.text(annotation.name), dump.text(annotation.stage));
            let text = if stage.is_empty() {
                name.to_owned()
            } else {
                format!("{name} {stage}")
            };
            marks.push(Mark {
                entry: u32::try_from(at).unwrap_or(NEVER),
                kind: MarkKind::Annotation,
                text,
            });
        }
    }
    marks.sort_by_key(|mark| mark.entry);
    marks
}

impl Timeline {
    fn note(&mut self, has_history: bool, strange: u64) {
        if !has_history {
            self.notes.push(
                "No history was recorded: only the moment of the snapshot is shown \
                 (torch.cuda.memory._record_memory_history() records one)."
                    .to_owned(),
            );
        }
        let before = self.allocations.partition_point(|span| span.start == 0);
        if has_history && before > 0 {
            self.notes.push(format!(
                "{before} allocations were made before the history begins: what they come after, \
                 and what was freed earlier, it does not say."
            ));
        }
        if strange > 0 {
            self.notes.push(format!(
                "{strange} entries begin where something still is: ends are missing in the history."
            ));
        }
    }

    /// Lists of what is alive, so many that finding it never looks at many, and so few that they
    /// hold less than the allocations themselves.
    fn set_checkpoints(&mut self) {
        let held: u64 = self
            .allocations
            .iter()
            .map(|span| u64::from(span.end.min(self.entries + 1) - span.start))
            .sum();
        let budget = 8 * self.allocations.len().max(1) as u64;
        let every = held.div_ceil(budget).max(CHECKPOINT_EVERY as u64);
        self.checkpoint_every = usize::try_from(every).unwrap_or(usize::MAX);
        let mut alive: Vec<u32> = Vec::new();
        let mut next = 0;
        let mut at = 0_u64;
        while at <= u64::from(self.entries) {
            let moment = u32::try_from(at).unwrap_or(NEVER);
            alive.retain(|id| self.allocations[*id as usize].end > moment);
            while let Some(span) = self.allocations.get(next).filter(|s| s.start <= moment) {
                if span.end > moment {
                    alive.push(u32::try_from(next).unwrap_or(NEVER));
                }
                next += 1;
            }
            self.checkpoints.push(alive.clone());
            at += every;
        }
    }
}

impl Tile {
    /// The tile as bytes, in the form that the page of `lastref view` reads: a header (`LRT1`,
    /// level, columns, spans; all little-endian), then each of its columns as one array.
    #[must_use]
    pub fn to_bytes(&self, timeline: &Timeline) -> Vec<u8> {
        let (columns, spans) = (self.live.len(), self.spans.len());
        let mut bytes = Vec::with_capacity(32 + columns * 28 + spans * 20);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
        bytes.extend(b"LRT1");
        bytes.extend(self.level.to_le_bytes());
        bytes.extend(count(columns));
        bytes.extend(count(spans));
        // Numbers of bytes are doubles there, exact up to 2^53.
        #[expect(
            clippy::cast_precision_loss,
            reason = "pictures do not need the last bit"
        )]
        let double = |value: u64| (value as f64).to_le_bytes();
        bytes.extend(double(self.first_entry));
        bytes.extend(double(self.small_below));
        for column in [&self.live, &self.small, &self.reserved] {
            bytes.extend(column.iter().flat_map(|value| double(*value)));
        }
        let span = |span: &TileSpan| timeline.allocations[span.id as usize];
        bytes.extend(self.spans.iter().flat_map(|s| double(span(s).bytes)));
        bytes.extend(self.moment.iter().flat_map(|m| m.to_le_bytes()));
        bytes.extend(self.spans.iter().flat_map(|s| s.id.to_le_bytes()));
        bytes.extend(self.spans.iter().flat_map(|s| count(span(s).stack.index())));
        bytes.extend(self.spans.iter().flat_map(|s| s.start_column.to_le_bytes()));
        bytes.extend(self.spans.iter().flat_map(|s| s.end_column.to_le_bytes()));
        bytes
    }
}
