//! Random programs against the collector, with reachability as the judge.
//!
//! One thread: after every step exactly those nodes are alive that counting keeps, and after a
//! collection exactly those that can be reached. Several threads: whoever has a handle finds the
//! node intact, and when all handles are gone nothing is left.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use lastref::gc::{self, Gc, Slot, Trace, Weak};
use proptest::prelude::*;

static TURN: Mutex<()> = Mutex::new(());

/// One test at a time, without automatic runs.
fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    gc::disable();
    gc::set_threshold(0, 10, 10);
    // What an earlier test left when it failed.
    while gc::collect(2).unwrap().objects > 0 {}
    let _ = gc::garbage();
    turn
}

#[derive(Clone, Debug)]
enum Op {
    New { fixed: Option<usize> },
    Link { from: usize, to: usize },
    Unlink { from: usize },
    Move { from: usize, to: usize },
    Swap { a: usize, b: usize },
    DropRoot { at: usize },
    CloneRoot { at: usize },
    Follow { at: usize },
    Upgrade { node: usize },
    Collect { generation: u32 },
    Freeze,
    Unfreeze,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Numbers are taken modulo what there is.
    let n = || 0_usize..12;
    let op = prop_oneof![
        4 => proptest::option::of(n()).prop_map(|fixed| Op::New { fixed }),
        6 => (n(), n()).prop_map(|(from, to)| Op::Link { from, to }),
        2 => n().prop_map(|from| Op::Unlink { from }),
        3 => (n(), n()).prop_map(|(from, to)| Op::Move { from, to }),
        1 => (n(), n()).prop_map(|(a, b)| Op::Swap { a, b }),
        6 => n().prop_map(|at| Op::DropRoot { at }),
        2 => n().prop_map(|at| Op::CloneRoot { at }),
        2 => n().prop_map(|at| Op::Follow { at }),
        2 => (0_usize..40).prop_map(|node| Op::Upgrade { node }),
        2 => (0_u32..3).prop_map(|generation| Op::Collect { generation }),
        1 => Just(Op::Freeze),
        1 => Just(Op::Unfreeze),
    ];
    proptest::collection::vec(op, 1..120)
}

#[derive(Trace)]
struct Node {
    edges: Slot<Vec<Gc<Node>>>,
    fixed: Option<Gc<Node>>,
    id: usize,
    #[trace(skip)]
    alive: Arc<Mutex<BTreeSet<usize>>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        assert!(self.alive.lock().unwrap().remove(&self.id), "dropped twice");
    }
}

/// What counting and reachability say about the same program.
#[derive(Default)]
struct Model {
    /// Per node: edges that can change, in order, and the one that cannot.
    edges: Vec<Vec<usize>>,
    fixed: Vec<Option<usize>>,
    roots: Vec<usize>,
    alive: BTreeSet<usize>,
    frozen: BTreeSet<usize>,
}

impl Model {
    /// Drops what nobody has a handle on, until nothing changes.
    fn count(&mut self) {
        loop {
            let mut held: BTreeSet<usize> = self.roots.iter().copied().collect();
            for &node in &self.alive {
                held.extend(self.out(node));
            }
            let before = self.alive.len();
            self.alive.retain(|node| held.contains(node));
            if self.alive.len() == before {
                self.frozen.retain(|node| held.contains(node));
                return;
            }
        }
    }

    fn out(&self, node: usize) -> impl Iterator<Item = usize> {
        self.edges[node].iter().copied().chain(self.fixed[node])
    }

    /// What can be reached from roots, and from these.
    fn reachable(&self, also: &BTreeSet<usize>) -> BTreeSet<usize> {
        let mut work: Vec<usize> = self.roots.iter().chain(also).copied().collect();
        let mut reached = BTreeSet::new();
        while let Some(node) = work.pop() {
            if reached.insert(node) {
                work.extend(self.out(node));
            }
        }
        reached
    }
}

fn run(program: &[Op]) {
    let alive = Arc::<Mutex<BTreeSet<usize>>>::default();
    let mut model = Model::default();
    let mut roots: Vec<Gc<Node>> = Vec::new();
    let mut weak: Vec<Weak<Node>> = Vec::new();
    for op in program {
        let num = roots.len();
        match *op {
            Op::New { fixed } => {
                let fixed = fixed.filter(|_| num > 0).map(|at| at % num);
                let id = model.edges.len();
                alive.lock().unwrap().insert(id);
                model.alive.insert(id);
                model.edges.push(Vec::new());
                model.fixed.push(fixed.map(|at| model.roots[at]));
                model.roots.push(id);
                roots.push(Gc::new(Node {
                    edges: Slot::default(),
                    fixed: fixed.map(|at| roots[at].clone()),
                    id,
                    alive: Arc::clone(&alive),
                }));
                weak.push(Gc::downgrade(&roots[num]));
            }
            Op::Link { from, to } if num > 0 => {
                let (from, to) = (from % num, to % num);
                roots[from].edges.lock().push(roots[to].clone());
                let target = model.roots[to];
                model.edges[model.roots[from]].push(target);
            }
            Op::Unlink { from } if num > 0 => {
                let from = from % num;
                let edge = roots[from].edges.lock().pop();
                drop(edge);
                model.edges[model.roots[from]].pop();
            }
            Op::Move { from, to } if num > 0 => {
                let (from, to) = (from % num, to % num);
                let edge = roots[from].edges.lock().pop();
                roots[to].edges.lock().extend(edge);
                let edge = model.edges[model.roots[from]].pop();
                model.edges[model.roots[to]].extend(edge);
            }
            Op::Swap { a, b } if num > 0 => {
                let (a, b) = (a % num, b % num);
                let edges = std::mem::take(&mut *roots[a].edges.lock());
                let edges = roots[b].edges.replace(edges);
                let before = roots[a].edges.replace(edges);
                drop(before);
                let (a, b) = (model.roots[a], model.roots[b]);
                let edges = std::mem::take(&mut model.edges[a]);
                let edges = std::mem::replace(&mut model.edges[b], edges);
                model.edges[a] = edges;
            }
            Op::DropRoot { at } if num > 0 => {
                drop(roots.swap_remove(at % num));
                model.roots.swap_remove(at % num);
            }
            Op::CloneRoot { at } if num > 0 => {
                roots.push(roots[at % num].clone());
                model.roots.push(model.roots[at % num]);
            }
            Op::Follow { at } if num > 0 => {
                let edge = roots[at % num].edges.lock().first().cloned();
                roots.extend(edge);
                let edge = model.edges[model.roots[at % num]].first().copied();
                model.roots.extend(edge);
            }
            Op::Upgrade { node } if !weak.is_empty() => {
                let node = node % weak.len();
                let found = weak[node].upgrade();
                assert_eq!(found.is_some(), model.alive.contains(&node), "{node} found");
                assert!(found.iter().all(|found| found.id == node));
                model.roots.extend(found.iter().map(|found| found.id));
                roots.extend(found);
            }
            Op::Collect { generation } => {
                let report = gc::collect(generation).unwrap();
                let before = model.alive.len();
                if generation == 2 {
                    let kept = model.reachable(&model.frozen);
                    model.alive.retain(|node| kept.contains(node));
                    let freed = before - model.alive.len();
                    assert_eq!(report.objects, freed as u64);
                } else {
                    // It may leave garbage to a thorough run, and frees nothing else.
                    let left = alive.lock().unwrap().clone();
                    let reachable = model.reachable(&BTreeSet::new());
                    assert!(reachable.is_subset(&left), "freed what can be reached");
                    model.alive = left;
                }
                model.frozen.retain(|node| model.alive.contains(node));
            }
            Op::Freeze => {
                gc::freeze();
                model.frozen = model.alive.clone();
            }
            Op::Unfreeze => {
                gc::unfreeze();
                model.frozen.clear();
            }
            _ => {}
        }
        model.count();
        assert_eq!(*alive.lock().unwrap(), model.alive, "after {op:?}");
        for (root, id) in roots.iter().zip(&model.roots) {
            let edges: Vec<usize> = root.edges.lock().iter().map(|edge| edge.id).collect();
            assert_eq!((root.id, &edges), (*id, &model.edges[*id]), "after {op:?}");
        }
    }
    drop(roots);
    gc::unfreeze();
    gc::collect(2).unwrap();
    assert_eq!(*alive.lock().unwrap(), BTreeSet::new(), "left in the end");
    gc::collect(2).unwrap();
    assert_eq!(gc::get_count(), (0, 0));
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn alive_is_what_counting_keeps_and_after_a_collection_what_can_be_reached(program in ops()) {
        let _turn = turn();
        run(&program);
    }
}

// ---- several threads ---------------------------------------------------------------------------

const INTACT: u64 = 0x1A57_0EF5;

#[derive(Trace)]
struct Shared {
    edges: Slot<Vec<Gc<Shared>>>,
    /// Leads to the node itself: an empty one was emptied by a collection.
    itself: Slot<Option<Gc<Shared>>>,
    #[trace(skip)]
    canary: AtomicU64,
    #[trace(skip)]
    alive: Arc<AtomicUsize>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        assert_eq!(
            self.canary.swap(0, Ordering::SeqCst),
            INTACT,
            "dropped twice"
        );
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

fn shared(alive: &Arc<AtomicUsize>) -> Gc<Shared> {
    alive.fetch_add(1, Ordering::SeqCst);
    let made = Gc::new(Shared {
        edges: Slot::default(),
        itself: Slot::default(),
        canary: AtomicU64::new(INTACT),
        alive: Arc::clone(alive),
    });
    made.itself.set(Some(made.clone()));
    made
}

fn check(node: &Gc<Shared>) {
    assert_eq!(
        node.canary.load(Ordering::SeqCst),
        INTACT,
        "used after its death"
    );
    let intact = node
        .itself
        .lock()
        .as_ref()
        .is_some_and(|itself| Gc::ptr_eq(itself, node));
    assert!(intact, "emptied while somebody had a handle");
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

type Roots = [Slot<Option<Gc<Shared>>>];

/// One thread's work on roots that all share. It locks one slot at a time.
fn mutate(
    roots: &Roots,
    weak: &Slot<Vec<Weak<Shared>>>,
    alive: &Arc<AtomicUsize>,
    seed: u64,
    steps: usize,
) {
    let mut random = Random(seed);
    let mut mine: Option<Gc<Shared>> = None;
    for _ in 0..steps {
        let at = random.below(roots.len());
        let root = roots[at].get();
        if let Some(root) = &root {
            check(root);
        }
        match (random.below(10), root, &mine) {
            (0 | 1, None, _) | (0, Some(_), _) => roots[at].set(Some(shared(alive))),
            (1, Some(root), _) => {
                let mut weak = weak.lock();
                let at = random.below(64);
                let made = Gc::downgrade(&root);
                if at < weak.len() {
                    weak[at] = made;
                } else {
                    weak.push(made);
                }
            }
            (2 | 3, Some(root), Some(mine)) => root.edges.lock().push(mine.clone()),
            (4, Some(root), Some(mine)) => {
                // A move: no count changes.
                let edge = root.edges.lock().pop();
                edge.iter().for_each(check);
                mine.edges.lock().extend(edge);
            }
            (5, Some(root), _) => drop(root.edges.take()),
            (6, Some(root), _) => {
                let edge = root.edges.lock().last().cloned();
                edge.iter().for_each(check);
                mine = edge;
            }
            (7, _, _) => {
                let found = weak.lock().last().cloned();
                if let Some(found) = found.and_then(|found| found.upgrade()) {
                    check(&found);
                    mine = Some(found);
                }
            }
            (8, _, _) => drop(roots[at].take()),
            (_, root, _) => mine = root,
        }
    }
}

#[test]
fn four_threads_beside_a_collector() {
    let _turn = turn();
    let alive = Arc::<AtomicUsize>::default();
    let roots: Vec<Slot<Option<Gc<Shared>>>> = (0..16).map(|_| Slot::default()).collect();
    let weak = Slot::default();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let collector = scope.spawn(|| {
            let mut sums = [0_u64; 3];
            for generation in (0..3).cycle() {
                let report = gc::collect(generation).unwrap();
                sums[0] += report.objects;
                sums[1] += report.busy;
                sums[2] += 1;
                if ends.load(Ordering::Relaxed) {
                    break;
                }
            }
            sums
        });
        let mutators: Vec<_> = (1..=4_u64)
            .map(|seed| {
                let (roots, weak, alive) = (&roots, &weak, &alive);
                scope.spawn(move || mutate(roots, weak, alive, seed * 0x9E37_79B9, 200_000))
            })
            .collect();
        for mutator in mutators {
            mutator.join().unwrap();
        }
        ends.store(true, Ordering::Relaxed);
        let [objects, busy, runs] = collector.join().unwrap();
        println!("{objects} freed in {runs} collections, {busy} busy");
        assert!(objects > 0);
    });
    drop(roots);
    gc::collect(2).unwrap();
    assert_eq!(alive.load(Ordering::SeqCst), 0, "left in the end");
    gc::collect(2).unwrap();
    assert_eq!(gc::get_count(), (0, 0));
    assert_eq!(gc::garbage().failures, Vec::<String>::new());
}
