//! What keeps an allocator alive: its handles, and the blocks it has given out.
//!
//! Handles are counted, and blocks are in the books anyway, so neither needs a counter of its own
//! that all threads would write to with every block. Both counts are the state's, and the last of
//! both to go frees the allocator.
//!
//! # Invariants
//!
//! 1. A `Shared` exists as long as there is a [`Handle`], or a [`BlockAnchor`] whose block is not
//!    freed. The state says so: [`State::is_unused`] is false.
//! 2. Without a handle no thread's cache takes blocks in, so that the books are exact.
//! 3. Who finds the state unused is the only one left, and frees the `Shared` after letting go of
//!    the lock. Whoever frees a block otherwise does not touch the `Shared` after that.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;

use crate::allocator::Shared;
use crate::bias::lock;
use crate::device::Device;
use crate::state::State;

/// A counted handle to an allocator.
pub(crate) struct Handle<D: Device>(BlockAnchor<D>);

impl<D: Device> Handle<D> {
    /// The first handle. The state counts one.
    pub(crate) fn new(shared: Shared<D>) -> Self {
        let shared = NonNull::from(Box::leak(Box::new(shared)));
        Self(BlockAnchor(shared, PhantomData))
    }

    /// What a block that is being given out needs. The books have it already.
    pub(crate) const fn for_block(&self) -> BlockAnchor<D> {
        BlockAnchor(self.0.0, PhantomData)
    }
}

impl<D: Device> Clone for Handle<D> {
    fn clone(&self) -> Self {
        self.0.handle()
    }
}

impl<D: Device> Deref for Handle<D> {
    type Target = Shared<D>;

    fn deref(&self) -> &Shared<D> {
        self.0.shared()
    }
}

impl<D: Device> Drop for Handle<D> {
    fn drop(&mut self) {
        self.0.release(State::drop_handle);
    }
}

/// A block's way to its allocator. Not counted: the block is.
pub(crate) struct BlockAnchor<D: Device>(NonNull<Shared<D>>, PhantomData<Shared<D>>);

// SAFETY: it leads to a `Shared`, which any thread may use and free: it is `Send` and `Sync`, since
// devices are.
unsafe impl<D: Device> Send for BlockAnchor<D> {}
// SAFETY: as above.
unsafe impl<D: Device> Sync for BlockAnchor<D> {}

impl<D: Device> BlockAnchor<D> {
    /// The allocator, for as long as the block is not freed.
    #[inline]
    pub(crate) fn shared(&self) -> &Shared<D> {
        // SAFETY: invariant 1: this anchor's handle or block is there.
        unsafe { self.0.as_ref() }
    }

    /// A handle of its own.
    pub(crate) fn handle(&self) -> Handle<D> {
        lock(&self.shared().state).add_handle();
        Handle(Self(self.0, PhantomData))
    }

    #[cold]
    fn free_shared(&self) {
        // SAFETY: invariant 3: nobody else can get to it. It was a box.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }

    /// Changes the state so that the block is freed, or the handle gone, and frees the allocator if
    /// that was the last.
    #[inline]
    pub(crate) fn release(&self, change: impl FnOnce(&mut State)) {
        let shared = self.shared();
        let mut state = lock(&shared.state);
        change(&mut state);
        if state.needs_care() {
            state.look_after(&shared.device);
        }
        let is_unused = state.is_unused();
        drop(state);
        if is_unused {
            self.free_shared();
        }
    }
}
