//! The allocators that are compared beside those of `lastref-bench`.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use lastref_alloc::DeviceResult;
use lastref_bench::Peer;
use lastref_bench::peers::CAPACITY_BYTES;
use offset_allocator::{Allocation, Allocator};

/// What sizes are rounded to.
const UNIT: u64 = 512;

/// The crate `offset-allocator` behind a lock, in units of 512 bytes.
pub(crate) struct Offset(Mutex<Allocator>);

impl Peer for Offset {
    const NAME: &'static str = "offset-allocator";
    type Block = Allocation;

    fn new() -> DeviceResult<Self> {
        let units = u32::try_from(CAPACITY_BYTES / UNIT).expect("few enough units");
        Ok(Self(Mutex::new(Allocator::new(units))))
    }

    fn alloc(&self, bytes: u64) -> Self::Block {
        let units = u32::try_from(bytes.div_ceil(UNIT)).expect("few enough units");
        let mut allocator = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        allocator.allocate(units).expect("it fits")
    }

    fn free(&self, block: Self::Block) {
        let mut allocator = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        allocator.free(block);
    }
}

/// The classic shape: a lock, ordered sets of free blocks, a table of the live ones. Splits and
/// merges, and keeps nothing else.
pub(crate) struct Ordered(Mutex<Sets>);

pub(crate) struct Sets {
    by_size: BTreeSet<(u64, u64)>,
    by_addr: BTreeSet<(u64, u64)>,
    live: HashMap<u64, u64>,
}

impl Peer for Ordered {
    const NAME: &'static str = "ordered sets";
    type Block = u64;

    fn new() -> DeviceResult<Self> {
        Ok(Self(Mutex::new(Sets {
            by_size: BTreeSet::from([(CAPACITY_BYTES, 0)]),
            by_addr: BTreeSet::from([(0, CAPACITY_BYTES)]),
            live: HashMap::new(),
        })))
    }

    fn alloc(&self, bytes: u64) -> Self::Block {
        let bytes = bytes.next_multiple_of(UNIT);
        let sets = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (size, addr) = *sets.by_size.range((bytes, 0)..).next().expect("it fits");
        sets.by_size.remove(&(size, addr));
        sets.by_addr.remove(&(addr, size));
        if size > bytes {
            sets.by_size.insert((size - bytes, addr + bytes));
            sets.by_addr.insert((addr + bytes, size - bytes));
        }
        sets.live.insert(addr, bytes);
        addr
    }

    fn free(&self, block: Self::Block) {
        let sets = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut addr = block;
        let mut size = sets.live.remove(&addr).expect("it is live");
        if let Some(&next) = sets.by_addr.range((addr, 0)..).next()
            && addr + size == next.0
        {
            sets.by_addr.remove(&next);
            sets.by_size.remove(&(next.1, next.0));
            size += next.1;
        }
        if let Some(&before) = sets.by_addr.range(..(addr, 0)).next_back()
            && before.0 + before.1 == addr
        {
            sets.by_addr.remove(&before);
            sets.by_size.remove(&(before.1, before.0));
            (addr, size) = (before.0, size + before.1);
        }
        sets.by_addr.insert((addr, size));
        sets.by_size.insert((size, addr));
    }
}
