//! The data model of a snapshot.
//!
//! Invariants, held by whoever makes one (`lastref-alloc` tests them):
//!
//! 1. Segments are sorted by device, then address, and do not overlap.
//! 2. The blocks of a segment are sorted by address and tile it without gaps.
//! 3. `allocated_bytes` is the sum over blocks in state [`BlockState::ActiveAllocated`];
//!    `active_bytes` adds those in [`BlockState::ActivePendingFree`]; `requested_bytes` sums what
//!    was asked for over both.
//!
//! Serialized names and values are PyTorch's where it has them; a trace entry also says
//! `sequence`, which orders entries that no clock was read for.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::dump::Action;

/// All memory an allocator held at one moment, on every device it serves.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Snapshot {
    /// What the allocator holds, sorted by device and address.
    pub segments: Vec<Segment>,
    /// The history of each device, oldest entry first, at the position of the device's index.
    /// Empty lists where no history is recorded.
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// How the allocator was set up.
    pub allocator_settings: AllocatorSettings,
}

impl Snapshot {
    /// Adds what another allocator held: that of another device. Settings stay this one's if it has
    /// segments, else they become the other's.
    pub fn join(&mut self, other: Self) {
        if self.segments.is_empty() {
            self.allocator_settings = other.allocator_settings;
        }
        self.segments.extend(other.segments);
        self.segments
            .sort_by_key(|segment| (segment.device, segment.address));
        for (device, trace) in other.device_traces.into_iter().enumerate() {
            if self.device_traces.len() <= device {
                self.device_traces.resize_with(device + 1, Vec::new);
            }
            self.device_traces[device].extend(trace);
        }
    }

    /// Writes it as PyTorch does: see [`Dump::write`](crate::Dump::write).
    ///
    /// # Errors
    ///
    /// What `out` fails with.
    pub fn write(&self, out: impl std::io::Write) -> std::io::Result<()> {
        crate::Dump::from(self).write(out)
    }
}

/// The settings of an allocator that explain what its snapshot shows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct AllocatorSettings {
    /// Whether memory is mapped into growing ranges, as opposed to segments of fixed size.
    pub expandable_segments: bool,
    /// The limit set by the user, in bytes.
    pub memory_limit_bytes: Option<u64>,
}

impl AllocatorSettings {
    /// Settings with the two values every allocator has.
    #[must_use]
    pub const fn new(expandable_segments: bool, memory_limit_bytes: Option<u64>) -> Self {
        Self {
            expandable_segments,
            memory_limit_bytes,
        }
    }
}

/// One contiguous range obtained from a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Segment {
    /// The index of the device.
    pub device: u32,
    /// Where it starts, in the device's address space.
    pub address: u64,
    /// Its length; the device counts these bytes as in use.
    #[serde(rename = "total_size")]
    pub total_bytes: u64,
    /// Bytes in blocks that callers hold.
    #[serde(rename = "allocated_size")]
    pub allocated_bytes: u64,
    /// Bytes in blocks that callers hold or that wait for a stream.
    #[serde(rename = "active_size")]
    pub active_bytes: u64,
    /// Bytes that callers asked for, over the same blocks as `active_bytes`.
    #[serde(rename = "requested_size")]
    pub requested_bytes: u64,
    /// The stream it was obtained for; 0 is the default stream.
    pub stream: u64,
    /// The pool it belongs to.
    #[serde(rename = "segment_type")]
    pub kind: SegmentKind,
    /// Whether it can grow and shrink in place.
    pub is_expandable: bool,
    /// Its blocks, sorted by address, without gaps.
    pub blocks: Vec<BlockRecord>,
}

/// The pool a segment belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentKind {
    /// Small blocks.
    Small,
    /// Large blocks.
    Large,
}

/// One block of a segment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BlockRecord {
    /// Where it starts.
    pub address: u64,
    /// Its length, rounding included.
    #[serde(rename = "size")]
    pub bytes: u64,
    /// What the caller asked for; 0 if it is inactive.
    #[serde(rename = "requested_size")]
    pub requested_bytes: u64,
    /// Who may use it.
    pub state: BlockState,
}

/// Who may use a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// A caller holds it.
    ActiveAllocated,
    /// The caller gave it back, and work on some stream may still use it.
    ActivePendingFree,
    /// It is free.
    Inactive,
}

/// One thing that happened in an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEntry {
    /// What happened.
    pub action: TraceAction,
    /// The address it happened to; 0 where there is none.
    pub address: u64,
    /// How many bytes: requested ones for blocks, real ones for segments.
    pub bytes: u64,
    /// The stream it happened on.
    pub stream: u64,
    /// Its position among all entries of the device. Grows by at least one an entry.
    pub sequence: u64,
    /// Microseconds since the Unix epoch, if a clock was read.
    pub time_us: Option<u64>,
}

/// What a [`TraceEntry`] reports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TraceAction {
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
    /// A snapshot was taken; the entry's bytes are those active then.
    Snapshot,
    /// An allocation failed; the entry's bytes are those requested.
    Oom {
        /// Bytes the device had free at that moment.
        device_free_bytes: u64,
    },
}

impl TraceAction {
    /// What happened, without what an out-of-memory entry says besides.
    #[must_use]
    pub const fn kind(self) -> Action {
        match self {
            Self::Alloc => Action::Alloc,
            Self::FreeRequested => Action::FreeRequested,
            Self::FreeCompleted => Action::FreeCompleted,
            Self::SegmentAlloc => Action::SegmentAlloc,
            Self::SegmentFree => Action::SegmentFree,
            Self::SegmentMap => Action::SegmentMap,
            Self::SegmentUnmap => Action::SegmentUnmap,
            Self::Snapshot => Action::Snapshot,
            Self::Oom { .. } => Action::Oom,
        }
    }

    /// PyTorch's word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.kind().as_str()
    }
}

// By hand, because an out-of-memory entry has `device_free` in the place of `addr`.
impl Serialize for TraceEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("action", self.action.as_str())?;
        if let TraceAction::Oom { device_free_bytes } = self.action {
            map.serialize_entry("device_free", &device_free_bytes)?;
        } else {
            map.serialize_entry("addr", &self.address)?;
        }
        map.serialize_entry("size", &self.bytes)?;
        map.serialize_entry("stream", &self.stream)?;
        map.serialize_entry("sequence", &self.sequence)?;
        if let Some(time_us) = self.time_us {
            map.serialize_entry("time_us", &time_us)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(action: TraceAction) -> TraceEntry {
        TraceEntry {
            action,
            address: 512,
            bytes: 1000,
            stream: 7,
            sequence: 3,
            time_us: None,
        }
    }

    #[test]
    fn segments_serialize_to_pytorchs_names() {
        let segment = Segment {
            device: 1,
            address: 4096,
            total_bytes: 2048,
            allocated_bytes: 512,
            active_bytes: 1024,
            requested_bytes: 700,
            stream: 0,
            kind: SegmentKind::Small,
            is_expandable: true,
            blocks: vec![
                BlockRecord {
                    address: 4096,
                    bytes: 512,
                    requested_bytes: 500,
                    state: BlockState::ActiveAllocated,
                },
                BlockRecord {
                    address: 4608,
                    bytes: 512,
                    requested_bytes: 200,
                    state: BlockState::ActivePendingFree,
                },
                BlockRecord {
                    address: 5120,
                    bytes: 1024,
                    requested_bytes: 0,
                    state: BlockState::Inactive,
                },
            ],
        };
        let snapshot = Snapshot {
            segments: vec![segment],
            device_traces: vec![vec![], vec![entry(TraceAction::Alloc)]],
            allocator_settings: AllocatorSettings::new(true, Some(99)),
        };
        assert_eq!(
            serde_json::to_value(&snapshot).unwrap(),
            json!({
                "segments": [{
                    "device": 1, "address": 4096, "total_size": 2048, "allocated_size": 512,
                    "active_size": 1024, "requested_size": 700, "stream": 0,
                    "segment_type": "small", "is_expandable": true,
                    "blocks": [
                        {"address": 4096, "size": 512, "requested_size": 500,
                         "state": "active_allocated"},
                        {"address": 4608, "size": 512, "requested_size": 200,
                         "state": "active_pending_free"},
                        {"address": 5120, "size": 1024, "requested_size": 0, "state": "inactive"},
                    ],
                }],
                "device_traces": [[], [
                    {"action": "alloc", "addr": 512, "size": 1000, "stream": 7, "sequence": 3},
                ]],
                "allocator_settings": {"expandable_segments": true, "memory_limit_bytes": 99},
            })
        );
    }

    #[test]
    fn what_is_written_reads_back_with_the_same_totals() {
        let block = |address, bytes, state| BlockRecord {
            address,
            bytes,
            requested_bytes: bytes,
            state,
        };
        let snapshot = Snapshot {
            segments: vec![Segment {
                device: 1,
                address: 4096,
                total_bytes: 2048,
                allocated_bytes: 512,
                active_bytes: 512,
                requested_bytes: 512,
                stream: 9,
                kind: SegmentKind::Large,
                is_expandable: true,
                blocks: vec![
                    block(4096, 512, BlockState::ActiveAllocated),
                    block(4608, 1536, BlockState::Inactive),
                ],
            }],
            device_traces: vec![
                vec![],
                vec![TraceEntry {
                    bytes: 512,
                    ..entry(TraceAction::Alloc)
                }],
            ],
            allocator_settings: AllocatorSettings::new(true, Some(99)),
        };
        let mut bytes = Vec::new();
        snapshot.write(&mut bytes).unwrap();
        let stats = crate::stats::Stats::of(&crate::Dump::read(bytes.as_slice()).unwrap());
        assert_eq!(stats.devices.keys().collect::<Vec<_>>(), [&1]);
        let device = &stats.devices[&1];
        assert_eq!(
            (device.reserved_bytes, device.largest_inactive_bytes),
            (2048, 1536)
        );
        assert_eq!(device.bytes_by_state["active_allocated"], 512);
        let history = &stats.history[0];
        assert_eq!((history.device, history.active_at_start_bytes), (1, 0));
        assert_eq!(stats.settings.int("memory_limit_bytes"), Some(99));
        assert_eq!(stats.problems, [""; 0]);
    }

    #[test]
    fn an_out_of_memory_entry_says_device_free_instead_of_an_address() {
        let oom = TraceEntry {
            time_us: Some(17),
            ..entry(TraceAction::Oom {
                device_free_bytes: 64,
            })
        };
        assert_eq!(
            serde_json::to_value(oom).unwrap(),
            json!({"action": "oom", "device_free": 64, "size": 1000, "stream": 7, "sequence": 3,
                   "time_us": 17})
        );
    }
}
