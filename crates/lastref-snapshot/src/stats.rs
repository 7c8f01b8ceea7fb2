//! Figures of a snapshot: what `lastref stats` prints.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::dump::{Action, Dump, Entry, History, Setting, Settings};
use crate::snapshot::BlockState;

/// The figures of a whole snapshot. Serialized names are those of `lastref stats --json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Stats {
    /// What each device holds, by its index.
    pub devices: BTreeMap<u32, DeviceStats>,
    /// The histories that have entries.
    pub history: Vec<HistoryStats>,
    /// The ids of the pools that occur, ascending.
    pub pools: Vec<(u64, u64)>,
    /// The streams that segments belong to, ascending.
    pub streams: Vec<u64>,
    /// How the allocator was set up.
    pub settings: Settings,
    /// What the file says that cannot be true.
    pub problems: Vec<String>,
}

/// What one device holds.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct DeviceStats {
    /// How many segments.
    pub segments: u64,
    /// Bytes in all segments.
    pub reserved_bytes: u64,
    /// How many blocks in each state that occurs.
    pub blocks_by_state: BTreeMap<&'static str, u64>,
    /// Bytes in them.
    pub bytes_by_state: BTreeMap<&'static str, u64>,
    /// Segments without a block that is in use: `empty_cache()` gives them back.
    pub wholly_free_segments: u64,
    /// Bytes in them.
    pub wholly_free_bytes: u64,
    /// The longest block that is not in use: the largest hole.
    pub largest_inactive_bytes: u64,
}

/// The figures of one device's history. Bytes are those that callers asked for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct HistoryStats {
    /// The index of the device.
    pub device: u32,
    /// How many entries there are.
    pub entries: u64,
    /// Bytes active before the first entry.
    pub active_at_start_bytes: u64,
    /// Bytes active after the last one.
    pub active_at_end_bytes: u64,
    /// The most bytes that were active at one moment.
    pub peak_active_bytes: u64,
    /// The entry that made it so, counted from 0; -1 if it was so before the first.
    pub peak_entry: i64,
    /// Allocations that failed.
    pub out_of_memory: Vec<OutOfMemoryStats>,
}

/// An allocation that failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct OutOfMemoryStats {
    /// The entry, counted from 0.
    pub entry: u64,
    /// What was asked for.
    pub requested_bytes: u64,
    /// What the device had free.
    pub device_free_bytes: u64,
    /// Bytes active at that moment.
    pub active_bytes: u64,
}

/// PyTorch's word for a state.
#[must_use]
pub const fn state_word(state: BlockState) -> &'static str {
    match state {
        BlockState::ActiveAllocated => "active_allocated",
        BlockState::ActivePendingFree => "active_pending_free",
        BlockState::Inactive => "inactive",
    }
}

impl Stats {
    /// The figures of `dump`.
    #[must_use]
    pub fn of(dump: &Dump) -> Self {
        let mut devices: BTreeMap<u32, DeviceStats> = BTreeMap::new();
        let (mut pools, mut streams) = (BTreeSet::new(), BTreeSet::new());
        for device in dump.devices() {
            let stats = devices.entry(device).or_default();
            for segment in dump.segments_of(device) {
                pools.extend(dump.pool(segment.pool));
                streams.insert(segment.stream);
                stats.segments += 1;
                stats.reserved_bytes += segment.total_bytes;
                let mut in_use = false;
                for block in dump.blocks_of(segment) {
                    let word = state_word(block.state);
                    *stats.blocks_by_state.entry(word).or_default() += 1;
                    *stats.bytes_by_state.entry(word).or_default() += block.bytes;
                    if block.is_active() {
                        in_use = true;
                    } else {
                        let largest = stats.largest_inactive_bytes.max(block.bytes);
                        stats.largest_inactive_bytes = largest;
                    }
                }
                if !in_use {
                    stats.wholly_free_segments += 1;
                    stats.wholly_free_bytes += segment.total_bytes;
                }
            }
        }
        let mut problems = dump.problems().to_vec();
        let histories = dump.histories().iter();
        let history = histories.map(|history| HistoryStats::of(dump, history, &mut problems));
        Self {
            devices,
            history: history.collect(),
            pools: pools.into_iter().collect(),
            streams: streams.into_iter().collect(),
            settings: dump.settings().clone(),
            problems,
        }
    }

    /// The variable `PYTORCH_CUDA_ALLOC_CONF` as it was, if it was set and the file says so.
    #[must_use]
    pub fn alloc_conf(&self) -> Option<&str> {
        match self.settings.get("PYTORCH_CUDA_ALLOC_CONF")? {
            Setting::Text(text) if !text.is_empty() => Some(text),
            _ => None,
        }
    }
}

/// Requested bytes in active blocks of a device: the level that its history ends at.
#[must_use]
pub fn active_at_end(dump: &Dump, device: u32) -> u64 {
    let segments = dump.segments_of(device).iter();
    let blocks = segments.flat_map(|segment| dump.blocks_of(segment));
    let active = blocks.filter(|block| block.is_active());
    active.map(|block| block.requested_bytes).sum()
}

/// By how much an entry changes the active bytes.
#[must_use]
pub fn active_change(entry: &Entry) -> i128 {
    match entry.action {
        Action::Alloc => i128::from(entry.bytes),
        Action::FreeCompleted => -i128::from(entry.bytes),
        _ => 0,
    }
}

/// Requested bytes in active blocks before the first entry of a history: those after the last, less
/// what the history allocates, plus what it frees.
///
/// Of a history without segments (a trace that leaves something allocated) the least that is never
/// below zero. Below zero itself, the history contradicts the segments.
#[must_use]
pub fn active_at_start(dump: &Dump, history: &History) -> i128 {
    let entries = dump.entries_of(history).iter();
    let (mut change, mut least) = (0i128, 0i128);
    for entry in entries {
        change += active_change(entry);
        least = least.min(change);
    }
    if change > 0 && dump.segments_of(history.device).is_empty() {
        return -least;
    }
    i128::from(active_at_end(dump, history.device)) - change
}

impl HistoryStats {
    fn of(dump: &Dump, history: &History, problems: &mut Vec<String>) -> Self {
        let device = history.device;
        let start = active_at_start(dump, history);
        if start < 0 {
            problems.push(format!(
                "device {device}: its history allocates {} bytes more than it frees and its \
                 blocks have",
                -start
            ));
        }
        let clamped = |level: i128| u64::try_from(level.max(0)).unwrap_or(u64::MAX);
        let (mut level, mut peak, mut peak_entry) = (start, start, -1);
        let mut out_of_memory = Vec::new();
        for (index, entry) in (0i64..).zip(dump.entries_of(history)) {
            level += active_change(entry);
            if level > peak {
                (peak, peak_entry) = (level, index);
            }
            if entry.action == Action::Oom {
                out_of_memory.push(OutOfMemoryStats {
                    entry: index.cast_unsigned(),
                    requested_bytes: entry.bytes,
                    device_free_bytes: entry.address,
                    active_bytes: clamped(level),
                });
            }
        }
        Self {
            device,
            entries: history.entries.len() as u64,
            active_at_start_bytes: clamped(start),
            active_at_end_bytes: clamped(level),
            peak_active_bytes: clamped(peak),
            peak_entry,
            out_of_memory,
        }
    }
}
