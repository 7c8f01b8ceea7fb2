//! What holds the memory, at the moment that matters, and why an allocation failed.
//!
//! The moment is the last allocation that failed, else the peak of the history, else the snapshot
//! itself. Everything is told from the [`State`] rebuilt for it. A [`Verdict`] is the first of these
//! that the numbers allow:
//!
//! 1. the device had room for the request: a limit on the process refused it;
//! 2. the request exceeds what the process has and could still get: no cache can help;
//! 3. what is free inside the process's segments would have been enough, but is in private pools, in
//!    segments of other streams, or in pieces: whichever has most;
//! 4. most of what is live was allocated where the failing allocation was, and is still there: it
//!    piles up;
//! 5. the live memory fills the device.

use std::collections::HashMap;

use serde::Serialize;

use crate::dump::{Action, Dump, Entry, FrameId, History, StackId};
use crate::rebuild::{Occupancy, State};
use crate::snapshot::BlockState;
use crate::stats::active_change;

/// How many frames of a stack say where it is.
const PLACE_FRAMES: usize = 4;
/// How many holders, pins and frames are listed.
pub(crate) const LISTED: usize = 10;

/// The answer for one device.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The index of the device.
    pub device: u32,
    /// What it is the state of.
    pub moment: Moment,
    /// The entries of the history before that moment; `None` without a history.
    pub entry: Option<u64>,
    /// The allocation that failed then.
    pub failure: Option<Failure>,
    /// Where the bytes are.
    pub memory: Memory,
    /// Where they were when the snapshot was taken.
    pub at_end: Memory,
    /// Who holds them, most first.
    pub holders: Vec<Holder>,
    /// What they are for, most first, as the stacks suggest.
    pub categories: Vec<Category>,
    /// Segments of which a fifth or more is free, and what keeps them, most free first.
    pub pins: Vec<Pin>,
    /// Entries of the history that contradict the snapshot; with any, the above is a guess.
    pub contradictions: u64,
}

/// A moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// An allocation failed.
    OutOfMemory,
    /// The most was active.
    Peak,
    /// The snapshot was taken.
    Snapshot,
}

/// An allocation that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// What was asked for.
    pub requested_bytes: u64,
    /// What the device had free.
    pub device_free_bytes: u64,
    /// Where: the frames of the program, innermost first.
    pub place: Vec<String>,
    /// How many allocations failed, this one included.
    pub failures: u64,
    /// Why.
    pub verdict: Verdict,
}

/// Why an allocation failed.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "cause")]
pub enum Verdict {
    /// The device had room: a limit on this process's share refused it.
    MemoryLimit,
    /// It exceeds all that the process has and the device had free.
    TooLarge {
        /// Reserved and free on the device, together.
        most_bytes: u64,
    },
    /// Enough is free in private pools, which serve nobody else.
    PrivatePool {
        /// Free in private pools.
        free_bytes: u64,
        /// The pool with most of it.
        pool: (u64, u64),
    },
    /// Enough is free in segments of other streams.
    OtherStream {
        /// Free there.
        free_bytes: u64,
        /// The stream with most of it.
        stream: u64,
        /// The longest stretch.
        largest_hole_bytes: u64,
    },
    /// Enough is free, in pieces that are too small.
    Fragmentation {
        /// Free in pieces.
        free_bytes: u64,
        /// The longest one.
        largest_hole_bytes: u64,
    },
    /// What was allocated at one place piles up, and the next of it failed.
    PileUp {
        /// How many blocks.
        blocks: u64,
        /// Bytes in them.
        bytes: u64,
        /// The place.
        place: Vec<String>,
        /// How many blocks from there were freed before.
        freed_before: u64,
    },
    /// The live memory fills the device.
    LiveMemory,
}

/// Where the bytes are. `live + pending + cached + fragmented` is `reserved`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Memory {
    /// In all segments.
    pub reserved_bytes: u64,
    /// In blocks that the program holds.
    pub live_bytes: u64,
    /// In blocks that it freed and that wait for a stream.
    pub pending_bytes: u64,
    /// In segments without a block: `empty_cache()` gives them back.
    pub cached_bytes: u64,
    /// Free in segments that have blocks.
    pub fragmented_bytes: u64,
    /// The longest stretch without a block.
    pub largest_hole_bytes: u64,
    /// What the device had free at the moment, where the history says so.
    pub device_free_bytes: Option<u64>,
    /// In use by others (contexts, libraries, other processes), where the device's size is known.
    pub outside_bytes: Option<u64>,
}

/// Live blocks of one place in the program.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// Bytes in them.
    pub bytes: u64,
    /// How many.
    pub blocks: u64,
    /// The frames of the program, innermost first; none if no stack was recorded. Of a
    /// [report](crate::report), the way from a variable to the storages, in words.
    pub place: Vec<String>,
    /// Of a report, the kind of the way: `variable`, `autograd` and so on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Of a report, what to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

/// Live blocks of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Category {
    /// What they are for.
    pub name: String,
    /// Bytes in them.
    pub bytes: u64,
    /// How many.
    pub blocks: u64,
}

/// A segment that is partly free.
#[derive(Clone, Debug, Serialize)]
pub struct Pin {
    /// The segment's address.
    pub segment: u64,
    /// Its stream.
    pub stream: u64,
    /// Free bytes in it.
    pub free_bytes: u64,
    /// The longest stretch of them.
    pub largest_hole_bytes: u64,
    /// Bytes in its blocks.
    pub used_bytes: u64,
    /// How many blocks.
    pub blocks: u64,
    /// Where the largest of them was allocated.
    pub place: Vec<String>,
}

/// Explains every device of `dump`. `capacity_bytes` is the size of the devices, if it is known.
#[must_use]
pub fn explain(dump: &Dump, capacity_bytes: Option<u64>) -> Vec<Explanation> {
    let mut places = Places::new(dump);
    let devices = dump.devices().into_iter();
    devices
        .map(|device| {
            let history = dump.histories().iter().find(|other| other.device == device);
            explain_device(dump, device, history, capacity_bytes, &mut places)
        })
        .collect()
}

fn explain_device(
    dump: &Dump,
    device: u32,
    history: Option<&History>,
    capacity_bytes: Option<u64>,
    places: &mut Places<'_>,
) -> Explanation {
    let entries = history.map_or(&[][..], |history| dump.entries_of(history));
    let (moment, count) = moment(entries);
    let state = state_at_moment(dump, device);
    let occupancy = state.occupancy();
    let failed = (moment == Moment::OutOfMemory).then(|| entries[count]);
    let memory = memory(&state, &occupancy, failed, capacity_bytes);
    let at_end = State::at_end(dump, device);
    let at_end = self::memory(&at_end, &at_end.occupancy(), None, None);
    let holders = holders(&state, places);
    let failure = failed.map(|entry| Failure {
        requested_bytes: entry.bytes,
        device_free_bytes: entry.address,
        place: places.texts(entry.stack),
        failures: entries
            .iter()
            .filter(|entry| entry.action == Action::Oom)
            .count() as u64,
        verdict: verdict(
            dump,
            &state,
            &occupancy,
            &entries[..=count],
            &memory,
            places,
        ),
    });
    Explanation {
        device,
        moment,
        entry: history.map(|_| count as u64),
        failure,
        memory,
        at_end,
        categories: categories(&state, places),
        holders: holders.into_iter().take(LISTED).collect(),
        pins: pins(&state, &occupancy, places),
        contradictions: state.contradictions,
    }
}

/// The state of one device at the moment that matters: see the [module](self).
#[must_use]
pub fn state_at_moment(dump: &Dump, device: u32) -> State {
    let history = dump.histories().iter().find(|other| other.device == device);
    match history.map(|history| (history, moment(dump.entries_of(history)))) {
        Some((history, (Moment::OutOfMemory | Moment::Peak, count))) => {
            State::at(dump, history, count)
        }
        _ => State::at_end(dump, device),
    }
}

/// The moment that matters, and how many entries come before it.
fn moment(entries: &[Entry]) -> (Moment, usize) {
    let failed = entries
        .iter()
        .rposition(|entry| entry.action == Action::Oom);
    if let Some(failed) = failed {
        return (Moment::OutOfMemory, failed);
    }
    let (mut level, mut peak, mut count) = (0, 0, 0);
    for (index, entry) in entries.iter().enumerate() {
        level += active_change(entry);
        if level > peak {
            (peak, count) = (level, index + 1);
        }
    }
    // An empty history, or one that only frees, is no better than the snapshot itself.
    if peak > 0 {
        (Moment::Peak, count)
    } else {
        (Moment::Snapshot, entries.len())
    }
}

fn memory(
    state: &State,
    occupancy: &[Occupancy],
    failed: Option<Entry>,
    capacity_bytes: Option<u64>,
) -> Memory {
    let mut memory = Memory {
        reserved_bytes: state.reserved_bytes(),
        live_bytes: state.bytes_in(BlockState::ActiveAllocated),
        pending_bytes: state.bytes_in(BlockState::ActivePendingFree),
        device_free_bytes: failed.map(|entry| entry.address),
        ..Memory::default()
    };
    for segment in occupancy {
        if segment.num_blocks == 0 {
            memory.cached_bytes = memory.cached_bytes.saturating_add(segment.free_bytes);
        } else {
            memory.fragmented_bytes = memory.fragmented_bytes.saturating_add(segment.free_bytes);
        }
        memory.largest_hole_bytes = memory.largest_hole_bytes.max(segment.largest_hole);
    }
    memory.outside_bytes = capacity_bytes
        .zip(memory.device_free_bytes)
        .map(|(capacity, free)| {
            capacity
                .saturating_sub(free)
                .saturating_sub(memory.reserved_bytes)
        });
    memory
}

/// What the allocator asks the device for, to serve a request.
pub(crate) fn segment_bytes(request: u64, expandable: bool) -> u64 {
    const MIB: u64 = 1 << 20;
    let unit = match request {
        0..=MIB => 2 * MIB,
        _ if request < 10 * MIB || expandable => 20 * MIB,
        _ => 2 * MIB,
    };
    request.checked_next_multiple_of(unit).unwrap_or(request)
}

/// `entries` end with the one that failed.
fn verdict(
    dump: &Dump,
    state: &State,
    occupancy: &[Occupancy],
    entries: &[Entry],
    memory: &Memory,
    places: &mut Places<'_>,
) -> Verdict {
    let [before @ .., failed] = entries else {
        return Verdict::LiveMemory;
    };
    let (requested, device_free) = (failed.bytes, failed.address);
    let expandable = state.segments.iter().any(|segment| segment.is_expandable);
    if device_free >= segment_bytes(requested, expandable) {
        return Verdict::MemoryLimit;
    }
    let most_bytes = device_free.saturating_add(memory.reserved_bytes);
    if requested > most_bytes {
        return Verdict::TooLarge { most_bytes };
    }

    // What is free, by why it could not be used.
    let own_pool = dump.pool(failed.pool).unwrap_or((0, 0));
    let (mut pools, mut streams) = (Sums::default(), Sums::default());
    let (mut own, mut own_hole, mut stream_hole) = (0u64, 0, 0);
    for found in occupancy {
        let segment = state.segments[found.segment];
        let pool = dump.pool(segment.pool).unwrap_or((0, 0));
        if pool != own_pool {
            pools.add(pool, found.free_bytes);
        } else if segment.stream != failed.stream {
            streams.add(segment.stream, found.free_bytes);
            stream_hole = stream_hole.max(found.largest_hole);
        } else {
            own = own.saturating_add(found.free_bytes);
            own_hole = own_hole.max(found.largest_hole);
        }
    }
    let free = own
        .saturating_add(pools.total)
        .saturating_add(streams.total);
    if free.saturating_add(device_free) >= requested && free > 0 {
        let most = own.max(pools.total).max(streams.total);
        if most == pools.total {
            return Verdict::PrivatePool {
                free_bytes: pools.total,
                pool: pools.largest().unwrap_or((0, 0)),
            };
        }
        if most == streams.total {
            return Verdict::OtherStream {
                free_bytes: streams.total,
                stream: streams.largest().unwrap_or(0),
                largest_hole_bytes: stream_hole,
            };
        }
        return Verdict::Fragmentation {
            free_bytes: own,
            largest_hole_bytes: own_hole,
        };
    }

    let place = places.of(failed.stack);
    let (mut blocks, mut bytes) = (0, 0u64);
    for block in &state.blocks {
        if places.of(block.stack) == place {
            blocks += 1;
            bytes = bytes.saturating_add(block.bytes);
        }
    }
    if failed.stack.is_some() && blocks >= 3 && bytes >= memory.live_bytes / 2 {
        let allocated = before.iter().filter(|entry| entry.action == Action::Alloc);
        let allocated = allocated
            .filter(|entry| places.of(entry.stack) == place)
            .count() as u64;
        return Verdict::PileUp {
            blocks,
            bytes,
            place: places.texts(failed.stack),
            freed_before: allocated.saturating_sub(blocks),
        };
    }
    Verdict::LiveMemory
}

/// Sums by a key.
struct Sums<K> {
    by: HashMap<K, u64>,
    total: u64,
}

impl<K> Default for Sums<K> {
    fn default() -> Self {
        Self {
            by: HashMap::new(),
            total: 0,
        }
    }
}

impl<K: Copy + Ord + std::hash::Hash> Sums<K> {
    fn add(&mut self, key: K, bytes: u64) {
        let sum = self.by.entry(key).or_default();
        *sum = sum.saturating_add(bytes);
        self.total = self.total.saturating_add(bytes);
    }

    fn largest(&self) -> Option<K> {
        let largest = self.by.iter().max_by_key(|(key, bytes)| (**bytes, **key));
        largest.map(|(key, _)| *key)
    }
}

/// Live and pending blocks of a state, by place, most bytes first.
#[must_use]
pub fn holders_of(dump: &Dump, state: &State) -> Vec<Holder> {
    holders(state, &mut Places::new(dump))
}

fn holders(state: &State, places: &mut Places<'_>) -> Vec<Holder> {
    let mut found: HashMap<StackId, (u64, u64)> = HashMap::new();
    for block in &state.blocks {
        let (bytes, blocks) = found.entry(places.of(block.stack)).or_default();
        *bytes = bytes.saturating_add(block.bytes);
        *blocks += 1;
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(place, (bytes, _))| (std::cmp::Reverse(*bytes), *place));
    let holders = found.into_iter().map(|(place, (bytes, blocks))| Holder {
        bytes,
        blocks,
        place: places.texts(place),
        kind: None,
        cure: None,
    });
    holders.collect()
}

fn categories(state: &State, places: &mut Places<'_>) -> Vec<Category> {
    let dump = places.dump;
    let mut found: HashMap<&str, (u64, u64)> = HashMap::new();
    for block in &state.blocks {
        let said = dump.text(dump.notes(block.notes).category);
        let name = if said.is_empty() {
            places.category(block.stack)
        } else {
            said
        };
        let (bytes, blocks) = found.entry(name).or_default();
        *bytes = bytes.saturating_add(block.bytes);
        *blocks += 1;
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(name, (bytes, _))| (std::cmp::Reverse(*bytes), *name));
    let categories = found.into_iter().map(|(name, (bytes, blocks))| Category {
        name: name.to_owned(),
        bytes,
        blocks,
    });
    categories.collect()
}

fn pins(state: &State, occupancy: &[Occupancy], places: &mut Places<'_>) -> Vec<Pin> {
    let mut found: Vec<_> = occupancy
        .iter()
        .filter(|found| found.num_blocks > 0 && found.free_bytes >= found.used_bytes / 4)
        .filter(|found| found.free_bytes > 0)
        .collect();
    found.sort_by_key(|found| (std::cmp::Reverse(found.free_bytes), found.segment));
    let pins = found.into_iter().take(LISTED).map(|found| {
        let blocks = &state.blocks[found.first_block..found.first_block + found.num_blocks];
        let largest = blocks.iter().max_by_key(|block| block.bytes);
        let segment = state.segments[found.segment];
        Pin {
            segment: segment.address,
            stream: segment.stream,
            free_bytes: found.free_bytes,
            largest_hole_bytes: found.largest_hole,
            used_bytes: found.used_bytes,
            blocks: found.num_blocks as u64,
            place: largest.map_or_else(Vec::new, |block| places.texts(block.stack)),
        }
    });
    pins.collect()
}

/// Stacks, told apart by the frames of the program alone.
struct Places<'a> {
    dump: &'a Dump,
    /// For each stack, the first one with the same place.
    of: Vec<Option<StackId>>,
    first: HashMap<Vec<FrameId>, StackId>,
    categories: HashMap<StackId, &'static str>,
}

impl<'a> Places<'a> {
    fn new(dump: &'a Dump) -> Self {
        Self {
            dump,
            of: vec![None; dump.num_stacks()],
            first: HashMap::new(),
            categories: HashMap::new(),
        }
    }

    /// The first stack with the same place as this one.
    fn of(&mut self, stack: StackId) -> StackId {
        if let Some(place) = self.of[stack.index()] {
            return place;
        }
        let frames = place(self.dump, stack);
        let place = *self.first.entry(frames).or_insert(stack);
        self.of[stack.index()] = Some(place);
        place
    }

    fn texts(&self, stack: StackId) -> Vec<String> {
        let frames = place(self.dump, stack).into_iter();
        frames
            .map(|frame| self.dump.frame_text(frame).to_string())
            .collect()
    }

    fn category(&mut self, stack: StackId) -> &'static str {
        let dump = self.dump;
        self.categories
            .entry(stack)
            .or_insert_with(|| category(dump, stack))
    }
}

/// The frames that say where in the program a stack is: the innermost ones that are the program's,
/// or if there is none, those that are not the machinery of recording.
#[must_use]
pub fn place(dump: &Dump, stack: StackId) -> Vec<FrameId> {
    let frames = dump.stack(stack);
    let of = |frame: &FrameId| {
        let frame = dump.frame(*frame);
        (dump.text(frame.name), dump.text(frame.file))
    };
    let is_program = |frame: &&FrameId| {
        let (name, file) = of(frame);
        // What every call of a module passes through, wherever PyTorch lies.
        let calls = ["_call_impl", "_wrapped_call_impl", "_apply", "convert"];
        if file.ends_with("module.py") && calls.contains(&name) {
            return false;
        }
        let libraries = [
            "/torch/",
            "/site-packages/",
            "/dist-packages/",
            "<frozen",
            "/lib/python",
        ];
        file.ends_with(".py") && !libraries.iter().any(|part| file.contains(part))
    };
    let is_machinery = |frame: &&FrameId| {
        let (name, file) = of(frame);
        let names = [
            "torch::unwind",
            "CapturedTraceback",
            "gather_with_cpp",
            "c10::cuda::",
            "_PyEval",
            "_PyObject",
            "PyObject_",
            "_PyFunction",
            "_start",
            "__libc_start",
        ];
        names
            .iter()
            .any(|part| name.starts_with(part) || name.contains("CapturedTraceback"))
            || (name.is_empty() && file.is_empty())
    };
    let program: Vec<_> = frames
        .iter()
        .filter(is_program)
        .take(PLACE_FRAMES)
        .copied()
        .collect();
    if !program.is_empty() {
        return program;
    }
    let rest = frames.iter().filter(|frame| !is_machinery(frame));
    rest.take(PLACE_FRAMES).copied().collect()
}

/// What a block is for, as its stack suggests.
fn category(dump: &Dump, stack: StackId) -> &'static str {
    if !stack.is_some() {
        return "not recorded";
    }
    let (mut backward, mut forward, mut made, mut data) = (false, false, false, false);
    for frame in dump.stack(stack) {
        let frame = dump.frame(*frame);
        let (name, file) = (dump.text(frame.name), dump.text(frame.file));
        if file.contains("/optim") || name.contains("zero_grad") || name.contains("_init_group") {
            return "optimizer";
        }
        if name.starts_with("nccl") || name.contains("all_reduce") || name.contains("all_gather") {
            return "communication";
        }
        backward |= name.contains("backward") || name.contains("autograd::Engine");
        forward |= name == "forward" || name == "_call_impl";
        made |= matches!(
            name,
            "_apply"
                | "convert"
                | "reset_parameters"
                | "load_state_dict"
                | "from_pretrained"
                | "__init__"
        );
        data |=
            name.contains("collate") || name.contains("pin_memory") || name.contains("dataloader");
    }
    match () {
        () if backward => "backward pass",
        () if forward => "forward pass",
        () if data => "input data",
        () if made => "construction of the model",
        () => "other code",
    }
}
