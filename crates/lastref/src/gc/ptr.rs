//! [`Gc`]: a counted handle on a node whose cycles are collected.

use std::alloc::Layout;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::header::{COUNT, Header, ONE_CLONE, VTable, check_count, release};
use super::slab;
use super::sync::{AtomicU64, Ordering};
use super::trace::Trace;
use super::weak::{Weak, WeakBox};

/// A node in memory: the header, then the value.
#[repr(C)]
pub(super) struct Node<T: ?Sized> {
    pub(super) header: Header,
    pub(super) value: T,
}

/// A counted handle on a node, as [`Arc`] is, whose cycles are found and freed.
///
/// Cloning makes another handle and copies nothing. The value dies at the moment its last handle
/// goes, on whatever thread that is. What can be reached only from itself dies when a
/// [collection](super::collect) finds it. Values that refer to each other do so through handles in
/// [`Slot`](super::Slot)s, and say so by [`Trace`].
///
/// # Examples
///
/// ```
/// use lastref::gc::{self, Gc, Slot, Trace};
///
/// #[derive(Trace)]
/// struct Person {
///     name: String,
///     friends: Slot<Vec<Gc<Person>>>,
/// }
///
/// let ada = Gc::new(Person { name: "Ada".into(), friends: Slot::default() });
/// let bob = Gc::new(Person { name: "Bob".into(), friends: Slot::default() });
/// ada.friends.lock().push(bob.clone());
/// bob.friends.lock().push(ada.clone());
/// let weak = Gc::downgrade(&ada);
///
/// drop((ada, bob)); // unreachable now, but each still has a handle on the other
/// assert_eq!(weak.upgrade().unwrap().name, "Ada");
/// gc::collect(2)?;
/// assert!(weak.upgrade().is_none());
/// # Ok::<(), gc::InvalidGeneration>(())
/// ```
pub struct Gc<T: ?Sized> {
    node: NonNull<Node<T>>,
    owns: PhantomData<Node<T>>,
}

// SAFETY: handles give shared access to the value and may drop it on any thread, as `Arc` does.
unsafe impl<T: ?Sized + Send + Sync> Send for Gc<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send + Sync> Sync for Gc<T> {}

struct Types<T>(PhantomData<T>);

impl<T: Trace> Types<T> {
    const VTABLE: VTable = VTable {
        trace: |node, tracer| {
            // SAFETY: the caller says that the value is alive; the vtable is of its type.
            unsafe { &node.cast::<Node<T>>().as_ref().value }.trace(tracer);
        },
        drop_value: |node| {
            // SAFETY: the caller says that the value is alive and dropped only here.
            let value = unsafe { &raw mut (*node.cast::<Node<T>>().as_ptr()).value };
            // SAFETY: as above.
            unsafe { std::ptr::drop_in_place(value) };
        },
        layout: Layout::new::<Node<T>>(),
        finalize: None,
        type_name: std::any::type_name::<T>,
        drops_more: true,
    };
    const WITH_FINALIZER: VTable = VTable {
        finalize: Some(|node| {
            // SAFETY: the caller says that the value is alive; the vtable is of its type.
            unsafe { &node.cast::<Node<T>>().as_ref().value }.finalize();
        }),
        ..Self::VTABLE
    };
    const PLAIN: VTable = VTable {
        drops_more: false,
        ..Self::VTABLE
    };
}

impl<T: Trace + Send + Sync + 'static> Gc<T> {
    /// A node that holds `value`, and the first handle on it.
    #[must_use]
    pub fn new(value: T) -> Self {
        let vtable = const {
            if std::mem::needs_drop::<T>() {
                &Types::<T>::VTABLE
            } else {
                &Types::<T>::PLAIN
            }
        };
        let vtable = if T::has_finalizer() {
            &Types::<T>::WITH_FINALIZER
        } else {
            vtable
        };
        let leaf = T::is_leaf(4) && !T::has_finalizer();
        let node = slab::alloc(Layout::new::<Node<T>>()).cast::<Node<T>>();
        // SAFETY: the slot is vacant and large enough; no reference is made.
        let place = unsafe { &raw mut (*node.as_ptr()).value };
        // SAFETY: nobody else writes to it.
        unsafe { place.write(value) };
        // SAFETY: as above.
        unsafe { Header::init(node.cast(), vtable, leaf) };
        Self {
            node,
            owns: PhantomData,
        }
    }

    /// A node whose value is made from a weak handle on itself. The handle finds nothing until the
    /// node is finished. To close a cycle of strong handles, use a [`Slot`](super::Slot).
    #[must_use]
    pub fn new_cyclic(make: impl FnOnce(&Weak<T>) -> T) -> Self {
        let shared = Arc::new(WeakBox::new());
        let this = Self::new(make(&Weak::from_box(Arc::clone(&shared))));
        // SAFETY: the handle keeps the header.
        shared.open(unsafe { this.header().as_ref() }, this.header());
        this
    }

    /// A weak handle on the node.
    #[must_use]
    pub fn downgrade(this: &Self) -> Weak<T> {
        // SAFETY: the handle keeps the header.
        Weak::from_box(WeakBox::of(
            unsafe { this.header().as_ref() },
            this.header(),
        ))
    }
}

impl<T> Gc<T> {
    /// # Safety
    ///
    /// The caller gives one count of the node, which is of this type, to the handle.
    pub(super) const unsafe fn from_node(node: NonNull<Node<T>>) -> Self {
        Self {
            node,
            owns: PhantomData,
        }
    }
}

impl<T: ?Sized> Gc<T> {
    pub(super) const fn header(&self) -> NonNull<Header> {
        self.node.cast()
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the handle keeps the node.
        unsafe { &(*self.node.as_ptr()).header.word }
    }

    /// Handles on the node now, those inside a cycle included.
    #[must_use]
    pub fn strong_count(this: &Self) -> usize {
        usize::try_from(this.word().load(Ordering::Relaxed) & COUNT).unwrap_or(usize::MAX)
    }

    /// Whether both are handles on the same node.
    #[must_use]
    pub fn ptr_eq<U: ?Sized>(this: &Self, other: &Gc<U>) -> bool {
        this.header() == other.header()
    }

    /// The address of the value, without giving the handle up.
    #[must_use]
    pub const fn as_ptr(this: &Self) -> *const T {
        // SAFETY: the handle keeps the node; no reference is made.
        unsafe { &raw const (*this.node.as_ptr()).value }
    }

    /// The address of the value; the handle's count goes with it. To be given back by
    /// [`from_raw`](Self::from_raw).
    #[must_use]
    pub fn into_raw(this: Self) -> *const T {
        Self::as_ptr(&std::mem::ManuallyDrop::new(this))
    }

    /// The handle that [`into_raw`](Self::into_raw) was made from.
    ///
    /// Between the two the pointer may be coerced, to a trait object for one, which is what
    /// [`gc_coerce!`](crate::gc_coerce) does.
    ///
    /// # Safety
    ///
    /// `value` must come from `into_raw`, by nothing but an unsizing coercion, and not be used for
    /// a second handle.
    #[must_use]
    pub unsafe fn from_raw(value: *const T) -> Self {
        // SAFETY: the count that came with the pointer keeps the value.
        let layout = Layout::for_value(unsafe { &*value });
        // The value lies behind the header, at the next multiple of its alignment.
        let offset = size_of::<Header>().next_multiple_of(layout.align());
        let node = value.wrapping_byte_sub(offset) as *mut Node<T>;
        // SAFETY: it is inside an allocation, so not null.
        let node = unsafe { NonNull::new_unchecked(node) };
        Self {
            node,
            owns: PhantomData,
        }
    }
}

/// Makes a `Gc<dyn Trait>` of a `Gc<T>` where `T: Trait`; stable Rust cannot do it by itself.
///
/// ```
/// use lastref::gc::{Gc, Trace};
/// use lastref::gc_coerce;
///
/// trait Shape: Trace + Send + Sync {
///     fn area(&self) -> f64;
/// }
/// #[derive(Trace)]
/// struct Square(f64);
/// impl Shape for Square {
///     fn area(&self) -> f64 {
///         self.0 * self.0
///     }
/// }
/// let shape: Gc<dyn Shape> = gc_coerce!(Gc::new(Square(3.0)) => dyn Shape);
/// assert_eq!(shape.area(), 9.0);
/// ```
#[macro_export]
macro_rules! gc_coerce {
    ($gc:expr => $target:ty) => {{
        let value = $crate::gc::Gc::into_raw($gc);
        let value: *const $target = value;
        // SAFETY: `value` comes from `into_raw` by an unsizing coercion.
        unsafe { $crate::gc::Gc::from_raw(value) }
    }};
}

impl<T: ?Sized> Clone for Gc<T> {
    #[inline]
    fn clone(&self) -> Self {
        check_count(self.word().fetch_add(ONE_CLONE, Ordering::Relaxed));
        Self {
            node: self.node,
            owns: PhantomData,
        }
    }
}

impl<T: ?Sized> Drop for Gc<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the handle's count is given back with it.
        unsafe { release(self.header()) };
    }
}

impl<T: ?Sized> Deref for Gc<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the handle keeps the value, and nobody has it mutably.
        unsafe { &(*self.node.as_ptr()).value }
    }
}

impl<T: ?Sized> AsRef<T> for Gc<T> {
    fn as_ref(&self) -> &T {
        self
    }
}

impl<T: Trace + Send + Sync + 'static> From<T> for Gc<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: fmt::Debug + ?Sized> fmt::Debug for Gc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: fmt::Display + ?Sized> fmt::Display for Gc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: PartialEq + ?Sized> PartialEq for Gc<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq + ?Sized> Eq for Gc<T> {}

impl<T: Hash + ?Sized> Hash for Gc<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}
