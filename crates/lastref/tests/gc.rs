//! The collector: what dies when, and what does not.
//!
//! The collector is one for the process, and these tests count its work: they take turns.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lastref::gc::{self, Finalize, Gc, Slot, Trace, Weak};

static TURN: Mutex<()> = Mutex::new(());

/// One test at a time, without automatic runs, from a clean start.
fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    gc::disable();
    gc::set_debug(0);
    while gc::collect(2).unwrap().objects > 0 {}
    let _ = gc::garbage();
    turn
}

/// Counts the values that are alive.
#[derive(Clone)]
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

#[derive(Trace)]
struct Node {
    edges: Slot<Vec<Gc<Node>>>,
    fixed: Option<Gc<Node>>,
    #[trace(skip)]
    alive: Alive,
}

impl Node {
    fn new(alive: &Alive) -> Gc<Self> {
        Self::with_fixed(alive, None)
    }

    fn with_fixed(alive: &Alive, fixed: Option<Gc<Node>>) -> Gc<Self> {
        alive.0.fetch_add(1, Ordering::SeqCst);
        Gc::new(Self {
            edges: Slot::default(),
            fixed,
            alive: alive.clone(),
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.alive.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn link(from: &Gc<Node>, to: &Gc<Node>) {
    from.edges.lock().push(to.clone());
}

fn collect() -> u64 {
    gc::collect(2).unwrap().objects
}

#[test]
fn what_is_in_no_cycle_dies_with_its_last_handle() {
    let _turn = turn();
    let alive = Alive::new();
    let (a, b) = (Node::new(&alive), Node::new(&alive));
    link(&a, &b);
    drop(b);
    assert_eq!(alive.count(), 2);
    drop(a);
    assert_eq!(alive.count(), 0);
    assert_eq!(collect(), 0);
}

#[test]
fn cycles_of_every_shape_are_freed() {
    let _turn = turn();
    let alive = Alive::new();
    let myself = Node::new(&alive);
    link(&myself, &myself);
    drop(myself);
    assert_eq!((collect(), alive.count()), (1, 0), "a cycle of one");

    let (a, b) = (Node::new(&alive), Node::new(&alive));
    link(&a, &b);
    link(&b, &a);
    drop((a, b));
    assert_eq!((collect(), alive.count()), (2, 0), "a pair");

    let ring: Vec<_> = (0..100).map(|_| Node::new(&alive)).collect();
    for n in 0..100 {
        link(&ring[n], &ring[(n + 1) % 100]);
    }
    drop(ring);
    assert_eq!((collect(), alive.count()), (100, 0), "a ring");

    let a = Node::new(&alive);
    let b = Node::with_fixed(&alive, Some(a.clone()));
    link(&a, &b);
    drop((a, b));
    assert_eq!(
        (collect(), alive.count()),
        (2, 0),
        "closed by an edge that cannot change"
    );

    let full: Vec<_> = (0..20).map(|_| Node::new(&alive)).collect();
    for a in &full {
        for b in &full {
            link(a, b);
        }
    }
    drop(full);
    assert_eq!((collect(), alive.count()), (20, 0), "everyone to everyone");
}

#[test]
fn what_is_held_from_outside_stays_with_all_it_reaches() {
    let _turn = turn();
    let alive = Alive::new();
    let (a, b, tail, kept) = (
        Node::new(&alive),
        Node::new(&alive),
        Node::new(&alive),
        Node::new(&alive),
    );
    link(&a, &b);
    link(&b, &a);
    link(&a, &tail);
    link(&b, &kept);
    drop((a.clone(), tail));
    drop(b);
    assert_eq!(collect(), 0);
    assert_eq!(alive.count(), 4);
    drop(a);
    assert_eq!(collect(), 3);
    assert_eq!(alive.count(), 1);
    drop(kept);
    assert_eq!(alive.count(), 0);
}

#[test]
fn a_locked_slot_makes_its_node_live_and_a_candidate_again() {
    let _turn = turn();
    let alive = Alive::new();
    let a = Node::new(&alive);
    link(&a, &a);
    let outside = a.clone();
    let guard = outside.edges.lock();
    drop(a);
    let report = gc::collect(2).unwrap();
    assert_eq!((report.objects, report.busy), (0, 1));
    drop(guard);
    drop(outside);
    assert_eq!(collect(), 1);
}

#[test]
fn long_chains_and_rings_need_no_stack() {
    let _turn = turn();
    let alive = Alive::new();
    let small_stack = std::thread::Builder::new().stack_size(256 << 10);
    let counter = alive.clone();
    let thread = small_stack.spawn(move || {
        let mut chain = Node::new(&counter);
        for _ in 1..1_000_000 {
            chain = Node::with_fixed(&counter, Some(chain));
        }
        drop(chain);
        assert_eq!(counter.count(), 0);
        let first = Node::new(&counter);
        let mut last = first.clone();
        for _ in 1..1_000_000 {
            last = Node::with_fixed(&counter, Some(last));
        }
        link(&first, &last);
        drop((first, last));
        assert_eq!(collect(), 1_000_000);
        assert_eq!(counter.count(), 0);
    });
    thread.unwrap().join().unwrap();
}

#[test]
fn weak_handles_find_the_living_only() {
    let _turn = turn();
    let alive = Alive::new();
    let a = Node::new(&alive);
    let weak = Gc::downgrade(&a);
    assert!(Gc::ptr_eq(&weak.upgrade().unwrap(), &a));
    link(&a, &a);
    drop(a);
    assert!(
        weak.upgrade().is_some(),
        "a dead cycle that nobody looked at"
    );
    collect();
    assert!(weak.upgrade().is_none());
    assert!(Weak::<Node>::new().upgrade().is_none());
}

#[test]
fn callbacks_of_weak_handles_run_once() {
    let _turn = turn();
    let alive = Alive::new();
    let called = Arc::new(AtomicUsize::new(0));
    let count = || {
        let called = Arc::clone(&called);
        move || {
            called.fetch_add(1, Ordering::SeqCst);
        }
    };
    let (plain, cyclic) = (Node::new(&alive), Node::new(&alive));
    let (first, second) = (Gc::downgrade(&plain), Gc::downgrade(&cyclic));
    first.on_death(count());
    second.on_death(count());
    drop(plain);
    assert_eq!(called.load(Ordering::SeqCst), 1);
    link(&cyclic, &cyclic);
    drop(cyclic);
    assert_eq!(called.load(Ordering::SeqCst), 1);
    assert_eq!(collect(), 1);
    assert_eq!(called.load(Ordering::SeqCst), 2);
    first.on_death(count());
    assert_eq!(called.load(Ordering::SeqCst), 3, "at once for the dead");
}

#[test]
fn cyclic_constructor_finds_itself_when_finished() {
    #[derive(Trace)]
    struct Tree {
        me: Weak<Tree>,
    }
    let _turn = turn();
    let tree = Gc::new_cyclic(|me| {
        assert!(me.upgrade().is_none(), "not finished");
        Tree { me: me.clone() }
    });
    assert!(Gc::ptr_eq(&tree.me.upgrade().unwrap(), &tree));
}

#[derive(Trace)]
#[trace(finalize)]
struct Phoenix {
    me: Slot<Option<Gc<Phoenix>>>,
    peer: Slot<Option<Gc<Phoenix>>>,
    rises: bool,
    name: u32,
}

static RISEN: Mutex<Vec<Gc<Phoenix>>> = Mutex::new(Vec::new());
static FINALIZED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

impl Finalize for Phoenix {
    fn finalize(&self) {
        if let Some(peer) = &*self.peer.lock() {
            assert!(peer.name > 0, "peers are intact");
        }
        FINALIZED.lock().unwrap().push(self.name);
        if self.rises {
            let me = self.me.lock().clone();
            RISEN.lock().unwrap().extend(me);
        }
    }
}

fn phoenix(name: u32, rises: bool) -> Gc<Phoenix> {
    let made = Gc::new(Phoenix {
        me: Slot::default(),
        peer: Slot::default(),
        rises,
        name,
    });
    made.me.set(Some(made.clone()));
    made
}

#[test]
fn finalizers_run_once_and_may_resurrect() {
    let _turn = turn();
    FINALIZED.lock().unwrap().clear();
    let (a, b) = (phoenix(1, true), phoenix(2, false));
    a.peer.set(Some(b.clone()));
    b.peer.set(Some(a.clone()));
    drop((a, b));
    assert_eq!(collect(), 0, "the one that rose holds the other");
    let mut finalized = FINALIZED.lock().unwrap().clone();
    finalized.sort_unstable();
    assert_eq!(finalized, [1, 2]);
    let risen = RISEN.lock().unwrap().pop().unwrap();
    assert_eq!(risen.peer.lock().as_ref().unwrap().name, 2);
    drop(risen);
    assert_eq!(collect(), 2, "and die without being finalized again");
    assert_eq!(FINALIZED.lock().unwrap().len(), 2);
}

#[test]
fn finalizers_run_when_the_last_handle_goes_too() {
    let _turn = turn();
    FINALIZED.lock().unwrap().clear();
    let made = Gc::new(Phoenix {
        me: Slot::default(),
        peer: Slot::default(),
        rises: false,
        name: 7,
    });
    drop(made);
    assert_eq!(*FINALIZED.lock().unwrap(), [7]);
}

#[test]
fn panics_in_destructors_are_kept_and_the_rest_is_freed() {
    #[derive(Trace)]
    struct Bomb {
        other: Slot<Option<Gc<Bomb>>>,
        #[trace(skip)]
        alive: Alive,
        explodes: bool,
    }
    impl Drop for Bomb {
        fn drop(&mut self) {
            self.alive.0.fetch_sub(1, Ordering::SeqCst);
            assert!(!self.explodes, "boom");
        }
    }
    let _turn = turn();
    let alive = Alive::new();
    let bomb = |explodes| {
        alive.0.fetch_add(1, Ordering::SeqCst);
        Gc::new(Bomb {
            other: Slot::default(),
            alive: alive.clone(),
            explodes,
        })
    };
    let (a, b) = (bomb(true), bomb(false));
    a.other.set(Some(b.clone()));
    b.other.set(Some(a.clone()));
    drop((a, b));
    assert_eq!((collect(), alive.count()), (2, 0));
    let failures = gc::garbage().failures;
    assert_eq!(failures.len(), 1);
    assert!(
        failures[0].contains("Bomb") && failures[0].contains("boom"),
        "{failures:?}"
    );
}

#[test]
fn a_destructor_may_collect_and_make_new_cycles() {
    #[derive(Trace)]
    struct Maker {
        me: Slot<Option<Gc<Maker>>>,
        #[trace(skip)]
        alive: Alive,
    }
    impl Drop for Maker {
        fn drop(&mut self) {
            assert_eq!(
                gc::collect(2).unwrap().objects,
                0,
                "inside a collection: nothing"
            );
            let made = Node::new(&self.alive);
            link(&made, &made);
        }
    }
    let _turn = turn();
    let alive = Alive::new();
    let maker = Gc::new(Maker {
        me: Slot::default(),
        alive: alive.clone(),
    });
    maker.me.set(Some(maker.clone()));
    drop(maker);
    assert_eq!(collect(), 1);
    assert_eq!(alive.count(), 1);
    assert_eq!((collect(), alive.count()), (1, 0));
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}

#[test]
fn frozen_nodes_are_left_alone_until_unfrozen() {
    let _turn = turn();
    let alive = Alive::new();
    let a = Node::new(&alive);
    link(&a, &a);
    gc::freeze();
    assert!(gc::freeze_count() >= 1);
    drop(a);
    assert_eq!(collect(), 0);
    gc::unfreeze();
    assert_eq!(gc::freeze_count(), 0);
    assert_eq!((collect(), alive.count()), (1, 0));
}

#[test]
fn saved_garbage_lives_until_its_handles_go() {
    let _turn = turn();
    let alive = Alive::new();
    let a = Node::new(&alive);
    link(&a, &a);
    drop(a);
    gc::set_debug(gc::DEBUG_SAVEALL);
    assert_eq!(collect(), 1);
    gc::set_debug(0);
    assert_eq!(alive.count(), 1);
    let garbage = gc::garbage();
    assert_eq!(garbage.saved.len(), 1);
    assert!(garbage.saved[0].type_name().ends_with("Node"));
    drop(garbage);
    assert_eq!((collect(), alive.count()), (1, 0));
}

#[test]
fn objects_and_referrers_are_found() {
    let _turn = turn();
    let alive = Alive::new();
    let (a, b) = (Node::new(&alive), Node::with_fixed(&alive, None));
    link(&a, &b);
    let target = gc::Object::from(&b);
    let referrers = gc::referrers(&target);
    assert_eq!(referrers, [gc::Object::from(&a)]);
    assert_eq!(
        referrers[0].referents().as_deref(),
        Some(std::slice::from_ref(&target))
    );
    assert!(gc::objects().contains(&target));
    let guard = a.edges.lock();
    assert_eq!(referrers[0].referents(), None, "its slot is locked");
    drop(guard);
}

#[test]
fn reports_and_callbacks_say_what_was_done() {
    let _turn = turn();
    let alive = Alive::new();
    let seen: Arc<Mutex<Vec<(gc::Phase, u64)>>> = Arc::default();
    let log = Arc::clone(&seen);
    let id = gc::add_callback(move |phase, report| {
        log.lock().unwrap().push((phase, report.objects));
    });
    let before = gc::stats()[2];
    let a = Node::new(&alive);
    link(&a, &a);
    drop(a);
    assert_eq!(collect(), 1);
    assert!(gc::remove_callback(id));
    assert!(!gc::remove_callback(id));
    collect();
    assert_eq!(
        *seen.lock().unwrap(),
        [(gc::Phase::Start, 0), (gc::Phase::Stop, 1)]
    );
    let after = gc::stats()[2];
    assert_eq!(after.collections - before.collections, 2);
    assert_eq!(after.collected - before.collected, 1);
    assert!(gc::collect(3).is_err());
}

#[test]
fn leaves_are_counted_and_nothing_else() {
    let _turn = turn();
    let number = Gc::new(7_u64);
    drop(number.clone());
    assert_eq!(gc::get_count(), (0, 0), "not a candidate");
    assert!(!gc::Object::from(&number).is_tracked());
}
