//! [`Object`]: a handle on a node of any type, for looking around.

use std::fmt;
use std::ptr::NonNull;

use super::header::{
    CONDEMNED, COUNT, DEAD, DROPPING, Header, ONE_CLONE, check_count, marks, release,
};
use super::ptr::Gc;
use super::slab;
use super::sync::Ordering;
use super::trace::{Mode, Tracer};

/// A handle on a node whose type is not known. It keeps the node, as [`Gc`] does.
///
/// Looking at a node makes it a candidate: the next run looks at it too.
pub struct Object {
    node: NonNull<Header>,
}

// SAFETY: nodes hold values that are `Send + Sync`, and the handle gives no access to them.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// # Safety
    ///
    /// The caller gives a count of the node to the handle.
    pub(super) const unsafe fn from_counted(node: NonNull<Header>) -> Self {
        Self { node }
    }

    /// A handle on the node in a slot, if there is one that is not dying.
    ///
    /// # Safety
    ///
    /// The address is that of a slot, or of a header that is kept.
    pub(super) unsafe fn upgrade(node: NonNull<Header>) -> Option<Self> {
        // SAFETY: the caller's promise; a slot's word is always readable.
        let word_of = unsafe { &(*node.as_ptr()).word };
        let mut word = word_of.load(Ordering::Acquire);
        loop {
            if word & COUNT == 0 || word & (DROPPING | DEAD | CONDEMNED) != 0 {
                return None;
            }
            check_count(word);
            let more = word.wrapping_add(ONE_CLONE);
            match word_of.compare_exchange_weak(word, more, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Self { node }),
                Err(now) => word = now,
            }
        }
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the handle keeps the header.
        unsafe { self.node.as_ref() }
    }

    /// The name of its type, as [`std::any::type_name`] gives it.
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        (self.header().vtable.type_name)()
    }

    /// A number that no other node has while this one lives.
    #[must_use]
    pub fn id(&self) -> usize {
        self.node.addr().get()
    }

    /// Handles on the node, this one not counted.
    #[must_use]
    pub fn strong_count(&self) -> usize {
        let count = self.header().word.load(Ordering::Relaxed) & COUNT;
        usize::try_from(count)
            .unwrap_or(usize::MAX)
            .saturating_sub(1)
    }

    /// Whether the node can be in a cycle, as far as its type says.
    #[must_use]
    pub fn is_tracked(&self) -> bool {
        !self.header().has(marks::LEAF)
    }

    /// Whether its finalizer ran.
    #[must_use]
    pub fn is_finalized(&self) -> bool {
        self.header().has(marks::FINALIZED)
    }

    /// Whether it is frozen.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.header().has(marks::FROZEN)
    }

    /// The nodes it refers to, as often as it does. `None` if one of its slots is locked.
    #[must_use]
    pub fn referents(&self) -> Option<Vec<Self>> {
        let mut targets = Vec::new();
        let mut tracer = Tracer::new(Mode::List(&mut targets));
        let trace = self.header().vtable.trace;
        // SAFETY: the handle keeps the value.
        unsafe { trace(self.node, &mut tracer) };
        (!tracer.busy).then_some(targets)
    }
}

impl<T: ?Sized> From<&Gc<T>> for Object {
    fn from(gc: &Gc<T>) -> Self {
        let gc = std::mem::ManuallyDrop::new(gc.clone());
        Self { node: gc.header() }
    }
}

impl Clone for Object {
    fn clone(&self) -> Self {
        check_count(self.header().word.fetch_add(ONE_CLONE, Ordering::Relaxed));
        Self { node: self.node }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the handle's count is given back with it.
        unsafe { release(self.node) };
    }
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        self.node == other.node
    }
}

impl Eq for Object {}

impl std::hash::Hash for Object {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.node.hash(state);
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} at {:#x}>", self.type_name(), self.id())
    }
}

/// Handles on all nodes that are not dying.
pub(super) fn all() -> Vec<Object> {
    let mut objects = Vec::new();
    // SAFETY: `for_each` gives slots.
    slab::for_each(|node| objects.extend(unsafe { Object::upgrade(node) }));
    objects
}

pub(super) fn freeze() {
    for object in all() {
        object
            .header()
            .marks
            .fetch_or(marks::FROZEN, Ordering::AcqRel);
    }
}

pub(super) fn unfreeze() {
    for object in all() {
        object
            .header()
            .marks
            .fetch_and(!marks::FROZEN, Ordering::AcqRel);
    }
    super::collect::requeue_postponed();
}

pub(super) fn freeze_count() -> usize {
    all().iter().filter(|object| object.is_frozen()).count()
}
