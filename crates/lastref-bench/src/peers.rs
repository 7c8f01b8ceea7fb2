//! The allocators that are compared, behind one trait.
//!
//! # Invariants
//!
//! 1. A [`HostBlock`] is the one owner of memory that mimalloc gave for its layout, whose size is not 0.
//!    Only [`Mimalloc`] makes and frees them.

use std::alloc::{GlobalAlloc, Layout, handle_alloc_error};
use std::ptr::NonNull;

use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{AllocatorOptions, Block, CachingAllocator, DeviceResult, StreamId};
use mimalloc::MiMalloc;

/// Memory that each of them manages, where it is not the host's.
pub const CAPACITY_BYTES: u64 = 32 << 30;

/// Entries of history that lastref keeps while it is measured.
pub const HISTORY_ENTRIES: usize = 1_000_000;

/// An allocator that can do the [works](crate::work). Panics where memory runs out: no work needs as much.
pub trait Peer: Sync + Sized {
    /// What it is called in tables.
    const NAME: &'static str;

    /// What is live. Freed by [`free`](Self::free), on any thread.
    type Block: Send;

    /// A fresh one, ready to be measured.
    ///
    /// # Errors
    ///
    /// The host has no addresses for a simulated device.
    fn new() -> DeviceResult<Self>;

    /// Allocates at least `bytes` bytes, of which there is at least one.
    fn alloc(&self, bytes: u64) -> Self::Block;

    /// Frees.
    fn free(&self, block: Self::Block);
}

/// lastref on a simulated device: with statistics, and with histories of a million entries that are full,
/// since pages of the host that are written for the first time are not what is measured.
#[derive(Debug)]
pub struct Lastref(CachingAllocator<SimDevice>);

impl Lastref {
    /// The allocator itself.
    #[must_use]
    pub const fn allocator(&self) -> &CachingAllocator<SimDevice> {
        &self.0
    }
}

impl Peer for Lastref {
    const NAME: &'static str = "lastref";
    type Block = Block<SimDevice>;

    fn new() -> DeviceResult<Self> {
        let device = SimDevice::new(SimOptions::new(CAPACITY_BYTES))?;
        let options = AllocatorOptions::new().with_history(HISTORY_ENTRIES);
        let allocator = CachingAllocator::with_options(device, &options);
        // The heap's and the thread's.
        for bytes in [1 << 20, 512] {
            for _ in 0..HISTORY_ENTRIES / 2 {
                drop(allocator.alloc(bytes, StreamId::DEFAULT));
            }
        }
        Ok(Self(allocator))
    }

    #[inline]
    fn alloc(&self, bytes: u64) -> Self::Block {
        let block = self.0.alloc(bytes, StreamId::DEFAULT);
        block.expect("no work needs more than the device has")
    }

    #[inline]
    fn free(&self, block: Self::Block) {
        drop(block);
    }
}

/// Host memory from mimalloc. It keeps no statistics and no history, but is the fastest that is known.
#[derive(Debug)]
pub struct Mimalloc;

/// Host memory that only its holder uses.
#[derive(Debug)]
pub struct HostBlock {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory has one owner, and mimalloc frees on any thread (invariant 1).
unsafe impl Send for HostBlock {}

impl Peer for Mimalloc {
    const NAME: &'static str = "mimalloc";
    type Block = HostBlock;

    fn new() -> DeviceResult<Self> {
        Ok(Self)
    }

    #[inline]
    fn alloc(&self, bytes: u64) -> Self::Block {
        let layout = usize::try_from(bytes.max(1))
            .ok()
            .and_then(|bytes| Layout::from_size_align(bytes, 16).ok())
            .expect("no work asks for more than a host can address");
        // SAFETY: the layout's size is not 0.
        let ptr = unsafe { MiMalloc.alloc(layout) };
        let ptr = NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout));
        HostBlock { ptr, layout }
    }

    #[inline]
    fn free(&self, block: Self::Block) {
        // SAFETY: it came from `alloc` with this layout, and is given up here (invariant 1).
        unsafe { MiMalloc.dealloc(block.ptr.as_ptr(), block.layout) };
    }
}
