//! The handle to a piece of device memory.

use std::fmt;
use std::sync::Arc;

use crate::allocator::{CachingAllocator, Shared};
use crate::device::{Device, DevicePtr, DeviceResult, StreamId};
use crate::heap::NodeId;
use crate::state::PoolId;

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
    shared: Arc<Shared<D>>,
    /// `None` for zero bytes. In the heap of its pool.
    node: Option<NodeId>,
    pool: PoolId,
    ptr: DevicePtr,
    requested: u64,
    bytes: u64,
    stream: StreamId,
}

impl<D: Device> Block<D> {
    pub(crate) const fn new(
        shared: Arc<Shared<D>>,
        node: Option<NodeId>,
        pool: PoolId,
        ptr: DevicePtr,
        requested: u64,
        bytes: u64,
        stream: StreamId,
    ) -> Self {
        Self {
            shared,
            node,
            pool,
            ptr,
            requested,
            bytes,
            stream,
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
        self.bytes
    }

    /// The stream it was allocated on.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        self.stream
    }

    /// The allocator it came from and goes back to.
    #[must_use]
    pub fn allocator(&self) -> CachingAllocator<D> {
        CachingAllocator::from_shared(Arc::clone(&self.shared))
    }

    /// Whether it was allocated from this pool of this allocator.
    pub(crate) fn is_from(&self, shared: &Arc<Shared<D>>, pool: PoolId) -> bool {
        Arc::ptr_eq(&self.shared, shared) && self.node.is_some() && self.pool == pool
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
            Some(node) => self
                .shared
                .record_stream((self.pool, node), self.ptr, stream),
            None => Ok(()),
        }
    }
}

impl<D: Device> Drop for Block<D> {
    fn drop(&mut self) {
        if let Some(node) = self.node {
            self.shared.free((self.pool, node), self.ptr, self.bytes);
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
