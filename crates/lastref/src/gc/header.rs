//! The header of a node: one 64-bit word that says everything, and who may free what.
//!
//! ```text
//!  63                    34 33 32 31 30 29 28 27                         0
//! ┌────────────────────────┬──┬──┬──┬──┬──┬──┬────────────────────────────┐
//! │ clone version (30)     │CO│DE│DR│SC│TA│BU│ count of strong handles    │
//! └────────────────────────┴──┴──┴──┴──┴──┴──┴────────────────────────────┘
//! ```
//!
//! A clone adds one to the count *and* to the version in one step; the version runs off the top of
//! the word by itself. So an unchanged word means that between two looks no handle was cloned, and
//! none dropped either, since a drop without a clone changes the count.
//!
//! | flag | set by | while it is set |
//! |---|---|---|
//! | `BUFFERED` | a drop to a count above zero | the candidate stack (or a collection that is killing the node) will look at it; the header stays |
//! | `TABLED` | a collection | its table points here; the header stays |
//! | `SCAN` | a collection | it is reading the value; the value stays, and its last drop waits |
//! | `DROPPING` | the drop to zero | the value is being dropped, or about to be |
//! | `DEAD` | after the value was dropped | only the header is left |
//! | `CONDEMNED` | a collection | it is deciding: weak handles may not be upgraded, and wait |
//!
//! # Invariants
//!
//! 1. The value is alive while the count is above zero, or `DROPPING` is set and `DEAD` is not.
//! 2. The value is dropped once: by whoever takes the count from 1 to 0, after waiting for `SCAN` to
//!    clear. Only if that thread is the one that reads the value, the collection drops it later.
//! 3. The header is freed once: by whoever makes `DEAD` set and `BUFFERED` and `TABLED` both clear.
//! 4. A node becomes a candidate *before* the count is given away: afterwards the node may be gone.
//!    And in one step with the check that it still is one: else a collection could take it off the
//!    stack in between, find it held by the handle that is about to go, and nobody would look at
//!    it again.
//!    And a collection clears `BUFFERED` of all that it takes before it traces anything: a drop that
//!    finds it set comes before every trace of that collection.
//! 5. Only a collection holding the collector's lock sets or clears `TABLED`, `SCAN` and
//!    `CONDEMNED`, and reads `index`.

use std::alloc::Layout;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::sync::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, lock};
use super::sync::{global, thread_local, yield_now};
use super::trace::Tracer;
use super::weak::WeakBox;

pub(super) const COUNT: u64 = (1 << 28) - 1;
pub(super) const BUFFERED: u64 = 1 << 28;
pub(super) const TABLED: u64 = 1 << 29;
pub(super) const SCAN: u64 = 1 << 30;
pub(super) const DROPPING: u64 = 1 << 31;
pub(super) const DEAD: u64 = 1 << 32;
pub(super) const CONDEMNED: u64 = 1 << 33;
/// One clone: one more handle, one version on.
pub(super) const ONE_CLONE: u64 = (1 << 34) | 1;
/// What a verdict compares: count and version.
pub(super) const VERDICT: u64 = !(BUFFERED | TABLED | SCAN | DROPPING | DEAD | CONDEMNED);

/// Permanent or sticky properties, outside the word since they take part in no race.
pub(super) mod marks {
    /// The type has no edges: never a candidate, never traced.
    pub(in super::super) const LEAF: u8 = 1;
    /// The finalizer ran.
    pub(in super::super) const FINALIZED: u8 = 2;
    /// Not to be collected; a root.
    pub(in super::super) const FROZEN: u8 = 4;
}

/// What is known of a node's type.
pub(super) struct VTable {
    pub(super) trace: unsafe fn(NonNull<Header>, &mut Tracer<'_>),
    pub(super) drop_value: unsafe fn(NonNull<Header>),
    pub(super) layout: Layout,
    pub(super) finalize: Option<unsafe fn(NonNull<Header>)>,
    pub(super) type_name: fn() -> &'static str,
    /// Whether dropping the value can drop other nodes or run code that does.
    pub(super) drops_more: bool,
}

#[repr(C)]
pub(super) struct Header {
    pub(super) word: AtomicU64,
    pub(super) vtable: &'static VTable,
    /// The next candidate on the stack.
    pub(super) next: AtomicPtr<Header>,
    /// Where weak handles look; null until there is one.
    pub(super) weak: AtomicPtr<WeakBox>,
    /// Position in the table of the collection that set `TABLED`.
    pub(super) index: AtomicU32,
    pub(super) marks: AtomicU8,
    /// The device bytes found below this node when it was last a candidate: how many bits the
    /// number has, 0 if it was never looked at.
    pub(super) weight: AtomicU8,
    /// A model fails if a header is not freed.
    #[cfg(loom)]
    pub(super) track: loom::alloc::Track<()>,
}

impl Header {
    /// Writes the header of a vacant slot; from its last step on the node can be found.
    ///
    /// # Safety
    ///
    /// The slot is vacant and the caller's, and the value behind the header has been written.
    #[expect(
        clippy::multiple_unsafe_ops_per_block,
        reason = "the place of a field, and the write to it"
    )]
    pub(super) unsafe fn init(slot: NonNull<Self>, vtable: &'static VTable, leaf: bool) {
        let header = slot.as_ptr();
        // SAFETY: the caller's slot, to which nobody else writes.
        unsafe { (&raw mut (*header).vtable).write(vtable) };
        // SAFETY: as above.
        unsafe { (&raw mut (*header).next).write(AtomicPtr::new(std::ptr::null_mut())) };
        // SAFETY: as above.
        unsafe { (&raw mut (*header).weak).write(AtomicPtr::new(std::ptr::null_mut())) };
        // SAFETY: as above.
        unsafe { (&raw mut (*header).index).write(AtomicU32::new(0)) };
        let marks = if leaf { marks::LEAF } else { 0 };
        // SAFETY: as above.
        unsafe { (&raw mut (*header).marks).write(AtomicU8::new(marks)) };
        // SAFETY: as above.
        unsafe { (&raw mut (*header).weight).write(AtomicU8::new(0)) };
        #[cfg(loom)]
        // SAFETY: loom's atomics must be made, not found.
        unsafe {
            (&raw mut (*header).word).write(AtomicU64::new(0));
        }
        #[cfg(loom)]
        // SAFETY: as above.
        unsafe {
            (&raw mut (*header).track).write(loom::alloc::Track::new(()));
        }
        // SAFETY: the word of a slot is always initialised.
        unsafe { &(*header).word }.store(1, Ordering::Release);
    }

    pub(super) fn has(&self, mark: u8) -> bool {
        self.marks.load(Ordering::Relaxed) & mark != 0
    }
}

// ---- candidates --------------------------------------------------------------------------------

/// The stack of candidates: nodes whose count fell, but not to zero, since a collection last took
/// the stack. Global, so that whoever needs memory sees the candidates of every thread.
pub(super) struct Candidates {
    head: AtomicPtr<Header>,
    /// How many were pushed and not taken; a moment out of step with the stack itself.
    pub(super) num: AtomicUsize,
}

global! {
    pub(super) static CANDIDATES: Candidates = Candidates {
        head: AtomicPtr::new(std::ptr::null_mut()),
        num: AtomicUsize::new(0),
    };
}

impl Candidates {
    /// Puts a node on the stack. `BUFFERED` is set on it, by whoever calls this.
    pub(super) fn push(&self, node: NonNull<Header>) {
        // Counted first: a collection that takes it at once must not count below zero.
        let num = self.num.fetch_add(1, Ordering::Relaxed) + 1;
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: `BUFFERED` keeps the header (invariant 3).
            unsafe { node.as_ref() }.next.store(head, Ordering::Relaxed);
            let pushed = self.head.compare_exchange_weak(
                head,
                node.as_ptr(),
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => break,
                Err(other) => head = other,
            }
        }
        super::trigger::candidate_pushed(num);
    }

    /// Takes all candidates. `BUFFERED` stays set on them.
    pub(super) fn take(&self) -> Vec<NonNull<Header>> {
        let mut taken = Vec::new();
        self.take_each(|node| taken.push(node));
        taken
    }

    /// Takes all candidates, and calls `f` with each in turn, upon which `BUFFERED` is its.
    pub(super) fn take_each(&self, mut f: impl FnMut(NonNull<Header>)) {
        let mut num = 0;
        let mut next = self.head.swap(std::ptr::null_mut(), Ordering::Acquire);
        while let Some(node) = NonNull::new(next) {
            // SAFETY: `BUFFERED` keeps the header (invariant 3) until `f` has it.
            next = unsafe { node.as_ref() }.next.load(Ordering::Relaxed);
            num += 1;
            f(node);
        }
        self.num.fetch_sub(num, Ordering::Relaxed);
    }
}

// ---- giving a handle back ----------------------------------------------------------------------

/// To be called with the word before a clone. A count that overflows would free what is in use;
/// there is no way on from there.
#[inline]
pub(super) fn check_count(before: u64) {
    if before & COUNT > COUNT / 2 {
        std::process::abort();
    }
}

/// Gives one handle back.
///
/// # Safety
///
/// The caller owns one count of the node and does not use it afterwards.
#[inline]
pub(super) unsafe fn release(node: NonNull<Header>) {
    // SAFETY: the caller's count keeps the header, until the word is changed below.
    let header = unsafe { node.as_ref() };
    if header.has(marks::LEAF) {
        // A leaf is never buffered or tabled: nobody else can be at it.
        if header.word.fetch_sub(1, Ordering::AcqRel) & COUNT == 1 {
            // SAFETY: this was the last handle, and no flag is ever set on a leaf.
            unsafe { destroy(node) };
        }
        return;
    }
    let mut word = header.word.load(Ordering::Relaxed);
    loop {
        let last = word & COUNT == 1;
        if !last && word & BUFFERED == 0 {
            // Invariant 4.
            if header.word.fetch_or(BUFFERED, Ordering::AcqRel) & BUFFERED == 0 {
                CANDIDATES.push(node);
            }
            word = header.word.load(Ordering::Relaxed);
            continue;
        }
        let less = if last {
            (word - 1) | DROPPING
        } else {
            word - 1
        };
        let changed =
            header
                .word
                .compare_exchange_weak(word, less, Ordering::AcqRel, Ordering::Relaxed);
        match changed {
            Ok(_) => break,
            Err(now) => word = now,
        }
    }
    if word & COUNT == 1 {
        // SAFETY: this was the last handle; `word` is what it was before `DROPPING`.
        unsafe { last_dropped(node, word) };
    }
}

/// Ends the life of a node whose count just reached zero. `before` is its word before that.
///
/// # Safety
///
/// The caller took the count from 1 to 0, setting `DROPPING` in the same step.
pub(super) unsafe fn last_dropped(node: NonNull<Header>, before: u64) {
    if before & SCAN != 0 {
        if super::collect::left_to_this_collection(node) {
            return;
        }
        // SAFETY: the value was not dropped yet, so the header is alive.
        let header = unsafe { node.as_ref() };
        // As long as it takes to read one value: a collection waits for nobody.
        while header.word.load(Ordering::Acquire) & SCAN != 0 {
            yield_now();
        }
    }
    if before & (BUFFERED | TABLED | SCAN) == 0 {
        // SAFETY: count zero, no flag: nobody else knows the node, and nobody can learn of it.
        unsafe { destroy(node) };
    } else {
        // SAFETY: the caller took the count to zero, and `SCAN` is clear (invariant 2).
        unsafe { finish_drop(node) };
    }
}

/// Drops the value of a node that others still know, and frees it if they no longer do.
///
/// # Safety
///
/// The caller is the one that invariant 2 names.
pub(super) unsafe fn finish_drop(node: NonNull<Header>) {
    // SAFETY: the caller's promise.
    unsafe { die(node, Step::FinishDrop) };
}

/// Drops the value of a node that nobody else knows, and frees it.
///
/// # Safety
///
/// The count is zero, and neither `BUFFERED`, `TABLED` nor `SCAN` was set when it became so.
unsafe fn destroy(node: NonNull<Header>) {
    // SAFETY: the caller's promise.
    unsafe { die(node, Step::Destroy) };
}

/// Clears flags that kept a header, and frees it if nothing else does.
///
/// # Safety
///
/// The flags are the caller's to clear (invariants 3 and 5), and it does not use the node after.
pub(super) unsafe fn clear_flags(node: NonNull<Header>, flags: u64) {
    // SAFETY: the flags keep the header until they are cleared.
    let before = unsafe { node.as_ref() }
        .word
        .fetch_and(!flags, Ordering::AcqRel);
    if before & DEAD != 0 && before & (BUFFERED | TABLED) & !flags == 0 {
        // SAFETY: invariant 3.
        unsafe { free(node) };
    }
}

/// # Safety
///
/// The caller is the one that invariant 3 names, or the only one that knows the node.
unsafe fn free(node: NonNull<Header>) {
    // SAFETY: the header is alive, by the caller's promise.
    let header = unsafe { node.as_ref() };
    super::weak::forget_box(header);
    let layout = header.vtable.layout;
    // SAFETY: nobody uses the node any more, by the caller's promise.
    unsafe { super::slab::free(node, layout) };
}

// ---- iterative death ---------------------------------------------------------------------------

/// Values are dropped on the stack of the thread up to this depth, and from a queue beyond it: a
/// chain of ten million nodes dies in constant stack.
const MAX_DEPTH: u32 = 32;

#[derive(Clone, Copy)]
enum Step {
    Destroy,
    FinishDrop,
}

struct Deaths {
    depth: Cell<u32>,
    queue: RefCell<Vec<(NonNull<Header>, Step)>>,
}

thread_local! {
    static DEATHS: Deaths = Deaths { depth: Cell::new(0), queue: RefCell::new(Vec::new()) };
}

/// Runs one death now or, deep inside others, later on this thread.
///
/// # Safety
///
/// That of [`destroy`] or [`finish_drop`], as `step` says.
unsafe fn die(node: NonNull<Header>, step: Step) {
    // SAFETY: the header is alive until the step has run.
    if !unsafe { node.as_ref() }.vtable.drops_more {
        // SAFETY: the caller's promise.
        unsafe { run(node, step) };
        return;
    }
    let queued = DEATHS.try_with(|deaths| {
        let depth = deaths.depth.get();
        if depth >= MAX_DEPTH {
            deaths.queue.borrow_mut().push((node, step));
            return;
        }
        deaths.depth.set(depth + 1);
        // SAFETY: the caller's promise.
        unsafe { run(node, step) };
        if depth == 0 {
            // The queue is not borrowed while a value is dropped: that may push to it.
            while let Some((node, step)) = { deaths.queue.borrow_mut().pop() } {
                // SAFETY: the promise of whoever pushed it.
                unsafe { run(node, step) };
            }
        }
        deaths.depth.set(depth);
    });
    if queued.is_err() {
        // The thread is ending and its variables are gone: no queue, so on the stack.
        // SAFETY: the caller's promise.
        unsafe { run(node, step) };
    }
}

/// # Safety
///
/// That of [`destroy`] or [`finish_drop`], as `step` says.
unsafe fn run(node: NonNull<Header>, step: Step) {
    // SAFETY: the header is alive until it is freed below.
    let header = unsafe { node.as_ref() };
    if let Some(finalize) = header.vtable.finalize
        && header.marks.fetch_or(marks::FINALIZED, Ordering::AcqRel) & marks::FINALIZED == 0
    {
        // Alive once more for its finalizer, which may give handles away. Flags stay as they are.
        header.word.fetch_and(!DROPPING, Ordering::AcqRel);
        header.word.fetch_add(ONE_CLONE, Ordering::AcqRel);
        // SAFETY: the value is alive.
        run_foreign(header, || unsafe { finalize(node) });
        // SAFETY: the count added above.
        unsafe { release(node) };
        return;
    }
    // Weak handles find nothing from here on, also while the destructor runs.
    super::weak::close_box(header);
    let drop_value = header.vtable.drop_value;
    // SAFETY: the value is alive and this is its one drop (invariant 2). A panic in it is kept
    // here: the rest of the value has been dropped by then, and other nodes still have to be.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| unsafe { drop_value(node) })) {
        note_panic((header.vtable.type_name)(), &*panic);
    }
    match step {
        // SAFETY: nobody else knows the node.
        Step::Destroy => unsafe { free(node) },
        Step::FinishDrop => {
            let before = header.word.fetch_or(DEAD, Ordering::AcqRel);
            if before & (BUFFERED | TABLED) == 0 {
                // SAFETY: invariant 3.
                unsafe { free(node) };
            }
        }
    }
}

/// Runs a finalizer or a callback of a node; a panic in it is kept.
pub(super) fn run_foreign(header: &Header, code: impl FnOnce()) {
    run_named((header.vtable.type_name)(), code);
}

/// Runs foreign code; a panic in it is kept under a name.
pub(super) fn run_named(name: &str, code: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(code)) {
        note_panic(name, &*panic);
    }
}

global! {
    /// Panics of destructors and finalizers, oldest first.
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
}
/// More are not kept if nobody reads them.
const MAX_PANICS: usize = 100;

pub(super) fn note_panic(type_name: &str, panic: &(dyn Any + Send)) {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let mut panics = lock(&PANICS);
    if panics.len() < MAX_PANICS {
        panics.push(format!("{type_name}: {}", text.unwrap_or("no message")));
    }
}

/// Takes the messages of panics in destructors and finalizers since the last call.
pub(super) fn take_panics() -> Vec<String> {
    std::mem::take(&mut *lock(&PANICS))
}
