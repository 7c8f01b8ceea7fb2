//! Runs an allocation trace through the allocator on a simulated device, and measures.
//!
//! [`replay`] does what the program behind a [`Trace`] did to its memory, in the same order and
//! on as many streams, with no work of its own between the operations: what is measured is the
//! allocator. [`smallest`] searches for the smallest device on which a replay completes.
//!
//! # What is checked
//!
//! With [`ReplayOptions::verify`], through real device memory, on the stream of each block:
//!
//! 1. A block is at least as long as what was asked for, and no live block overlaps another
//!    (an interval tree of its own, which shares no code with the allocator, says so).
//! 2. Bytes written at the allocation are unchanged at the free: a word that no other allocation
//!    writes there, first, last and every 2 MiB; in scaled replays every byte of the block.
//! 3. The device saw no access to memory that nobody held.
//!
//! Whatever fails first ends the replay as [`ReplayError::Diverged`], naming the operation, its
//! stream and its label.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use lastref_snapshot::trace::{Operation, OperationKind, Trace};
use thiserror::Error;

use crate::device::{Device, DeviceError, DevicePtr, FillValue, StreamId};
use crate::error::AllocError;
use crate::sim::{Call, SimDevice};
use crate::{Block, CachingAllocator};

/// Capacities are searched in steps of this size, the size of a page.
pub const SMALLEST_STEP_BYTES: u64 = 2 << 20;
/// In blocks that are not checked whole, the distance between checked words.
const STAMP_STEP_BYTES: u64 = 2 << 20;
/// The progress callback is called once in so many operations.
pub(crate) const PROGRESS_STEP: usize = 1 << 12;

/// How to replay.
pub struct ReplayOptions<'a> {
    /// Whether to write to the blocks and check them: see the [module](self).
    pub verify: bool,
    /// Sizes are divided by this, to no less than 1. Above 1, blocks are verified whole.
    pub scale: NonZeroU64,
    /// Called now and then with the number of operations done.
    pub progress: Option<&'a mut dyn FnMut(u64)>,
    /// Called when the replay is over, or memory has run out, while what is live then still is. By
    /// [`replay`] alone.
    pub at_end: Option<&'a mut AtEnd<'a>>,
}

/// What is called with the allocator of a replay.
pub type AtEnd<'a> = dyn FnMut(&CachingAllocator<SimDevice>) + 'a;

impl Default for ReplayOptions<'_> {
    fn default() -> Self {
        Self {
            verify: false,
            scale: NonZeroU64::MIN,
            progress: None,
            at_end: None,
        }
    }
}

impl fmt::Debug for ReplayOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            verify,
            scale,
            progress: _,
            at_end: _,
        } = self;
        f.debug_struct("ReplayOptions")
            .field("verify", verify)
            .field("scale", scale)
            .finish_non_exhaustive()
    }
}

/// What a replay measured. Where it ran out of memory, up to there.
#[derive(Clone, PartialEq, Debug)]
pub struct ReplayReport {
    /// Operations done.
    pub operations: u64,
    /// The most bytes that were requested and not freed at one moment.
    pub peak_live_bytes: u64,
    /// The most bytes that were in use at one moment, as the device counts them.
    pub peak_reserved_bytes: u64,
    /// Device calls that asked for memory: for a segment or for a page.
    pub device_allocations: u64,
    /// The time all device calls of the allocator take by the device's latency table, in
    /// microseconds.
    pub device_microseconds: f64,
    /// Host time, without what the simulated device itself used.
    pub host_time: Duration,
    /// The allocation that failed, if one did.
    pub out_of_memory: Option<OutOfMemory>,
}

impl ReplayReport {
    /// Peak reserved over peak live bytes; 1 for a trace without bytes.
    #[must_use]
    pub fn reserved_over_live(&self) -> f64 {
        ratio(self.peak_reserved_bytes, self.peak_live_bytes)
    }

    /// Host time for one operation in nanoseconds, device time apart. A verifying replay cannot
    /// help but count the reading of the clock around each operation too, and the cold caches.
    #[must_use]
    pub fn nanoseconds_per_operation(&self) -> f64 {
        self.host_time.as_secs_f64() * 1e9 / self.operations.max(1) as f64
    }
}

fn ratio(bytes: u64, live: u64) -> f64 {
    if live == 0 {
        1.0
    } else {
        bytes as f64 / live as f64
    }
}

/// An operation of a trace, in words for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its position in the trace, counted from 0.
    pub operation: u64,
    /// Its line in the file, counted from 1.
    pub line: u64,
    /// The allocation's id in the file.
    pub id: u64,
    /// The allocation's stream in the file.
    pub stream: u64,
    /// The allocation's label.
    pub label: String,
}

impl Place {
    pub(crate) fn new(trace: &Trace, index: usize) -> Self {
        let operation = &trace.operations()[index];
        Self {
            operation: index as u64,
            line: Trace::line(index),
            id: operation.id,
            stream: operation.stream,
            label: trace.label(operation).to_owned(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            operation,
            line,
            id,
            stream,
            label,
        } = self;
        write!(
            f,
            "operation {operation} (line {line}, id {id}, stream {stream}, label {label:?})"
        )
    }
}

/// An allocation that failed for want of memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Which.
    pub place: Place,
    /// Bytes it asked for.
    pub requested: u64,
    /// What the allocator said: [`AllocError::OutOfMemory`] or [`AllocError::TooLarge`].
    pub error: AllocError,
}

/// Why a replay has no report.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The allocator did something that it must not. Never seen from a sound one.
    #[error("diverged at {place}: {reason}")]
    Diverged {
        /// Where it was noticed.
        place: Place,
        /// What was noticed.
        reason: String,
    },
    /// An allocation failed for another reason than memory.
    #[error("{place}: {source}")]
    Alloc {
        /// Which.
        place: Place,
        /// Why.
        source: AllocError,
    },
    /// A device call of the replay itself failed.
    #[error("the simulated device failed: {0}")]
    Device(#[from] DeviceError),
}

/// Runs `trace` through `allocator`, which should be fresh, and measures it.
///
/// The counters of the device are reset. Streams of the trace other than 0 become streams of the device, and are destroyed again. What
/// the trace does not free is freed at the end.
///
/// # Errors
///
/// [`ReplayError`]. To run out of memory is no error: the report says so.
///
/// # Examples
///
/// ```
/// use lastref_alloc::replay::{ReplayOptions, replay};
/// use lastref_alloc::sim::{SimDevice, SimOptions};
/// use lastref_alloc::CachingAllocator;
/// use lastref_snapshot::trace::Trace;
///
/// let csv = "op,id,bytes,stream,phase,label\nalloc,1,5000000,0,init,weights\nfree,1,0,0,end,\n";
/// let trace = Trace::read(csv.as_bytes())?;
/// let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(64 << 20))?);
/// let report = replay(&allocator, &trace, ReplayOptions { verify: true, ..Default::default() })?;
/// assert_eq!(report.operations, 2);
/// assert_eq!(report.peak_live_bytes, 5_000_000);
/// assert!(report.peak_reserved_bytes >= 5_000_000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn replay(
    allocator: &CachingAllocator<SimDevice>,
    trace: &Trace,
    mut options: ReplayOptions<'_>,
) -> Result<ReplayReport, ReplayError> {
    let device = allocator.device();
    // Declared first, so that it is dropped last: blocks must not outlive their streams.
    let mut streams = Streams::create(allocator, trace)?;
    let mut blocks: Vec<Option<Block<SimDevice>>> = Vec::new();
    blocks.resize_with(trace.peak_live_blocks(), || None);
    let mut verifier = options
        .verify
        .then(|| Verifier::new(device, trace.peak_live_blocks(), options.scale));
    let mut live = Live::default();
    let mut out_of_memory = None;
    let mut done = 0;

    device.reset_counters();
    let mut watch = Stopwatch::start(options.verify);
    for (index, operation) in trace.operations().iter().enumerate() {
        if index % PROGRESS_STEP == 0
            && let Some(progress) = &mut options.progress
        {
            progress(index as u64);
        }
        let slot = operation.slot as usize;
        let bytes = scaled(operation, options.scale);
        match operation.kind {
            OperationKind::Alloc => {
                let stream = streams.of(operation);
                let started = watch.begin();
                let result = allocator.alloc(bytes, stream);
                watch.end(started);
                match result {
                    Ok(block) => {
                        // Moved once, and freed where it lies: moving a block takes as long as a
                        // tenth of allocating it.
                        blocks[slot] = Some(block);
                        if let (Some(verifier), Some(block)) = (&mut verifier, &blocks[slot]) {
                            verifier
                                .allocated(block, bytes, operation, index)
                                .map_err(|unsound| unsound.at(trace, index))?;
                        }
                        live.add(bytes);
                    }
                    Err(error) if error.is_out_of_memory() => {
                        let place = Place::new(trace, index);
                        out_of_memory = Some(OutOfMemory {
                            place,
                            requested: bytes,
                            error,
                        });
                        break;
                    }
                    Err(source) => {
                        return Err(ReplayError::Alloc {
                            place: Place::new(trace, index),
                            source,
                        });
                    }
                }
            }
            OperationKind::Free => {
                let block = &mut blocks[slot];
                assert!(block.is_some(), "a trace frees what is live, once");
                if let (Some(verifier), Some(block)) = (&mut verifier, &*block) {
                    verifier
                        .freed(block, bytes, operation)
                        .map_err(|unsound| unsound.at(trace, index))?;
                }
                let started = watch.begin();
                *block = None;
                watch.end(started);
                live.remove(bytes);
            }
        }
        done = index as u64 + 1;
    }
    let host_time = watch.stop();

    if out_of_memory.is_none()
        && let Some(verifier) = &mut verifier
    {
        verifier.finish(trace, &blocks)?;
    }
    if let Some(at_end) = &mut options.at_end {
        at_end(allocator);
    }
    let counters = device.counters();
    let checks = verifier.map(|verifier| verifier.cost).unwrap_or_default();
    let device_time = Duration::from_nanos(counters.host_nanoseconds - checks.host_nanoseconds);
    Ok(ReplayReport {
        operations: done,
        peak_live_bytes: live.peak,
        peak_reserved_bytes: counters.peak_held_bytes,
        device_allocations: counters.calls(Call::AllocSegment) + counters.calls(Call::CreatePage),
        device_microseconds: counters.device_microseconds - checks.device_microseconds,
        host_time: host_time.saturating_sub(device_time),
        out_of_memory,
    })
}

/// The smallest device on which a replay completes.
#[derive(Clone, PartialEq, Debug)]
pub struct Smallest {
    /// Its capacity, a multiple of [`SMALLEST_STEP_BYTES`]. On a device one step smaller the
    /// replay runs out of memory.
    pub bytes: u64,
    /// The replay on it.
    pub report: ReplayReport,
}

impl Smallest {
    /// The capacity over the peak of live bytes; 1 for a trace without bytes.
    #[must_use]
    pub fn over_live(&self) -> f64 {
        ratio(self.bytes, self.report.peak_live_bytes)
    }
}

/// Finds the smallest device on which `trace` completes, by trying.
///
/// `allocator` makes a fresh allocator on a device of that capacity. The last replay is that of
/// the answer, with `options`; those before it do not verify.
///
/// An allocator may fail with more memory where it completes with less, so "smallest" means what
/// [`Smallest::bytes`] says: it completes there, and one step below it does not.
///
/// # Errors
///
/// [`ReplayError`]; what `allocator` answers if it cannot make such a device.
pub fn smallest(
    trace: &Trace,
    options: ReplayOptions<'_>,
    mut allocator: impl FnMut(u64) -> Result<CachingAllocator<SimDevice>, DeviceError>,
) -> Result<Smallest, ReplayError> {
    let scale = options.scale;
    let completes = |capacity| {
        let options = ReplayOptions {
            scale,
            ..ReplayOptions::default()
        };
        let report = replay(&allocator(capacity)?, trace, options)?;
        Ok::<_, ReplayError>(report.out_of_memory.is_none())
    };
    let bytes = search_smallest(peak_live_bytes(trace, scale), None, completes)?;
    let report = replay(&allocator(bytes)?, trace, options)?;
    Ok(Smallest { bytes, report })
}

/// The search of [`smallest`]. What lives at once must fit: less than `live` cannot complete.
/// A capacity that may be `enough` shortens it.
pub(crate) fn search_smallest<E>(
    live: u64,
    enough: Option<u64>,
    mut completes: impl FnMut(u64) -> Result<bool, E>,
) -> Result<u64, E> {
    let mut completes = |steps: u64| completes(steps.saturating_mul(SMALLEST_STEP_BYTES));
    // Zero steps are no device.
    let floor = live.div_ceil(SMALLEST_STEP_BYTES).max(1);
    let (mut too_small, mut smallest) = (floor - 1, floor);
    let enough = enough.map_or(floor, |enough| enough.div_ceil(SMALLEST_STEP_BYTES));
    if enough > floor && completes(enough)? {
        smallest = enough;
    } else {
        let mut stride = 1;
        while !completes(smallest)? {
            too_small = smallest;
            smallest = smallest.saturating_add(stride);
            stride = stride.saturating_mul(2);
        }
    }
    while smallest - too_small > 1 {
        let middle = too_small + (smallest - too_small) / 2;
        if completes(middle)? {
            smallest = middle;
        } else {
            too_small = middle;
        }
    }
    Ok(smallest * SMALLEST_STEP_BYTES)
}

/// The most bytes that are live at one moment of `trace`, its sizes divided by `scale`.
#[must_use]
pub fn peak_live_bytes(trace: &Trace, scale: NonZeroU64) -> u64 {
    let mut live = Live::default();
    for operation in trace.operations() {
        let bytes = scaled(operation, scale);
        match operation.kind {
            OperationKind::Alloc => live.add(bytes),
            OperationKind::Free => live.remove(bytes),
        }
    }
    live.peak
}

/// The bytes of an operation; something stays something.
#[inline]
pub(crate) fn scaled(operation: &Operation, scale: NonZeroU64) -> u64 {
    if scale == NonZeroU64::MIN {
        return operation.bytes;
    }
    (operation.bytes / scale).max(operation.bytes.min(1))
}

/// Requested bytes that are live.
#[derive(Default)]
pub(crate) struct Live {
    current: u64,
    pub(crate) peak: u64,
}

impl Live {
    // Cannot overflow: a trace promises it for its own sizes, which are no smaller.
    pub(crate) const fn add(&mut self, bytes: u64) {
        self.current += bytes;
        if self.current > self.peak {
            self.peak = self.current;
        }
    }

    pub(crate) const fn remove(&mut self, bytes: u64) {
        self.current -= bytes;
    }
}

/// The time spent in the allocator. Without verification that is all the time between start and
/// stop, and nothing else is done then; with it, each operation is timed by itself.
struct Stopwatch {
    start: Instant,
    each: Option<Duration>,
}

impl Stopwatch {
    fn start(each: bool) -> Self {
        Self {
            start: Instant::now(),
            each: each.then_some(Duration::ZERO),
        }
    }

    /// Begins an operation. Not a closure around it, whose result would be copied once more.
    fn begin(&self) -> Option<Instant> {
        self.each.is_some().then(Instant::now)
    }

    fn end(&mut self, started: Option<Instant>) {
        if let (Some(total), Some(started)) = (&mut self.each, started) {
            *total += started.elapsed();
        }
    }

    fn stop(self) -> Duration {
        self.each.unwrap_or_else(|| self.start.elapsed())
    }
}

/// The streams of a trace on a device. Destroyed when dropped.
struct Streams<'a> {
    allocator: &'a CachingAllocator<SimDevice>,
    /// Ids in the trace, ascending, and on the device.
    ids: Vec<(u64, StreamId)>,
    /// The one that was asked for last.
    recent: (u64, StreamId),
}

impl<'a> Streams<'a> {
    fn create(
        allocator: &'a CachingAllocator<SimDevice>,
        trace: &Trace,
    ) -> Result<Self, DeviceError> {
        let mut streams = Self {
            allocator,
            ids: Vec::new(),
            recent: (StreamId::DEFAULT.0, StreamId::DEFAULT),
        };
        for &id in trace.streams() {
            let stream = if id == StreamId::DEFAULT.0 {
                StreamId::DEFAULT
            } else {
                allocator.device().create_stream(0)?
            };
            streams.ids.push((id, stream));
        }
        Ok(streams)
    }

    fn of(&mut self, operation: &Operation) -> StreamId {
        if operation.stream == self.recent.0 {
            return self.recent.1;
        }
        let position = self
            .ids
            .binary_search_by_key(&operation.stream, |(id, _)| *id);
        self.recent = self.ids[position.expect("a trace lists all its streams")];
        self.recent.1
    }
}

impl Drop for Streams<'_> {
    fn drop(&mut self) {
        for (_, stream) in &self.ids {
            if *stream != StreamId::DEFAULT {
                // Both fail only for a stream that does not exist.
                let _ = self.allocator.retire_stream(*stream);
                let _ = self.allocator.device().destroy_stream(*stream);
            }
        }
    }
}

/// Why a check failed.
enum Unsound {
    Found(String),
    Device(DeviceError),
}

impl From<DeviceError> for Unsound {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl Unsound {
    fn at(self, trace: &Trace, index: usize) -> ReplayError {
        match self {
            Self::Found(reason) => ReplayError::Diverged {
                place: Place::new(trace, index),
                reason,
            },
            Self::Device(error) => ReplayError::Device(error),
        }
    }
}

/// Writes to blocks and checks them, as the [module](self) says.
struct Verifier<'a> {
    device: &'a SimDevice,
    whole: bool,
    /// The operation that allocated what is in a slot.
    origin: Vec<usize>,
    /// Live blocks: from where to where, and the operation that allocated them.
    intervals: BTreeMap<u64, (u64, usize)>,
    scratch: Vec<u8>,
    cost: Cost,
}

/// What the checks cost, to be taken off what the device was asked for in all.
#[derive(Clone, Copy, Default)]
struct Cost {
    device_microseconds: f64,
    host_nanoseconds: u64,
}

impl<'a> Verifier<'a> {
    fn new(device: &'a SimDevice, slots: usize, scale: NonZeroU64) -> Self {
        Self {
            device,
            whole: scale.get() > 1,
            origin: vec![0; slots],
            intervals: BTreeMap::new(),
            scratch: vec![0; 1 << 20],
            cost: Cost::default(),
        }
    }

    fn aside<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.device.counters();
        let result = work(self);
        let after = self.device.counters();
        self.cost.device_microseconds += after.device_microseconds - before.device_microseconds;
        self.cost.host_nanoseconds += after.host_nanoseconds - before.host_nanoseconds;
        result
    }

    /// A block was allocated by operation `index`.
    fn allocated(
        &mut self,
        block: &Block<SimDevice>,
        bytes: u64,
        operation: &Operation,
        index: usize,
    ) -> Result<(), Unsound> {
        self.origin[operation.slot as usize] = index;
        if bytes == 0 {
            return Ok(());
        }
        if block.allocated_bytes() < bytes {
            let allocated = block.allocated_bytes();
            return Err(Unsound::Found(format!(
                "{allocated} bytes allocated for {bytes}"
            )));
        }
        let (start, end) = (block.ptr().0, block.ptr().0 + block.allocated_bytes());
        if let Some((other_start, (other_end, other))) = self.intervals.range(..end).next_back()
            && *other_end > start
        {
            return Err(Unsound::Found(format!(
                "the block {start:#x}..{end:#x} overlaps {other_start:#x}..{other_end:#x}, which \
                 operation {other} holds"
            )));
        }
        self.intervals.insert(start, (end, index));
        self.aside(|this| this.write(block, bytes, index))
    }

    /// A block is about to be freed.
    fn freed(
        &mut self,
        block: &Block<SimDevice>,
        bytes: u64,
        operation: &Operation,
    ) -> Result<(), Unsound> {
        if bytes == 0 {
            return Ok(());
        }
        self.intervals.remove(&block.ptr().0);
        let index = self.origin[operation.slot as usize];
        self.aside(|this| this.check(block, bytes, index))
    }

    /// The replay is over; checks what still lives.
    fn finish(
        &mut self,
        trace: &Trace,
        blocks: &[Option<Block<SimDevice>>],
    ) -> Result<(), ReplayError> {
        for (slot, block) in blocks.iter().enumerate() {
            let Some(block) = block else { continue };
            let index = self.origin[slot];
            let bytes = block.requested_bytes();
            if bytes > 0 {
                self.aside(|this| this.check(block, bytes, index))
                    .map_err(|unsound| unsound.at(trace, index))?;
            }
        }
        match self.device.errors().first() {
            Some(error) => {
                let last = trace.operations().len() - 1;
                Err(Unsound::Found(format!("the device reports {error}")).at(trace, last))
            }
            None => Ok(()),
        }
    }

    fn write(&self, block: &Block<SimDevice>, bytes: u64, index: usize) -> Result<(), Unsound> {
        let (ptr, stream) = (block.ptr(), block.stream());
        if self.whole {
            let pattern = pattern(index);
            self.device
                .fill(ptr, FillValue::U32(pattern), bytes / 4, stream)?;
            let rest = usize::try_from(bytes % 4).expect("less than 4");
            if rest > 0 {
                let at = ptr.offset(bytes - bytes % 4);
                self.device
                    .copy_from_host(at, &pattern.to_ne_bytes()[..rest], stream)?;
            }
        } else {
            for (at, length) in words(bytes) {
                let word = word(index, at);
                self.device
                    .copy_from_host(ptr.offset(at), &word[..length], stream)?;
            }
        }
        Ok(())
    }

    fn check(&mut self, block: &Block<SimDevice>, bytes: u64, index: usize) -> Result<(), Unsound> {
        let (ptr, stream) = (block.ptr(), block.stream());
        if self.whole {
            let expected = pattern(index).to_ne_bytes();
            let mut at = 0;
            while at < bytes {
                let length = (bytes - at).min(self.scratch.len() as u64);
                let read = &mut self.scratch[..usize::try_from(length).expect("a buffer's")];
                self.device.copy_to_host(read, ptr.offset(at), stream)?;
                // `at` is a multiple of the buffer's length, and so of the pattern's.
                let whole = read.chunks_exact(4);
                let rest = whole.remainder();
                if !whole.clone().all(|word| word == expected) || rest != &expected[..rest.len()] {
                    let wrong = (0..)
                        .zip(&*read)
                        .find(|(i, byte)| **byte != expected[i % 4]);
                    let at = at + wrong.map_or(0, |(i, _)| i as u64);
                    return Err(changed(ptr, at, index));
                }
                at += length;
            }
        } else {
            for (at, length) in words(bytes) {
                let mut found = [0; 8];
                self.device
                    .copy_to_host(&mut found[..length], ptr.offset(at), stream)?;
                if found[..length] != word(index, at)[..length] {
                    return Err(changed(ptr, at, index));
                }
            }
        }
        Ok(())
    }
}

fn changed(ptr: DevicePtr, at: u64, index: usize) -> Unsound {
    Unsound::Found(format!(
        "byte {at} of the block at {ptr}, allocated by operation {index}, is not what was written \
         there"
    ))
}

/// The words of a block of `bytes` bytes, at least 1, that are written and checked, with their
/// lengths: one every [`STAMP_STEP_BYTES`] from the first on, and the last. They do not overlap,
/// and one is shorter than 8 bytes only where there is no more room.
fn words(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let steps = (bytes - 1) / STAMP_STEP_BYTES;
    let last = (bytes.saturating_sub(8)).max(steps * STAMP_STEP_BYTES + 8);
    let starts = (0..=steps).map(|step| step * STAMP_STEP_BYTES);
    starts
        .chain((last < bytes).then_some(last))
        .map(move |at| (at, usize::try_from((bytes - at).min(8)).expect("at most 8")))
}

/// What the allocation of operation `index` writes `at` bytes into its block.
fn word(index: usize, at: u64) -> [u8; 8] {
    // Odd multipliers, so that neighbours differ in all bytes, the first one too.
    let n = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (n ^ at.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .rotate_left(29)
        .to_ne_bytes()
}

/// What fills the block of operation `index`, if it is filled.
fn pattern(index: usize) -> u32 {
    let [a, b, c, d, ..] = word(index, 0);
    u32::from_ne_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{Fault, SimOptions};

    const MIB: u64 = 1 << 20;

    fn trace(lines: &str) -> Trace {
        let csv = format!("op,id,bytes,stream,phase,label\n{lines}");
        Trace::read(csv.as_bytes()).expect("the test's trace is sound")
    }

    fn allocator(capacity: u64) -> CachingAllocator<SimDevice> {
        CachingAllocator::new(SimDevice::new(SimOptions::new(capacity)).unwrap())
    }

    fn verified() -> ReplayOptions<'static> {
        ReplayOptions {
            verify: true,
            ..ReplayOptions::default()
        }
    }

    fn scaled_by(scale: u64) -> ReplayOptions<'static> {
        ReplayOptions {
            scale: NonZeroU64::new(scale).unwrap(),
            ..verified()
        }
    }

    /// Sizes around everything that is rounded or stepped, on two streams, some never freed.
    fn varied() -> Trace {
        varied_on([0, 5])
    }

    fn varied_on(streams: [u64; 2]) -> Trace {
        let mut lines = String::new();
        let sizes = [
            0,
            1,
            7,
            8,
            9,
            511,
            513,
            131_073,
            2 * MIB - 1,
            2 * MIB + 3,
            9 * MIB + 1,
        ];
        for round in 0..3 {
            for (i, bytes) in sizes.iter().enumerate() {
                let id = round * sizes.len() + i;
                lines += &format!("alloc,{id},{bytes},{},p,l\n", streams[i % 2]);
            }
            for i in (0..sizes.len()).step_by(3) {
                lines += &format!("free,{},0,0,p,\n", round * sizes.len() + i);
            }
        }
        trace(&lines)
    }

    #[test]
    fn a_replay_counts_what_the_trace_and_the_device_did() {
        let trace = trace(
            "alloc,1,4194304,0,p,a\nalloc,2,4194304,0,p,b\nfree,1,0,0,p,\nalloc,3,4194304,0,p,c\n",
        );
        let allocator = allocator(64 * MIB);
        let report = replay(&allocator, &trace, ReplayOptions::default()).unwrap();
        assert_eq!(report.operations, 4);
        assert_eq!(report.peak_live_bytes, 8 * MIB);
        assert_eq!(report.peak_reserved_bytes, 8 * MIB);
        assert!((report.reserved_over_live() - 1.0).abs() < 1e-12);
        assert_eq!(report.device_allocations, 4, "pages of 2 MiB");
        assert!(
            report.device_microseconds > 4.0 * 193.0,
            "creating a page takes 193"
        );
        assert!(report.nanoseconds_per_operation() > 0.0);
        assert_eq!(report.out_of_memory, None);
        assert_eq!(
            allocator.stats().allocated_bytes.all.current,
            0,
            "freed at the end"
        );
    }

    #[test]
    fn verifying_changes_nothing_that_is_reported_but_time() {
        // On one stream: of two, one has to ask what the other is done with.
        let trace = varied_on([0, 0]);
        let plain = replay(&allocator(512 * MIB), &trace, ReplayOptions::default()).unwrap();
        let verifying = replay(&allocator(512 * MIB), &trace, verified()).unwrap();
        let same = ReplayReport {
            host_time: plain.host_time,
            device_microseconds: plain.device_microseconds,
            ..verifying.clone()
        };
        assert_eq!(same, plain);
        let difference = verifying.device_microseconds - plain.device_microseconds;
        // Work that is really pending makes the allocator ask about events; that costs little, or saves a little: checks synchronise.
        assert!((-10.0..100.0).contains(&difference), "{difference}");
    }

    #[test]
    fn every_size_survives_verification_whole_and_by_words() {
        for options in [verified(), scaled_by(2), scaled_by(64)] {
            let report = replay(&allocator(512 * MIB), &varied(), options).unwrap();
            assert_eq!(report.operations, varied().operations().len() as u64);
        }
    }

    #[test]
    fn sizes_are_divided_but_never_to_nothing() {
        let trace = trace("alloc,1,6400,0,p,a\nalloc,2,3,0,p,b\nalloc,3,0,0,p,c\n");
        let scale = NonZeroU64::new(64).unwrap();
        assert_eq!(peak_live_bytes(&trace, scale), 100 + 1);
        assert_eq!(
            peak_live_bytes(&trace, NonZeroU64::MIN),
            trace.peak_live_bytes()
        );
    }

    #[test]
    fn out_of_memory_is_reported_with_its_place_and_what_came_before() {
        let trace = trace("alloc,1,9000000,0,p,a\nalloc,7,90000000,3,p,culprit\nfree,1,0,0,p,\n");
        let allocator = allocator(64 * MIB);
        let report = replay(&allocator, &trace, verified()).unwrap();
        assert_eq!((report.operations, report.peak_live_bytes), (1, 9_000_000));
        let failed = report.out_of_memory.expect("90 MB do not fit into 64 MiB");
        assert_eq!(failed.requested, 90_000_000);
        assert_eq!(
            failed.place.to_string(),
            "operation 1 (line 3, id 7, stream 3, label \"culprit\")"
        );
        assert_eq!(
            allocator.stats().allocated_bytes.all.current,
            0,
            "nothing is kept"
        );
    }

    #[test]
    fn another_failure_of_the_device_is_an_error_with_its_place() {
        let allocator = allocator(64 * MIB);
        allocator.device().inject(Fault::nth(Call::CreatePage, 2));
        let trace = trace("alloc,1,100,0,p,a\nalloc,2,3000000,0,p,b\n");
        let error = replay(&allocator, &trace, verified()).unwrap_err();
        assert!(
            matches!(&error, ReplayError::Alloc { place, .. } if place.operation == 1),
            "{error}"
        );
        assert_eq!(
            allocator.stats().allocated_bytes.all.current,
            0,
            "nothing is kept"
        );
    }

    #[test]
    fn streams_of_the_trace_are_destroyed_again() {
        let allocator = allocator(64 * MIB);
        let trace = trace("alloc,1,600,5,p,a\nalloc,2,600,9,p,b\nfree,1,0,0,p,\n");
        replay(&allocator, &trace, verified()).unwrap();
        let counters = allocator.device().counters();
        assert_eq!(
            counters.calls(Call::CreateStream),
            0,
            "made before the counting begins"
        );
        assert_eq!(counters.calls(Call::DestroyStream), 2);
    }

    #[test]
    fn progress_reports_rising_numbers_of_operations() {
        let lines: String = (0..10_000)
            .map(|id| format!("alloc,{id},8,0,p,l\n"))
            .collect();
        let mut seen = Vec::new();
        let options = ReplayOptions {
            progress: Some(&mut |done| seen.push(done)),
            ..ReplayOptions::default()
        };
        replay(&allocator(64 * MIB), &trace(&lines), options).unwrap();
        assert_eq!(seen, [0, 4096, 8192]);
    }

    #[test]
    fn the_smallest_device_completes_and_one_a_step_smaller_does_not() {
        let trace = trace("alloc,1,5000000,0,p,a\nalloc,2,100,0,p,b\nalloc,3,3000000,0,p,c\n");
        let made = |bytes| Ok(allocator(bytes));
        let smallest = smallest(&trace, verified(), made).unwrap();
        assert_eq!(smallest.bytes % SMALLEST_STEP_BYTES, 0);
        assert!(smallest.over_live() >= 1.0);
        assert_eq!(smallest.report.out_of_memory, None);
        assert_eq!(smallest.report.operations, 3);
        let less = allocator(smallest.bytes - SMALLEST_STEP_BYTES);
        let report = replay(&less, &trace, ReplayOptions::default()).unwrap();
        assert!(report.out_of_memory.is_some());
    }

    /// A block of `bytes` bytes, and a trace whose operation 0 allocates it.
    fn stamped(bytes: u64) -> (CachingAllocator<SimDevice>, Block<SimDevice>, Trace) {
        let allocator = allocator(64 * MIB);
        let block = allocator.alloc(bytes, StreamId::DEFAULT).unwrap();
        (allocator, block, trace(&format!("alloc,1,{bytes},0,p,l\n")))
    }

    #[test]
    fn a_changed_byte_is_found_in_every_place_that_is_promised() {
        let bytes = 5 * MIB + 3;
        let by_words = [0, 7, 2 * MIB, 4 * MIB + 7, bytes - 8, bytes - 1];
        let whole = [
            0,
            1,
            9,
            12345,
            MIB - 1,
            MIB,
            3 * MIB + 77,
            bytes - 2,
            bytes - 1,
        ];
        for (scale, places) in [(1, &by_words[..]), (2, &whole[..])] {
            for &at in places {
                let (allocator, block, trace) = stamped(bytes);
                let device = allocator.device();
                let mut verifier = Verifier::new(device, 1, NonZeroU64::new(scale).unwrap());
                let operation = &trace.operations()[0];
                assert!(verifier.allocated(&block, bytes, operation, 0).is_ok());
                device.synchronize().unwrap();
                let place = block.ptr().offset(at);
                let byte = device.read_bytes(place, 1).unwrap()[0];
                device.write_bytes(place, &[byte ^ 0x40]).unwrap();
                let Err(unsound) = verifier.freed(&block, bytes, operation) else {
                    panic!("byte {at} changed at scale {scale}, and nobody saw it");
                };
                let text = unsound.at(&trace, 0).to_string();
                assert!(text.contains("stream 0, label \"l\""), "{text}");
                if scale == 2 {
                    assert!(text.contains(&format!("byte {at} of the block")), "{text}");
                }
            }
        }
    }

    #[test]
    fn overlapping_blocks_are_found() {
        let (allocator, block, trace) = stamped(1000);
        let other = allocator.alloc(1000, StreamId::DEFAULT).unwrap();
        let mut verifier = Verifier::new(allocator.device(), 3, NonZeroU64::MIN);
        let operation = &trace.operations()[0];
        assert!(verifier.allocated(&block, 1000, operation, 0).is_ok());
        assert!(verifier.allocated(&other, 1000, operation, 1).is_ok());
        let Err(Unsound::Found(reason)) = verifier.allocated(&block, 1000, operation, 2) else {
            panic!("a block handed out twice, and nobody saw it");
        };
        assert!(
            reason.contains("overlaps") && reason.contains("operation 0 holds"),
            "{reason}"
        );
        // Also one that only begins inside another.
        verifier.intervals.clear();
        verifier
            .intervals
            .insert(block.ptr().0 - 4096, (block.ptr().0 + 1, 9));
        assert!(verifier.allocated(&block, 1000, operation, 2).is_err());
    }

    #[test]
    fn a_block_shorter_than_asked_for_is_found() {
        let (allocator, block, trace) = stamped(1000);
        let mut verifier = Verifier::new(allocator.device(), 1, NonZeroU64::MIN);
        let operation = &trace.operations()[0];
        let result = verifier.allocated(&block, block.allocated_bytes() + 1, operation, 0);
        assert!(matches!(result, Err(Unsound::Found(_))));
    }

    #[test]
    fn what_the_trace_leaves_is_checked_at_the_end() {
        let (allocator, block, trace) = stamped(1000);
        let device = allocator.device();
        let mut verifier = Verifier::new(device, 1, NonZeroU64::MIN);
        assert!(
            verifier
                .allocated(&block, 1000, &trace.operations()[0], 0)
                .is_ok()
        );
        device.synchronize().unwrap();
        let place = block.ptr();
        let blocks = [Some(block)];
        assert!(verifier.finish(&trace, &blocks).is_ok());
        device.write_bytes(place, &[0; 8]).unwrap();
        assert!(verifier.finish(&trace, &blocks).is_err());
    }

    #[test]
    fn checked_words_cover_both_ends_and_do_not_overlap() {
        for bytes in (1..40)
            .chain(2 * MIB - 20..2 * MIB + 20)
            .chain([6 * MIB, 6 * MIB + 5])
        {
            let words: Vec<_> = words(bytes).collect();
            assert_eq!(words[0], (0, bytes.min(8) as usize), "{bytes}");
            let (last, length) = words[words.len() - 1];
            assert_eq!(last + length as u64, bytes);
            for pair in words.windows(2) {
                assert!(
                    pair[0].0 + pair[0].1 as u64 <= pair[1].0,
                    "{bytes}: {pair:?}"
                );
                assert!(
                    pair[1].0 - pair[0].0 <= STAMP_STEP_BYTES,
                    "{bytes}: {pair:?}"
                );
            }
        }
    }

    #[test]
    fn no_two_allocations_write_the_same() {
        let mut seen = std::collections::HashSet::new();
        for index in 0..100_000 {
            assert!(seen.insert(pattern(index)), "{index}");
            assert_ne!(word(index, 0), word(index, STAMP_STEP_BYTES));
        }
    }
}
