//! What a memory snapshot file holds, in rows and tables: the model that every analysis works on.
//!
//! ```text
//! Dump ─┬─ segments ──▶ a range of blocks          rows, sorted by device and address
//!       ├─ histories ─▶ a range of entries         rows, oldest first, one history a device
//!       ├─ annotations, settings, problems
//!       └─ Tables: texts ◀─ frames ◀─ stacks, pools, notes      each distinct value once
//! ```
//!
//! Rows are small and of fixed size; whatever repeats (a text, a frame, a whole stack, a pool's
//! id, an entry's notes) is in a table once and named by a number. A snapshot of a gigabyte is so
//! held in less than its own size.
//!
//! Invariants, held by the reader and by [`Dump::from`]:
//!
//! 1. Segments are sorted by device, then address; each names a range of [`Dump::blocks`] of its
//!    own, and ranges follow each other in the order of the segments.
//! 2. The blocks of a segment are in the order of the file, and have addresses.
//! 3. Every id in a row is valid in this dump's tables; id 0 is "none".
//! 4. The bytes of all blocks, and of all segments, sum up to less than 2^64.
//!
//! What a file says that cannot be true (blocks that do not tile their segment, sums that differ)
//! is not refused: it is in [`Dump::problems`].

use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::ops::Range;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use serde::Serialize;

use crate::snapshot::{self, BlockState, SegmentKind, Snapshot, TraceAction};
use crate::trace::{Operation, OperationKind, Trace};

/// A text in a dump's tables; 0 is the empty text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct TextId(pub(crate) u32);

/// A frame of a stack in a dump's tables.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct FrameId(pub(crate) u32);

/// A stack in a dump's tables; 0 is "not recorded".
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct StackId(pub(crate) u32);

/// A pool's id in a dump's tables; 0 is "not given".
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct PoolId(pub(crate) u32);

/// What an entry has besides numbers, in a dump's tables; 0 is nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct NotesId(pub(crate) u32);

impl StackId {
    /// Whether a stack was recorded.
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }

    /// Its position among the stacks of the dump, to index a table of one's own with.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl PoolId {
    /// Whether the file says which pool it is.
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

/// One place in a program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Frame {
    /// The function.
    pub name: TextId,
    /// The file.
    pub file: TextId,
    /// The line; 0 where it is not known.
    pub line: u32,
}

/// What few entries have.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Notes {
    /// The compiled region, or `N/A`.
    pub compile_context: TextId,
    /// What the user attached.
    pub user_metadata: TextId,
    /// The stack of the forward operation, for an allocation of the backward pass.
    pub forward_stack: StackId,
    /// What a profiler found the memory to be for.
    pub category: TextId,
    /// The word for an action that this crate does not know.
    pub unknown_action: TextId,
}

/// One contiguous range obtained from a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The index of the device.
    pub device: u32,
    /// Where it starts.
    pub address: u64,
    /// Its length in bytes.
    pub total_bytes: u64,
    /// Bytes in blocks that callers hold, as the file says; `None` where it does not.
    pub allocated_bytes: Option<u64>,
    /// As `allocated_bytes`, with blocks that wait for a stream.
    pub active_bytes: Option<u64>,
    /// The stream it was obtained for.
    pub stream: u64,
    /// Whether it is for small or for large blocks; `None` where the file does not say.
    pub kind: Option<SegmentKind>,
    /// The pool it belongs to.
    pub pool: PoolId,
    /// Whether it can grow in place.
    pub is_expandable: bool,
    /// Where it was obtained.
    pub stack: StackId,
    /// Its blocks, as a range of [`Dump::blocks`].
    pub blocks: Range<usize>,
}

/// One block of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// Where it starts.
    pub address: u64,
    /// Its length, rounding included.
    pub bytes: u64,
    /// What the caller asked for; of an inactive block, what its last caller asked for.
    pub requested_bytes: u64,
    /// Where it was allocated.
    pub stack: StackId,
    /// Who may use it.
    pub state: BlockState,
}

impl Block {
    /// Whether a caller holds it, or work on a stream may still use it.
    #[must_use]
    pub const fn is_active(&self) -> bool {
        !matches!(self.state, BlockState::Inactive)
    }
}

/// What an [`Entry`] reports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// A caller got a block.
    Alloc,
    /// A caller gave a block back.
    FreeRequested,
    /// A block given back became usable again.
    FreeCompleted,
    /// A segment was obtained from the device.
    SegmentAlloc,
    /// A segment was given back to the device.
    SegmentFree,
    /// Memory was mapped into a range.
    SegmentMap,
    /// Memory was unmapped from a range.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// An allocation failed. The entry's `address` is what the device had free.
    Oom,
    /// The user wrote something down.
    Annotate,
    /// Something this crate does not know; [`Notes::unknown_action`] has the word.
    Other,
}

impl Action {
    /// PyTorch's word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
            Self::SegmentAlloc => "segment_alloc",
            Self::SegmentFree => "segment_free",
            Self::SegmentMap => "segment_map",
            Self::SegmentUnmap => "segment_unmap",
            Self::Snapshot => "snapshot",
            Self::Oom => "oom",
            Self::Annotate => "annotate",
            Self::Other => "other",
        }
    }
}

/// One thing that happened in an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The address it happened to; of [`Action::Oom`], the bytes that the device had free.
    pub address: u64,
    /// How many bytes: requested ones for blocks, real ones for segments.
    pub bytes: u64,
    /// Microseconds since the Unix epoch; 0 if no clock was read.
    pub time_us: u64,
    /// The stream it happened on.
    pub stream: u64,
    /// Where it happened.
    pub stack: StackId,
    /// The pool of the block.
    pub pool: PoolId,
    /// What else is known.
    pub notes: NotesId,
    /// What happened.
    pub action: Action,
}

/// The history of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct History {
    /// The index of the device.
    pub device: u32,
    /// Its entries, oldest first, as a range of [`Dump::entries`].
    pub entries: Range<usize>,
}

/// A moment that the program named.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Annotation {
    /// The index of the device.
    pub device: u32,
    /// Microseconds since the Unix epoch.
    pub time_us: u64,
    /// What the program called it.
    pub name: TextId,
    /// `START` or `END` for a stretch of time, else empty.
    pub stage: TextId,
}

/// The value of a setting.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Setting {
    /// Not set.
    None,
    /// Yes or no.
    Bool(bool),
    /// A whole number; -1 often means "no limit".
    Int(i64),
    /// A fraction.
    Float(f64),
    /// A text.
    Text(String),
    /// Settings by name, in the file's order.
    Map(Settings),
}

/// Settings by name, in the order of the file.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Settings(pub(crate) Vec<(String, Setting)>);

impl Serialize for Settings {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl Settings {
    /// The setting of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Setting> {
        let (_, value) = self.0.iter().find(|(found, _)| found == name)?;
        Some(value)
    }

    /// Every setting, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Setting)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The setting of this name, if it is a yes or no.
    #[must_use]
    pub fn bool(&self, name: &str) -> Option<bool> {
        match self.get(name)? {
            Setting::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The setting of this name, if it is a whole number.
    #[must_use]
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.get(name)? {
            Setting::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// The setting of this name, if it is a text.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            Setting::Text(value) => Some(value),
            _ => None,
        }
    }
}

/// A memory snapshot as read from a file, or taken of an allocator. See the [module](self).
#[derive(Clone, Debug, Default)]
pub struct Dump {
    pub(crate) segments: Vec<Segment>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) histories: Vec<History>,
    pub(crate) annotations: Vec<Annotation>,
    pub(crate) settings: Settings,
    pub(crate) problems: Vec<String>,
    pub(crate) host_bytes: u64,
    pub(crate) tables: Tables,
}

impl Dump {
    /// What the allocator held, sorted by device and address.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The blocks of all segments; [`Segment::blocks`] says which are whose.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The blocks of one segment, in the order of their addresses.
    #[must_use]
    pub fn blocks_of(&self, segment: &Segment) -> &[Block] {
        &self.blocks[segment.blocks.clone()]
    }

    /// The entries of all histories; [`History::entries`] says which are whose.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The histories that have entries, by device.
    #[must_use]
    pub fn histories(&self) -> &[History] {
        &self.histories
    }

    /// The entries of one history, oldest first.
    #[must_use]
    pub fn entries_of(&self, history: &History) -> &[Entry] {
        &self.entries[history.entries.clone()]
    }

    /// The moments that the program named, in the order of the file.
    #[must_use]
    pub fn annotations(&self) -> &[Annotation] {
        &self.annotations
    }

    /// How the allocator was set up, under PyTorch's names.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What the file says that cannot be true, for people.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Bytes in segments of pinned host memory, where the file lists them.
    #[must_use]
    pub const fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    /// A text.
    #[must_use]
    pub fn text(&self, id: TextId) -> &str {
        self.tables.texts.get(id.0)
    }

    /// A frame.
    #[must_use]
    pub fn frame(&self, id: FrameId) -> Frame {
        self.tables.frames[id.0 as usize]
    }

    /// The frames of a stack, innermost first; none if it was not recorded.
    #[must_use]
    pub fn stack(&self, id: StackId) -> &[FrameId] {
        self.tables.stacks.get(id.0)
    }

    /// How many stacks there are, with number 0 for "not recorded". Every [`StackId::index`] is less.
    #[must_use]
    pub fn num_stacks(&self) -> usize {
        self.tables.stacks.len()
    }

    /// The two numbers of a pool's id; `None` if the file does not give it.
    #[must_use]
    pub fn pool(&self, id: PoolId) -> Option<(u64, u64)> {
        id.is_some().then(|| self.tables.pools[id.0 as usize])
    }

    /// What an entry has besides numbers.
    #[must_use]
    pub fn notes(&self, id: NotesId) -> Notes {
        self.tables.notes[id.0 as usize]
    }

    /// The indices of the devices that have segments or a history, ascending.
    #[must_use]
    pub fn devices(&self) -> Vec<u32> {
        let segments = self.segments.iter().map(|segment| segment.device);
        let mut devices: Vec<u32> = segments
            .chain(self.histories.iter().map(|history| history.device))
            .collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// The segments of one device.
    #[must_use]
    pub fn segments_of(&self, device: u32) -> &[Segment] {
        let start = self.segments.partition_point(|other| other.device < device);
        let end = self
            .segments
            .partition_point(|other| other.device <= device);
        &self.segments[start..end]
    }
}

/// Everything that repeats, once.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub(crate) texts: Texts,
    pub(crate) frames: Vec<Frame>,
    frame_ids: HashTable<u32>,
    pub(crate) stacks: Stacks,
    pub(crate) pools: Vec<(u64, u64)>,
    pool_ids: HashTable<u32>,
    pub(crate) notes: Vec<Notes>,
    notes_ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Default for Tables {
    fn default() -> Self {
        let nowhere = Frame {
            name: TextId(0),
            file: TextId(0),
            line: 0,
        };
        let mut tables = Self {
            texts: Texts::default(),
            frames: Vec::new(),
            frame_ids: HashTable::new(),
            stacks: Stacks::default(),
            // The first pool stands for "not given": it is never found by its numbers.
            pools: vec![(0, 0)],
            pool_ids: HashTable::new(),
            notes: Vec::new(),
            notes_ids: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
        };
        tables.frame(nowhere);
        tables.notes(Notes::default());
        tables
    }
}

/// The id of `value` in `rows`, where it is put if it is new.
fn intern<T: Copy + Eq + Hash>(
    rows: &mut Vec<T>,
    ids: &mut HashTable<u32>,
    hasher: &DefaultHashBuilder,
    value: T,
) -> Option<u32> {
    let hash = hasher.hash_one(value);
    if let Some(id) = ids.find(hash, |id| rows[*id as usize] == value) {
        return Some(*id);
    }
    let id = u32::try_from(rows.len()).ok()?;
    rows.push(value);
    ids.insert_unique(hash, id, |id| hasher.hash_one(rows[*id as usize]));
    Some(id)
}

// `None` is a table with 2^32 distinct values, which no file of less than ten gigabytes makes.
impl Tables {
    pub(crate) fn text(&mut self, text: &str) -> Option<TextId> {
        self.texts.intern(&self.hasher, text).map(TextId)
    }

    pub(crate) fn frame(&mut self, frame: Frame) -> Option<FrameId> {
        intern(&mut self.frames, &mut self.frame_ids, &self.hasher, frame).map(FrameId)
    }

    /// Of no frames, the stack 0.
    pub(crate) fn stack(&mut self, frames: &[FrameId]) -> Option<StackId> {
        self.stacks.intern(&self.hasher, frames).map(StackId)
    }

    pub(crate) fn pool(&mut self, pool: (u64, u64)) -> Option<PoolId> {
        intern(&mut self.pools, &mut self.pool_ids, &self.hasher, pool).map(PoolId)
    }

    pub(crate) fn notes(&mut self, notes: Notes) -> Option<NotesId> {
        intern(&mut self.notes, &mut self.notes_ids, &self.hasher, notes).map(NotesId)
    }
}

/// Distinct texts in one buffer. Text 0 is the empty one.
#[derive(Clone, Debug)]
pub(crate) struct Texts {
    buffer: String,
    ends: Vec<usize>,
    ids: HashTable<u32>,
}

impl Default for Texts {
    fn default() -> Self {
        Self {
            buffer: String::new(),
            ends: vec![0],
            ids: HashTable::new(),
        }
    }
}

fn text_at<'a>(buffer: &'a str, ends: &[usize], id: u32) -> &'a str {
    let id = id as usize;
    let start = if id == 0 { 0 } else { ends[id - 1] };
    &buffer[start..ends[id]]
}

impl Texts {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, id: u32) -> &str {
        text_at(&self.buffer, &self.ends, id)
    }

    fn intern(&mut self, hasher: &DefaultHashBuilder, text: &str) -> Option<u32> {
        if text.is_empty() {
            return Some(0);
        }
        let Self { buffer, ends, ids } = self;
        let hash = hasher.hash_one(text);
        if let Some(id) = ids.find(hash, |id| text_at(buffer, ends, *id) == text) {
            return Some(*id);
        }
        let id = u32::try_from(ends.len()).ok()?;
        buffer.push_str(text);
        ends.push(buffer.len());
        ids.insert_unique(hash, id, |id| hasher.hash_one(text_at(buffer, ends, *id)));
        Some(id)
    }
}

/// Distinct stacks in one list of frames. Stack 0 has none.
#[derive(Clone, Debug)]
pub(crate) struct Stacks {
    frames: Vec<FrameId>,
    ends: Vec<usize>,
    ids: HashTable<u32>,
}

impl Default for Stacks {
    fn default() -> Self {
        Self {
            frames: Vec::new(),
            ends: vec![0],
            ids: HashTable::new(),
        }
    }
}

fn stack_at<'a>(frames: &'a [FrameId], ends: &[usize], id: u32) -> &'a [FrameId] {
    let id = id as usize;
    let start = if id == 0 { 0 } else { ends[id - 1] };
    &frames[start..ends[id]]
}

impl Stacks {
    pub(crate) fn get(&self, id: u32) -> &[FrameId] {
        stack_at(&self.frames, &self.ends, id)
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    fn intern(&mut self, hasher: &DefaultHashBuilder, stack: &[FrameId]) -> Option<u32> {
        if stack.is_empty() {
            return Some(0);
        }
        let Self { frames, ends, ids } = self;
        let hash = hasher.hash_one(stack);
        if let Some(id) = ids.find(hash, |id| stack_at(frames, ends, *id) == stack) {
            return Some(*id);
        }
        let id = u32::try_from(ends.len()).ok()?;
        frames.extend_from_slice(stack);
        ends.push(frames.len());
        ids.insert_unique(hash, id, |id| hasher.hash_one(stack_at(frames, ends, *id)));
        Some(id)
    }
}

impl From<&Snapshot> for Dump {
    fn from(snapshot: &Snapshot) -> Self {
        let mut dump = Self::default();
        for segment in &snapshot.segments {
            let start = dump.blocks.len();
            dump.blocks.extend(segment.blocks.iter().map(|block| Block {
                address: block.address,
                bytes: block.bytes,
                requested_bytes: block.requested_bytes,
                stack: StackId(0),
                state: block.state,
            }));
            dump.segments.push(Segment {
                device: segment.device,
                address: segment.address,
                total_bytes: segment.total_bytes,
                allocated_bytes: Some(segment.allocated_bytes),
                active_bytes: Some(segment.active_bytes),
                stream: segment.stream,
                kind: Some(segment.kind),
                pool: PoolId(0),
                is_expandable: segment.is_expandable,
                stack: StackId(0),
                blocks: start..dump.blocks.len(),
            });
        }
        for (device, entries) in (0..).zip(&snapshot.device_traces) {
            let start = dump.entries.len();
            dump.entries.extend(entries.iter().map(Entry::from));
            if start < dump.entries.len() {
                dump.histories.push(History {
                    device,
                    entries: start..dump.entries.len(),
                });
            }
        }
        let settings = &snapshot.allocator_settings;
        let limit = settings.memory_limit_bytes.map_or(Setting::None, |bytes| {
            Setting::Int(i64::try_from(bytes).unwrap_or(i64::MAX))
        });
        dump.settings = Settings(vec![
            (
                "expandable_segments".to_owned(),
                Setting::Bool(settings.expandable_segments),
            ),
            ("memory_limit_bytes".to_owned(), limit),
        ]);
        dump
    }
}

impl From<&snapshot::TraceEntry> for Entry {
    fn from(entry: &snapshot::TraceEntry) -> Self {
        let address = match entry.action {
            TraceAction::Oom { device_free_bytes } => device_free_bytes,
            _ => entry.address,
        };
        Self {
            address,
            bytes: entry.bytes,
            time_us: entry.time_us.unwrap_or(0),
            stream: entry.stream,
            stack: StackId(0),
            pool: PoolId(0),
            notes: NotesId(0),
            action: entry.action.kind(),
        }
    }
}

impl Tables {
    /// What a trace knows of an operation beside numbers: its label is its stack, its phase is its
    /// category.
    fn of_operation(&mut self, trace: &Trace, operation: &Operation) -> (StackId, NotesId) {
        const FULL: &str = "a trace has less than 2^32 of everything";
        let mut frames = Vec::new();
        let names = trace.label(operation).split('|');
        for name in names.filter(|name| !name.is_empty()) {
            let frame = Frame {
                name: self.text(name).expect(FULL),
                file: TextId(0),
                line: 0,
            };
            frames.push(self.frame(frame).expect(FULL));
        }
        let notes = Notes {
            category: self.text(trace.phase(operation)).expect(FULL),
            ..Notes::default()
        };
        let stack = self.stack(&frames).expect(FULL);
        (stack, self.notes(notes).expect(FULL))
    }
}

impl Dump {
    /// What an allocator held after the first `operations` of a trace were replayed on it, or when
    /// the one after them failed. Blocks and entries have the labels of the trace as stacks, and its
    /// phases as categories, as far as the history goes back: its allocations are the last ones of the
    /// trace.
    #[must_use]
    pub fn of_replay(snapshot: &Snapshot, trace: &Trace, operations: usize) -> Self {
        let mut dump = Self::from(snapshot);
        let all = trace.operations();
        let done = &all[..operations.min(all.len())];
        // An allocation of no bytes is not in the history.
        let is_alloc = |op: &&Operation| op.kind == OperationKind::Alloc && op.bytes > 0;
        let mut allocs = done.iter().filter(is_alloc).rev();
        let mut latest = HashMap::new();
        // The device's names of the trace's streams.
        let mut streams = HashMap::new();
        for at in (0..dump.entries.len()).rev() {
            let known = match dump.entries[at].action {
                Action::Alloc => allocs.next(),
                Action::Oom => all.get(operations),
                _ => None,
            };
            let Some(operation) = known else { continue };
            let (stack, notes) = dump.tables.of_operation(trace, operation);
            let entry = &mut dump.entries[at];
            (entry.stack, entry.notes) = (stack, notes);
            if entry.action == Action::Alloc {
                latest.entry(entry.address).or_insert(stack);
                streams.insert(entry.stream, operation.stream);
            }
        }
        let in_trace = |stream: &mut u64| *stream = streams.get(stream).copied().unwrap_or(*stream);
        for entry in &mut dump.entries {
            in_trace(&mut entry.stream);
        }
        for segment in &mut dump.segments {
            in_trace(&mut segment.stream);
        }
        for block in dump.blocks.iter_mut().filter(|block| block.is_active()) {
            block.stack = latest.get(&block.address).copied().unwrap_or_default();
        }
        dump
    }
}

impl From<&Trace> for Dump {
    /// The history of a program without an allocator: no segments. Every allocation has an address of
    /// its own; its label is its stack, the phase it happened in is its category.
    fn from(trace: &Trace) -> Self {
        let mut dump = Self::default();
        let mut next = 1u64 << 32;
        let mut addresses = vec![0; trace.peak_live_blocks()];
        for operation in trace.operations() {
            let slot = operation.slot as usize;
            let action = match operation.kind {
                OperationKind::Alloc => {
                    addresses[slot] = next;
                    // Far apart, and distinct even where a size is 0.
                    let room = operation.bytes.saturating_add(512) & !511;
                    next = next.saturating_add(room);
                    Action::Alloc
                }
                OperationKind::Free => Action::FreeCompleted,
            };
            let (stack, notes) = dump.tables.of_operation(trace, operation);
            dump.entries.push(Entry {
                address: addresses[slot],
                bytes: operation.bytes,
                time_us: 0,
                stream: operation.stream,
                stack,
                pool: PoolId(0),
                notes,
                action,
            });
        }
        if !dump.entries.is_empty() {
            dump.histories.push(History {
                device: 0,
                entries: 0..dump.entries.len(),
            });
        }
        dump
    }
}

/// A frame as people write it: `file:line in name`.
#[derive(Clone, Copy, Debug)]
pub struct FrameText<'a> {
    dump: &'a Dump,
    frame: Frame,
}

impl Dump {
    /// A frame as text.
    #[must_use]
    pub fn frame_text(&self, id: FrameId) -> FrameText<'_> {
        let frame = self.frame(id);
        FrameText { dump: self, frame }
    }
}

impl fmt::Display for FrameText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dump, frame } = self;
        let (name, file) = (dump.text(frame.name), dump.text(frame.file));
        if file.is_empty() || file == "??" {
            f.write_str(name)
        } else if frame.line == 0 {
            write!(f, "{name} ({file})")
        } else {
            write!(f, "{name} ({file}:{})", frame.line)
        }
    }
}
