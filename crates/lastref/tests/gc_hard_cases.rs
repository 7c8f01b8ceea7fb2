//! What cycle collectors get wrong, case by case.
//!
//! Each of these has been a bug of some collector. Those that depend on what two threads do between
//! two instructions are decided by the models in `gc_loom.rs`, which try every interleaving; here
//! the same runs at full speed. `LASTREF_TEST_ALL=1` makes chains and rings ten million nodes long.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use lastref::gc::{self, Finalize, Gc, Slot, Trace, Tracer, Weak};
use lastref::{Tensor, cuda};

use common::{GIB, MIB, allocated, bytes_on_gpu};

static TURN: Mutex<()> = Mutex::new(());

/// One test at a time, without automatic runs, from a clean start.
fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    gc::disable();
    gc::unfreeze();
    gc::set_threshold(0, 10, 10);
    while gc::collect(2).unwrap().objects > 0 {}
    let _ = gc::garbage();
    turn
}

/// Counts the values that are alive.
#[derive(Clone, Default)]
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

const INTACT: u64 = 0x1A57_0EF5;

#[derive(Trace)]
struct Node {
    edge: Slot<Option<Gc<Node>>>,
    peer: Slot<Option<Gc<Node>>>,
    fixed: Option<Gc<Node>>,
    #[trace(skip)]
    alive: Alive,
    #[trace(skip)]
    canary: AtomicU64,
}

impl Node {
    fn new(alive: &Alive) -> Gc<Self> {
        Self::with_fixed(alive, None)
    }

    fn with_fixed(alive: &Alive, fixed: Option<Gc<Node>>) -> Gc<Self> {
        alive.0.fetch_add(1, Ordering::SeqCst);
        Gc::new(Self {
            edge: Slot::default(),
            peer: Slot::default(),
            fixed,
            alive: alive.clone(),
            canary: AtomicU64::new(INTACT),
        })
    }

    /// A node whose `edge` leads to itself.
    fn ring(alive: &Alive) -> Gc<Self> {
        let made = Self::new(alive);
        made.edge.set(Some(made.clone()));
        made
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let canary = self.canary.swap(0, Ordering::SeqCst);
        assert_eq!(canary, INTACT, "dropped twice");
        self.alive.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn assert_intact(ring: &Gc<Node>) {
    assert_eq!(
        ring.canary.load(Ordering::SeqCst),
        INTACT,
        "used after its death"
    );
    assert!(
        ring.edge.lock().is_some(),
        "emptied while somebody had a handle"
    );
}

fn collect() -> u64 {
    gc::collect(2).unwrap().objects
}

/// Runs `work` while another thread collects all the time.
fn beside_collections(work: impl FnOnce()) {
    let ends = AtomicBool::new(false);
    let runs = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                gc::collect(2).unwrap();
                runs.fetch_add(1, Ordering::Relaxed);
            }
        });
        // On a busy machine all the work may be done before the thread has begun.
        while runs.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        work();
        ends.store(true, Ordering::Relaxed);
    });
}

/// Nothing is left, and nothing went wrong on the way.
fn assert_all_freed(alive: &Alive) {
    collect();
    assert_eq!(alive.count(), 0);
    collect();
    assert_eq!(gc::get_count(), (0, 0));
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}

const ROUNDS: usize = 20_000;

#[test]
fn case_01_lost_candidate_on_the_side_of_the_decrement() {
    let _turn = turn();
    let alive = Alive::default();
    beside_collections(|| {
        let (send, receive) = mpsc::sync_channel::<Gc<Node>>(64);
        thread::scope(|scope| {
            scope.spawn(move || receive.into_iter().for_each(drop));
            for _ in 0..ROUNDS {
                let ring = Node::ring(&alive);
                send.send(ring.clone()).unwrap();
                drop(ring);
            }
            drop(send);
        });
    });
    assert_all_freed(&alive);
}

#[test]
fn case_02_lost_candidate_on_the_side_of_the_collector() {
    let _turn = turn();
    let alive = Alive::default();
    let kept = Node::ring(&alive);
    gc::freeze();
    let owner = Node::ring(&alive);
    owner.peer.set(Some(kept)); // Moved: its count never fell.
    drop(owner);
    assert_eq!(collect(), 1, "a frozen node is not looked at");
    gc::unfreeze();
    assert_eq!(collect(), 1, "the end of its owner made it a candidate");
    assert_all_freed(&alive);
}

#[test]
fn case_03_nothing_is_touched_after_its_count_was_given_up() {
    let _turn = turn();
    let alive = Alive::default();
    beside_collections(|| {
        let (send, receive) = mpsc::sync_channel::<Gc<Node>>(64);
        thread::scope(|scope| {
            scope.spawn(move || receive.into_iter().for_each(drop));
            for _ in 0..ROUNDS {
                // In no cycle: it dies with either of the two.
                let node = Node::new(&alive);
                send.send(node.clone()).unwrap();
                drop(node);
            }
            drop(send);
        });
        assert_eq!(alive.count(), 0);
    });
    assert_all_freed(&alive);
}

#[test]
fn case_04_moves_without_counts() {
    let _turn = turn();
    let alive = Alive::default();
    beside_collections(|| {
        let (a, b) = (Node::ring(&alive), Node::ring(&alive));
        a.peer.set(Some(Node::ring(&alive)));
        for _ in 0..ROUNDS {
            drop((a.clone(), b.clone())); // Candidates.
            b.peer.set(a.peer.take());
            let moved = b.peer.take().unwrap();
            assert_intact(&moved);
            a.peer.set(Some(moved));
        }
        assert_intact(&a);
        assert_intact(&b);
    });
    assert_all_freed(&alive);
}

#[test]
fn case_05_clone_and_drop_between_snapshot_and_check() {
    let _turn = turn();
    let alive = Alive::default();
    beside_collections(|| {
        for _ in 0..ROUNDS {
            let a = Node::ring(&alive);
            a.peer.set(Some(Node::ring(&alive)));
            let weak = Gc::downgrade(&a);
            drop(a);
            if let Some(kept) = weak.upgrade().and_then(|a| a.peer.take()) {
                assert_intact(&kept);
            }
        }
    });
    assert_all_freed(&alive);
}

/// A value whose trace takes its time: it tells when it begins and waits for the word to go on.
struct SlowTrace {
    begun: mpsc::SyncSender<()>,
    go_on: Mutex<mpsc::Receiver<()>>,
    dropped: Arc<AtomicBool>,
}

// SAFETY: there is nothing to report.
unsafe impl Trace for SlowTrace {
    fn trace(&self, _: &mut Tracer<'_>) {
        if self.begun.try_send(()).is_ok() {
            let _ = self
                .go_on
                .lock()
                .unwrap()
                .recv_timeout(Duration::from_secs(10));
        }
        assert!(
            !self.dropped.load(Ordering::SeqCst),
            "dropped while it is read"
        );
    }
}

impl Drop for SlowTrace {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

#[test]
fn case_06_count_reaches_zero_while_the_collector_reads_the_value() {
    let _turn = turn();
    let (begun, begins) = mpsc::sync_channel(1);
    let (go, go_on) = mpsc::channel();
    let dropped = Arc::new(AtomicBool::new(false));
    let slow = Gc::new(SlowTrace {
        begun,
        go_on: Mutex::new(go_on),
        dropped: Arc::clone(&dropped),
    });
    drop(slow.clone());
    thread::scope(|scope| {
        scope.spawn(collect);
        begins.recv().unwrap();
        let dropper = scope.spawn(|| drop(slow));
        // Nothing tells that the other thread waits, but time: it has no other way to go.
        thread::sleep(Duration::from_millis(50));
        assert!(!dropped.load(Ordering::SeqCst) && !dropper.is_finished());
        go.send(()).unwrap();
        dropper.join().unwrap();
        assert!(
            dropped.load(Ordering::SeqCst),
            "gone when its last handle is"
        );
    });
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}

/// A value whose trace drops the last handle on it.
struct DropsItself;

static LAST_HANDLE: Mutex<Option<Gc<DropsItself>>> = Mutex::new(None);
static DROPPED_ITSELF: AtomicUsize = AtomicUsize::new(0);

// SAFETY: there is nothing to report.
unsafe impl Trace for DropsItself {
    fn trace(&self, _: &mut Tracer<'_>) {
        let last = LAST_HANDLE.lock().unwrap().take();
        drop(last);
        assert_eq!(DROPPED_ITSELF.load(Ordering::SeqCst), 0);
    }
}

impl Drop for DropsItself {
    fn drop(&mut self) {
        DROPPED_ITSELF.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn case_06_count_reaches_zero_by_the_collector_reading_the_value() {
    let _turn = turn();
    let node = Gc::new(DropsItself);
    drop(node.clone());
    *LAST_HANDLE.lock().unwrap() = Some(node);
    collect();
    assert_eq!(DROPPED_ITSELF.load(Ordering::SeqCst), 1);
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}

#[test]
fn case_07_candidates_die_by_their_count_before_the_next_run() {
    let _turn = turn();
    let alive = Alive::default();
    let die = |times: usize| {
        for _ in 0..times {
            let node = Node::new(&alive);
            drop(node.clone());
            drop(node);
        }
        assert_eq!(alive.count(), 0, "values go at once");
    };
    die(1000);
    assert_eq!(gc::get_count().0, 1000, "headers wait");
    collect();
    assert_eq!(gc::get_count(), (0, 0));
    assert_eq!(gc::objects(), []);
    // Nor do they pile up when the collector is switched off: its thread lets go of the dead.
    gc::set_threshold(700, 10, 10);
    let mut most = 0;
    for _ in 0..100 {
        die(1000);
        most = most.max(gc::get_count().0);
        let until = Instant::now() + Duration::from_secs(10);
        while gc::get_count().0 >= 5000 && Instant::now() < until {
            thread::yield_now();
        }
    }
    assert!(most < 50_000, "{most} of 100,000 waited");
}

#[test]
fn case_08_weak_upgrade_versus_verdict() {
    let _turn = turn();
    let alive = Alive::default();
    beside_collections(|| {
        let mut upgraded = 0;
        for _ in 0..ROUNDS {
            let ring = Node::ring(&alive);
            let weak = Gc::downgrade(&ring);
            drop(ring);
            if let Some(ring) = weak.upgrade() {
                assert_intact(&ring);
                upgraded += 1;
            }
        }
        assert!(upgraded > 0);
    });
    assert_all_freed(&alive);
}

#[test]
fn case_08_weak_handles_are_cleared_before_finalizers_see_them() {
    #[derive(Trace)]
    #[trace(finalize)]
    struct Looks {
        me: Slot<Option<Gc<Looks>>>,
        watched: Weak<Node>,
        plain: Weak<Node>,
        node: Slot<Option<Gc<Node>>>,
    }
    static FOUND: Mutex<Option<(bool, bool)>> = Mutex::new(None);
    impl Finalize for Looks {
        fn finalize(&self) {
            let found = (
                self.watched.upgrade().is_some(),
                self.plain.upgrade().is_some(),
            );
            *FOUND.lock().unwrap() = Some(found);
        }
    }
    let _turn = turn();
    let alive = Alive::default();
    let (watched, plain) = (Node::ring(&alive), Node::ring(&alive));
    let weak = Gc::downgrade(&watched);
    weak.on_death(|| {});
    let looks = Gc::new(Looks {
        me: Slot::default(),
        watched: weak,
        plain: Gc::downgrade(&plain),
        node: Slot::new(Some(watched)),
    });
    looks.node.lock().as_ref().unwrap().peer.set(Some(plain));
    looks.me.set(Some(looks.clone()));
    drop(looks);
    assert_eq!(collect(), 3);
    assert_eq!(
        *FOUND.lock().unwrap(),
        Some((false, true)),
        "with a callback: cleared first"
    );
    assert_all_freed(&alive);
}

// ---- finalizers --------------------------------------------------------------------------------

type Action = Box<dyn Fn(&Final) + Send + Sync>;

#[derive(Trace)]
#[trace(finalize)]
struct Final {
    me: Slot<Option<Gc<Final>>>,
    peer: Slot<Option<Gc<Final>>>,
    node: Slot<Option<Gc<Node>>>,
    #[trace(skip)]
    action: Action,
    #[trace(skip)]
    runs: Arc<AtomicUsize>,
    #[trace(skip)]
    alive: Alive,
}

impl Finalize for Final {
    fn finalize(&self) {
        self.runs.fetch_add(1, Ordering::SeqCst);
        (self.action)(self);
    }
}

impl Drop for Final {
    fn drop(&mut self) {
        self.alive.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A cycle of one with a finalizer; and how often that ran.
fn finalized(
    alive: &Alive,
    action: impl Fn(&Final) + Send + Sync + 'static,
) -> (Gc<Final>, Arc<AtomicUsize>) {
    let runs = Arc::<AtomicUsize>::default();
    alive.0.fetch_add(1, Ordering::SeqCst);
    let made = Gc::new(Final {
        me: Slot::default(),
        peer: Slot::default(),
        node: Slot::default(),
        action: Box::new(action),
        runs: Arc::clone(&runs),
        alive: alive.clone(),
    });
    made.me.set(Some(made.clone()));
    (made, runs)
}

fn runs(counter: &Arc<AtomicUsize>) -> usize {
    counter.load(Ordering::SeqCst)
}

#[test]
fn case_09_finalizer_resurrects_itself() {
    static RISEN: Mutex<Vec<Gc<Final>>> = Mutex::new(Vec::new());
    let _turn = turn();
    let alive = Alive::default();
    let (made, ran) = finalized(&alive, |me| RISEN.lock().unwrap().extend(me.me.get()));
    drop(made);
    assert_eq!((collect(), alive.count(), runs(&ran)), (0, 1, 1));
    let risen = RISEN.lock().unwrap().pop().unwrap();
    assert!(risen.me.lock().is_some(), "intact");
    assert!(gc::Object::from(&risen).is_finalized());
    // Dies for good beside one whose finalizer has yet to run.
    let (other, other_ran) = finalized(&alive, |_| ());
    risen.peer.set(Some(other));
    drop(risen);
    assert_eq!((collect(), alive.count(), runs(&ran)), (2, 0, 1));
    assert_eq!(runs(&other_ran), 1);
}

#[test]
fn case_09_finalizer_resurrects_a_peer_and_a_neighbour() {
    static PEERS: Mutex<Vec<Gc<Final>>> = Mutex::new(Vec::new());
    static NEIGHBOURS: Mutex<Vec<Gc<Node>>> = Mutex::new(Vec::new());
    let _turn = turn();
    let alive = Alive::default();
    let (a, ran) = finalized(&alive, |me| {
        PEERS.lock().unwrap().extend(me.peer.get());
        NEIGHBOURS.lock().unwrap().extend(me.node.get());
    });
    let (b, _) = finalized(&alive, |_| ());
    a.node.set(Some(Node::ring(&alive)));
    a.peer.set(Some(b));
    drop(a);
    assert_eq!(collect(), 1, "the one that nobody took");
    assert_eq!((alive.count(), runs(&ran)), (2, 1));
    let neighbour = NEIGHBOURS.lock().unwrap().pop().unwrap();
    assert_intact(&neighbour);
    let peer = PEERS.lock().unwrap().pop().unwrap();
    assert!(peer.me.lock().is_some(), "intact");
    drop((peer, neighbour));
    assert_eq!((collect(), alive.count()), (2, 0));
}

#[test]
fn case_09_finalizer_panics_and_the_others_run() {
    let _turn = turn();
    let alive = Alive::default();
    let (a, first) = finalized(&alive, |_| panic!("no"));
    let (b, second) = finalized(&alive, |_| ());
    a.peer.set(Some(b));
    drop(a);
    assert_eq!((collect(), alive.count()), (2, 0));
    assert_eq!((runs(&first), runs(&second)), (1, 1));
    let failures = gc::garbage().failures;
    assert!(
        failures.len() == 1 && failures[0].contains("Final: no"),
        "{failures:?}"
    );
}

#[test]
fn case_09_finalizer_allocates_and_collects() {
    let _turn = turn();
    let alive = Alive::default();
    let counter = alive.clone();
    let (made, ran) = finalized(&alive, move |_| {
        drop(Node::ring(&counter));
        assert_eq!(
            gc::collect(2).unwrap().traced,
            0,
            "inside a collection: nothing"
        );
    });
    drop(made);
    let mut found = 0;
    for _ in 0..2 {
        found += collect();
    }
    assert_eq!((found, alive.count(), runs(&ran)), (2, 0, 1));
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}

#[test]
fn case_09_finalizer_runs_on_another_thread_than_the_creator() {
    let _turn = turn();
    let alive = Alive::default();
    let (ran_on, thread_of) = mpsc::channel();
    let ran_on = Mutex::new(ran_on);
    let (made, _) = finalized(&alive, move |_| {
        ran_on.lock().unwrap().send(thread::current().id()).unwrap();
    });
    drop(made);
    let collector = thread::spawn(|| {
        collect();
        thread::current().id()
    });
    assert_eq!(collector.join().unwrap(), thread_of.recv().unwrap());
    assert_eq!(alive.count(), 0);
}

// ---- destructors -------------------------------------------------------------------------------

#[test]
fn case_10_destructors_touch_peers_which_are_alive_with_empty_slots() {
    #[derive(Trace)]
    struct Touches {
        peer: Option<Gc<Touches>>,
        back: Slot<Option<Gc<Touches>>>,
        #[trace(skip)]
        canary: AtomicU64,
        #[trace(skip)]
        saw: Arc<Mutex<Vec<(u64, bool)>>>,
    }
    impl Drop for Touches {
        fn drop(&mut self) {
            if let Some(peer) = &self.peer {
                let canary = peer.canary.load(Ordering::SeqCst);
                let empty = peer.back.lock().is_none();
                self.saw.lock().unwrap().push((canary, empty));
            }
            self.canary.store(0, Ordering::SeqCst);
        }
    }
    let _turn = turn();
    let saw = Arc::<Mutex<Vec<_>>>::default();
    let made = |peer| {
        Gc::new(Touches {
            peer,
            back: Slot::default(),
            canary: AtomicU64::new(INTACT),
            saw: Arc::clone(&saw),
        })
    };
    let a = made(None);
    let b = made(Some(a.clone()));
    a.back.set(Some(b.clone()));
    drop((a, b));
    assert_eq!(collect(), 2);
    assert_eq!(*saw.lock().unwrap(), [(INTACT, true)]);
}

#[test]
fn case_10_destructor_gives_a_peer_to_somebody_who_lives() {
    static KEPT: Mutex<Option<Gc<Node>>> = Mutex::new(None);
    /// Owned by a slot's content, so dropped when the slot is emptied.
    #[derive(Trace)]
    struct Keeper(Gc<Node>);
    impl Drop for Keeper {
        fn drop(&mut self) {
            *KEPT.lock().unwrap() = Some(self.0.clone());
        }
    }
    #[derive(Trace)]
    struct Owner {
        me: Slot<Option<Gc<Owner>>>,
        keeper: Slot<Option<Keeper>>,
    }
    let _turn = turn();
    let alive = Alive::default();
    let kept = Node::ring(&alive);
    let owner = Gc::new(Owner {
        me: Slot::default(),
        keeper: Slot::default(),
    });
    owner.me.set(Some(owner.clone()));
    owner.keeper.set(Some(Keeper(kept)));
    drop(owner);
    assert_eq!(collect(), 2);
    assert_eq!(alive.count(), 1, "somebody has a handle");
    let kept = KEPT.lock().unwrap().take().unwrap();
    assert_eq!(kept.canary.load(Ordering::SeqCst), INTACT);
    kept.edge.set(Some(kept.clone())); // It may be used again,
    drop(kept);
    assert_eq!((collect(), alive.count()), (1, 0), "and be garbage again");
    assert_all_freed(&alive);
}

// ---- what a trace may do wrong ---------------------------------------------------------------------

#[test]
fn case_11_edge_reported_twice_is_told() {
    struct Twice(Gc<Node>, Slot<Option<Gc<Twice>>>);
    // SAFETY: it is not: the edge is reported twice, which the collector is to notice here.
    unsafe impl Trace for Twice {
        fn trace(&self, tracer: &mut Tracer<'_>) {
            self.0.trace(tracer);
            self.0.trace(tracer);
            self.1.trace(tracer);
        }
    }
    let _turn = turn();
    let alive = Alive::default();
    let twice = Gc::new(Twice(Node::new(&alive), Slot::default()));
    drop(twice.clone());
    collect();
    assert_eq!(alive.count(), 1, "it lives");
    let failures = gc::garbage().failures;
    assert!(
        failures.len() == 1 && failures[0].contains("twice"),
        "{failures:?}"
    );
    drop(twice);
    assert_eq!(alive.count(), 0);
    assert_all_freed(&alive);
}

#[test]
fn case_11_edge_left_out_only_leaks_while_it_is_there() {
    struct Hidden(Slot<Option<Gc<Hidden>>>);
    // SAFETY: an edge that is left out leaks and does no harm.
    unsafe impl Trace for Hidden {
        fn trace(&self, _: &mut Tracer<'_>) {}
    }
    let _turn = turn();
    let hidden = Gc::new(Hidden(Slot::new(None)));
    hidden.0.set(Some(hidden.clone()));
    let weak = Gc::downgrade(&hidden);
    drop(hidden);
    assert_eq!(collect(), 0);
    let found = weak.upgrade().unwrap();
    drop(found.0.take());
    drop(found);
    assert!(weak.upgrade().is_none());
}

#[test]
fn case_12_busy_slot_counts_as_live_and_is_looked_at_again() {
    let _turn = turn();
    let alive = Alive::default();
    let (owner, ring) = (Node::new(&alive), Node::ring(&alive));
    // `ring` is held by `owner` alone, whose slot is held: nobody can tell what is in it.
    owner.peer.set(Some(ring.clone()));
    owner.edge.set(Some(owner.clone()));
    drop(ring);
    let guard = owner.peer.lock();
    drop(owner.clone());
    let report = gc::collect(2).unwrap();
    assert_eq!((report.objects, report.busy), (0, 1));
    assert_eq!(gc::get_count().0, 1, "a candidate again");
    drop(guard);
    // The last handle goes in a way that makes nothing a candidate: its count is given to a slot.
    let second = Node::ring(&alive);
    collect();
    second.peer.set(Some(owner));
    drop(second);
    assert_eq!(collect(), 3);
    assert_all_freed(&alive);
}

#[test]
fn case_12_poisoned_slot_counts_as_live() {
    let _turn = turn();
    let alive = Alive::default();
    let ring = Node::ring(&alive);
    let weak = Gc::downgrade(&ring);
    let poisoner = {
        let ring = ring.clone();
        thread::spawn(move || {
            let _guard = ring.peer.lock();
            panic!("while it holds the slot");
        })
    };
    assert!(poisoner.join().is_err());
    drop(ring);
    for _ in 0..2 {
        let report = gc::collect(2).unwrap();
        assert_eq!((report.objects, report.busy), (0, 1));
    }
    // Whoever knows of it can still break the cycle.
    weak.upgrade().unwrap().edge.set(None);
    assert_eq!(alive.count(), 0);
    assert_all_freed(&alive);
}

#[test]
fn case_12_trace_that_panics_in_a_slot_leaves_it_as_it_was() {
    struct Holder(Slot<Content>);
    // SAFETY: the slot is reported once.
    unsafe impl Trace for Holder {
        fn trace(&self, tracer: &mut Tracer<'_>) {
            self.0.trace(tracer);
        }
    }
    #[derive(Default)]
    struct Content(Option<Gc<Holder>>, Arc<AtomicBool>);
    // SAFETY: the handle is reported once, or the trace ends early.
    unsafe impl Trace for Content {
        fn trace(&self, tracer: &mut Tracer<'_>) {
            assert!(!self.1.load(Ordering::SeqCst), "not today");
            self.0.trace(tracer);
        }
    }
    let _turn = turn();
    let panics = Arc::new(AtomicBool::new(true));
    let holder = Gc::new(Holder(Slot::new(Content(None, Arc::clone(&panics)))));
    let itself = holder.clone();
    holder.0.lock().0 = Some(itself);
    drop(holder);
    let report = gc::collect(2).unwrap();
    assert_eq!((report.objects, report.busy), (0, 1));
    assert_eq!(gc::garbage().failures.len(), 1);
    // Neither locked nor poisoned by it.
    panics.store(false, Ordering::SeqCst);
    assert_eq!(collect(), 1);
}

#[test]
fn case_12_panicking_trace_counts_as_live_and_is_looked_at_again() {
    struct Moody(Slot<Option<Gc<Moody>>>, Arc<AtomicBool>);
    // SAFETY: the slot is reported once, or the trace ends early.
    unsafe impl Trace for Moody {
        fn trace(&self, tracer: &mut Tracer<'_>) {
            assert!(!self.1.load(Ordering::SeqCst), "not today");
            self.0.trace(tracer);
        }
    }
    let _turn = turn();
    let panics = Arc::new(AtomicBool::new(true));
    let moody = Gc::new(Moody(Slot::new(None), Arc::clone(&panics)));
    moody.0.set(Some(moody.clone()));
    drop(moody);
    let report = gc::collect(2).unwrap();
    assert_eq!((report.objects, report.busy), (0, 1));
    let failures = gc::garbage().failures;
    assert!(
        failures.len() == 1 && failures[0].contains("not today"),
        "{failures:?}"
    );
    panics.store(false, Ordering::SeqCst);
    assert_eq!(collect(), 1);
}

#[test]
fn case_12_slots_inside_slots_are_no_reason_to_keep_garbage() {
    #[derive(Trace)]
    struct Cell {
        to: Slot<Option<Gc<Table>>>,
    }
    #[derive(Trace)]
    struct Table {
        cells: Slot<Vec<Cell>>,
        last: Slot<Option<Gc<Table>>>,
    }
    let _turn = turn();
    let table = Gc::new(Table {
        cells: Slot::default(),
        last: Slot::default(),
    });
    let weak = Gc::downgrade(&table);
    {
        let mut cells = table.cells.lock();
        cells.extend((0..3).map(|_| Cell {
            to: Slot::new(None),
        }));
        for _ in 0..10 {
            cells[0].to.set(Some(table.clone()));
        }
    }
    drop(table);
    let report = gc::collect(2).unwrap();
    assert_eq!((report.objects, report.busy), (1, 0));
    assert!(weak.upgrade().is_none());
}

// ---- re-entry and waiting ------------------------------------------------------------------------------

#[test]
fn case_13_destructor_collects() {
    #[derive(Trace)]
    struct Collects {
        me: Slot<Option<Gc<Collects>>>,
        #[trace(skip)]
        alive: Alive,
    }
    impl Drop for Collects {
        fn drop(&mut self) {
            // In a plain drop this is a collection like any other, in one of a collection nothing.
            gc::collect(2).unwrap();
            self.alive.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let _turn = turn();
    let alive = Alive::default();
    let made = || {
        alive.0.fetch_add(1, Ordering::SeqCst);
        Gc::new(Collects {
            me: Slot::default(),
            alive: alive.clone(),
        })
    };
    let ring = made();
    ring.me.set(Some(ring.clone()));
    drop(ring);
    drop(made());
    assert_eq!(alive.count(), 0, "the plain drop collected the ring");
}

#[test]
fn case_13_two_threads_collect_at_once() {
    let _turn = turn();
    let alive = Alive::default();
    for _ in 0..200 {
        for _ in 0..10 {
            drop(Node::ring(&alive));
        }
        let found: u64 = thread::scope(|scope| {
            let threads = [scope.spawn(collect), scope.spawn(collect)];
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        assert_eq!((found, alive.count()), (10, 0));
    }
}

#[test]
fn case_13_thread_ends_with_handles_in_its_variables() {
    std::thread_local! {
        static MINE: Slot<Vec<Gc<Node>>> = Slot::new(Vec::new());
    }
    let _turn = turn();
    let alive = Alive::default();
    let counter = alive.clone();
    let ends = thread::spawn(move || {
        MINE.with(|mine| {
            // Dropped when the thread's variables go, those of the collector perhaps before.
            let chain = (0..1000).fold(Node::new(&counter), |chain, _| {
                Node::with_fixed(&counter, Some(chain))
            });
            mine.lock().extend([Node::ring(&counter), chain]);
        });
        drop(Node::ring(&counter));
    });
    ends.join().unwrap();
    assert_eq!(alive.count(), 2, "the chain is dead, the rings are garbage");
    assert_eq!(collect(), 2);
    assert_all_freed(&alive);
}

#[test]
fn case_13_collector_waits_for_no_slot_and_no_slot_for_it() {
    let _turn = turn();
    let alive = Alive::default();
    let ring = Node::ring(&alive);
    drop(ring.clone());
    let guard = ring.peer.lock();
    let other = thread::spawn(|| gc::collect(2).unwrap().busy);
    assert_eq!(other.join().unwrap(), 1);
    drop(guard);
    drop(ring);
    assert_all_freed(&alive);
}

#[derive(Trace)]
struct Holds {
    me: Slot<Option<Gc<Holds>>>,
    tensor: Tensor,
}

/// A tensor of so many bytes in a dead cycle.
fn dead_bytes(bytes: i64) -> lastref::Result<()> {
    let made = Gc::new(Holds {
        me: Slot::default(),
        tensor: bytes_on_gpu(bytes)?,
    });
    assert!(made.tensor.is_cuda());
    made.me.set(Some(made.clone()));
    Ok(())
}

#[test]
fn case_14_freed_is_not_yet_reusable() {
    let _turn = turn();
    let _device = common::turn("8GiB");
    let stream = cuda::Stream::new().unwrap();
    let tensor = bytes_on_gpu(5 * GIB).unwrap();
    common::hold(&stream);
    tensor.record_stream(&stream).unwrap();
    let made = Gc::new(Holds {
        me: Slot::default(),
        tensor,
    });
    made.me.set(Some(made.clone()));
    drop(made);
    // The collection frees it, and the stream still uses it: it is waited for.
    let next = bytes_on_gpu(5 * GIB).unwrap();
    drop(next);
    assert_eq!(allocated(), 0);
}

fn tests_all() -> bool {
    std::env::var_os("LASTREF_TEST_ALL").is_some()
}

fn depth() -> usize {
    if tests_all() { 10_000_000 } else { 1_000_000 }
}

fn on_small_stack(work: impl FnOnce() + Send + 'static) {
    let small = thread::Builder::new().stack_size(256 << 10);
    small.spawn(work).unwrap().join().unwrap();
}

#[test]
fn case_15_depth_in_plain_drop() {
    let _turn = turn();
    on_small_stack(|| {
        let alive = Alive::default();
        let mut chain = Node::new(&alive);
        for _ in 1..depth() {
            chain = Node::with_fixed(&alive, Some(chain));
        }
        assert_eq!(alive.count(), depth());
        drop(chain);
        assert_eq!(alive.count(), 0);
    });
}

#[test]
fn case_15_depth_in_collect() {
    let _turn = turn();
    on_small_stack(|| {
        let alive = Alive::default();
        let first = Node::new(&alive);
        let mut last = first.clone();
        for _ in 1..depth() {
            last = Node::with_fixed(&alive, Some(last));
        }
        first.edge.set(Some(last));
        drop(first.clone());
        assert_eq!(collect(), 0, "a live ring");
        drop(first);
        assert_eq!(collect(), depth() as u64, "a dead one");
        assert_eq!(alive.count(), 0);
    });
}

#[test]
fn case_16_cycles_through_another_heap_are_not_freed_until_that_lets_go() {
    /// What another collector owns: to ours, a handle from outside.
    type OtherHeap = Arc<Mutex<Option<Gc<Wrapped>>>>;
    #[derive(Trace)]
    struct Wrapped {
        #[trace(skip)]
        other: OtherHeap,
        ring: Gc<Node>,
    }
    let _turn = turn();
    let alive = Alive::default();
    let other = OtherHeap::default();
    let wrapped = Gc::new(Wrapped {
        other: Arc::clone(&other),
        ring: Node::ring(&alive),
    });
    *other.lock().unwrap() = Some(wrapped.clone());
    let weak = Gc::downgrade(&wrapped);
    drop(wrapped);
    assert_eq!(collect(), 0);
    assert_intact(&weak.upgrade().unwrap().ring);
    // The other collector breaks the cycle on its side.
    let cut = weak.upgrade().unwrap().other.lock().unwrap().take();
    drop(cut);
    assert!(weak.upgrade().is_none());
    assert_eq!(collect(), 1);
    assert_all_freed(&alive);
}

#[test]
fn case_17_huge_live_component_touched_every_step() {
    let _turn = turn();
    let alive = Alive::default();
    let first = Node::new(&alive);
    let mut last = first.clone();
    for _ in 1..100_000 {
        last = Node::with_fixed(&alive, Some(last));
    }
    first.edge.set(Some(last));
    drop(first.clone());
    assert_eq!(
        gc::collect(2).unwrap().traced,
        100_000,
        "looked at, in vain"
    );
    gc::freeze();
    for _ in 0..10 {
        drop(first.clone());
        drop(Node::ring(&alive));
        let report = gc::collect(2).unwrap();
        assert_eq!(
            (report.objects, report.traced),
            (1, 1),
            "frozen: not looked at"
        );
    }
    gc::unfreeze();
    drop(first);
    assert_eq!(collect(), 100_000);
    assert_all_freed(&alive);
}

#[test]
fn case_18_few_candidates_hold_all_the_memory_and_many_hold_nothing() {
    let _turn = turn();
    let _device = common::turn("8GiB");
    let alive = Alive::default();
    let light: Vec<_> = (0..200_000).map(|_| Node::ring(&alive)).collect();
    let touch = || light.iter().for_each(|node| drop(node.clone()));
    touch();
    collect(); // By now it is known that they hold nothing.
    touch();
    for _ in 0..3 {
        dead_bytes(500 * MIB).unwrap();
    }
    let report = first_automatic_run(|| drop(light[0].clone()));
    assert_eq!(report.reason, gc::Reason::Count);
    assert_eq!(
        report.device_bytes_freed,
        1500 << 20,
        "the heaviest first: {report:?}"
    );
    assert!(
        report.postponed > 0,
        "and not all the rest in its 2 ms: {report:?}"
    );
    gc::disable();
    drop(light);
    assert_all_freed(&alive);
}

/// Lets the collector run by itself at the next candidate, which `push` makes; what its first run
/// did.
fn first_automatic_run(push: impl FnOnce()) -> gc::CollectionReport {
    let (send, receive) = mpsc::channel();
    let send = Mutex::new(send);
    let id = gc::add_callback(move |phase, report| {
        if phase == gc::Phase::Stop {
            let _ = send.lock().unwrap().send(*report);
        }
    });
    gc::enable();
    gc::set_threshold(1, 10, 10);
    // All of them are candidates already: one that was not has to come.
    drop(
        Gc::new(Holds {
            me: Slot::default(),
            tensor: Tensor::zeros([1]).unwrap(),
        })
        .clone(),
    );
    push();
    let report = receive.recv_timeout(Duration::from_secs(30)).unwrap();
    gc::set_threshold(0, 10, 10);
    gc::remove_callback(id);
    report
}

/// Nodes over a kilobyte do not lie in chunks.
#[test]
fn large_nodes_are_found_and_freed() {
    #[derive(Trace)]
    struct Large {
        itself: Slot<Option<Gc<Large>>>,
        bytes: [u64; 250],
    }
    let _turn = turn();
    let large: Vec<_> = (0..30_000)
        .map(|number| {
            let made = Gc::new(Large {
                itself: Slot::default(),
                bytes: [number; 250],
            });
            made.itself.set(Some(made.clone()));
            made
        })
        .collect();
    assert_eq!(gc::objects().len(), 30_000);
    let sum: u64 = large.iter().map(|large| large.bytes[249]).sum();
    assert_eq!(sum, 30_000 * 29_999 / 2);
    drop(large);
    assert_eq!(collect(), 30_000);
    collect();
    assert_eq!(gc::objects(), []);
}

#[test]
fn a_lonely_candidate_is_looked_at_within_seconds() {
    let _turn = turn();
    let alive = Alive::default();
    gc::enable();
    drop(Node::ring(&alive));
    let until = Instant::now() + Duration::from_secs(30);
    while alive.count() > 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
    gc::disable();
    assert_eq!(alive.count(), 0, "nobody looked at it");
}

/// Handles that are forgotten, not dropped, until their count would overflow. The test runs itself
/// in a process of its own, which must abort.
#[test]
#[expect(clippy::mem_forget, reason = "handles that are never given back")]
fn counts_do_not_overflow() {
    const WHICH: &str = "LASTREF_TEST_OVERFLOW";
    let name = "counts_do_not_overflow";
    // Others count the nodes there are.
    let _turn = turn();
    let node = Gc::new(7_u64);
    let weak = Gc::downgrade(&node);
    let object = gc::Object::from(&node);
    match std::env::var(WHICH).as_deref() {
        Ok("clone") => loop_forever(|| std::mem::forget(node.clone())),
        Ok("upgrade") => loop_forever(|| std::mem::forget(weak.upgrade())),
        Ok("object") => loop_forever(|| std::mem::forget(object.clone())),
        _ => {}
    }
    let mut all = vec!["clone", "object"];
    if tests_all() {
        all.push("upgrade"); // Under a lock each time: several seconds.
    }
    for which in all {
        let this = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new(this);
        let child = child.args([name, "--exact"]).env(WHICH, which);
        let output = child.output().unwrap();
        assert!(
            !output.status.success() && output.status.code().is_none(),
            "{which}: {output:?}"
        );
    }
}

/// As often as a count of 28 bits allows, and once more.
fn loop_forever(work: impl Fn()) {
    (0..=1_u32 << 28).for_each(|_| work());
}
