//! The allocator itself: blocks, pools, and what is asked of the device.

use std::collections::{BTreeMap, HashMap};

use super::settings::{MIN_LARGE, Settings, part};

const MIB: u64 = 1 << 20;
/// Blocks are whole multiples of this, and no smaller.
const UNIT: u64 = 512;
/// The largest request of the small pool.
const SMALL: u64 = MIB;
/// What the small pool asks for, and what the driver rounds up to.
const SMALL_SEGMENT: u64 = 2 * MIB;
/// The least that is split off in the large pool is more than this.
const SMALLEST_LARGE_REMAINDER: u64 = MIB;
/// No request is larger: PyTorch refuses them before it looks.
const LARGEST_REQUEST: u64 = 1 << 60;
/// The largest device, so that addresses fit in the keys of [`key`].
const MOST_CAPACITY: u64 = 1 << 48;
/// No block.
const NONE: u32 = u32::MAX;

/// A block that was given out, to be given back by [`NativeAllocator::free`].
#[derive(PartialEq, Eq, Hash, Debug)]
pub struct NativeBlock {
    /// Its place among the blocks, or [`NONE`].
    index: u32,
    /// The number of the allocation: another block may have the place by now.
    ticket: u64,
}

/// An allocation failed after all that PyTorch tries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exhausted {
    /// Bytes that the block would have had.
    pub rounded: u64,
    /// Bytes that were given back to the device in vain.
    pub released: u64,
    /// Whether not even an empty device would do.
    pub hopeless: bool,
}

/// Counters, with PyTorch's meanings.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct NativeStats {
    /// Bytes taken from the device, which PyTorch counts as `reserved_bytes`.
    pub reserved_bytes: u64,
    /// The most of them at one moment.
    pub peak_reserved_bytes: u64,
    /// Bytes in blocks that callers hold.
    pub allocated_bytes: u64,
    /// Bytes in blocks that callers gave back and another stream may still use.
    pub pending_bytes: u64,
    /// The largest free block.
    pub largest_free_bytes: u64,
    /// `num_device_alloc`: segments, and stretches of pages mapped at once.
    pub num_device_alloc: u64,
    /// `num_device_free`.
    pub num_device_free: u64,
    /// `num_alloc_retries`: allocations that gave all cached memory back and tried again.
    pub num_alloc_retries: u64,
    /// `num_ooms`.
    pub num_ooms: u64,
    /// Ranges of addresses reserved: one for each expandable segment.
    pub num_ranges: u64,
    /// Bytes of pages created, in all.
    pub page_bytes_created: u64,
    /// Bytes of pages given back, in all.
    pub page_bytes_released: u64,
    /// Bytes of segments asked for, in all, without pages.
    pub segment_bytes_allocated: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Held by a caller.
    Live,
    /// Given back, and an event is pending.
    Pending,
    Free,
    /// Address space of an expandable segment without memory.
    Unmapped,
}

/// A stretch of a segment. With its neighbours it covers the segment.
#[derive(Clone, Debug)]
struct Block {
    /// The number of the segment: they are counted in the order in which they were made.
    segment: u32,
    /// The pool it belongs to.
    pool: u32,
    prev: u32,
    next: u32,
    /// Its place in the segment.
    offset: u64,
    size: u64,
    /// How often its pool had been searched when it became free.
    searches_before: u64,
    /// The number of the allocation that it was last given out for.
    ticket: u64,
    state: State,
}

impl Block {
    /// By size, then segment, then address.
    fn key(&self) -> u128 {
        key(self.size, self.segment, self.offset)
    }

    /// By address alone. Segments of a stream are taken to lie in the order in which they were made.
    const fn place(&self) -> (u32, u64) {
        (self.segment, self.offset)
    }
}

/// 56 bits of size in units, 32 of segment, 40 of offset in units.
fn key(size: u64, segment: u32, offset: u64) -> u128 {
    u128::from(size / UNIT) << 72 | u128::from(segment) << 40 | u128::from(offset / UNIT)
}

/// The least key of this size.
fn from_size(size: u64) -> u128 {
    key(size, 0, 0)
}

/// Free memory of one stream, for small or for large requests.
#[derive(Clone, Debug)]
struct Pool {
    stream: u64,
    small: bool,
    free: BTreeMap<u128, u32>,
    unmapped: BTreeMap<(u32, u64), u32>,
}

/// PyTorch's native caching allocator on a device of a given capacity, as numbers. See the
/// [module](super) for what it does.
///
/// # Examples
///
/// ```
/// use lastref_alloc::pytorch::{NativeAllocator, Settings};
///
/// let mut allocator = NativeAllocator::new(Settings::default(), 8 << 30);
/// let block = allocator.alloc(3 << 20, 0).unwrap();
/// assert_eq!(allocator.stats().reserved_bytes, 20 << 20);
/// allocator.free(block);
/// allocator.empty_cache();
/// assert_eq!(allocator.stats().reserved_bytes, 0);
/// ```
#[derive(Clone, Debug)]
pub struct NativeAllocator {
    settings: Settings,
    capacity: u64,
    /// The most that may be reserved, if a fraction was set.
    limit: Option<u64>,
    /// What the device has given, rounded as it rounds.
    held: u64,
    blocks: Vec<Block>,
    /// Blocks that are no more, to be used again.
    spare: Vec<u32>,
    pools: Vec<Pool>,
    /// By stream, and whether it is for small requests: the position of the pool.
    pool_of: HashMap<(u64, bool), usize>,
    /// Searches of the small pools and of the large ones.
    searches: [u64; 2],
    pending: Vec<u32>,
    segments: u32,
    tickets: u64,
    stats: NativeStats,
}

impl NativeAllocator {
    /// An allocator with these settings on an empty device. None is larger than 256 TiB.
    #[must_use]
    pub fn new(settings: Settings, capacity: u64) -> Self {
        let capacity = capacity.min(MOST_CAPACITY);
        Self {
            limit: settings.limit(capacity),
            settings,
            capacity,
            held: 0,
            blocks: Vec::new(),
            spare: Vec::new(),
            pools: Vec::new(),
            pool_of: HashMap::new(),
            searches: [0; 2],
            pending: Vec::new(),
            segments: 0,
            tickets: 0,
            stats: NativeStats::default(),
        }
    }

    /// The counters. `largest_free_bytes` is looked up at this moment.
    #[must_use]
    pub fn stats(&self) -> NativeStats {
        let largest = |pool: &Pool| pool.free.last_key_value().map(|(_, block)| *block);
        let blocks = self.pools.iter().filter_map(largest);
        NativeStats {
            largest_free_bytes: blocks
                .map(|block| self.blocks[block as usize].size)
                .max()
                .unwrap_or(0),
            ..self.stats
        }
    }

    /// The limit that a memory fraction sets.
    #[must_use]
    pub const fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Allocates `bytes` on a stream, which can have any number. Nothing is taken for 0 bytes.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] where PyTorch raises `OutOfMemoryError`.
    pub fn alloc(&mut self, bytes: u64, stream: u64) -> Result<NativeBlock, Exhausted> {
        if bytes == 0 {
            return Ok(NativeBlock {
                index: NONE,
                ticket: 0,
            });
        }
        let rounded = if bytes > LARGEST_REQUEST {
            u64::MAX
        } else {
            self.settings.round(bytes)
        };
        if rounded > LARGEST_REQUEST {
            self.stats.num_ooms += 1;
            return Err(Exhausted {
                rounded,
                released: 0,
                hopeless: true,
            });
        }
        let pool = self.pool(stream, rounded <= SMALL);
        let found = match self.search(pool, rounded) {
            Some(block) => block,
            None => self.grow(pool, rounded)?,
        };
        Ok(self.take(found, rounded))
    }

    /// Gives a block back: no other stream uses it.
    pub fn free(&mut self, block: NativeBlock) {
        self.free_when_done(&block);
        self.done(block);
    }

    /// Gives back a block that another stream may still use, for which PyTorch records an event.
    /// [`done`](Self::done) says that PyTorch has seen the event complete.
    ///
    /// # Panics
    ///
    /// If it was given back before.
    pub fn free_when_done(&mut self, block: &NativeBlock) {
        if block.index == NONE {
            return;
        }
        let this = &mut self.blocks[block.index as usize];
        let is_live = this.state == State::Live && this.ticket == block.ticket;
        assert!(is_live, "a block is given back once, to where it is from");
        this.state = State::Pending;
        self.stats.allocated_bytes -= this.size;
        self.stats.pending_bytes += this.size;
        self.pending.push(block.index);
    }

    /// The events of a block that was given back have completed.
    pub fn done(&mut self, block: NativeBlock) {
        // Nearly always the last. Not there if all were waited for.
        let is_it = |pending: &u32| {
            *pending == block.index && self.blocks[*pending as usize].ticket == block.ticket
        };
        if let Some(at) = self.pending.iter().rposition(is_it) {
            self.pending.swap_remove(at);
            self.free_block(block.index);
        }
    }

    /// Gives back to the device what is wholly free, as `torch.cuda.empty_cache()`. Returns how many
    /// bytes that were.
    pub fn empty_cache(&mut self) -> u64 {
        let before = self.stats.reserved_bytes;
        for block in std::mem::take(&mut self.pending) {
            self.free_block(block);
        }
        for pool in 0..self.pools.len() {
            self.release_pool(pool);
        }
        before - self.stats.reserved_bytes
    }

    fn pool(&mut self, stream: u64, small: bool) -> usize {
        // Mostly the first two, of the only stream.
        let is_it = |pool: &Pool| pool.stream == stream && pool.small == small;
        if let Some(pool) = self.pools.iter().take(2).position(is_it) {
            return pool;
        }
        if let Some(pool) = self.pool_of.get(&(stream, small)) {
            return *pool;
        }
        self.pool_of.insert((stream, small), self.pools.len());
        self.pools.push(Pool {
            stream,
            small,
            free: BTreeMap::new(),
            unmapped: BTreeMap::new(),
        });
        self.pools.len() - 1
    }

    // ---- finding a block -------------------------------------------------------------------------

    /// Takes the free block that serves a request out of its pool.
    fn search(&mut self, pool: usize, size: u64) -> Option<u32> {
        let Pool { small, free, .. } = &self.pools[pool];
        if self.settings.collects() {
            self.searches[usize::from(!*small)] += 1;
        }
        let mut candidates = free.range(from_size(size)..);
        let (mut key, mut block) = candidates.next()?;
        if self.settings.expandable {
            let mut could_be = self.could_be(*block);
            for (next_key, next) in candidates {
                let next_could_be = self.could_be(*next);
                if next_could_be >= could_be {
                    break;
                }
                (key, block, could_be) = (next_key, next, next_could_be);
            }
        }
        let max_split = self.settings.max_split;
        let found = self.blocks[*block as usize].size;
        let too_large = if size < max_split {
            found >= max_split
        } else {
            found >= size.saturating_add(self.settings.non_split_rounding())
        };
        if too_large {
            return None;
        }
        let (key, block) = (*key, *block);
        self.pools[pool].free.remove(&key);
        Some(block)
    }

    /// The size a free block has, or could grow to.
    fn could_be(&self, block: u32) -> u64 {
        let Block { size, next, .. } = self.blocks[block as usize];
        match self.blocks.get(next as usize) {
            Some(next) if next.state == State::Unmapped => size + next.size,
            _ => size,
        }
    }

    /// Gives out a block that is in no pool, and puts back what is split off.
    fn take(&mut self, block: u32, size: u64) -> NativeBlock {
        let this = &self.blocks[block as usize];
        let pool = &self.pools[this.pool as usize];
        let remainder = this.size - size;
        let splits = if pool.small || self.settings.expandable {
            remainder >= UNIT
        } else {
            size < self.settings.max_split && remainder > SMALLEST_LARGE_REMAINDER
        };
        if splits {
            let rest = self.cut(block, size);
            self.blocks[rest as usize].state = State::Free;
            self.put(rest);
        }
        let this = &mut self.blocks[block as usize];
        self.tickets += 1;
        this.state = State::Live;
        this.ticket = self.tickets;
        self.stats.allocated_bytes += this.size;
        NativeBlock {
            index: block,
            ticket: self.tickets,
        }
    }

    /// Shortens a block to `size`. Returns the new block behind it, in the same state and in no pool.
    fn cut(&mut self, block: u32, size: u64) -> u32 {
        let this = &self.blocks[block as usize];
        let rest = Block {
            prev: block,
            offset: this.offset + size,
            size: this.size - size,
            ..this.clone()
        };
        let after = rest.next;
        let rest = self.add(rest);
        let this = &mut self.blocks[block as usize];
        this.size = size;
        this.next = rest;
        if after != NONE {
            self.blocks[after as usize].prev = rest;
        }
        rest
    }

    fn add(&mut self, block: Block) -> u32 {
        if let Some(index) = self.spare.pop() {
            self.blocks[index as usize] = block;
            return index;
        }
        let index = u32::try_from(self.blocks.len()).unwrap_or(NONE);
        assert!(index < NONE, "fewer than 2^32 blocks");
        self.blocks.push(block);
        index
    }

    /// Puts a free or unmapped block into its pool.
    fn put(&mut self, block: u32) {
        let this = &mut self.blocks[block as usize];
        let pool = &mut self.pools[this.pool as usize];
        if this.state == State::Unmapped {
            pool.unmapped.insert(this.place(), block);
        } else {
            this.searches_before = self.searches[usize::from(!pool.small)];
            pool.free.insert(this.key(), block);
        }
    }

    /// Takes a free or unmapped block out of its pool.
    fn pull(&mut self, block: u32) {
        let this = &self.blocks[block as usize];
        let pool = &mut self.pools[this.pool as usize];
        let was_there = if this.state == State::Unmapped {
            pool.unmapped.remove(&this.place())
        } else {
            pool.free.remove(&this.key())
        };
        debug_assert_eq!(was_there, Some(block));
    }

    /// Merges a block that is in no pool with neighbours in the same state.
    fn merge(&mut self, block: u32) {
        let Block { prev, next, .. } = self.blocks[block as usize];
        let state = self.blocks[block as usize].state;
        let same =
            |this: &Self, other: u32| other != NONE && this.blocks[other as usize].state == state;
        if same(self, prev) {
            self.pull(prev);
            let before = self.blocks[prev as usize].clone();
            let this = &mut self.blocks[block as usize];
            this.offset = before.offset;
            this.size += before.size;
            this.prev = before.prev;
            if before.prev != NONE {
                self.blocks[before.prev as usize].next = block;
            }
            self.spare.push(prev);
        }
        if same(self, next) {
            self.pull(next);
            let after = self.blocks[next as usize].clone();
            let this = &mut self.blocks[block as usize];
            this.size += after.size;
            this.next = after.next;
            if after.next != NONE {
                self.blocks[after.next as usize].prev = block;
            }
            self.spare.push(next);
        }
    }

    fn free_block(&mut self, block: u32) {
        let this = &mut self.blocks[block as usize];
        debug_assert_eq!(this.state, State::Pending);
        this.state = State::Free;
        self.stats.pending_bytes -= this.size;
        self.merge(block);
        self.put(block);
    }

    // ---- growing ---------------------------------------------------------------------------------

    /// A block of at least `size` from the device, in no pool, after all that PyTorch tries.
    fn grow(&mut self, pool: usize, size: u64) -> Result<u32, Exhausted> {
        if self.settings.collects() {
            self.collect();
        }
        if let Some(block) = self.ask(pool, size) {
            return Ok(block);
        }
        let mut released = 0;
        if !self.refuses_early(size) {
            let before = self.stats.reserved_bytes;
            if self.release_oversize(pool, size)
                && let Some(block) = self.ask(pool, size)
            {
                return Ok(block);
            }
            self.empty_cache();
            released = before - self.stats.reserved_bytes;
            self.stats.num_alloc_retries += 1;
            if let Some(block) = self.ask(pool, size) {
                return Ok(block);
            }
        }
        self.stats.num_ooms += 1;
        let most = self.limit.unwrap_or(self.capacity).min(self.capacity);
        Err(Exhausted {
            rounded: size,
            released,
            hopeless: size > most,
        })
    }

    /// What is asked of the device for a request.
    fn segment_size(&self, size: u64) -> u64 {
        if size <= SMALL {
            SMALL_SEGMENT
        } else if size < MIN_LARGE {
            self.settings.large_segment
        } else {
            size.next_multiple_of(SMALL_SEGMENT)
        }
    }

    /// Whether `throw_on_cudamalloc_oom` makes the allocation fail before anything is tried.
    fn refuses_early(&self, size: u64) -> bool {
        let most = part(self.settings.fraction, self.capacity);
        let wanted = self.stats.reserved_bytes + self.segment_size(size);
        self.settings.refuses_early && self.limit.is_none() && wanted > most
    }

    /// Asks the device once.
    fn ask(&mut self, pool: usize, size: u64) -> Option<u32> {
        let segment = self.segment_size(size);
        let over = |limit| self.stats.reserved_bytes + segment > limit;
        if self.limit.is_some_and(over) || self.refuses_early(size) {
            return None;
        }
        if self.settings.expandable {
            self.expand(pool, size)
        } else {
            self.new_segment(pool, segment)
        }
    }

    /// Takes memory from the device, or does nothing.
    fn hold(&mut self, bytes: u64, reserved: u64) -> bool {
        if self.capacity - self.held < bytes {
            return false;
        }
        self.held += bytes;
        self.stats.reserved_bytes += reserved;
        let peak = &mut self.stats.peak_reserved_bytes;
        *peak = self.stats.reserved_bytes.max(*peak);
        self.stats.num_device_alloc += 1;
        true
    }

    fn new_segment(&mut self, pool: usize, bytes: u64) -> Option<u32> {
        if !self.hold(bytes.next_multiple_of(SMALL_SEGMENT), bytes) {
            return None;
        }
        self.stats.segment_bytes_allocated += bytes;
        Some(self.segment(pool, bytes, State::Free))
    }

    fn segment(&mut self, pool: usize, size: u64, state: State) -> u32 {
        self.segments += 1;
        self.add(Block {
            segment: self.segments,
            pool: u32::try_from(pool).unwrap_or(NONE),
            prev: NONE,
            next: NONE,
            offset: 0,
            size,
            searches_before: 0,
            ticket: 0,
            state,
        })
    }

    /// The size of a page of a pool's expandable segments.
    fn page(&self, pool: usize) -> u64 {
        if self.pools[pool].small {
            SMALL_SEGMENT
        } else {
            self.settings.large_segment
        }
    }

    /// Maps pages where a request then fits. Returns the free block there, in no pool. What was mapped
    /// before the device refused stays mapped.
    fn expand(&mut self, pool: usize, size: u64) -> Option<u32> {
        let mut block = self.expandable_place(pool, size)?;
        if self.blocks[block as usize].state == State::Unmapped && !self.map(block, size) {
            return None;
        }
        loop {
            let Block {
                size: has, next, ..
            } = self.blocks[block as usize];
            if has >= size {
                break;
            }
            // What lies behind is unmapped: the place has room, and free blocks are merged.
            if !self.map(next, size - has) {
                return None;
            }
            block = next;
        }
        self.pull(block);
        Some(block)
    }

    /// The lowest place of free and unmapped blocks that has room, in a new segment if need be. The
    /// first block there is unmapped, or an unmapped one follows it.
    fn expandable_place(&mut self, pool: usize, size: u64) -> Option<u32> {
        let is_open = |block: u32| {
            block != NONE
                && matches!(
                    self.blocks[block as usize].state,
                    State::Free | State::Unmapped
                )
        };
        for &unmapped in self.pools[pool].unmapped.values() {
            let before = self.blocks[unmapped as usize].prev;
            let start = if is_open(before) { before } else { unmapped };
            let mut room = 0;
            let mut block = start;
            while room < size && is_open(block) {
                room += self.blocks[block as usize].size;
                block = self.blocks[block as usize].next;
            }
            if room >= size {
                return Some(start);
            }
        }
        let page = self.page(pool);
        let space = self.settings.address_space(self.capacity);
        let space = space.div_ceil(page).saturating_mul(page);
        if space < size {
            return None;
        }
        self.stats.num_ranges += 1;
        let block = self.segment(pool, space, State::Unmapped);
        self.put(block);
        Some(block)
    }

    /// Maps whole pages at the start of an unmapped block, enough for `size` or for all of it, and puts
    /// what is then free into the pool.
    fn map(&mut self, block: u32, size: u64) -> bool {
        let Block {
            pool, size: has, ..
        } = self.blocks[block as usize];
        let page = self.page(pool as usize);
        let bytes = size.min(has).next_multiple_of(page);
        if !self.hold(bytes, bytes) {
            return false;
        }
        self.stats.page_bytes_created += bytes;
        self.pull(block);
        if bytes < has {
            let rest = self.cut(block, bytes);
            self.put(rest);
        }
        self.blocks[block as usize].state = State::Free;
        self.merge(block);
        self.put(block);
        true
    }

    // ---- giving back -----------------------------------------------------------------------------

    fn is_whole(&self, block: u32) -> bool {
        let Block { prev, next, .. } = self.blocks[block as usize];
        prev == NONE && next == NONE
    }

    /// Gives a segment back that is one free block, in its pool.
    fn release_segment(&mut self, block: u32) {
        self.pull(block);
        let size = self.blocks[block as usize].size;
        self.held -= size.next_multiple_of(SMALL_SEGMENT);
        self.stats.reserved_bytes -= size;
        self.stats.num_device_free += 1;
        self.spare.push(block);
    }

    fn release_pool(&mut self, pool: usize) {
        let free: Vec<u32> = self.pools[pool].free.values().copied().collect();
        for block in free {
            if self.settings.expandable {
                self.unmap(block);
            } else if self.is_whole(block) {
                self.release_segment(block);
            }
        }
    }

    /// Gives back the whole pages of a free block in an expandable segment, and the segment with the
    /// last of them.
    fn unmap(&mut self, block: u32) {
        let Block {
            pool, offset, size, ..
        } = self.blocks[block as usize];
        let page = self.page(pool as usize);
        let (start, end) = (offset.next_multiple_of(page), (offset + size) / page * page);
        if start >= end {
            return;
        }
        self.pull(block);
        let mut middle = block;
        if start > offset {
            middle = self.cut(block, start - offset);
            self.put(block);
        }
        if end < offset + size {
            let rest = self.cut(middle, end - start);
            self.put(rest);
        }
        self.blocks[middle as usize].state = State::Unmapped;
        self.merge(middle);
        let bytes = end - start;
        self.held -= bytes;
        self.stats.reserved_bytes -= bytes;
        self.stats.num_device_free += 1;
        self.stats.page_bytes_released += bytes;
        if self.is_whole(middle) {
            self.spare.push(middle);
        } else {
            self.put(middle);
        }
    }

    /// Gives cached segments back that are too large to be split: one that would do, or the largest
    /// until it is enough. Returns whether it is enough.
    fn release_oversize(&mut self, pool: usize, size: u64) -> bool {
        let max_split = self.settings.max_split;
        if max_split == u64::MAX {
            return false;
        }
        let wanted = size.max(max_split);
        let free = &self.pools[pool].free;
        if self.settings.expandable {
            // Blocks of expandable segments are passed over, and there are no others.
            return false;
        }
        if let Some((_, &block)) = free.range(from_size(wanted)..).next() {
            self.release_segment(block);
            return true;
        }
        let mut released = 0;
        let mut doomed = Vec::new();
        for &block in free.values().rev() {
            let bytes = self.blocks[block as usize].size;
            if released >= wanted || bytes < max_split {
                break;
            }
            released += bytes;
            doomed.push(block);
        }
        for block in doomed {
            self.release_segment(block);
        }
        released >= wanted
    }

    /// `garbage_collection_threshold`: gives whole cached segments of the large pools back, those of at
    /// least the mean age first, until less than the threshold is reserved.
    fn collect(&mut self) {
        let Some(limit) = self.limit else { return };
        let threshold = part(self.settings.gc_threshold, limit);
        let Some(target) = self.stats.reserved_bytes.checked_sub(threshold) else {
            return;
        };
        if target == 0 {
            return;
        }
        let searches = self.searches[1];
        let large = self.pools.iter().filter(|pool| !pool.small);
        let mut whole: Vec<(u32, u64)> = large
            .flat_map(|pool| pool.free.values())
            .filter(|block| self.is_whole(**block))
            .map(|block| {
                let age = searches - self.blocks[*block as usize].searches_before;
                (*block, age)
            })
            .collect();
        let mut reclaimed = 0;
        while reclaimed < target && !whole.is_empty() {
            let total: u64 = whole.iter().map(|(_, age)| age).sum();
            #[expect(clippy::cast_precision_loss, reason = "as PyTorch computes it")]
            let mean = total as f64 / whole.len() as f64;
            #[expect(clippy::cast_precision_loss, reason = "as PyTorch computes it")]
            let (old, young): (Vec<_>, Vec<_>) =
                whole.into_iter().partition(|(_, age)| *age as f64 >= mean);
            for (block, _) in old {
                reclaimed += self.blocks[block as usize].size;
                self.release_segment(block);
            }
            whole = young;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn on(settings: &str, capacity: u64) -> NativeAllocator {
        NativeAllocator::new(settings.parse().unwrap(), capacity)
    }

    fn alloc(allocator: &mut NativeAllocator, mebibytes: u64) -> NativeBlock {
        allocator.alloc(mebibytes * MIB, 0).unwrap()
    }

    fn reserved(allocator: &NativeAllocator) -> u64 {
        allocator.stats().reserved_bytes / MIB
    }

    /// What PyTorch's developers published of it: eight blocks of 16 MiB and then four of 32.
    #[test]
    fn the_example_of_pytorchs_developers() {
        let run = |settings, sizes: [(u64, u64); 2]| {
            let mut allocator = on(settings, 8 << 30);
            for (count, mebibytes) in sizes {
                let blocks: Vec<_> = (0..count)
                    .map(|_| alloc(&mut allocator, mebibytes))
                    .collect();
                for block in blocks {
                    allocator.free(block);
                }
            }
            reserved(&allocator)
        };
        assert_eq!(run("", [(8, 16), (4, 32)]), 256);
        assert_eq!(run("", [(4, 32), (8, 16)]), 128);
        assert_eq!(run("expandable_segments:True", [(8, 16), (4, 32)]), 140);
    }

    #[test]
    fn a_stream_uses_no_other_streams_memory() {
        let mut allocator = on("", 8 << 30);
        let block = allocator.alloc(20 * MIB, 7).unwrap();
        allocator.free(block);
        let _other = allocator.alloc(20 * MIB, 8).unwrap();
        assert_eq!(reserved(&allocator), 40);
        let _same = allocator.alloc(20 * MIB, 7).unwrap();
        assert_eq!(reserved(&allocator), 40);
    }

    #[test]
    fn nothing_is_taken_for_no_bytes() {
        let mut allocator = on("", 8 << 30);
        let block = allocator.alloc(0, 0).unwrap();
        assert_eq!(allocator.stats(), NativeStats::default());
        allocator.free_when_done(&block);
        allocator.free(block);
    }

    #[test]
    fn a_pending_block_is_neither_merged_nor_used() {
        let mut allocator = on("", 8 << 30);
        let blocks: Vec<_> = (0..5).map(|_| alloc(&mut allocator, 4)).collect();
        let [a, b, ..] = &blocks[..] else {
            unreachable!()
        };
        allocator.free_when_done(a);
        allocator.free_when_done(b);
        let stats = allocator.stats();
        assert_eq!(
            (stats.allocated_bytes, stats.pending_bytes),
            (12 * MIB, 8 * MIB)
        );
        assert_eq!(stats.largest_free_bytes, 0);
        let mut blocks = blocks.into_iter();
        allocator.done(blocks.next().unwrap());
        assert_eq!(allocator.stats().largest_free_bytes, 4 * MIB);
        allocator.done(blocks.next().unwrap());
        assert_eq!(allocator.stats().largest_free_bytes, 8 * MIB);
        allocator.check();
    }

    /// The free blocks are not searched again after pending events were waited for (PyTorch's issue
    /// 189504), so that the same call fails and then does not.
    #[test]
    fn what_waiting_made_free_serves_the_next_call() {
        let mut allocator = on("", 20 * MIB);
        let blocks: Vec<_> = (0..5).map(|_| alloc(&mut allocator, 4)).collect();
        allocator.free_when_done(&blocks[0]);
        allocator.free_when_done(&blocks[1]);
        let failed = allocator.alloc(8 * MIB, 0).unwrap_err();
        assert_eq!((failed.released, failed.hopeless), (0, false));
        assert_eq!(allocator.stats().num_ooms, 1);
        let _block = alloc(&mut allocator, 8);
        for block in blocks.into_iter().take(2) {
            // Its event is one of those waited for: this must not free it twice.
            allocator.done(block);
        }
        allocator.check();
    }

    #[test]
    fn a_full_device_gets_its_free_segments_back() {
        let mut allocator = on("", 100 * MIB);
        let small = alloc(&mut allocator, 30);
        let kept = alloc(&mut allocator, 40);
        allocator.free(small);
        let _large = alloc(&mut allocator, 60);
        let stats = allocator.stats();
        assert_eq!((reserved(&allocator), stats.num_device_free), (100, 1));
        assert_eq!((stats.num_alloc_retries, stats.num_ooms), (1, 0));
        assert!(allocator.alloc(2 * MIB, 0).is_err());
        let hopeless = allocator.alloc(101 * MIB, 0).unwrap_err();
        assert!(hopeless.hopeless);
        allocator.free(kept);
    }

    #[test]
    fn a_large_block_is_not_split_under_a_max_split_size() {
        let mut allocator = on("max_split_size_mb:64", 8 << 30);
        let block = alloc(&mut allocator, 100);
        allocator.free(block);
        let _small = alloc(&mut allocator, 50);
        assert_eq!(reserved(&allocator), 150, "the 100 MiB are not for 50");
        let _near = alloc(&mut allocator, 81);
        assert_eq!(
            reserved(&allocator),
            150,
            "but for 81, which is within 20 of it"
        );
        let mut allocator = on("max_split_size_mb:64", 8 << 30);
        let block = alloc(&mut allocator, 100);
        allocator.free(block);
        let _far = alloc(&mut allocator, 80);
        assert_eq!(reserved(&allocator), 180);
    }

    #[test]
    fn old_segments_are_collected_at_the_threshold() {
        let conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8";
        let mut allocator = on(conf, 1000 * MIB);
        let old = alloc(&mut allocator, 300);
        allocator.free(old);
        for _ in 0..10 {
            let young = alloc(&mut allocator, 310);
            allocator.free(young);
        }
        // 610 of the 800 allowed are reserved; the block of 300 has not been used for long.
        let _new = alloc(&mut allocator, 320);
        assert_eq!(allocator.stats().num_device_free, 1);
        assert_eq!(reserved(&allocator), 630);
        let mut alone = on("garbage_collection_threshold:0.5", 1000 * MIB);
        let old = alloc(&mut alone, 600);
        alone.free(old);
        let _new = alloc(&mut alone, 350);
        assert_eq!(
            alone.stats().num_device_free,
            0,
            "nothing without a fraction"
        );
    }

    #[test]
    fn pages_of_an_expandable_segment_go_back_and_return() {
        let mut allocator = on("expandable_segments:True", 200 * MIB);
        let first = alloc(&mut allocator, 40);
        let second = alloc(&mut allocator, 40);
        assert_eq!(
            (reserved(&allocator), allocator.stats().num_device_alloc),
            (80, 2)
        );
        allocator.free(first);
        assert_eq!(allocator.empty_cache(), 40 * MIB);
        // Lowest first: the hole is mapped again, and what is missing behind the second block is not
        // next to it.
        let third = alloc(&mut allocator, 50);
        assert_eq!(reserved(&allocator), 40 + 60);
        allocator.free(second);
        allocator.free(third);
        assert_eq!(allocator.empty_cache(), 100 * MIB);
        assert_eq!(allocator.stats().reserved_bytes, 0);
        allocator.check();
    }

    #[test]
    fn an_early_refusal_gives_nothing_back() {
        let run = |settings| {
            let mut allocator = on(settings, 100 * MIB);
            let block = alloc(&mut allocator, 60);
            allocator.free(block);
            allocator.alloc(80 * MIB, 0).is_ok()
        };
        assert!(run(""));
        assert!(!run("throw_on_cudamalloc_oom:True"));
    }

    impl NativeAllocator {
        /// Blocks cover their segments, those that are free are merged and in their pools, and the
        /// counters are sums over them.
        fn check(&self) {
            let gone: std::collections::HashSet<u32> = self.spare.iter().copied().collect();
            let is_there = |block: u32| block != NONE && !gone.contains(&block);
            let (mut mapped, mut live, mut pending) = (0, 0, 0);
            let (mut free, mut unmapped) = (0, 0);
            for (index, block) in (0..).zip(&self.blocks) {
                if !is_there(index) {
                    continue;
                }
                assert!(block.size > 0 && block.size.is_multiple_of(UNIT));
                let pool = &self.pools[block.pool as usize];
                match block.state {
                    State::Live => live += block.size,
                    State::Pending => pending += block.size,
                    State::Free => {
                        free += 1;
                        assert_eq!(pool.free.get(&block.key()), Some(&index));
                    }
                    State::Unmapped => {
                        unmapped += 1;
                        assert_eq!(pool.unmapped.get(&block.place()), Some(&index));
                        assert!(self.settings.expandable);
                        assert_eq!(block.offset % self.page(block.pool as usize), 0);
                    }
                }
                if block.state != State::Unmapped {
                    mapped += block.size;
                }
                if block.prev == NONE {
                    assert_eq!(block.offset, 0);
                }
                if block.next != NONE {
                    let next = &self.blocks[block.next as usize];
                    assert!(is_there(block.next));
                    assert_eq!((next.prev, next.segment), (index, block.segment));
                    assert_eq!(next.offset, block.offset + block.size);
                    let merges = matches!(block.state, State::Free | State::Unmapped);
                    assert!(!(merges && next.state == block.state), "not merged");
                }
            }
            assert_eq!(
                free,
                self.pools.iter().map(|pool| pool.free.len()).sum::<usize>()
            );
            assert_eq!(
                unmapped,
                self.pools
                    .iter()
                    .map(|pool| pool.unmapped.len())
                    .sum::<usize>()
            );
            let stats = self.stats;
            assert_eq!(mapped, stats.reserved_bytes);
            assert_eq!(
                (live, pending),
                (stats.allocated_bytes, stats.pending_bytes)
            );
            assert!(stats.reserved_bytes <= stats.peak_reserved_bytes);
            assert!(self.held <= self.capacity);
            assert!(
                self.limit
                    .is_none_or(|limit| self.settings.expandable || stats.reserved_bytes <= limit)
            );
        }
    }

    proptest! {
        #[test]
        fn its_books_balance(
            settings in prop::sample::select(vec![
                "",
                "expandable_segments:True",
                "expandable_segments:True,max_split_size_mb:32",
                "expandable_segments:True,expandable_segments_reserve:0.5",
                "max_split_size_mb:32",
                "max_split_size_mb:24,garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
                "roundup_power2_divisions:4",
                "large_segment_size_mb:21",
            ]),
            operations in prop::collection::vec((0_u8..10, 0_u64..3, any::<u32>()), 1..400),
        ) {
            let mut allocator = on(settings, 256 * MIB);
            let mut live = Vec::new();
            let mut waiting = Vec::new();
            for (what, stream, number) in operations {
                // Of all magnitudes, up to 64 MiB.
                let bytes = u64::from(number) >> (6 + number % 20);
                let at = number as usize;
                match what {
                    0..=4 => live.extend(allocator.alloc(bytes, stream)),
                    5 if !live.is_empty() => {
                        let block = live.swap_remove(at % live.len());
                        allocator.free_when_done(&block);
                        waiting.push(block);
                    }
                    6 if !waiting.is_empty() => {
                        allocator.done(waiting.swap_remove(at % waiting.len()));
                    }
                    9 if number % 16 == 0 => {
                        allocator.empty_cache();
                    }
                    _ if !live.is_empty() => allocator.free(live.swap_remove(at % live.len())),
                    _ => {}
                }
                allocator.check();
            }
            for block in live {
                allocator.free(block);
            }
            for block in waiting {
                allocator.done(block);
            }
            allocator.empty_cache();
            prop_assert_eq!(allocator.stats().reserved_bytes, 0);
            // But for address space that no page was ever mapped into.
            let left = allocator.blocks.len() - allocator.spare.len();
            let unmapped = allocator.pools.iter().map(|pool| pool.unmapped.len());
            prop_assert_eq!(left, unmapped.sum::<usize>());
        }
    }
}
