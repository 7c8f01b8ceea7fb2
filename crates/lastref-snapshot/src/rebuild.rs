//! The state of a device at any moment of its history, and what it is made of.
//!
//! A history is a ring: it may begin in the middle, but it ends with the snapshot. So the state is
//! rebuilt backwards, from the snapshot's segments and blocks, by undoing one entry after the other.
//! Sizes of blocks that are gone by the end are known as requested, and rounded up to 512 bytes as
//! the allocators do.
//!
//! 1. Blocks and segments are sorted by address.
//! 2. [`State::contradictions`] counts the entries that do not fit what was rebuilt (a free of what is
//!    not there): with any, the state is a guess.

use std::collections::{BTreeMap, HashMap};

use crate::dump::{Action, Dump, History, NotesId, PoolId, StackId};
use crate::snapshot::{BlockState, SegmentKind};

/// Blocks are rounded up to this many bytes.
const GRANULE: u64 = 512;

/// What a device held at one moment.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Ranges obtained from the device, sorted by address.
    pub segments: Vec<StateSegment>,
    /// Blocks in use, sorted by address.
    pub blocks: Vec<StateBlock>,
    /// Entries that do not fit.
    pub contradictions: u64,
}

/// A range obtained from the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateSegment {
    /// Where it starts.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// The stream it is for.
    pub stream: u64,
    /// The pool it belongs to; 0 where it is not known.
    pub pool: PoolId,
    /// Whether it is for small or for large blocks, if known.
    pub kind: Option<SegmentKind>,
    /// Whether it can grow in place.
    pub is_expandable: bool,
}

/// A block in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateBlock {
    /// Where it starts.
    pub address: u64,
    /// Its length, rounded.
    pub bytes: u64,
    /// What was asked for.
    pub requested_bytes: u64,
    /// Where it was allocated.
    pub stack: StackId,
    /// What else its entry said.
    pub notes: NotesId,
    /// Allocated, or pending.
    pub state: BlockState,
    /// The entry that allocated it, if the history has it.
    pub since: Option<usize>,
}

/// What one segment holds, and where it is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Occupancy {
    /// Its position in [`State::segments`].
    pub segment: usize,
    /// The first of its blocks in [`State::blocks`].
    pub first_block: usize,
    /// How many blocks it has.
    pub num_blocks: usize,
    /// Bytes in blocks.
    pub used_bytes: u64,
    /// Bytes in no block.
    pub free_bytes: u64,
    /// The longest stretch in no block.
    pub largest_hole: u64,
}

impl State {
    /// What the snapshot itself says of one device.
    #[must_use]
    pub fn at_end(dump: &Dump, device: u32) -> Self {
        let (segments, blocks) = last(dump, device);
        Self {
            segments: segments.into_values().collect(),
            blocks: blocks.into_values().collect(),
            contradictions: 0,
        }
    }

    /// After the first `count` entries of `history`.
    #[must_use]
    pub fn at(dump: &Dump, history: &History, count: usize) -> Self {
        let entries = dump.entries_of(history);
        let count = count.min(entries.len());
        let (mut segments, mut blocks) = last(dump, history.device);
        // Which allocation a later free is of, and whether it was requested first (in a trace it is
        // not); and of blocks that stay, which allocation made them.
        let mut made: HashMap<u64, (usize, bool)> = HashMap::new();
        let mut freed: HashMap<usize, (usize, bool)> = HashMap::new();
        for (index, entry) in entries.iter().enumerate() {
            match entry.action {
                Action::Alloc => {
                    made.insert(entry.address, (index, false));
                }
                Action::FreeRequested => {
                    if let Some((_, requested)) = made.get_mut(&entry.address) {
                        *requested = true;
                    }
                }
                Action::FreeCompleted => {
                    if let Some(alloc) = made.remove(&entry.address)
                        && index >= count
                    {
                        freed.insert(index, alloc);
                    }
                }
                _ => {}
            }
        }
        for (address, block) in &mut blocks {
            if let Some(alloc) = made.get(address) {
                block.since = Some(alloc.0);
                block.notes = entries[alloc.0].notes;
            }
        }
        let mut contradictions = 0;
        for (index, entry) in entries.iter().enumerate().skip(count).rev() {
            let fits = match entry.action {
                Action::Alloc => blocks.remove(&entry.address).is_some(),
                Action::FreeCompleted => {
                    let alloc = freed.get(&index).copied();
                    let from = alloc.map(|(alloc, _)| &entries[alloc]);
                    let pending = alloc.is_none_or(|(_, requested)| requested);
                    let block = StateBlock {
                        address: entry.address,
                        bytes: rounded(entry.bytes),
                        requested_bytes: entry.bytes,
                        stack: from.map_or(StackId(0), |from| from.stack),
                        notes: from.map_or(NotesId(0), |from| from.notes),
                        state: if pending {
                            BlockState::ActivePendingFree
                        } else {
                            BlockState::ActiveAllocated
                        },
                        since: alloc.map(|(alloc, _)| alloc),
                    };
                    blocks.insert(entry.address, block).is_none()
                }
                Action::FreeRequested => match blocks.get_mut(&entry.address) {
                    Some(block) => {
                        block.state = BlockState::ActiveAllocated;
                        true
                    }
                    None => false,
                },
                Action::SegmentAlloc => segments.remove(&entry.address).is_some(),
                Action::SegmentFree => {
                    let segment = StateSegment {
                        address: entry.address,
                        bytes: entry.bytes,
                        stream: entry.stream,
                        pool: entry.pool,
                        kind: None,
                        is_expandable: false,
                    };
                    segments.insert(entry.address, segment).is_none()
                }
                Action::SegmentMap => cut(&mut segments, entry.address, entry.bytes),
                Action::SegmentUnmap => join(
                    &mut segments,
                    entry.address,
                    entry.bytes,
                    entry.stream,
                    entry.pool,
                ),
                Action::Snapshot | Action::Oom | Action::Annotate | Action::Other => true,
            };
            contradictions += u64::from(!fits);
        }
        Self {
            segments: segments.into_values().collect(),
            blocks: blocks.into_values().collect(),
            contradictions,
        }
    }

    /// Bytes in all segments.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.segments
            .iter()
            .fold(0, |sum, segment| sum.saturating_add(segment.bytes))
    }

    /// Bytes in blocks of one state.
    #[must_use]
    pub fn bytes_in(&self, state: BlockState) -> u64 {
        let blocks = self.blocks.iter().filter(|block| block.state == state);
        blocks.fold(0, |sum, block| sum.saturating_add(block.bytes))
    }

    /// What each segment holds, in their order.
    #[must_use]
    pub fn occupancy(&self) -> Vec<Occupancy> {
        let mut next_block = 0;
        let segments = self.segments.iter().enumerate();
        segments
            .map(|(index, segment)| {
                let end = segment.address.saturating_add(segment.bytes);
                let before = self.blocks[next_block..]
                    .partition_point(|block| block.address < segment.address);
                let first_block = next_block + before;
                let mut occupancy = Occupancy {
                    segment: index,
                    first_block,
                    num_blocks: 0,
                    used_bytes: 0,
                    free_bytes: 0,
                    largest_hole: 0,
                };
                let mut place = segment.address;
                let blocks = self.blocks[first_block..].iter();
                for block in blocks.take_while(|block| block.address < end) {
                    let hole = block.address.saturating_sub(place);
                    occupancy.largest_hole = occupancy.largest_hole.max(hole);
                    occupancy.free_bytes += hole;
                    place = place
                        .max(block.address.saturating_add(block.bytes))
                        .min(end);
                    occupancy.num_blocks += 1;
                }
                let hole = end - place;
                occupancy.largest_hole = occupancy.largest_hole.max(hole);
                occupancy.free_bytes += hole;
                occupancy.used_bytes = segment.bytes - occupancy.free_bytes;
                next_block = first_block + occupancy.num_blocks;
                occupancy
            })
            .collect()
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes
        .max(1)
        .checked_next_multiple_of(GRANULE)
        .unwrap_or(bytes)
}

type Segments = BTreeMap<u64, StateSegment>;
type Blocks = BTreeMap<u64, StateBlock>;

/// What the snapshot says.
fn last(dump: &Dump, device: u32) -> (Segments, Blocks) {
    let (mut segments, mut blocks) = (Segments::new(), Blocks::new());
    for segment in dump.segments_of(device) {
        let range = StateSegment {
            address: segment.address,
            bytes: segment.total_bytes,
            stream: segment.stream,
            pool: segment.pool,
            kind: segment.kind,
            is_expandable: segment.is_expandable,
        };
        segments.insert(segment.address, range);
        for block in dump
            .blocks_of(segment)
            .iter()
            .filter(|block| block.is_active())
        {
            let block = StateBlock {
                address: block.address,
                bytes: block.bytes,
                requested_bytes: block.requested_bytes,
                stack: block.stack,
                notes: NotesId(0),
                state: block.state,
                since: None,
            };
            blocks.insert(block.address, block);
        }
    }
    (segments, blocks)
}

/// Takes a range out of the segment that has it.
fn cut(segments: &mut Segments, address: u64, bytes: u64) -> bool {
    let Some((_, found)) = segments.range(..=address).next_back() else {
        return false;
    };
    let found = *found;
    let (start, end) = (found.address, found.address.saturating_add(found.bytes));
    let cut_end = address.saturating_add(bytes);
    if address >= end || cut_end > end {
        return false;
    }
    segments.remove(&start);
    if start < address {
        let bytes = address - start;
        segments.insert(start, StateSegment { bytes, ..found });
    }
    if cut_end < end {
        let right = StateSegment {
            address: cut_end,
            bytes: end - cut_end,
            ..found
        };
        segments.insert(cut_end, right);
    }
    true
}

/// Puts a range back, joined to the expandable segments it touches.
fn join(segments: &mut Segments, address: u64, bytes: u64, stream: u64, pool: PoolId) -> bool {
    let mut new = StateSegment {
        address,
        bytes,
        stream,
        pool,
        kind: None,
        is_expandable: true,
    };
    if let Some((_, left)) = segments.range(..address).next_back() {
        let left = *left;
        let left_end = left.address.saturating_add(left.bytes);
        if left_end > address {
            return false;
        }
        if left.is_expandable && left_end == address && left.stream == stream {
            segments.remove(&left.address);
            new = StateSegment {
                bytes: left.bytes.saturating_add(bytes),
                ..left
            };
        }
    }
    let end = new.address.saturating_add(new.bytes);
    if let Some(right) = segments.get(&end).copied()
        && right.is_expandable
        && right.stream == stream
    {
        segments.remove(&end);
        new = StateSegment {
            address: new.address,
            bytes: new.bytes.saturating_add(right.bytes),
            ..right
        };
    }
    segments.insert(new.address, new).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: u64, bytes: u64) -> StateSegment {
        StateSegment {
            address,
            bytes,
            stream: 0,
            pool: PoolId(0),
            kind: None,
            is_expandable: true,
        }
    }

    #[test]
    fn what_is_cut_out_can_be_joined_again() {
        let whole = Segments::from([(100, range(100, 50))]);
        for (address, bytes) in [(100, 10), (120, 10), (140, 10), (100, 50)] {
            let mut segments = whole.clone();
            assert!(cut(&mut segments, address, bytes));
            assert_eq!(
                segments.values().map(|range| range.bytes).sum::<u64>(),
                50 - bytes
            );
            assert!(!cut(&mut segments, address, bytes), "it is not there twice");
            assert!(join(&mut segments, address, bytes, 0, PoolId(0)));
            assert_eq!(segments, whole);
        }
        assert!(!cut(&mut whole.clone(), 140, 20));
        assert!(!join(&mut whole.clone(), 120, 10, 0, PoolId(0)));
    }
}
