//! [`Weak`]: a handle that does not keep its node.
//!
//! Weak handles of one node share a [`WeakBox`], made with the first of them. The box holds the
//! node's address until the node dies, or a collection condemns it for good; both close the box
//! under its lock, before the header can go. So whoever finds the address under the lock may look
//! at the header.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use super::header::{CONDEMNED, COUNT, DEAD, DROPPING, Header, ONE_CLONE, check_count};
use super::ptr::{Gc, Node};
use super::sync::{Mutex, Ordering, lock, yield_now};

pub(super) type Callback = Box<dyn FnOnce() + Send>;

/// See the [module](self).
pub(super) struct WeakBox(Mutex<Content>);

struct Content {
    node: Option<NonNull<Header>>,
    callbacks: Vec<Callback>,
}

// SAFETY: the address is looked at under the lock only, where it is of a live header; callbacks
// are `Send`.
unsafe impl Send for WeakBox {}
// SAFETY: as above.
unsafe impl Sync for WeakBox {}

impl WeakBox {
    /// A box that leads nowhere yet.
    pub(super) fn new() -> Self {
        Self(Mutex::new(Content {
            node: None,
            callbacks: Vec::new(),
        }))
    }

    /// The box of a node, made if there is none. The caller holds a handle on the node.
    pub(super) fn of(header: &Header, node: NonNull<Header>) -> Arc<Self> {
        let found = match NonNull::new(header.weak.load(Ordering::Acquire)) {
            Some(found) => found,
            None => {
                let made = Arc::new(Self::new());
                lock(&made.0).node = Some(node);
                Self::install(header, made)
            }
        };
        // SAFETY: the header owns one count of its box until it is freed, which the caller's handle
        // prevents.
        unsafe { Arc::increment_strong_count(found.as_ptr()) };
        // SAFETY: the count added above is this one's.
        unsafe { Arc::from_raw(found.as_ptr()) }
    }

    /// Gives the header its box, unless another thread was first; returns the one it has.
    fn install(header: &Header, made: Arc<Self>) -> NonNull<Self> {
        let raw = Arc::into_raw(made).cast_mut();
        let installed = header.weak.compare_exchange(
            std::ptr::null_mut(),
            raw,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        match installed {
            // SAFETY: an `Arc` is not null.
            Ok(_) => unsafe { NonNull::new_unchecked(raw) },
            Err(other) => {
                // SAFETY: it came from `into_raw` above and was given to nobody.
                drop(unsafe { Arc::from_raw(raw) });
                // SAFETY: the exchange failed since it was not null.
                unsafe { NonNull::new_unchecked(other) }
            }
        }
    }

    /// Makes an empty box the box of a node that has none: for cyclic constructors, whose node
    /// nobody else knows yet.
    pub(super) fn open(self: Arc<Self>, header: &Header, node: NonNull<Header>) {
        lock(&self.0).node = Some(node);
        Self::install(header, self);
    }
}

fn content_of(header: &Header) -> Option<&WeakBox> {
    let found = NonNull::new(header.weak.load(Ordering::Acquire))?;
    // SAFETY: the header owns a count of its box until it is freed.
    Some(unsafe { found.as_ref() })
}

/// Weak handles find nothing from now on. Callbacks that are left run now.
pub(super) fn close_box(header: &Header) {
    if content_of(header).is_some() {
        for callback in take_callbacks(header, true) {
            run_callback(header, callback);
        }
    }
}

/// Takes the callbacks of a node's weak handles; with `close`, or if there are any, the handles
/// find nothing any more.
pub(super) fn take_callbacks(header: &Header, close: bool) -> Vec<Callback> {
    let Some(found) = content_of(header) else {
        return Vec::new();
    };
    let mut content = lock(&found.0);
    let callbacks = std::mem::take(&mut content.callbacks);
    if close || !callbacks.is_empty() {
        content.node = None;
    }
    callbacks
}

/// Whether a node has weak handles with callbacks.
pub(super) fn has_callbacks(header: &Header) -> bool {
    content_of(header).is_some_and(|found| !lock(&found.0).callbacks.is_empty())
}

pub(super) fn run_callback(header: &Header, callback: Callback) {
    super::header::run_foreign(header, callback);
}

/// Gives the header's count of its box back, as the header is freed.
pub(super) fn forget_box(header: &Header) {
    if let Some(found) = NonNull::new(header.weak.load(Ordering::Acquire)) {
        // SAFETY: this is the count that the header owns, and the header goes now.
        drop(unsafe { Arc::from_raw(found.as_ptr()) });
    }
}

/// A handle that does not keep its node.
///
/// It finds the node until the node's last handle goes, or until a collection has found it to be
/// garbage. A handle with a [callback](Self::on_death) finds nothing from the moment the callback
/// is due, even if a finalizer then brings the node back.
pub struct Weak<T> {
    shared: Arc<WeakBox>,
    target: PhantomData<fn() -> Gc<T>>,
}

impl<T> Weak<T> {
    /// A handle that finds nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::from_box(Arc::new(WeakBox::new()))
    }

    pub(super) const fn from_box(shared: Arc<WeakBox>) -> Self {
        Self {
            shared,
            target: PhantomData,
        }
    }

    /// A handle on the node, if it is still there. Waits while a collection is deciding about it,
    /// which takes no longer than comparing words.
    #[must_use]
    pub fn upgrade(&self) -> Option<Gc<T>> {
        loop {
            let content = lock(&self.shared.0);
            let node = content.node?;
            // SAFETY: the box is open and locked.
            let header = unsafe { node.as_ref() };
            let mut word = header.word.load(Ordering::Acquire);
            while word & CONDEMNED == 0 {
                if word & COUNT == 0 || word & (DROPPING | DEAD) != 0 {
                    return None;
                }
                check_count(word);
                let upgraded = header.word.compare_exchange_weak(
                    word,
                    word.wrapping_add(ONE_CLONE),
                    Ordering::AcqRel,
                    Ordering::Acquire,
                );
                match upgraded {
                    // SAFETY: the count was just added, and the box is of a node of this type.
                    Ok(_) => return Some(unsafe { Gc::from_node(node.cast::<Node<T>>()) }),
                    Err(now) => word = now,
                }
            }
            drop(content);
            yield_now();
        }
    }

    /// Calls `callback` once when the node is about to die: after its last handle went, or when a
    /// collection found it to be garbage, before any finalizer. On the thread where that happens.
    /// Called at once if the node is gone. A panic in it is kept and reported.
    pub fn on_death(&self, callback: impl FnOnce() + Send + 'static) {
        let mut content = lock(&self.shared.0);
        if content.node.is_some() {
            content.callbacks.push(Box::new(callback));
        } else {
            drop(content);
            callback();
        }
    }

    /// Whether both belong to the same node, dead or alive.
    #[must_use]
    pub fn ptr_eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl<T> Clone for Weak<T> {
    fn clone(&self) -> Self {
        Self::from_box(Arc::clone(&self.shared))
    }
}

impl<T> Default for Weak<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for Weak<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(Weak)")
    }
}

// SAFETY: it gives out handles, which may be used on several threads under these bounds.
unsafe impl<T: Send + Sync> Send for Weak<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Weak<T> {}
