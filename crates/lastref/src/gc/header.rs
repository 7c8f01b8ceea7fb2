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
//! | `SCAN` | a collection | it is reading the value; the value stays |
//! | `DROPPING` | the drop to zero | the value is being dropped, or whoever set `SCAN` will drop it |
//! | `DEAD` | after the value was dropped | only the header is left |
//! | `CONDEMNED` | a collection | it is deciding: weak handles may not be upgraded, and wait |
//!
//! # Invariants
//!
//! 1. The value is alive while the count is above zero, or `DROPPING` is set and `DEAD` is not.
//! 2. The value is dropped once: by whoever takes the count from 1 to 0, unless `SCAN` was set at
//!    that moment; then by whoever clears `SCAN`.
//! 3. The header is freed once: by whoever makes `DEAD` set and `BUFFERED` and `TABLED` both clear.
//! 4. A node becomes a candidate *before* the count is given away: afterwards the node may be gone.
//!    And in one step with the check that it still is one: else a collection could take it off the
//!    stack in between, find it held by the handle that is about to go, and nobody would look at
//!    it again.
//! 5. Only a collection holding the collector's lock sets or clears `TABLED`, `SCAN` and
//!    `CONDEMNED`, and reads `index`.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use super::sync::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Mutex, Ordering, lock};
use super::sync::{global, thread_local};
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
    pub(super) free: unsafe fn(NonNull<Header>),
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
}

impl Header {
    pub(super) fn new(vtable: &'static VTable, leaf: bool) -> Self {
        Self {
            word: AtomicU64::new(1),
            vtable,
            next: AtomicPtr::new(std::ptr::null_mut()),
            weak: AtomicPtr::new(std::ptr::null_mut()),
            index: AtomicU32::new(0),
            marks: AtomicU8::new(if leaf { marks::LEAF } else { 0 }),
        }
    }

    pub(super) fn has(&self, mark: u8) -> bool {
        self.marks.load(Ordering::Relaxed) & mark != 0
    }
}
