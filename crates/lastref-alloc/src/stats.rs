//! Statistics in PyTorch's families and words.
//!
//! Each [`Stat`] has four faces: *current*, *peak* since the last reset, *allocated* (all that was
//! ever added) and *freed* (all that was ever taken away); `current = allocated - freed` between
//! resets. Each family is kept for both pools and for all together ([`StatByPool`]).

use std::collections::BTreeMap;
use std::fmt;

use crate::ladder::{Rung, RungTotals};
use crate::thread_cache::Flows;

/// The two pools: blocks up to 128 KiB and all others. They never share a segment or a page, so
/// that long-lived small blocks do not pin memory that large ones need.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PoolKind {
    /// Blocks of at most [`PoolKind::MAX_SMALL_BYTES`].
    Small = 0,
    /// Larger blocks.
    Large = 1,
}

impl PoolKind {
    /// The largest small block, in bytes. PyTorch's limit is 1 MiB; on real allocation traces
    /// 128 KiB wasted less.
    pub const MAX_SMALL_BYTES: u64 = 128 << 10;

    /// The pool for blocks of `bytes` bytes.
    #[must_use]
    pub const fn for_size(bytes: u64) -> Self {
        if bytes <= Self::MAX_SMALL_BYTES {
            Self::Small
        } else {
            Self::Large
        }
    }
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Small => "small",
            Self::Large => "large",
        })
    }
}

/// One number with its history. Bytes or counts, as its family says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stat {
    /// The value now.
    pub current: u64,
    /// The highest value since the start or the last reset of peaks.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    /// Books the change to a value that is counted elsewhere.
    pub(crate) fn set(&mut self, value: u64) {
        if value > self.current {
            self.increase(value - self.current);
        } else {
            self.decrease(self.current - value);
        }
    }

    fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    fn decrease(&mut self, by: u64) {
        debug_assert!(by <= self.current, "a statistic fell below zero");
        self.current -= by;
        self.freed += by;
    }
}

/// A statistic for all memory and for each pool.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StatByPool {
    /// Both pools together.
    pub all: Stat,
    /// The small pool.
    pub small_pool: Stat,
    /// The large pool.
    pub large_pool: Stat,
}

/// A number that is being counted: what a [`Stat`] is made of, with less to do for each change.
#[derive(Clone, Copy, Default, Debug)]
struct Count {
    /// Below zero while a thread's cache has counted what was added, and its removal was counted
    /// here.
    current: i64,
    peak: i64,
    /// `allocated - freed` differs from `current` by what there was at the last reset.
    allocated: u64,
    at_reset: i64,
}

/// Changes of one number since some moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Flow {
    /// What was added and not removed: below zero if more was removed.
    current: i64,
    /// The most by which it was above what it was at that moment.
    peak: i64,
    added: u64,
}

impl Flow {
    #[inline]
    pub(crate) fn add(&mut self, by: u64) {
        self.added += by;
        self.current += signed(by);
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(crate) const fn remove(&mut self, by: u64) {
        self.current -= signed(by);
    }

    /// The sum of all increases.
    pub(crate) const fn added(&self) -> u64 {
        self.added
    }
}

/// A [`StatByPool`] that is being counted.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Tally {
    pools: [Count; 2],
    peak: i64,
}

/// A number of bytes or blocks with a sign: no device has more of either.
const fn signed(value: u64) -> i64 {
    value.cast_signed()
}

/// A count that is not below zero, as is any when all caches were visited.
fn unsigned(value: i64) -> u64 {
    debug_assert!(value >= 0, "a statistic fell below zero");
    value.cast_unsigned()
}

impl Tally {
    #[inline]
    pub(crate) fn increase(&mut self, pool: PoolKind, by: u64) {
        let count = &mut self.pools[pool as usize];
        count.current += signed(by);
        count.allocated += by;
        count.peak = count.peak.max(count.current);
        self.peak = self.peak.max(self.balance());
    }

    #[inline]
    pub(crate) const fn decrease(&mut self, pool: PoolKind, by: u64) {
        self.pools[pool as usize].current -= signed(by);
    }

    /// Books the change to a value that is counted elsewhere.
    #[inline]
    pub(crate) fn set(&mut self, pool: PoolKind, value: u64) {
        let count = &mut self.pools[pool as usize];
        let change = signed(value) - count.current;
        if change > 0 {
            self.increase(pool, change.unsigned_abs());
        } else {
            count.current += change;
        }
    }

    /// Adds what was counted elsewhere, after all that was counted here.
    fn fold(&mut self, pool: PoolKind, flow: Flow) {
        self.peak = self.peak.max(self.balance() + flow.peak);
        let count = &mut self.pools[pool as usize];
        count.peak = count.peak.max(count.current + flow.peak);
        count.current += flow.current;
        count.allocated += flow.added;
    }

    /// The value as far as it is known: below zero where a cache that was not visited has the rest.
    pub(crate) const fn balance(&self) -> i64 {
        self.pools[0].current + self.pools[1].current
    }

    /// The value now. To be asked when all caches were visited.
    pub(crate) fn current(&self) -> u64 {
        unsigned(self.balance())
    }

    /// The value of one pool now.
    pub(crate) fn current_in(&self, pool: PoolKind) -> u64 {
        unsigned(self.pools[pool as usize].current)
    }

    /// The most there was since the last reset.
    pub(crate) fn peak(&self) -> u64 {
        unsigned(self.peak)
    }

    /// The sum of all increases.
    pub(crate) fn allocated(&self) -> u64 {
        self.read().all.allocated
    }

    /// The sum of all decreases.
    pub(crate) fn freed(&self) -> u64 {
        self.read().all.freed
    }

    fn reset_peaks(&mut self) {
        for count in &mut self.pools {
            count.peak = count.current;
        }
        self.peak = self.balance();
    }

    fn reset_accumulated(&mut self) {
        for count in &mut self.pools {
            (count.allocated, count.at_reset) = (0, count.current);
        }
    }

    fn read(&self) -> StatByPool {
        let [small_pool, large_pool] = self.pools.map(|count| Stat {
            current: unsigned(count.current),
            peak: unsigned(count.peak),
            allocated: count.allocated,
            freed: unsigned(count.at_reset + signed(count.allocated) - count.current),
        });
        let all = Stat {
            current: small_pool.current + large_pool.current,
            peak: unsigned(self.peak),
            allocated: small_pool.allocated + large_pool.allocated,
            freed: small_pool.freed + large_pool.freed,
        };
        StatByPool {
            all,
            small_pool,
            large_pool,
        }
    }
}

/// What is pending: given back by callers, and still used by a stream. What is *active* is that and
/// what is allocated. So it grows only with what is allocated, and has the same peaks save while
/// something is pending.
#[derive(Clone, Copy, Default, Debug)]
struct Pending {
    pools: [i64; 2],
    at_reset: [i64; 2],
    /// What was active at most while something was pending, by pool and in all.
    peaks: [i64; 2],
    peak: i64,
}

impl Pending {
    const fn balance(&self) -> i64 {
        self.pools[0] + self.pools[1]
    }

    /// Notes that so much more than now is allocated in a pool, or was for a moment.
    fn note_active(&mut self, allocated: &Tally, pool: PoolKind, more: i64) {
        self.peak = self.peak.max(allocated.balance() + self.balance() + more);
        let active = allocated.pools[pool as usize].current + self.pools[pool as usize];
        let peak = &mut self.peaks[pool as usize];
        *peak = (*peak).max(active + more);
    }

    fn reset_peaks(&mut self, allocated: &Tally) {
        self.peak = allocated.balance() + self.balance();
        for (at, peak) in self.peaks.iter_mut().enumerate() {
            *peak = allocated.pools[at].current + self.pools[at];
        }
    }

    /// What is active.
    fn tally(&self, allocated: &Tally) -> Tally {
        let mut active = *allocated;
        active.peak = active.peak.max(self.peak);
        for (at, count) in active.pools.iter_mut().enumerate() {
            count.current += self.pools[at];
            count.at_reset += self.at_reset[at];
            count.peak = count.peak.max(self.peaks[at]);
        }
        active
    }
}

/// The families of statistics while they are counted.
#[derive(Clone, Default, Debug)]
pub(crate) struct Books {
    pub(crate) allocation: Tally,
    pub(crate) allocated_bytes: Tally,
    pub(crate) requested_bytes: Tally,
    pending: Pending,
    pending_bytes: Pending,
    pub(crate) inactive_split: Tally,
    pub(crate) inactive_split_bytes: Tally,
    pub(crate) segment: Tally,
    pub(crate) reserved_bytes: Tally,
}

impl Books {
    /// Books a block that a caller holds from now on.
    #[inline]
    pub(crate) fn allocate(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.allocation.increase(pool, 1);
        self.allocated_bytes.increase(pool, bytes);
        self.requested_bytes.increase(pool, requested);
        if self.pending.balance() != 0 {
            self.note_active(pool, 0, 0);
        }
    }

    #[cold]
    fn note_active(&mut self, pool: PoolKind, more: i64, more_bytes: i64) {
        self.pending.note_active(&self.allocation, pool, more);
        let allocated = &self.allocated_bytes;
        self.pending_bytes.note_active(allocated, pool, more_bytes);
    }

    /// Books a block that a caller gave back.
    #[inline]
    pub(crate) const fn free(&mut self, pool: PoolKind, bytes: u64, requested: u64) {
        self.allocation.decrease(pool, 1);
        self.allocated_bytes.decrease(pool, bytes);
        self.requested_bytes.decrease(pool, requested);
    }

    /// Books a block that was given back as one that a stream still uses.
    pub(crate) const fn begin_pending(&mut self, pool: PoolKind, bytes: u64) {
        self.pending.pools[pool as usize] += 1;
        self.pending_bytes.pools[pool as usize] += signed(bytes);
    }

    /// Books that streams are done with such a block.
    pub(crate) const fn end_pending(&mut self, pool: PoolKind, bytes: u64) {
        self.pending.pools[pool as usize] -= 1;
        self.pending_bytes.pools[pool as usize] -= signed(bytes);
    }

    pub(crate) fn reset_peaks(&mut self) {
        for tally in self.tallies_mut() {
            tally.reset_peaks();
        }
        self.pending.reset_peaks(&self.allocation);
        self.pending_bytes.reset_peaks(&self.allocated_bytes);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        for tally in self.tallies_mut() {
            tally.reset_accumulated();
        }
        for pending in [&mut self.pending, &mut self.pending_bytes] {
            pending.at_reset = pending.pools;
        }
    }

    fn tallies_mut(&mut self) -> [&mut Tally; 7] {
        [
            &mut self.allocation,
            &mut self.allocated_bytes,
            &mut self.requested_bytes,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
            &mut self.segment,
            &mut self.reserved_bytes,
        ]
    }

    /// Blocks held by callers or still used by a stream.
    pub(crate) fn active(&self) -> Tally {
        self.pending.tally(&self.allocation)
    }

    /// Bytes of such blocks.
    pub(crate) fn active_bytes(&self) -> Tally {
        self.pending_bytes.tally(&self.allocated_bytes)
    }

    /// Bytes of blocks given back that a stream may still use. The caches of threads have no part in it.
    pub(crate) fn pending_bytes(&self) -> u64 {
        unsigned(self.pending_bytes.balance())
    }

    /// Adds what a thread's cache counted.
    pub(crate) fn fold(&mut self, flows: &Flows) {
        let pool = PoolKind::Small;
        if self.pending.balance() != 0 {
            self.note_active(pool, flows.blocks.peak, flows.bytes.peak);
        }
        self.allocation.fold(pool, flows.blocks);
        self.allocated_bytes.fold(pool, flows.bytes);
        self.requested_bytes.fold(pool, flows.requested);
    }

    /// `rest` with the families as they are now.
    pub(crate) fn read(&self, rest: &MemoryStats) -> MemoryStats {
        MemoryStats {
            allocation: self.allocation.read(),
            segment: self.segment.read(),
            active: self.active().read(),
            inactive_split: self.inactive_split.read(),
            allocated_bytes: self.allocated_bytes.read(),
            reserved_bytes: self.reserved_bytes.read(),
            active_bytes: self.active_bytes().read(),
            inactive_split_bytes: self.inactive_split_bytes.read(),
            requested_bytes: self.requested_bytes.read(),
            ..rest.clone()
        }
    }
}

/// All statistics of one device's allocator.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Number of blocks held by callers.
    pub allocation: StatByPool,
    /// Number of segments; a contiguous mapped stretch of virtual memory counts as one.
    pub segment: StatByPool,
    /// Number of blocks held by callers or still used by a stream.
    pub active: StatByPool,
    /// Number of free blocks of which some part cannot go back to the device.
    pub inactive_split: StatByPool,
    /// Bytes in blocks held by callers, rounding included.
    pub allocated_bytes: StatByPool,
    /// Bytes obtained from the device.
    pub reserved_bytes: StatByPool,
    /// Bytes in blocks held by callers or still used by a stream.
    pub active_bytes: StatByPool,
    /// Bytes of free blocks that cannot go back to the device, since a block shares their page or
    /// segment.
    pub inactive_split_bytes: StatByPool,
    /// Bytes that callers asked for, in the blocks that they hold.
    pub requested_bytes: StatByPool,
    /// How often an allocation had to give cached memory back before it was tried again.
    pub num_alloc_retries: u64,
    /// How often an allocation failed for want of memory.
    pub num_ooms: u64,
    /// How often the allocator waited for streams.
    pub num_sync_all_streams: u64,
    /// Device calls that obtained memory: segments and pages.
    pub num_device_alloc: u64,
    /// Device calls that gave memory back.
    pub num_device_free: u64,
    /// Idle pages of virtual memory that were moved to where memory was needed, instead of creating
    /// new ones.
    pub num_pages_moved: u64,
    /// How often an allocation waited for streams before it moved pages, to keep within the slack.
    pub num_waits_before_growing: u64,
    /// Waits for another stream that were submitted to a stream, on the device, so that it could be
    /// given free memory.
    pub num_stream_waits: u64,
    /// How often memory was given back because it had not been used for long.
    pub num_trims: u64,
    /// Bytes given back because they had not been used for long.
    pub num_trimmed_bytes: u64,
    /// Device calls that failed where the caller could not be told: in a free, a poll, a clean-up.
    pub num_device_errors: u64,
    /// Allocations that a thread's own cache served, without the heap and its lock.
    pub num_thread_cache_hits: u64,
    /// What calls of `empty_cache` gave back, and how much of it was obtained again.
    pub empty_cache: EmptyCacheStats,
    /// What each rung of the out-of-memory [ladder](crate::ladder) was asked and gave. The first four are
    /// also steps before the heap grows, and are counted there too.
    pub rungs: BTreeMap<Rung, RungTotals>,
}

/// What calls of [`empty_cache`](crate::CachingAllocator::empty_cache) did, and undid.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct EmptyCacheStats {
    /// Calls that gave something back.
    pub num_calls: u64,
    /// Bytes that they gave back.
    pub bytes_released: u64,
    /// Bytes that were obtained from the device again after such a call, at most what the call had
    /// given back.
    pub bytes_refilled: u64,
}

/// Fewer calls of `empty_cache` than this are no habit.
const MIN_CALLS_FOR_ADVICE: u64 = 3;

impl MemoryStats {
    /// The families with PyTorch's names for them.
    #[must_use]
    pub fn families(&self) -> [(&'static str, &StatByPool); 9] {
        [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ]
    }

    /// Every number under the key that `torch.cuda.memory_stats()` gives it, such as
    /// `allocated_bytes.all.peak`, and what torch does not have: `num_stream_waits`,
    /// `rung.move_pages.bytes_freed` and so on.
    ///
    /// # Examples
    ///
    /// ```
    /// let stats = lastref_alloc::MemoryStats::default();
    /// let keys: Vec<String> = stats.torch_keys().into_iter().map(|(key, _)| key).collect();
    /// assert!(keys.contains(&"reserved_bytes.small_pool.current".to_string()));
    /// ```
    #[must_use]
    pub fn torch_keys(&self) -> Vec<(String, u64)> {
        let mut keys = Vec::new();
        for (family, stat) in self.families() {
            let pools = [
                ("all", stat.all),
                ("small_pool", stat.small_pool),
                ("large_pool", stat.large_pool),
            ];
            for (pool, stat) in pools {
                let faces = [
                    ("current", stat.current),
                    ("peak", stat.peak),
                    ("allocated", stat.allocated),
                    ("freed", stat.freed),
                ];
                keys.extend(faces.map(|(face, value)| (format!("{family}.{pool}.{face}"), value)));
            }
        }
        let scalars = [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_pages_moved", self.num_pages_moved),
            ("num_waits_before_growing", self.num_waits_before_growing),
            ("num_stream_waits", self.num_stream_waits),
            ("num_trims", self.num_trims),
            ("num_trimmed_bytes", self.num_trimmed_bytes),
            ("num_thread_cache_hits", self.num_thread_cache_hits),
            ("num_device_errors", self.num_device_errors),
            ("empty_cache_calls", self.empty_cache.num_calls),
            (
                "empty_cache_bytes_released",
                self.empty_cache.bytes_released,
            ),
            (
                "empty_cache_bytes_refilled",
                self.empty_cache.bytes_refilled,
            ),
        ];
        keys.extend(scalars.map(|(key, value)| (key.to_owned(), value)));
        for (rung, totals) in self.all_rungs() {
            let faces = [
                ("num_tried", totals.num_tried),
                ("num_failed", totals.num_failed),
                ("bytes_freed", totals.bytes_freed),
                ("microseconds", totals.microseconds),
            ];
            let rung = rung.key();
            keys.extend(faces.map(|(face, value)| (format!("rung.{rung}.{face}"), value)));
        }
        keys
    }

    /// What each rung did, also those that never ran; of reclaimers those that ran.
    #[must_use]
    pub fn all_rungs(&self) -> BTreeMap<Rung, RungTotals> {
        let mut all = BTreeMap::from(Rung::ALL.map(|rung| (rung, RungTotals::default())));
        all.extend(self.rungs.clone());
        all
    }

    /// What the numbers suggest to change in the program; empty if nothing. Each is one line, such
    /// as: "`empty_cache` released what the next step re-allocated".
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::{CachingAllocator, StreamId, sim::{SimDevice, SimOptions}};
    ///
    /// let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(8 << 30))?);
    /// for _step in 0..3 {
    ///     drop(allocator.alloc(500 << 20, StreamId::DEFAULT)?);
    ///     allocator.empty_cache()?;
    /// }
    /// let advice = allocator.stats().advice();
    /// assert!(advice[0].starts_with("empty_cache released what the next step re-allocated"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn advice(&self) -> Vec<String> {
        let EmptyCacheStats {
            num_calls,
            bytes_released,
            bytes_refilled,
        } = self.empty_cache;
        // What the latest call released may still be asked for: it is not held against the rest.
        let before = bytes_released - bytes_released / num_calls.max(1);
        let mut advice = Vec::new();
        if num_calls >= MIN_CALLS_FOR_ADVICE && bytes_refilled >= before / 2 {
            advice.push(format!(
                "empty_cache released what the next step re-allocated, {num_calls} times, {} MiB: \
                 leave the calls out, cached memory goes back by itself before an out-of-memory \
                 error",
                bytes_released >> 20
            ));
        }
        advice
    }

    /// Sets what is counted beside the families to zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
        self.num_pages_moved = 0;
        self.num_waits_before_growing = 0;
        self.num_stream_waits = 0;
        self.num_trims = 0;
        self.num_trimmed_bytes = 0;
        self.num_thread_cache_hits = 0;
        self.num_device_errors = 0;
        self.empty_cache = EmptyCacheStats::default();
        self.rungs.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_reads_back_as_what_was_done() {
        let mut tally = Tally::default();
        tally.set(PoolKind::Small, 10);
        tally.set(PoolKind::Large, 5);
        tally.set(PoolKind::Small, 4);
        let stat = |current, peak, allocated, freed| Stat {
            current,
            peak,
            allocated,
            freed,
        };
        assert_eq!(tally.read().all, stat(9, 15, 15, 6));
        assert_eq!(tally.read().small_pool, stat(4, 10, 10, 6));
        assert_eq!(tally.read().large_pool, stat(5, 5, 5, 0));
        tally.reset_peaks();
        assert_eq!(tally.read().all, stat(9, 9, 15, 6));
        tally.reset_accumulated();
        assert_eq!(tally.read().all, stat(9, 9, 0, 0));
        tally.decrease(PoolKind::Large, 3);
        tally.increase(PoolKind::Small, 1);
        assert_eq!(tally.read().all, stat(7, 9, 1, 3));
        assert_eq!(tally.read().large_pool, stat(2, 5, 0, 3));
        assert_eq!(tally.freed(), 3);
    }

    #[test]
    fn what_is_counted_elsewhere_ends_in_the_same_numbers() {
        let (mut straight, mut folded) = (Tally::default(), Tally::default());
        let mut flow = Flow::default();
        let pool = PoolKind::Small;
        for tally in [&mut straight, &mut folded] {
            tally.increase(PoolKind::Large, 100);
            tally.increase(pool, 50);
        }
        for (adds, by) in [(false, 30), (true, 10), (true, 45), (false, 75), (true, 5)] {
            if adds {
                straight.increase(pool, by);
                flow.add(by);
            } else {
                straight.decrease(pool, by);
                flow.remove(by);
            }
        }
        folded.fold(pool, flow);
        assert_eq!(straight.read(), folded.read());
        assert_eq!(folded.read().all.peak, 175);
    }

    #[test]
    fn a_removal_may_be_counted_before_what_it_removes() {
        let mut tally = Tally::default();
        let mut flow = Flow::default();
        flow.add(10);
        flow.add(5);
        tally.decrease(PoolKind::Small, 10);
        tally.increase(PoolKind::Large, 3);
        tally.fold(PoolKind::Small, flow);
        assert_eq!(tally.read().all.current, 8);
        assert_eq!(
            (tally.read().all.allocated, tally.read().all.freed),
            (18, 10)
        );
    }

    #[test]
    fn what_is_active_is_what_is_allocated_or_pending() {
        let mut books = Books::default();
        let pool = PoolKind::Large;
        books.allocate(pool, 1000, 900);
        books.free(pool, 1000, 900);
        books.begin_pending(pool, 1000);
        books.allocate(pool, 500, 500);
        let stat = |current, peak, allocated, freed| Stat {
            current,
            peak,
            allocated,
            freed,
        };
        assert_eq!(books.active_bytes().read().all, stat(1500, 1500, 1500, 0));
        assert_eq!(books.active().read().large_pool, stat(2, 2, 2, 0));
        assert_eq!(
            books.allocated_bytes.read().all,
            stat(500, 1000, 1500, 1000)
        );
        let mut flow = Flow::default();
        flow.add(10);
        flow.remove(10);
        let flows = Flows {
            blocks: flow,
            bytes: flow,
            requested: flow,
        };
        books.fold(&flows);
        assert_eq!(books.active_bytes().read().all.peak, 1510);
        books.end_pending(pool, 1000);
        assert_eq!(books.active_bytes().read().all, stat(500, 1510, 1510, 1010));
        books.begin_pending(pool, 7);
        books.reset_peaks();
        books.reset_accumulated();
        assert_eq!(books.active_bytes().read().all, stat(507, 507, 0, 0));
        books.end_pending(pool, 7);
        books.free(pool, 500, 500);
        assert_eq!(books.active_bytes().read().all, stat(0, 507, 0, 507));
    }

    #[test]
    fn every_family_has_all_its_keys() {
        let keys = MemoryStats::default().torch_keys();
        assert_eq!(keys.len(), 9 * 3 * 4 + 15 + 6 * 4);
    }
}
