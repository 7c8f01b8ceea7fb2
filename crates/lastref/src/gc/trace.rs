//! What a type says about its edges.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::ptr::NonNull;

use super::collect::Scan;
use super::header::{Header, marks};
use super::object::Object;
use super::ptr::Gc;
use crate::Tensor;

/// A type that says which [`Gc`] handles it owns. To be derived: `#[derive(Trace)]`.
///
/// # Safety
///
/// [`trace`](Self::trace) reports every `Gc` that the value owns **at most once**, and none that it
/// does not own alone: what is behind an `Rc`, an `Arc` or a reference has other owners. Leaving
/// one out leaks the cycles through it; reporting one twice frees live data.
///
/// A handle that can change after the value is shared lives in a [`Slot`](super::Slot): this trait
/// is implemented for no cell and no lock of the standard library.
pub unsafe trait Trace {
    /// Calls [`Trace::trace`] of everything the value owns that can hold a [`Gc`].
    fn trace(&self, tracer: &mut Tracer<'_>);

    /// Whether values of this type can never hold a [`Gc`], as far as can be told by looking
    /// `levels` types deep; false is always right. Nodes of such types are counted and nothing
    /// else: they are never candidates.
    #[must_use]
    fn is_leaf(levels: u32) -> bool
    where
        Self: Sized,
    {
        let _ = levels;
        false
    }

    /// Whether [`finalize`](Self::finalize) does anything.
    #[must_use]
    fn has_finalizer() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Called once before the value dies, whether it is found in a cycle or its last handle goes.
    /// All it refers to is intact. It may give handles on itself and its neighbours to others: what
    /// they hold then does not die, and is not finalized again.
    fn finalize(&self) {}
}

/// Visits edges, for [`Trace::trace`].
pub struct Tracer<'a> {
    pub(super) mode: Mode<'a>,
    /// A slot was locked or poisoned, or had changed: the node counts as live.
    pub(super) busy: bool,
    /// What is traced now is the content of a slot.
    pub(super) in_slot: bool,
}

pub(super) enum Mode<'a> {
    /// Count edges and note the versions of slots.
    Scan(&'a mut Scan),
    /// Compare the versions of slots, from this position on.
    Verify(&'a Scan, usize),
    /// Empty the slots.
    Sever,
    /// List the targets of edges.
    List(&'a mut Vec<Object>),
}

impl fmt::Debug for Tracer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracer").finish_non_exhaustive()
    }
}

impl<'a> Tracer<'a> {
    pub(super) fn new(mode: Mode<'a>) -> Self {
        Self {
            mode,
            busy: false,
            in_slot: false,
        }
    }

    pub(super) fn edge(&mut self, target: NonNull<Header>) {
        match &mut self.mode {
            Mode::Scan(scan) => {
                // SAFETY: the handle that is being reported keeps the target.
                let header = unsafe { target.as_ref() };
                // Neither can be garbage in a cycle; what only they hold is held.
                if !header.has(marks::LEAF | marks::FROZEN) {
                    scan.add_edge(target);
                }
            }
            // SAFETY: the handle that is being reported keeps the target.
            Mode::List(targets) => targets.extend(unsafe { Object::upgrade(target) }),
            Mode::Verify(..) | Mode::Sever => {}
        }
    }

    /// Reports memory on a device that goes when the value goes: what decides which candidates are
    /// looked at first.
    pub(super) fn device_bytes(&mut self, bytes: u64) {
        if let Mode::Scan(scan) = &mut self.mode {
            scan.add_bytes(bytes);
        }
    }
}

// SAFETY: the handle is reported once.
unsafe impl<T: ?Sized> Trace for Gc<T> {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        tracer.edge(self.header());
    }
}

// SAFETY: a tensor holds no handle.
unsafe impl Trace for Tensor {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        if self.is_cuda() {
            tracer.device_bytes(self.storage().nbytes());
        }
    }

    fn is_leaf(_: u32) -> bool {
        true
    }
}

/// Implements [`Trace`] for types that can hold no handle.
macro_rules! leaf {
    ($($type:ty),+ $(,)?) => {$(
        // SAFETY: there is nothing to report.
        unsafe impl Trace for $type {
            fn trace(&self, _: &mut Tracer<'_>) {}

            fn is_leaf(_: u32) -> bool {
                true
            }
        }
    )+};
}

leaf!(
    (),
    bool,
    char,
    u8,
    u16,
    u32,
    u64,
    u128,
    usize,
    i8,
    i16,
    i32,
    i64,
    i128,
    isize,
    f32,
    f64,
    String,
    &'static str,
    crate::WeakTensor,
    crate::DType,
    crate::Device,
    half::f16,
    half::bf16,
    std::time::Duration,
    std::time::Instant,
    std::path::PathBuf,
);

// SAFETY: a weak handle owns nothing.
unsafe impl<T> Trace for super::Weak<T> {
    fn trace(&self, _: &mut Tracer<'_>) {}

    fn is_leaf(_: u32) -> bool {
        true
    }
}

/// Implements [`Trace`] for a container by tracing what it iterates over.
macro_rules! container {
    ($([$($bounds:tt)*] $type:ty);+ $(;)?) => {$(
        // SAFETY: each element is owned once, and traced once.
        unsafe impl<T: Trace $($bounds)*> Trace for $type {
            fn trace(&self, tracer: &mut Tracer<'_>) {
                self.iter().for_each(|element| element.trace(tracer));
            }

            fn is_leaf(levels: u32) -> bool {
                T::is_leaf(levels)
            }
        }
    )+};
}

container!(
    [] Option<T>;
    [] Vec<T>;
    [] VecDeque<T>;
    [+ Ord] BTreeSet<T>;
    [+ Eq + Hash, S] HashSet<T, S>;
    [, const N: usize] [T; N];
);

macro_rules! map {
    ($([$($bounds:tt)*] $type:ty);+ $(;)?) => {$(
        // SAFETY: each key and value is owned once, and traced once.
        unsafe impl<$($bounds)*> Trace for $type {
            fn trace(&self, tracer: &mut Tracer<'_>) {
                for (key, value) in self {
                    key.trace(tracer);
                    value.trace(tracer);
                }
            }

            fn is_leaf(levels: u32) -> bool {
                K::is_leaf(levels) && V::is_leaf(levels)
            }
        }
    )+};
}

map!(
    [K: Trace + Ord, V: Trace] BTreeMap<K, V>;
    [K: Trace + Eq + Hash, V: Trace, S] HashMap<K, V, S>;
);

// SAFETY: the box owns its value alone.
unsafe impl<T: Trace + ?Sized> Trace for Box<T> {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        (**self).trace(tracer);
    }
}

macro_rules! tuple {
    ($($name:ident)+) => {
        // SAFETY: each field is owned once, and traced once.
        unsafe impl<$($name: Trace),+> Trace for ($($name,)+) {
            #[expect(non_snake_case, reason = "the type parameters name the fields")]
            fn trace(&self, tracer: &mut Tracer<'_>) {
                let ($($name,)+) = self;
                $($name.trace(tracer);)+
            }

            fn is_leaf(levels: u32) -> bool {
                true $(&& $name::is_leaf(levels))+
            }
        }
    };
}

tuple!(A);
tuple!(A B);
tuple!(A B C);
tuple!(A B C D);
