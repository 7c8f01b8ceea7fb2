//! The handle to a piece of device memory.

use std::fmt;

use crate::allocator::{CachingAllocator, Shared};
use crate::anchor::BlockAnchor;
use crate::clock::StreamSlot;
use crate::device::{Device, DevicePtr, DeviceResult, StreamId};
use crate::heap::{NIL, NodeId, rounded};
use crate::state::{Place, PoolId, State};
use crate::sync::{AtomicU64, Ordering};
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
    node: Node,
    ptr: DevicePtr,
    requested: u64,
    stream: StreamId,
    /// Of its allocation, in the history.
    stamp: u64,
    uses: Uses,
}

// A block is moved, by everybody, by words; a word that was written in parts is slow to read for some
// nanoseconds, a fifth of what a small block costs. So these are words.

/// A pool, and a node in its heap; [`NIL`] for zero bytes.
#[derive(Clone, Copy)]
struct Node(u64);

impl Node {
    #[inline]
    const fn new(pool: PoolId, node: NodeId) -> Self {
        Self((pool.number() as u64) << 32 | node as u64)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "each half is one of the two"
    )]
    #[inline]
    const fn parts(self) -> (PoolId, NodeId) {
        (PoolId::from_number((self.0 >> 32) as u32), self.0 as u32)
    }
}

/// The slot of its stream, and whether a block was recorded on another: then no thread's cache may
/// keep it.
struct Uses(AtomicU64);

impl Uses {
    const RECORDED: u64 = 1 << 63;

    #[inline]
    fn new(slot: StreamSlot) -> Self {
        Self(AtomicU64::new(u64::from(slot.index())))
    }

    /// Whoever drops the block has heard of this in some way of their own.
    fn record(&self) {
        self.0.fetch_or(Self::RECORDED, Ordering::Relaxed);
    }

    /// The slot, if it was recorded on no other stream.
    #[inline]
    fn alone(&self) -> Option<StreamSlot> {
        u32::try_from(self.0.load(Ordering::Relaxed))
            .ok()
            .map(StreamSlot::at)
    }
}

impl<D: Device> Block<D> {
    /// At a node, at its address, for its stream, with its stamp. [`NIL`] for zero bytes.
    #[inline]
    pub(crate) fn new(
        anchor: BlockAnchor<D>,
        (node, ptr, slot, stamp): Place,
        pool: PoolId,
        requested: u64,
        stream: StreamId,
    ) -> Self {
        Self {
            anchor,
            node: Node::new(pool, node),
            ptr,
            requested,
            stream,
            stamp,
            uses: Uses::new(slot),
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
        self.anchor.shared().id == shared.id && self.place().is_some_and(|(of, _)| of == pool)
    }

    /// Announces that work on `stream` uses this block. After the drop the memory is *pending*
    /// until that work, as far as it was submitted before the drop, is done.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`](crate::DeviceError::InvalidArgument) if there is no such
    /// stream.
    pub fn record_stream(&self, stream: StreamId) -> DeviceResult<()> {
        match self.place() {
            Some(place) => {
                self.uses.record();
                let shared = self.anchor.shared();
                shared.record_stream(place, self.ptr, stream)
            }
            None => Ok(()),
        }
    }
}

impl<D: Device> Block<D> {
    /// Its pool and its node there, if it is not of zero bytes.
    #[inline]
    fn place(&self) -> Option<(PoolId, NodeId)> {
        let (pool, node) = self.node.parts();
        (node != NIL).then_some((pool, node))
    }

    /// What a thread's cache needs to know, if it may keep the block.
    #[inline]
    fn entry(&self) -> Option<Entry> {
        let (pool, node) = self.place()?;
        let is_small = pool == PoolId::DEFAULT && self.requested <= thread_cache::MAX_REQUEST;
        let slot = self.uses.alone()?;
        is_small.then(|| Entry {
            addr: self.ptr.0,
            node,
            slot,
            requested: u32::try_from(self.requested).unwrap_or(u32::MAX),
        })
    }

    /// Frees what a thread's cache has not taken in.
    #[inline(never)]
    fn free(&mut self, put: Put) {
        let stamp = self.stamp;
        let Some((pool, node)) = self.place() else {
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
            state.on(pool, |state| state.free(node));
        });
    }

    /// Tells the observer, if there is one.
    #[cold]
    fn observe_free(&self) {
        if let Some(block) = self.place() {
            let bytes = rounded(self.requested);
            if self.anchor.shared().observe_free(block, self.ptr, bytes) {
                self.uses.record();
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
