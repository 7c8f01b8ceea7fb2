//! The race detector: which work may run at the same time, and does it touch the same bytes?
//!
//! Each stream has a vector clock: for every other stream, up to which access it is known to run
//! later. So has the host, taken as one thread of control, since all calls come in some order.
//!
//! ```text
//!   submit on s        s learns what the host knows
//!   record e on s      e stands for what s knows, itself included
//!   t waits for e      t learns what e stands for
//!   e is finished      the host learns what e stands for   (query says so, or the host waited)
//!   s or the device
//!   was waited for     the host learns what s, or every stream, knows
//! ```
//!
//! An access is named by (stream, count of that stream). Another stream's access comes after it if
//! that stream's clock has reached the count at submission. Nothing here depends on when work
//! really runs: a race is found in every interleaving that submits the same work.
//!
//! The **shadow** holds, for each stretch of *physical* bytes, the last write and the reads since,
//! one a stream. A later access is compared with those. Physical, because a page keeps its bytes
//! when it is mapped elsewhere.
//!
//! An allocator on top tells of its blocks through [`BlockObserver`]. Memory that is handed out is
//! compared with what its new stream knows; at a free, uses on streams that were not recorded are
//! reported, and named to the allocator so that it holds the memory back until they are done.
//!
//! # Invariants
//!
//! 1. `clocks[HOST]` is the host's; it has no accesses of its own.
//! 2. The stretches of a space do not overlap, and none is empty.
//! 3. A stream's clock at its own place is the number of its accesses so far.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::mem::{Discriminant, discriminant};
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::memory::Place;
use super::world::Asked;
use crate::device::{DevicePtr, StreamId};
use crate::error::Bytes;

/// A stream of a device.
type StreamKey = (usize, StreamId);

/// The host's place in a clock (invariant 1).
const HOST: usize = 0;

/// Reports kept; the others are counted.
const MAX_REPORTS: usize = 1000;

/// One use of device memory by work on a stream.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemoryUse {
    /// What it was: the name of the device call, or the one given to
    /// [`SimDevice::launch`](super::SimDevice::launch).
    pub what: &'static str,
    /// The device whose stream it was submitted to.
    pub device: u32,
    /// The stream.
    pub stream: StreamId,
    /// The first address.
    pub ptr: DevicePtr,
    /// How many bytes from there on.
    pub bytes: u64,
    /// Whether it writes.
    pub writes: bool,
    /// Where in the program it was submitted.
    pub at: &'static Location<'static>,
    /// Its number among all submissions of the group, in their order.
    pub sequence: u64,
    /// The block that it lay in.
    pub block: Option<BlockSite>,
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} by {} on stream {} (#{}, {}): {} at {}",
            if self.writes { "write" } else { "read" },
            self.what,
            self.stream,
            self.sequence,
            self.at,
            Bytes(self.bytes),
            self.ptr
        )
    }
}

/// A block of an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BlockSite {
    /// Where it is.
    pub ptr: DevicePtr,
    /// Its size.
    pub bytes: u64,
    /// The stream it was allocated on.
    pub stream: StreamId,
    /// Where in the program it was allocated.
    pub at: &'static Location<'static>,
    /// The number of the last submission before it was allocated.
    pub sequence: u64,
}

impl fmt::Display for BlockSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "block {} of {}, allocated on stream {} (#{}, {})",
            self.ptr,
            Bytes(self.bytes),
            self.stream,
            self.sequence,
            self.at
        )
    }
}

/// Two things that may happen at the same time and must not. Printed, it says what happened, where
/// both sites are, and the cure.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Race {
    /// Two uses of the same bytes, at least one of them a write.
    Access {
        /// The use that was submitted first.
        earlier: MemoryUse,
        /// The other one.
        later: MemoryUse,
    },
    /// A block was freed while a stream that was not recorded may still use it.
    FreedInUse {
        /// The block.
        block: BlockSite,
        /// The last such use.
        used: MemoryUse,
        /// The number of the last submission before the free.
        sequence: u64,
    },
    /// A block was handed out while a stream may still use the memory for an earlier one.
    Reused {
        /// The block that was handed out.
        block: BlockSite,
        /// The last such use.
        used: MemoryUse,
    },
    /// Work was submitted on memory of a block that had been freed.
    UsedAfterFree {
        /// The block.
        block: BlockSite,
        /// The number of the last submission before the free.
        freed: u64,
        /// The use.
        used: MemoryUse,
    },
    /// Memory was taken from under work: unmapped, or its segment freed.
    Unmapped {
        /// The call that did.
        call: &'static str,
        /// The use that may still be running.
        used: MemoryUse,
    },
}

impl Race {
    /// The use of memory that came first, or the only one.
    #[must_use]
    pub const fn first_use(&self) -> &MemoryUse {
        match self {
            Self::Access { earlier: used, .. }
            | Self::FreedInUse { used, .. }
            | Self::Reused { used, .. }
            | Self::UsedAfterFree { used, .. }
            | Self::Unmapped { used, .. } => used,
        }
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Access { earlier, later } => {
                let (first, second) = (earlier.stream, later.stream);
                write!(f, "race between stream {first} and stream {second}")?;
                write!(f, "\n  earlier: {earlier}\n  later:   {later}")?;
                for block in [earlier.block, later.block].iter().flatten() {
                    write!(f, "\n  {block}")?;
                }
                if earlier.block == later.block || later.block.is_none() {
                    write!(
                        f,
                        "\n  cure: record an event on stream {first} after the earlier one and make \
                         stream {second} wait for it"
                    )
                } else {
                    write!(
                        f,
                        "\n  cure: the memory changed hands between the two; make stream {second} \
                         wait for the stream that the later block was allocated on, and \
                         record_stream every other stream that uses a block before it is dropped"
                    )
                }
            }
            Self::FreedInUse {
                block,
                used,
                sequence,
            } => {
                let stream = used.stream;
                write!(
                    f,
                    "block {} used on stream {stream}, freed without record_stream: stream \
                     {stream} was not recorded, and stream {} does not wait for it",
                    block.ptr, block.stream
                )?;
                write!(
                    f,
                    "\n  used:  {used}\n  freed: after #{sequence}\n  {block}"
                )?;
                write!(
                    f,
                    "\n  cure: record_stream({stream}) before the block is dropped, or make stream \
                     {} wait for stream {stream} (here the memory is held back until that work is \
                     done)",
                    block.stream
                )
            }
            Self::Reused { block, used } => {
                write!(
                    f,
                    "memory given to stream {} while stream {} may still use it",
                    block.stream, used.stream
                )?;
                write!(f, "\n  used:  {used}\n  given: {block}")?;
                if let Some(earlier) = used.block {
                    write!(f, "\n  it was {earlier}")?;
                }
                write!(
                    f,
                    "\n  cure: record_stream({}) before the earlier block is dropped; if that was \
                     done, the allocator is at fault",
                    used.stream
                )
            }
            Self::UsedAfterFree { block, freed, used } => {
                write!(f, "block {} used on stream {}", block.ptr, used.stream)?;
                write!(f, " after it was freed")?;
                write!(f, "\n  used:  {used}\n  freed: after #{freed}\n  {block}")?;
                write!(
                    f,
                    "\n  cure: keep the block until its last work is submitted"
                )
            }
            Self::Unmapped { call, used } => {
                write!(
                    f,
                    "{call} while stream {} may still use the memory",
                    used.stream
                )?;
                write!(f, "\n  used: {used}")?;
                if let Some(block) = used.block {
                    write!(f, "\n  {block}")?;
                }
                write!(
                    f,
                    "\n  cure: wait for the stream, or for an event recorded on it, before giving \
                     memory back"
                )
            }
        }
    }
}

/// For each stream by its number: how many of its accesses are known to come earlier.
#[derive(Clone, Default, Debug)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    fn get(&self, actor: usize) -> u64 {
        self.0.get(actor).copied().unwrap_or(0)
    }

    fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    fn count(&mut self, actor: usize) -> u64 {
        if self.0.len() <= actor {
            self.0.resize(actor + 1, 0);
        }
        self.0[actor] += 1;
        self.0[actor]
    }

    fn covers(&self, access: &Access) -> bool {
        self.get(access.actor) >= access.count
    }
}

#[derive(Clone, Debug)]
struct Access {
    actor: usize,
    count: u64,
    site: Arc<MemoryUse>,
}

/// A stretch of physical bytes that has been used alike.
#[derive(Clone, Debug)]
struct Stretch {
    end: u64,
    write: Option<Access>,
    /// Since the write; the latest of each stream.
    reads: SmallVec<[Access; 2]>,
}

impl Stretch {
    fn accesses(&self) -> impl Iterator<Item = &Access> {
        self.write.iter().chain(&self.reads)
    }
}

/// The stretches of one physical space by their start.
#[derive(Debug, Default)]
struct Shadow(BTreeMap<u64, Stretch>);

impl Shadow {
    /// Makes `at` a border, if it lies inside a stretch.
    fn cut(&mut self, at: u64) {
        let Some((_, stretch)) = self.0.range_mut(..at).next_back() else {
            return;
        };
        if stretch.end > at {
            let rest = stretch.clone();
            stretch.end = at;
            self.0.insert(at, rest);
        }
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &Stretch> {
        let before = self.0.range(..start).next_back();
        let before = before.filter(move |(_, stretch)| stretch.end > start);
        before
            .into_iter()
            .chain(self.0.range(start..end))
            .map(|(_, stretch)| stretch)
    }

    fn forget(&mut self, start: u64, end: u64) {
        self.cut(start);
        self.cut(end);
        let inside: Vec<u64> = self.0.range(start..end).map(|(at, _)| *at).collect();
        for at in inside {
            self.0.remove(&at);
        }
    }

    fn write(&mut self, start: u64, end: u64, access: Access) {
        self.forget(start, end);
        let stretch = Stretch {
            end,
            write: Some(access),
            reads: SmallVec::new(),
        };
        self.0.insert(start, stretch);
    }

    fn read(&mut self, start: u64, end: u64, access: &Access) {
        self.cut(start);
        self.cut(end);
        let mut gaps = Vec::new();
        let mut at = start;
        for (&from, stretch) in self.0.range_mut(start..end) {
            if from > at {
                gaps.push((at, from));
            }
            at = stretch.end;
            stretch.reads.retain(|read| read.actor != access.actor);
            stretch.reads.push(access.clone());
        }
        if at < end {
            gaps.push((at, end));
        }
        for (from, end) in gaps {
            let stretch = Stretch {
                end,
                write: None,
                reads: SmallVec::from_elem(access.clone(), 1),
            };
            self.0.insert(from, stretch);
        }
    }
}

#[derive(Debug)]
struct Block {
    site: BlockSite,
    /// After which submission it was freed; its addresses have not been handed out again since.
    freed: Option<u64>,
    recorded: SmallVec<[StreamId; 2]>,
}

/// Bytes that a piece of work uses.
#[derive(Debug)]
pub(super) struct Touched {
    /// The device that the memory is on.
    pub(super) device: usize,
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) writes: bool,
    pub(super) places: SmallVec<[Place; 1]>,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Races {
    actors: HashMap<StreamKey, usize>,
    streams: Vec<Option<StreamKey>>,
    clocks: Vec<Clock>,
    shadows: HashMap<(usize, bool), Shadow>,
    blocks: HashMap<usize, BTreeMap<u64, Block>>,
    sequence: u64,
    reported: HashSet<(Discriminant<Race>, u64, u64)>,
    found: Vec<Race>,
    left_out: u64,
}

impl Races {
    pub(super) fn new() -> Self {
        Self {
            actors: HashMap::new(),
            streams: vec![None],
            clocks: vec![Clock::default()],
            shadows: HashMap::new(),
            blocks: HashMap::new(),
            sequence: 0,
            reported: HashSet::new(),
            found: Vec::new(),
            left_out: 0,
        }
    }

    pub(super) fn found(&self) -> &[Race] {
        &self.found
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out
    }

    pub(super) fn clear(&mut self) {
        self.found.clear();
        self.left_out = 0;
    }

    /// Reports once for each kind and pair of numbers.
    fn report(&mut self, earlier: u64, later: u64, race: Race) {
        let key = (discriminant(&race), earlier, later);
        if !self.reported.insert(key) {
            return;
        }
        if self.found.len() < MAX_REPORTS {
            self.found.push(race);
        } else {
            self.left_out += 1;
        }
    }

    // ---- what is known to come before what ------------------------------------------------

    fn actor(&mut self, stream: StreamKey) -> usize {
        *self.actors.entry(stream).or_insert_with(|| {
            self.streams.push(Some(stream));
            self.clocks.push(Clock::default());
            self.clocks.len() - 1
        })
    }

    /// What work submitted to `stream` from now on comes after.
    fn reach(&mut self, stream: StreamKey) -> usize {
        let actor = self.actor(stream);
        let host = self.clocks[HOST].clone();
        self.clocks[actor].join(&host);
        actor
    }

    /// What an event recorded now on `stream` stands for.
    pub(super) fn recorded(&mut self, stream: StreamKey) -> Clock {
        let actor = self.reach(stream);
        self.clocks[actor].clone()
    }

    /// `stream` was made to wait for an event.
    pub(super) fn waits(&mut self, stream: StreamKey, event: &Clock) {
        let actor = self.actor(stream);
        self.clocks[actor].join(event);
    }

    /// The host has seen that an event is finished.
    pub(super) fn host_saw(&mut self, event: &Clock) {
        self.clocks[HOST].join(event);
    }

    /// The host has seen that a stream is done.
    pub(super) fn host_saw_stream(&mut self, stream: StreamKey) {
        let actor = self.actor(stream);
        let clock = self.clocks[actor].clone();
        self.clocks[HOST].join(&clock);
    }

    /// The host has seen that all streams of a device are done.
    pub(super) fn host_saw_device(&mut self, device: usize) {
        for actor in 1..self.clocks.len() {
            if self.streams[actor].is_some_and(|(on, _)| on == device) {
                let clock = self.clocks[actor].clone();
                self.clocks[HOST].join(&clock);
            }
        }
    }

    // ---- uses of memory -------------------------------------------------------------------

    /// Work was submitted to `stream` that uses memory.
    pub(super) fn used(&mut self, stream: StreamKey, asked: Asked, touched: Vec<Touched>) {
        self.sequence += 1;
        let sequence = self.sequence;
        let actor = self.reach(stream);
        for touched in touched {
            let block = self.block_at(touched.device, touched.ptr);
            let site = Arc::new(MemoryUse {
                what: asked.call,
                device: u32::try_from(stream.0).unwrap_or(u32::MAX),
                stream: stream.1,
                ptr: touched.ptr,
                bytes: touched.bytes,
                writes: touched.writes,
                at: asked.at,
                sequence,
                block: block.map(|block| block.site),
            });
            if let Some(&Block {
                site: block,
                freed: Some(freed),
                ..
            }) = block.filter(|_| !asked.in_graph)
            {
                let used = (*site).clone();
                let race = Race::UsedAfterFree { block, freed, used };
                self.report(sequence, sequence, race);
            }
            // Of one piece of work, what it reads and what it writes are one access each, later
            // than all that came before.
            let count = self.clocks[actor].count(actor);
            let access = Access { actor, count, site };
            for place in &touched.places {
                self.compare(&access, touched.device, place);
                let shadow = self
                    .shadows
                    .entry((touched.device, place.segment))
                    .or_default();
                let (start, end) = (place.start, place.end);
                if touched.writes {
                    shadow.write(start, end, access.clone());
                } else {
                    shadow.read(start, end, &access);
                }
            }
        }
    }

    /// Reports the accesses of a place that do not come before `access` and conflict with it.
    fn compare(&mut self, access: &Access, device: usize, place: &Place) {
        let Some(shadow) = self.shadows.get(&(device, place.segment)) else {
            return;
        };
        let clock = &self.clocks[access.actor];
        let mut conflicts = Vec::new();
        for stretch in shadow.overlapping(place.start, place.end) {
            let reads = stretch.reads.iter().filter(|_| access.site.writes);
            let earlier = stretch.write.iter().chain(reads);
            conflicts.extend(
                earlier
                    .filter(|earlier| !clock.covers(earlier))
                    .map(|earlier| Arc::clone(&earlier.site)),
            );
        }
        for earlier in conflicts {
            let race = Race::Access {
                earlier: (*earlier).clone(),
                later: (*access.site).clone(),
            };
            self.report(earlier.sequence, access.site.sequence, race);
        }
    }

    /// The latest use by each stream of these places that neither the host nor `stream` knows to
    /// come earlier than now.
    fn unknown_uses(
        &mut self,
        stream: Option<StreamKey>,
        device: usize,
        places: &[Place],
    ) -> Vec<Access> {
        let known = match stream {
            Some(stream) => self.reach(stream),
            None => HOST,
        };
        let clock = &self.clocks[known];
        let mut latest: Vec<Access> = Vec::new();
        for place in places {
            let Some(shadow) = self.shadows.get(&(device, place.segment)) else {
                continue;
            };
            for stretch in shadow.overlapping(place.start, place.end) {
                for access in stretch.accesses() {
                    if clock.covers(access) {
                        continue;
                    }
                    match latest.iter_mut().find(|seen| seen.actor == access.actor) {
                        Some(seen) if seen.count >= access.count => {}
                        Some(seen) => *seen = access.clone(),
                        None => latest.push(access.clone()),
                    }
                }
            }
        }
        latest
    }

    /// The host takes memory away. A page keeps its bytes, and its past, when it is unmapped; a
    /// segment is gone.
    pub(super) fn taken_away(&mut self, device: usize, call: &'static str, places: &[Place]) {
        for access in self.unknown_uses(None, device, places) {
            let used = (*access.site).clone();
            self.report(used.sequence, 0, Race::Unmapped { call, used });
        }
    }

    /// Nobody owns these bytes any more.
    pub(super) fn forget(&mut self, device: usize, place: &Place) {
        if let Some(shadow) = self.shadows.get_mut(&(device, place.segment)) {
            shadow.forget(place.start, place.end);
        }
    }

    // ---- blocks ---------------------------------------------------------------------------

    fn block_at(&self, device: usize, ptr: DevicePtr) -> Option<&Block> {
        let before = self.blocks.get(&device)?.range(..=ptr.0).next_back();
        before
            .map(|(_, block)| block)
            .filter(|block| ptr.0 < block.site.ptr.0 + block.site.bytes)
    }

    pub(super) fn allocated(
        &mut self,
        (device, stream): StreamKey,
        ptr: DevicePtr,
        bytes: u64,
        at: &'static Location<'static>,
        places: &[Place],
    ) {
        let sequence = self.sequence;
        let site = BlockSite {
            ptr,
            bytes,
            stream,
            at,
            sequence,
        };
        for access in self.unknown_uses(Some((device, stream)), device, places) {
            let used = (*access.site).clone();
            self.report(used.sequence, sequence, Race::Reused { block: site, used });
        }
        let blocks = self.blocks.entry(device).or_default();
        let overlapped: Vec<u64> = blocks
            .range(..ptr.0 + bytes)
            .rev()
            .take_while(|(_, block)| block.site.ptr.0 + block.site.bytes > ptr.0)
            .map(|(at, _)| *at)
            .collect();
        for at in overlapped {
            blocks.remove(&at);
        }
        let block = Block {
            site,
            freed: None,
            recorded: SmallVec::new(),
        };
        blocks.insert(ptr.0, block);
    }

    pub(super) fn stream_recorded(&mut self, device: usize, ptr: DevicePtr, stream: StreamId) {
        let block = self
            .blocks
            .get_mut(&device)
            .and_then(|blocks| blocks.get_mut(&ptr.0));
        if let Some(block) = block {
            block.recorded.push(stream);
        }
    }

    /// A block is freed. Returns the streams that were not recorded and may still use it.
    pub(super) fn freed(
        &mut self,
        device: usize,
        ptr: DevicePtr,
        places: &[Place],
    ) -> Vec<StreamId> {
        let sequence = self.sequence;
        let block = self
            .blocks
            .get_mut(&device)
            .and_then(|blocks| blocks.get_mut(&ptr.0));
        let Some(block) = block else {
            return Vec::new();
        };
        block.freed = Some(sequence);
        let (site, recorded) = (block.site, block.recorded.clone());
        let mut unrecorded = Vec::new();
        for access in self.unknown_uses(Some((device, site.stream)), device, places) {
            let Some((on, stream)) = self.streams[access.actor] else {
                continue;
            };
            if on == device && recorded.contains(&stream) || access.site.block != Some(site) {
                continue;
            }
            if on == device {
                unrecorded.push(stream);
            }
            let race = Race::FreedInUse {
                block: site,
                used: (*access.site).clone(),
                sequence,
            };
            self.report(access.site.sequence, sequence, race);
        }
        unrecorded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(actor: usize, count: u64) -> Access {
        let site = MemoryUse {
            what: "test",
            device: 0,
            stream: StreamId(actor as u64),
            ptr: DevicePtr(0),
            bytes: 1,
            writes: true,
            at: Location::caller(),
            sequence: count,
            block: None,
        };
        Access {
            actor,
            count,
            site: Arc::new(site),
        }
    }

    fn shape(shadow: &Shadow) -> Vec<(u64, u64, Option<usize>, Vec<usize>)> {
        shadow
            .0
            .iter()
            .map(|(at, stretch)| {
                let write = stretch.write.as_ref().map(|access| access.actor);
                let reads = stretch.reads.iter().map(|access| access.actor).collect();
                (*at, stretch.end, write, reads)
            })
            .collect()
    }

    #[test]
    fn the_shadow_is_cut_where_uses_differ() {
        let mut shadow = Shadow::default();
        shadow.write(10, 20, access(1, 1));
        shadow.read(15, 30, &access(2, 1));
        shadow.read(18, 19, &access(2, 2));
        assert_eq!(
            shape(&shadow),
            [
                (10, 15, Some(1), vec![]),
                (15, 18, Some(1), vec![2]),
                (18, 19, Some(1), vec![2]),
                (19, 20, Some(1), vec![2]),
                (20, 30, None, vec![2]),
            ]
        );
        shadow.write(12, 25, access(3, 1));
        assert_eq!(
            shape(&shadow),
            [
                (10, 12, Some(1), vec![]),
                (12, 25, Some(3), vec![]),
                (25, 30, None, vec![2]),
            ]
        );
        shadow.forget(11, 26);
        assert_eq!(
            shape(&shadow),
            [(10, 11, Some(1), vec![]), (26, 30, None, vec![2])]
        );
        assert_eq!(shadow.overlapping(0, 10).count(), 0);
        assert_eq!(shadow.overlapping(10, 27).count(), 2);
    }
}
