//! The collector under loom: every interleaving of a mutator with a collection, within loom's
//! bounds.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p lastref --test gc_loom --release`.
//!
//! Loom tells of a node that is leaked or freed twice, of a value that is read while it is dropped,
//! of a deadlock and of a memory ordering that is too weak for what depends on it. The models tell
//! of a value that died early, late or twice, and of a slot that was emptied under its owner.
#![cfg(loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lastref::gc::{self, Gc, Slot, Trace, Tracer};
use loom::cell::UnsafeCell;
use loom::thread;

/// Counts the values that are alive.
type Alive = Arc<AtomicUsize>;

struct Node {
    edge: Slot<Option<Gc<Node>>>,
    peer: Slot<Option<Gc<Node>>>,
    fixed: Option<Gc<Node>>,
    alive: Alive,
    /// Read by a trace and written by the destructor: loom tells if nothing orders the two.
    value: UnsafeCell<bool>,
}

// SAFETY: loom checks the accesses to the cell; the rest is `Sync`.
unsafe impl Sync for Node {}

// SAFETY: each slot is reported once.
unsafe impl Trace for Node {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        // SAFETY: nobody writes to it but the destructor.
        self.value
            .with(|value| assert!(unsafe { *value }, "read after its death"));
        self.edge.trace(tracer);
        self.peer.trace(tracer);
        self.fixed.trace(tracer);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: the destructor has the value for itself.
        self.value.with_mut(|value| unsafe { *value = false });
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

fn node(alive: &Alive) -> Gc<Node> {
    node_with(alive, None)
}

fn node_with(alive: &Alive, fixed: Option<Gc<Node>>) -> Gc<Node> {
    alive.fetch_add(1, Ordering::Relaxed);
    Gc::new(Node {
        edge: Slot::new(None),
        peer: Slot::new(None),
        fixed,
        alive: Arc::clone(alive),
        value: UnsafeCell::new(true),
    })
}

/// A node whose `edge` leads to itself, so that no count will free it.
fn ring(alive: &Alive) -> Gc<Node> {
    let made = node(alive);
    made.edge.set(Some(made.clone()));
    made
}

/// Nobody emptied the slots of a node that `ring` made.
fn assert_intact(ring: &Gc<Node>) {
    let intact = ring
        .edge
        .lock()
        .as_ref()
        .is_some_and(|edge| Gc::ptr_eq(edge, ring));
    assert!(intact, "emptied while somebody had a handle");
}

/// Two threads switch at most `preemptions` times against their will.
fn model(preemptions: usize, least: usize, f: impl Fn(&Alive) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    let interleavings = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&interleavings);
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let alive = Alive::default();
        f(&alive);
        // Whatever the threads did, now nobody has a handle.
        gc::collect(2).unwrap();
        assert_eq!(
            alive.load(Ordering::Relaxed),
            0,
            "garbage that nobody looks at again"
        );
        // Dead nodes that are still on the stack are let go of.
        gc::collect(2).unwrap();
        assert_eq!(gc::garbage().failures, Vec::<String>::new());
    });
    // A model that loom cannot vary checks nothing.
    let interleavings = interleavings.load(Ordering::Relaxed);
    println!("{interleavings} interleavings");
    assert!(interleavings >= least, "only {interleavings} interleavings");
}

#[test]
fn handles_cloned_and_dropped_on_two_threads() {
    model(3, 20, |alive| {
        let a = node(alive);
        let other = a.clone();
        let thread = thread::spawn(move || drop(other.clone()));
        drop(a.clone());
        drop(a);
        thread.join().unwrap();
        assert_eq!(
            alive.load(Ordering::Relaxed),
            0,
            "dead with its last handle"
        );
    });
}

#[test]
fn the_last_handle_goes_beside_a_collection() {
    model(3, 20, |alive| {
        let a = node(alive);
        drop(a.clone()); // A candidate.
        let thread = thread::spawn(move || drop(a));
        assert_eq!(gc::collect(2).unwrap().objects, 0);
        thread.join().unwrap();
        assert_eq!(
            alive.load(Ordering::Relaxed),
            0,
            "dead with its last handle"
        );
    });
}

#[test]
fn the_last_handle_on_a_ring_goes_beside_a_collection() {
    model(3, 20, |alive| {
        let a = ring(alive);
        drop(a.clone());
        let thread = thread::spawn(move || drop(a));
        gc::collect(2).unwrap();
        thread.join().unwrap();
    });
}

#[test]
fn a_pair_is_let_go_of_beside_a_collection() {
    model(3, 20, |alive| {
        let (a, b) = (node(alive), node(alive));
        a.edge.set(Some(b.clone()));
        b.edge.set(Some(a.clone()));
        drop(a);
        let thread = thread::spawn(move || drop(b));
        gc::collect(2).unwrap();
        thread.join().unwrap();
    });
}

#[test]
fn two_collections_meet() {
    model(3, 20, |alive| {
        let (a, b) = (node(alive), node(alive));
        a.edge.set(Some(b.clone()));
        b.edge.set(Some(a.clone()));
        drop((a, b));
        let thread = thread::spawn(|| gc::collect(2).unwrap().objects);
        let mine = gc::collect(2).unwrap().objects;
        let theirs = thread.join().unwrap();
        assert_eq!(mine + theirs, 2, "found by one");
    });
}

#[test]
fn an_edge_is_taken_out_beside_a_collection() {
    model(3, 20, |alive| {
        let (owner, moved) = (ring(alive), ring(alive));
        owner.peer.set(Some(moved)); // By now the only handle on it, but its own.
        drop(owner.clone());
        let thread = thread::spawn(move || {
            // No count changes by this.
            let moved = owner.peer.take().unwrap();
            drop(owner);
            moved
        });
        gc::collect(2).unwrap();
        let moved = thread.join().unwrap();
        assert_intact(&moved);
    });
}

#[test]
fn an_edge_is_moved_to_another_slot_beside_a_collection() {
    model(3, 20, |alive| {
        let (from, to, moved) = (ring(alive), ring(alive), ring(alive));
        from.peer.set(Some(moved));
        drop(to.clone());
        drop(from.clone());
        let thread = thread::spawn(move || {
            to.peer.set(from.peer.take());
            drop(from);
            to
        });
        gc::collect(2).unwrap();
        let to = thread.join().unwrap();
        assert_intact(&to);
        assert_intact(to.peer.lock().as_ref().unwrap());
    });
}

#[test]
fn a_traced_neighbour_dies_beside_a_collection() {
    model(3, 20, |alive| {
        let owner = ring(alive);
        owner.peer.set(Some(node(alive)));
        drop(owner.clone());
        let thread = thread::spawn(move || {
            owner.peer.set(None);
            owner
        });
        gc::collect(2).unwrap();
        let owner = thread.join().unwrap();
        assert_eq!(alive.load(Ordering::Relaxed), 1);
        assert_intact(&owner);
    });
}

#[test]
fn an_upgrade_meets_a_verdict() {
    model(3, 20, |alive| {
        let a = ring(alive);
        let weak = Gc::downgrade(&a);
        drop(a);
        let thread = thread::spawn(move || weak.upgrade());
        let found = gc::collect(2).unwrap().objects;
        let upgraded = thread.join().unwrap();
        assert_eq!(u64::from(upgraded.is_none()), found, "either, or");
        upgraded.iter().for_each(assert_intact);
    });
}

#[test]
fn a_clone_comes_and_goes_between_snapshot_and_check() {
    model(3, 20, |alive| {
        let (a, kept) = (ring(alive), ring(alive));
        a.peer.set(Some(kept));
        let weak = Gc::downgrade(&a);
        drop(a);
        let thread = thread::spawn(move || {
            // When it is done, all counts are what they were, and it has what `a` had.
            weak.upgrade().and_then(|a| a.peer.take())
        });
        gc::collect(2).unwrap();
        let kept = thread.join().unwrap();
        kept.iter().for_each(assert_intact);
    });
}

#[test]
fn a_callback_comes_late() {
    model(3, 8, |alive| {
        let a = ring(alive);
        let weak = Gc::downgrade(&a);
        drop(a);
        let called = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&called);
        let thread = thread::spawn(move || {
            weak.on_death(move || {
                count.fetch_add(1, Ordering::Relaxed);
                // Would never return if the collector's lock were held.
                let _ = gc::get_count();
            });
        });
        gc::collect(2).unwrap();
        thread.join().unwrap();
        assert_eq!(called.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_pair_is_let_go_of_beside_two_collections() {
    // The third switch: the other collection has the node in its table when this one lets it go.
    model(3, 20, |alive| {
        let (a, b) = (node(alive), node(alive));
        a.edge.set(Some(b.clone()));
        b.edge.set(Some(a.clone()));
        drop(a);
        let thread = thread::spawn(move || {
            drop(b);
            gc::collect(2).unwrap();
        });
        gc::collect(2).unwrap();
        thread.join().unwrap();
    });
}

#[test]
fn an_upgrade_meets_the_last_drop() {
    model(3, 8, |alive| {
        let a = node(alive);
        let weak = Gc::downgrade(&a);
        let thread = thread::spawn(move || {
            let found = weak.upgrade();
            drop(found);
            weak.upgrade().is_some()
        });
        drop(a);
        thread.join().unwrap();
        assert_eq!(
            alive.load(Ordering::Relaxed),
            0,
            "dead with its last handle"
        );
    });
}

#[test]
fn threads_wait_for_the_holder_of_a_slot() {
    model(2, 20, |alive| {
        let a = node(alive);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let a = a.clone();
                thread::spawn(move || drop(a.edge.lock()))
            })
            .collect();
        drop(a.edge.lock());
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn an_edge_is_put_into_a_slot_while_a_collection_reads_it() {
    model(3, 20, |alive| {
        let (a, other) = (ring(alive), ring(alive));
        drop(a.clone());
        let thread = thread::spawn(move || {
            a.peer.set(Some(other));
            a
        });
        gc::collect(2).unwrap();
        let a = thread.join().unwrap();
        assert_intact(&a);
        assert_intact(a.peer.lock().as_ref().unwrap());
    });
}

#[test]
fn handles_change_places_beside_a_collection() {
    model(3, 20, |alive| {
        // At every moment the thread has one handle, by which it comes to the next: what it leaves
        // behind lies in the slot of what it takes.
        let (first, second) = (ring(alive), ring(alive));
        first.peer.set(Some(second.clone()));
        drop(second);
        drop(first.clone()); // The later candidate, which is traced first.
        let thread = thread::spawn(move || {
            let second = first.peer.take().unwrap();
            second.peer.set(Some(first));
            second
        });
        gc::collect(2).unwrap();
        let second = thread.join().unwrap();
        assert_intact(&second);
        assert_intact(second.peer.lock().as_ref().unwrap());
    });
}

#[test]
fn a_guard_is_forgotten_beside_a_collection() {
    model(3, 20, |alive| {
        // The same, but the slot is never given back: that it was taken must tell.
        let (first, second) = (node(alive), ring(alive));
        first.peer.set(Some(second.clone()));
        drop(second);
        drop(first.clone());
        let thread = thread::spawn(move || {
            let mut guard = first.peer.lock();
            let second = guard.take().unwrap();
            std::mem::forget(guard);
            second.peer.set(Some(first));
            second
        });
        gc::collect(2).unwrap();
        let second = thread.join().unwrap();
        assert_intact(&second);
        assert!(second.peer.lock().is_some(), "emptied");
    });
}

/// A node with a finalizer, which reads the value.
struct Final {
    node: Node,
    me: Slot<Option<Gc<Final>>>,
}

fn finalized(alive: &Alive) -> Gc<Final> {
    alive.fetch_add(1, Ordering::Relaxed);
    Gc::new(Final {
        node: Node {
            edge: Slot::new(None),
            peer: Slot::new(None),
            fixed: None,
            alive: Arc::clone(alive),
            value: UnsafeCell::new(true),
        },
        me: Slot::new(None),
    })
}

// SAFETY: the node's slots are reported once.
unsafe impl Trace for Final {
    fn trace(&self, tracer: &mut Tracer<'_>) {
        self.node.trace(tracer);
        self.me.trace(tracer);
    }

    fn has_finalizer() -> bool {
        true
    }

    fn finalize(&self) {
        // SAFETY: nobody writes to it but the destructor.
        self.node
            .value
            .with(|value| assert!(unsafe { *value }, "finalized after its death"));
    }
}

#[test]
fn a_node_is_finalized_beside_a_collection() {
    model(3, 20, |alive| {
        let a = finalized(alive);
        drop(a.clone());
        let thread = thread::spawn(move || drop(a));
        gc::collect(2).unwrap();
        thread.join().unwrap();
        assert_eq!(
            alive.load(Ordering::Relaxed),
            0,
            "dead with its last handle"
        );
    });
}

#[test]
fn an_edge_and_the_last_handle_go_while_their_node_is_a_candidate() {
    model(3, 20, |alive| {
        let a = ring(alive);
        a.peer.set(Some(a.clone()));
        drop(a.clone());
        let thread = thread::spawn(move || {
            // Neither makes it a candidate: it is one already. If the collection has counted the
            // edge by then, it must look again.
            a.peer.set(None);
            drop(a);
        });
        gc::collect(2).unwrap();
        thread.join().unwrap();
    });
}

#[test]
fn an_edge_that_was_traced_goes_beside_a_collection() {
    model(3, 20, |alive| {
        let (owner, kept) = (ring(alive), ring(alive));
        owner.peer.set(Some(kept.clone()));
        drop(kept); // A candidate before it loses its last handle from outside, below.
        drop(owner.clone());
        let thread = thread::spawn(move || {
            owner.peer.set(None);
            owner
        });
        gc::collect(2).unwrap();
        let owner = thread.join().unwrap();
        gc::collect(2).unwrap();
        assert_eq!(
            alive.load(Ordering::Relaxed),
            1,
            "garbage that nobody looks at again"
        );
        assert_intact(&owner);
    });
}

#[test]
fn an_upgrade_meets_a_collection_that_runs_finalizers() {
    model(2, 20, |alive| {
        // Garbage of which something has a finalizer: all of it is alive once more meanwhile.
        let dead = finalized(alive);
        dead.me.set(Some(dead.clone()));
        let (a, peer) = (ring(alive), ring(alive));
        a.peer.set(Some(peer));
        let weak = Gc::downgrade(&a);
        drop((dead, a));
        let thread = thread::spawn(move || weak.upgrade().and_then(|a| a.peer.get()));
        gc::collect(2).unwrap();
        let peer = thread.join().unwrap();
        gc::collect(2).unwrap();
        peer.iter().for_each(assert_intact);
    });
}

#[test]
fn a_clone_comes_and_goes_after_the_verdict_on_its_neighbour() {
    model(2, 20, |alive| {
        let kept = ring(alive);
        let a = node_with(alive, Some(kept.clone()));
        a.edge.set(Some(a.clone()));
        let weak = Gc::downgrade(&a);
        drop(a);
        drop(kept); // The later candidate, which is judged first.
        let thread = thread::spawn(move || {
            // No slot changes, and when it is done the count of `a` is what it was.
            weak.upgrade().and_then(|a| a.fixed.clone())
        });
        gc::collect(2).unwrap();
        let kept = thread.join().unwrap();
        kept.iter().for_each(assert_intact);
    });
}
