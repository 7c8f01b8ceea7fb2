//! Where nodes live: memory in which every node can be found.
//!
//! ```text
//!  thread ──▶ Heap (one a thread at a time, never freed)
//!               ├── per size: free slots, a chunk being filled, slots freed by other threads
//!  CHUNKS ─────▶ [Chunk 64 KiB: slots of one size][Chunk][Chunk]…      read by `for_each`
//! ```
//!
//! Nothing is done per node to make it findable: a slot that holds a node has a word other than
//! zero at its start. So a walk over all chunks sees every node, as CPython's free-threaded
//! collector sees objects by walking its allocator's pages.
//!
//! # Invariants
//!
//! 1. A slot starts with a [`Header`] whose `word` is zero exactly while the slot is vacant. The
//!    other fields are written only while it is, and read by strangers only after a handle was
//!    taken by a compare-and-swap on a word above zero.
//! 2. Chunks and heaps are never freed: an address of a slot stays one. What is vacant is used
//!    again by nodes of the same size class.
//! 3. A heap's own lists are touched only by the thread that has it, its `remote` lists by anyone.
//!
//! Under loom, nodes are boxes and cannot be walked.

use std::alloc::Layout;
use std::ptr::NonNull;

use super::header::Header;

pub(super) use imp::{alloc, for_each, free};

#[cfg(not(loom))]
mod imp {
    use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error};
    use std::cell::{Cell, UnsafeCell};
    use std::collections::BTreeMap;

    use super::super::sync::{AtomicPtr, Mutex, Ordering, lock};
    use super::{Header, Layout, NonNull};

    const CHUNK_BYTES: usize = 64 << 10;
    const STEP: usize = 16;
    const MAX_SLOT_BYTES: usize = 1024;
    const NUM_CLASSES: usize = MAX_SLOT_BYTES / STEP;
    const CHUNK_LAYOUT: Layout = match Layout::from_size_align(CHUNK_BYTES, CHUNK_BYTES) {
        Ok(layout) => layout,
        Err(_) => panic!("the chunk size is a power of two"),
    };

    /// At the start of each chunk; slots follow.
    struct Chunk {
        owner: &'static Heap,
        slot_bytes: usize,
    }
    /// Where the slots begin.
    const FIRST_SLOT: usize = size_of::<Chunk>().next_multiple_of(STEP);

    struct Class {
        /// Vacant slots, linked by `Header::next`.
        free: Cell<*mut Header>,
        /// The part of the newest chunk that was never used.
        fresh: Cell<*mut u8>,
        fresh_end: Cell<*mut u8>,
        /// Slots freed by other threads.
        remote: AtomicPtr<Header>,
    }

    struct Heap(UnsafeCell<[Class; NUM_CLASSES]>);

    // SAFETY: invariant 3: the cells are touched by one thread at a time, the atomics by any.
    unsafe impl Sync for Heap {}

    struct Chunks(Vec<NonNull<Chunk>>);
    // SAFETY: addresses, of memory that is never freed.
    unsafe impl Send for Chunks {}

    static CHUNKS: Mutex<Chunks> = Mutex::new(Chunks(Vec::new()));
    /// Heaps that no thread has at the moment.
    static IDLE_HEAPS: Mutex<Vec<&'static Heap>> = Mutex::new(Vec::new());
    /// Nodes too large, or too aligned, for a slot: address and layout.
    static LARGE: Mutex<Large> = Mutex::new(Large(BTreeMap::new()));

    struct Large(BTreeMap<NonNull<Header>, Layout>);
    // SAFETY: addresses of nodes, looked at under the lock, where they are alive.
    unsafe impl Send for Large {}

    /// A thread's heap; given back when the thread ends.
    struct Lease(&'static Heap);

    impl Lease {
        fn take() -> Self {
            let idle = lock(&IDLE_HEAPS).pop();
            Self(idle.unwrap_or_else(|| Box::leak(Box::new(Heap::new()))))
        }
    }

    impl Drop for Lease {
        fn drop(&mut self) {
            lock(&IDLE_HEAPS).push(self.0);
        }
    }

    std::thread_local! {
        static HEAP: Lease = Lease::take();
    }

    impl Heap {
        fn new() -> Self {
            Self(UnsafeCell::new(std::array::from_fn(|_| Class {
                free: Cell::new(std::ptr::null_mut()),
                fresh: Cell::new(std::ptr::null_mut()),
                fresh_end: Cell::new(std::ptr::null_mut()),
                remote: AtomicPtr::new(std::ptr::null_mut()),
            })))
        }

        fn class(&self, class: usize) -> &Class {
            // SAFETY: only shared references are ever made of the array.
            let classes = unsafe { &*self.0.get() };
            &classes[class]
        }

        /// # Safety
        ///
        /// The calling thread has the heap.
        unsafe fn alloc(&'static self, class: usize) -> NonNull<Header> {
            let lists = self.class(class);
            let mut slot = lists.free.get();
            if slot.is_null() {
                // Acquire: what the freeing threads did to the slots comes before.
                slot = lists.remote.swap(std::ptr::null_mut(), Ordering::Acquire);
            }
            if let Some(found) = NonNull::new(slot) {
                // SAFETY: a vacant slot has a header.
                let next = unsafe { found.as_ref() }.next.load(Ordering::Relaxed);
                lists.free.set(next);
                return found;
            }
            self.fresh(class)
        }

        fn fresh(&'static self, class: usize) -> NonNull<Header> {
            let lists = self.class(class);
            let slot_bytes = (class + 1) * STEP;
            if (lists.fresh_end.get() as usize) - (lists.fresh.get() as usize) < slot_bytes {
                // SAFETY: the size is not zero.
                let memory = unsafe { alloc_zeroed(CHUNK_LAYOUT) };
                let Some(chunk) = NonNull::new(memory.cast::<Chunk>()) else {
                    handle_alloc_error(CHUNK_LAYOUT)
                };
                // SAFETY: new memory, aligned, large enough.
                unsafe {
                    chunk.write(Chunk {
                        owner: self,
                        slot_bytes,
                    })
                };
                lists.fresh.set(memory.wrapping_add(FIRST_SLOT));
                lists.fresh_end.set(memory.wrapping_add(CHUNK_BYTES));
                lock(&CHUNKS).0.push(chunk);
            }
            let slot = lists.fresh.get();
            lists.fresh.set(slot.wrapping_add(slot_bytes));
            // SAFETY: it points into a chunk.
            unsafe { NonNull::new_unchecked(slot.cast()) }
        }
    }

    fn class_of(layout: Layout) -> Option<usize> {
        let fits = layout.size() <= MAX_SLOT_BYTES && layout.align() <= STEP;
        fits.then(|| layout.size().div_ceil(STEP) - 1)
    }

    /// A vacant slot for a node of this layout: its word is zero, the rest holds anything.
    pub(in super::super) fn alloc(layout: Layout) -> NonNull<Header> {
        let Some(class) = class_of(layout) else {
            // SAFETY: a node has a header, so its size is not zero.
            let memory = unsafe { alloc_zeroed(layout) };
            let Some(node) = NonNull::new(memory.cast::<Header>()) else {
                handle_alloc_error(layout)
            };
            lock(&LARGE).0.insert(node, layout);
            return node;
        };
        // SAFETY: this thread has the heap.
        let slot = HEAP.try_with(|heap| unsafe { heap.0.alloc(class) });
        slot.unwrap_or_else(|_| {
            // The thread is ending: borrow a heap for this one.
            let lease = Lease::take();
            // SAFETY: as above.
            unsafe { lease.0.alloc(class) }
        })
    }

    /// Gives a slot back.
    ///
    /// # Safety
    ///
    /// It came from [`alloc`] with this layout, its value is gone, and nobody uses it any more.
    pub(in super::super) unsafe fn free(node: NonNull<Header>, layout: Layout) {
        let Some(class) = class_of(layout) else {
            lock(&LARGE).0.remove(&node);
            // SAFETY: it was allocated with this layout, and cannot be found any more.
            unsafe { dealloc(node.as_ptr().cast(), layout) };
            return;
        };
        // SAFETY: a slot's header is always readable.
        let header = unsafe { node.as_ref() };
        // Vacant from here on (invariant 1).
        header.word.store(0, Ordering::Release);
        let chunk = node
            .as_ptr()
            .map_addr(|addr| addr & !(CHUNK_BYTES - 1))
            .cast::<Chunk>();
        // SAFETY: slots lie in chunks, which are never freed.
        let owner = unsafe { (*chunk).owner };
        let own = HEAP
            .try_with(|heap| std::ptr::eq(heap.0, owner))
            .unwrap_or(false);
        let lists = owner.class(class);
        if own {
            header.next.store(lists.free.get(), Ordering::Relaxed);
            lists.free.set(node.as_ptr());
            return;
        }
        let mut head = lists.remote.load(Ordering::Relaxed);
        loop {
            header.next.store(head, Ordering::Relaxed);
            let pushed = lists.remote.compare_exchange_weak(
                head,
                node.as_ptr(),
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }

    /// Calls `f` with every slot whose word is not zero. The node may be dying, or be gone by the
    /// time `f` looks: `f` may read the word, and the rest once it has got a handle.
    pub(in super::super) fn for_each(mut f: impl FnMut(NonNull<Header>)) {
        let chunks = lock(&CHUNKS).0.clone();
        for chunk in chunks {
            // SAFETY: chunks are never freed.
            let slot_bytes = unsafe { chunk.as_ref() }.slot_bytes;
            let mut at = FIRST_SLOT;
            while at + slot_bytes <= CHUNK_BYTES {
                // SAFETY: inside the chunk.
                let slot = unsafe { chunk.byte_add(at) }.cast::<Header>();
                // SAFETY: invariant 1: the word of a slot can always be read.
                if unsafe { &(*slot.as_ptr()).word }.load(Ordering::Acquire) != 0 {
                    f(slot);
                }
                at += slot_bytes;
            }
        }
        // Under the lock, since these are really freed.
        for node in lock(&LARGE).0.keys() {
            // SAFETY: it is in the list, so not freed.
            if unsafe { &(*node.as_ptr()).word }.load(Ordering::Acquire) != 0 {
                f(*node);
            }
        }
    }
}

#[cfg(loom)]
mod imp {
    use super::{Header, Layout, NonNull};

    pub(in super::super) fn alloc(layout: Layout) -> NonNull<Header> {
        // SAFETY: a node has a header, so its size is not zero.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        NonNull::new(memory.cast()).expect("models are small")
    }

    /// The memory is not used again, so that whoever still looks at it finds nothing that loom
    /// knows, which panics.
    pub(in super::super) unsafe fn free(node: NonNull<Header>, layout: Layout) {
        // SAFETY: loom's atomics have destructors.
        unsafe { std::ptr::drop_in_place(node.as_ptr()) };
        // SAFETY: the whole of the node, which is the caller's.
        unsafe { node.cast::<u8>().write_bytes(0xFF, layout.size()) };
    }

    pub(in super::super) fn for_each(_: impl FnMut(NonNull<Header>)) {}
}
