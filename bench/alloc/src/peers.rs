//! The allocators that are compared, behind one trait.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{AllocatorOptions, Block, CachingAllocator, StreamId};
use mimalloc::MiMalloc;
use offset_allocator::{Allocation, Allocator};

/// Memory that each of them manages, where it is not the host's.
const CAPACITY: u64 = 32 << 30;
/// What sizes are rounded to, where they are.
const UNIT: u64 = 512;

pub(crate) trait Peer: Sync {
    const NAME: &'static str;
    type Block: Send;
    fn new() -> Self;
    fn alloc(&self, bytes: u64) -> Self::Block;
    fn free(&self, block: Self::Block);
}

/// With statistics, and a history of a million entries that is full, the thread's as well as the
/// heap's: pages of the host that are written for the first time are not what is measured.
pub(crate) struct Lastref(pub(crate) CachingAllocator<SimDevice>);

impl Peer for Lastref {
    const NAME: &'static str = "lastref";
    type Block = Block<SimDevice>;

    fn new() -> Self {
        let device = SimDevice::new(SimOptions::new(CAPACITY)).expect("the host has addresses");
        let options = AllocatorOptions::new().with_history(1_000_000);
        let allocator = CachingAllocator::with_options(device, &options);
        for bytes in [1 << 20, UNIT] {
            for _ in 0..500_000 {
                drop(allocator.alloc(bytes, StreamId::DEFAULT));
            }
        }
        Self(allocator)
    }

    fn alloc(&self, bytes: u64) -> Self::Block {
        self.0.alloc(bytes, StreamId::DEFAULT).expect("it fits")
    }

    fn free(&self, block: Self::Block) {
        drop(block);
    }
}

/// Host memory. It keeps none of the statistics, but is the fastest that is known.
pub(crate) struct Mimalloc;

/// A piece of host memory that only its holder uses.
pub(crate) struct HostBlock(*mut u8, Layout);

// SAFETY: the memory has one owner, and mimalloc frees on any thread.
unsafe impl Send for HostBlock {}

impl Peer for Mimalloc {
    const NAME: &'static str = "mimalloc";
    type Block = HostBlock;

    fn new() -> Self {
        Self
    }

    fn alloc(&self, bytes: u64) -> Self::Block {
        let bytes = usize::try_from(bytes).expect("a size of the host");
        let layout = Layout::from_size_align(bytes, 16).expect("a sound layout");
        // SAFETY: the layout is not of size zero: no work asks for that.
        let ptr = unsafe { MiMalloc.alloc(layout) };
        HostBlock(ptr, layout)
    }

    fn free(&self, block: Self::Block) {
        // SAFETY: it came from `alloc` with this layout, and is given up here.
        unsafe { MiMalloc.dealloc(block.0, block.1) };
    }
}

/// The crate `offset-allocator` behind a lock, in units of 512 bytes.
pub(crate) struct Offset(Mutex<Allocator>);

impl Peer for Offset {
    const NAME: &'static str = "offset-allocator";
    type Block = Allocation;

    fn new() -> Self {
        let units = u32::try_from(CAPACITY / UNIT).expect("few enough units");
        Self(Mutex::new(Allocator::new(units)))
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

    fn new() -> Self {
        Self(Mutex::new(Sets {
            by_size: BTreeSet::from([(CAPACITY, 0)]),
            by_addr: BTreeSet::from([(0, CAPACITY)]),
            live: HashMap::new(),
        }))
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
