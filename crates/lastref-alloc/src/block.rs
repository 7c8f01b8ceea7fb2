//! The handle to a piece of device memory.

use std::fmt;

use crate::allocator::{CachingAllocator, Shared};
use crate::anchor::BlockAnchor;
use crate::clock::StreamSlot;
use crate::device::{Device, DevicePtr, DeviceResult, StreamId};
use crate::heap::{NodeId, rounded};
use crate::state::{PoolId, State};
use crate::sync::{AtomicBool, Ordering};
use crate::thread_cache::{self, Entry, Put};

/// A piece of device memory, held. Dropping it frees it: the memory returns to the allocator's
/// cache at that moment, on any thread, without a device call and without waiting.
///
/// The memory is at a multiple of 512 bytes and is not initialised. A block of zero bytes has the
/// address [`DevicePtr::NULL`] and takes no memory. The allocator lives as long as its blocks.
///
/// # Streams
///
/// The block belongs to the stream it was allocated on: after the drop, that stream may get the
/// same memory at once, since work submitted to it later runs later. Work on *other* streams must
/// either be waited for before the drop, or announced with
/// [`record_stream`](Self::record_stream).
pub struct Block<D: Device> {
    anchor: BlockAnchor<D>,
    /// `None` for zero bytes. In the heap of its pool.
    node: Option<NodeId>,
    pool: PoolId,
    ptr: DevicePtr,
    requested: u64,
    stream: StreamId,
    slot: StreamSlot,
    /// Of its allocation, in the history.
    stamp: u64,
    /// Whether it was recorded on another stream. Then no thread's cache may keep it.
    recorded: AtomicBool,
}

impl<D: Device> Block<D> {
    /// `None` for zero bytes; otherwise the node, its address, its stream and its stamp.
    #[inline]
    pub(crate) fn new(
        anchor: BlockAnchor<D>,
        place: Option<(NodeId, DevicePtr, StreamSlot, u64)>,
        pool: PoolId,
        requested: u64,
        stream: StreamId,
    ) -> Self {
        let (node, ptr, slot, stamp) = match place {
            Some((node, ptr, slot, stamp)) => (Some(node), ptr, slot, stamp),
            None => (None, DevicePtr::NULL, StreamSlot::DEFAULT, 0),
        };
        Self {
            anchor,
            node,
            pool,
            ptr,
            requested,
            stream,
            slot,
            stamp,
            recorded: AtomicBool::new(false),
        }
    }

    /// Where it is.
    #[must_use]
    pub const fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The bytes that were asked for, all of them usable.
    #[must_use]
    pub const fn requested_bytes(&self) -> u64 {
        self.requested
    }

    /// The bytes it takes, rounding included.
    #[must_use]
    pub const fn allocated_bytes(&self) -> u64 {
        rounded(self.requested)
    }

    /// The stream it was allocated on.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        self.stream
    }

    /// The allocator it came from and goes back to.
    #[must_use]
    pub fn allocator(&self) -> CachingAllocator<D> {
        CachingAllocator::from_handle(self.anchor.handle())
    }

    /// Whether it was allocated from this pool of this allocator.
    pub(crate) fn is_from(&self, shared: &Shared<D>, pool: PoolId) -> bool {
        self.anchor.shared().id == shared.id && self.node.is_some() && self.pool == pool
    }

    /// Announces that work on `stream` uses this block. After the drop the memory is *pending*
    /// until that work, as far as it was submitted before the drop, is done.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`](crate::DeviceError::InvalidArgument) if there is no such
    /// stream.
    pub fn record_stream(&self, stream: StreamId) -> DeviceResult<()> {
        match self.node {
            Some(node) => {
                // Whoever drops the block has heard of this call in some way of their own.
                self.recorded.store(true, Ordering::Relaxed);
                let shared = self.anchor.shared();
                shared.record_stream((self.pool, node), self.ptr, stream)
            }
            None => Ok(()),
        }
    }
}

impl<D: Device> Block<D> {
    /// What a thread's cache needs to know, if it may keep the block.
    #[inline]
    fn entry(&self) -> Option<Entry> {
        let is_small = self.pool == PoolId::DEFAULT && self.requested <= thread_cache::MAX_REQUEST;
        let node = self.node?;
        (is_small && !self.recorded.load(Ordering::Relaxed)).then(|| Entry {
            addr: self.ptr.0,
            node,
            slot: self.slot,
            requested: u32::try_from(self.requested).unwrap_or(u32::MAX),
        })
    }

    /// Frees what a thread's cache has not taken in.
    #[inline(never)]
    fn free(&mut self, put: Put) {
        let stamp = self.stamp;
        let Some(node) = self.node else {
            return self.anchor.release(State::drop_empty_block);
        };
        if put == Put::NoRoom
            && let Some(entry) = self.entry()
        {
            let free = |state: &mut State| state.free_small(&entry, stamp);
            return self.anchor.release(free);
        }
        self.anchor.release(|state| {
            state.history.pass(stamp);
            state.on(self.pool, |state| state.free(node));
        });
    }

    /// Tells the observer, if there is one.
    #[cold]
    fn observe_free(&self) {
        if let Some(node) = self.node {
            let (block, bytes) = ((self.pool, node), rounded(self.requested));
            if self.anchor.shared().observe_free(block, self.ptr, bytes) {
                self.recorded.store(true, Ordering::Relaxed);
            }
        }
    }
}

impl<D: Device> Drop for Block<D> {
    #[inline]
    fn drop(&mut self) {
        if self.anchor.shared().is_observed() {
            self.observe_free();
        }
        let put = match self.entry() {
            // After this the allocator may be gone.
            Some(entry) => thread_cache::put(self.anchor.shared().id, &entry, self.stamp),
            None => Put::Unwanted,
        };
        if put != Put::Kept {
            self.free(put);
        }
    }
}

impl<D: Device> fmt::Debug for Block<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("ptr", &self.ptr)
            .field("requested_bytes", &self.requested)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
