//! A collection: from candidates to deaths.
//!
//! 1. **Take** the candidates and trace what they reach, once, counting the edges that arrive at
//!    each node and noting the version of each slot. A node that is being read has `SCAN` set, so
//!    its value stays; a slot that somebody holds makes its node live.
//! 2. **Snapshot** the words: of each node at the end of its trace or, if tracing took long, of all
//!    after it. A node with more handles than edges is held from outside: live, with all it reaches.
//! 3. **Validate** what is left, node by node: its word must have the count and version of the
//!    snapshot, and `CONDEMNED` is set in the same step; its slots must have the versions that were
//!    traced. Whatever changed is live, with all it reaches.
//! 4. What is left is **garbage**. If it has weak handles with callbacks or finalizers, they run, on
//!    intact objects, and everything is looked at again. If not, its slots are emptied, and counting
//!    does the rest.
//!
//! # Why it is sound
//!
//! Call the set that is left after 3 *G*. After the trace and before the first check of 3 there is
//! a moment *t*. No word of *G* changed between the snapshot and its check, so no handle on *G* was
//! cloned or dropped between them. No slot of *G* was locked between its trace and its check, and
//! *t* lies between those too: at *t* the slots held the edges that were counted, and edges outside
//! slots never change. So at *t* all handles on *G* were edges inside *G*, and nobody outside could
//! reach it. To reach it later, one must have been able to reach it at *t*, or have upgraded a weak
//! handle; an upgrade changes the word before its check, or meets `CONDEMNED` and waits.
//!
//! That speaks of before and after as if all threads saw one order. What they do see suffices. Words
//! change by steps that read the newest one; slots are checked by plain loads, but after all traces.
//! Take a thread that has a handle on *G* outside and was overlooked: the trace counted that handle
//! in a slot. Either the thread put it there before, and the trace, which took the slot's lock after
//! it, has acquired all it did until then: the check sees each slot it had taken something out of.
//! It came to that slot by a handle that it still had, so go on with that one, up to the last that
//! was put away. Or it took the handle out after the trace, by way of another handle outside, and
//! that one is next. The first handle by which a thread came to *G* was never in a slot; so the trace
//! did not count it, and the node's word tells of it.
//!
//! The version in a word could lie only if a node was cloned exactly 2^30 times, or a multiple,
//! between two looks at it; a validation in which two passes over the words lie further apart than
//! [`MAX_WINDOW`] is therefore void.
//!
//! # Locks
//!
//! The collector's lock is held during 1 to 3 and not during 4: destructors, finalizers and
//! callbacks run with no lock of ours held, and may do anything, collect and allocate included.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::header::{
    BUFFERED, CANDIDATES, CONDEMNED, COUNT, DEAD, DROPPING, Header, ONE_CLONE, SCAN, TABLED,
    VERDICT, clear_flags, finish_drop, last_dropped, marks, note_panic, release, run_foreign,
};
use super::object::Object;
use super::sync::{Condvar, Mutex, MutexGuard, Ordering, global, lock, thread_local, wait_timeout};
use super::trace::{Mode, Tracer};
use super::weak::{Callback, has_callbacks, run_callback, take_callbacks};

/// The longest that may pass between two looks at a word. 2^30 clones, each with its drop, take over
/// 4 s on one thread at 4 ns a pair; half of that leaves a margin.
const MAX_WINDOW: Duration = unless_modelled(Duration::from_secs(2));
/// After so long, all words are looked at once more: millions of slots take seconds to compare.
const NEXT_PASS: Duration = unless_modelled(Duration::from_millis(200));

/// A model of loom's runs again and again and must do the same each time: no clock decides in it.
const fn unless_modelled(time: Duration) -> Duration {
    if cfg!(loom) { Duration::MAX } else { time }
}

/// After so many runs in a row that needed little memory, it is given back.
const MAX_SMALL_RUNS: u32 = 8;
/// Finalizers may make new garbage with finalizers: so often is looked again in one run.
const MAX_ROUNDS: usize = 10;

/// What one collection did.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Outcome {
    /// Nodes found in garbage.
    pub(super) objects: u64,
    /// Nodes traced.
    pub(super) traced: u64,
    /// Candidates put back: frozen, or left for want of time.
    pub(super) postponed: u64,
    /// Nodes that could not be judged, since somebody held one of their slots.
    pub(super) busy: u64,
}

/// What collections leave for later ones, under the collector's lock.
#[derive(Default)]
pub(super) struct Postponed {
    /// Candidates that wait for a thorough run; `BUFFERED` stays set on them.
    candidates: Vec<NonNull<Header>>,
    /// How many there were after they were last pruned.
    left_by_prune: usize,
    /// Lists for the next run, which are empty: getting memory for millions of entries takes longer
    /// than looking at them.
    lists: Scan,
}

// SAFETY: addresses of headers that `BUFFERED` keeps, and lists of none.
unsafe impl Send for Postponed {}

global! {
    /// Held while a collection looks: the right to use `TABLED` and its like.
    static COLLECTOR: Mutex<Postponed> = Mutex::new(Postponed::default());
}

thread_local! {
    /// Whether this thread is inside a collection, destructors included.
    static COLLECTING: Cell<bool> = Cell::new(false);
    /// The node that this thread is reading.
    static READING: Cell<Option<NonNull<Header>>> = Cell::new(None);
    /// Nodes whose last handle this thread dropped while it was reading them.
    static LEFT: RefCell<Vec<NonNull<Header>>> = RefCell::new(Vec::new());
}

/// Takes over the drop of a node's value if this very thread is reading it: waiting for oneself
/// would take forever.
pub(super) fn left_to_this_collection(node: NonNull<Header>) -> bool {
    let reading = READING.try_with(Cell::get).ok().flatten();
    reading == Some(node) && LEFT.try_with(|left| left.borrow_mut().push(node)).is_ok()
}

/// How thorough a collection is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Also the candidates that earlier runs have put back.
    pub(super) postponed: bool,
    /// How long to take further candidates, the heaviest first.
    pub(super) budget: Option<Duration>,
}

/// Runs a collection on this thread. `None` if this thread is inside one already.
pub(super) fn run(effort: Effort) -> Option<Outcome> {
    if COLLECTING
        .try_with(|inside| inside.replace(true))
        .unwrap_or(true)
    {
        return None;
    }
    let _inside = Inside;
    let mut outcome = Outcome::default();
    for _ in 0..MAX_ROUNDS {
        let looked = look(effort, &mut outcome);
        for node in looked.left {
            // SAFETY: this thread took the count to zero while reading; `SCAN` is clear now.
            unsafe { finish_drop(node) };
        }
        match looked.garbage {
            Garbage::None => break,
            Garbage::ToTell(nodes) => tell(&nodes),
            Garbage::ToKill(found, late) => {
                outcome.objects += found.len() as u64;
                for (node, callback) in late {
                    // SAFETY: a count of each node is held.
                    run_callback(unsafe { node.as_ref() }, callback);
                }
                // SAFETY: a count of each is held, and goes into the handle.
                let mut saved = found
                    .iter()
                    .map(|found| unsafe { Object::from_counted(found.node) });
                if super::save_all(&mut saved) {
                    unbuffer(&found);
                } else {
                    kill(&found);
                }
                break;
            }
        }
    }
    Some(outcome)
}

/// Collections that have found garbage and not freed all of it yet: what they found, no other will
/// find.
struct Killing {
    num: Mutex<usize>,
    changed: Condvar,
}

global! {
    static KILLING: Killing = Killing { num: Mutex::new(0), changed: Condvar::new() };
}

struct Kill;

impl Kill {
    /// To be called before the collector's lock is free again.
    fn begin() -> Self {
        *lock(&KILLING.num) += 1;
        Self
    }
}

impl Drop for Kill {
    fn drop(&mut self) {
        *lock(&KILLING.num) -= 1;
        KILLING.changed.notify_all();
    }
}

struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = COLLECTING.try_with(|inside| inside.set(false));
    }
}

/// One node in the table of a collection.
struct Entry {
    node: NonNull<Header>,
    /// The word at the snapshot.
    word: u64,
    /// Edges found that arrive here.
    arriving: u32,
    /// Where this node's edges are, and where its slots' versions begin.
    edges: (u32, u32),
    first_version: u32,
    live: bool,
    /// Garbage that has callbacks, or a finalizer that did not run.
    tells: bool,
}

/// A position in a list of a run: four bytes, since lists of millions are read again and again.
fn position(len: usize) -> u32 {
    u32::try_from(len).expect("under 2^32 nodes, edges and slots in one run")
}

/// What a collection has traced.
#[derive(Default)]
pub(super) struct Scan {
    table: Vec<Entry>,
    edges: Vec<u32>,
    versions: Vec<u64>,
    bytes: u64,
    left: Vec<NonNull<Header>>,
    busy: Vec<NonNull<Header>>,
    /// Runs in a row that needed a fraction of the lists' memory.
    small_runs: u32,
    /// The word of the node that was read last, when it had been read.
    word_read: u64,
}

enum Garbage {
    None,
    /// With callbacks to run or finalizers; a count of each node is held.
    ToTell(Vec<NonNull<Header>>),
    /// A count of each node is held, and `BUFFERED` is set on it. And callbacks that were set while
    /// the collection looked.
    ToKill(Vec<Found>, Vec<(NonNull<Header>, Callback)>),
}

/// A node found to be garbage.
struct Found {
    node: NonNull<Header>,
    /// Whether `BUFFERED` was set by this collection. If not, the node is on the stack or among
    /// the postponed, which keep its header until a later collection takes it from there.
    buffered_here: bool,
}

struct Looked {
    garbage: Garbage,
    _kill: Option<Kill>,
    left: Vec<NonNull<Header>>,
}

/// Steps 1 to 3, under the collector's lock.
fn look(effort: Effort, outcome: &mut Outcome) -> Looked {
    let mut collector = lock(&COLLECTOR);
    let mut scan = std::mem::take(&mut collector.lists);
    let mut window = Window::open();
    scan.trace_candidates(effort, &mut collector, outcome);
    let is_old = window.pass.elapsed() > NEXT_PASS;
    if is_old {
        window = Window::open();
    }
    scan.snapshot(is_old);
    scan.validate(&mut window);
    LEFT.with(|left| scan.left.append(&mut left.borrow_mut()));
    outcome.traced += scan.table.len() as u64;
    outcome.busy += scan.busy.len() as u64;
    let num_traced = scan.table.len();
    let garbage = scan.end(window.void, &mut collector);
    let left = std::mem::take(&mut scan.left);
    collector.lists = scan.emptied(num_traced);
    Looked {
        _kill: (!matches!(garbage, Garbage::None)).then(Kill::begin),
        garbage,
        left,
    }
}

/// The time since words were last looked at.
struct Window {
    /// When the latest pass over all words began.
    pass: Instant,
    /// Two passes were too far apart to conclude anything.
    void: bool,
}

impl Window {
    /// To be called before the first pass: the trace, or the snapshot if that looks at words again.
    fn open() -> Self {
        Self {
            pass: Instant::now(),
            void: false,
        }
    }

    /// A pass that began then has ended.
    fn passed(&mut self, began: Instant) {
        self.void |= self.pass.elapsed() > MAX_WINDOW;
        self.pass = began;
    }
}

impl Scan {
    /// The lists for the next run. Their memory is kept, unless several runs in a row have needed a
    /// fraction of it: giving it back takes milliseconds if it is much.
    fn emptied(mut self, num_traced: usize) -> Self {
        self.edges.clear();
        self.versions.clear();
        if self.table.capacity() / 4 <= num_traced {
            self.small_runs = 0;
        } else {
            self.small_runs += 1;
        }
        if self.small_runs == MAX_SMALL_RUNS {
            return Self::default();
        }
        self.bytes = 0;
        self
    }

    /// Adds a node to the table, once. The caller keeps its header until it is in it.
    fn add(&mut self, node: NonNull<Header>) -> u32 {
        // SAFETY: the caller keeps the header.
        let header = unsafe { node.as_ref() };
        if header.word.load(Ordering::Relaxed) & TABLED == 0 {
            header.word.fetch_or(TABLED, Ordering::AcqRel);
            self.push(node);
        }
        header.index.load(Ordering::Relaxed)
    }

    /// Adds a node that is not in the table. `TABLED` is set on it.
    fn push(&mut self, node: NonNull<Header>) {
        // SAFETY: `TABLED` keeps the header.
        let header = unsafe { node.as_ref() };
        header
            .index
            .store(position(self.table.len()), Ordering::Relaxed);
        self.table.push(Entry {
            node,
            word: 0,
            arriving: 0,
            edges: (0, 0),
            first_version: 0,
            live: false,
            tells: false,
        });
    }

    pub(super) fn add_edge(&mut self, target: NonNull<Header>) {
        let index = self.add(target);
        self.table[index as usize].arriving += 1;
        self.edges.push(index);
    }

    pub(super) fn add_version(&mut self, version: u64) {
        self.versions.push(version);
    }

    pub(super) fn version(&self, at: usize) -> Option<u64> {
        self.versions.get(at).copied()
    }

    pub(super) fn add_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// The header of an entry. Not bound to `self`: the table may grow meanwhile.
    fn header(&self, at: usize) -> &'static Header {
        // SAFETY: `TABLED` keeps the header until the end of the run, and nothing outlives that.
        unsafe { self.table[at].node.as_ref() }
    }

    /// Reads the value of an entry under `SCAN`. False if nothing can be concluded: the value is
    /// gone or going, a slot was held or had changed, or the trace panicked.
    fn read(&mut self, at: usize, mode: impl FnOnce(&mut Self) -> Mode<'_>) -> bool {
        self.read_if(at, 0, |_| true, mode)
    }

    /// The same if the word is one that `is_expected`; false if not. Other `flags` are set in the
    /// same step as `SCAN`, and stay.
    fn read_if(
        &mut self,
        at: usize,
        flags: u64,
        is_expected: impl FnOnce(u64) -> bool,
        mode: impl FnOnce(&mut Self) -> Mode<'_>,
    ) -> bool {
        let node = self.table[at].node;
        let header = self.header(at);
        let before = header.word.fetch_or(SCAN | flags, Ordering::AcqRel);
        let is_alive = before & COUNT != 0 && before & (DROPPING | DEAD) == 0;
        let mut readable = is_alive && is_expected(before);
        let mut busy = false;
        if readable {
            READING.with(|reading| reading.set(Some(node)));
            let mut tracer = Tracer::new(mode(self));
            let trace = header.vtable.trace;
            // SAFETY: the count was not zero when `SCAN` was set, so the value stays until it is
            // cleared.
            let traced = catch_unwind(AssertUnwindSafe(|| unsafe { trace(node, &mut tracer) }));
            busy = tracer.busy || traced.is_err();
            readable = !busy;
            READING.with(|reading| reading.set(None));
            if let Err(panic) = traced {
                note_panic((header.vtable.type_name)(), &*panic);
            }
        }
        self.word_read = header.word.fetch_and(!SCAN, Ordering::AcqRel);
        if busy {
            self.busy.push(node);
        }
        readable
    }

    // ---- 1: take and trace -----------------------------------------------------------------------

    fn trace_candidates(
        &mut self,
        effort: Effort,
        postponed: &mut MutexGuard<'_, Postponed>,
        outcome: &mut Outcome,
    ) {
        let mut earlier = Vec::new();
        if effort.postponed {
            earlier.append(&mut postponed.candidates);
        }
        if effort.budget.is_some() {
            let mut candidates = CANDIDATES.take();
            candidates.append(&mut earlier);
            // The heaviest first. What was never looked at comes before what held nothing.
            candidates.sort_by_key(|node| {
                // SAFETY: `BUFFERED` keeps the header.
                let weight = unsafe { node.as_ref() }.weight.load(Ordering::Relaxed);
                std::cmp::Reverse(if weight == 0 { 2 } else { weight })
            });
            for node in candidates {
                self.add_candidate(node, postponed, outcome);
            }
        } else {
            CANDIDATES.take_each(|node| self.add_candidate(node, postponed, outcome));
            for node in earlier {
                self.add_candidate(node, postponed, outcome);
            }
        }
        // From here on: many candidates take long to sort, and some are to be looked at.
        let until = effort.budget.map(|budget| Instant::now() + budget);
        let num_candidates = self.table.len();
        let mut next = num_candidates;
        for candidate in 0..num_candidates {
            let header = self.header(candidate);
            if until.is_some_and(|until| Instant::now() >= until) {
                self.table[candidate].live = true;
                outcome.postponed += 1;
                if header.word.fetch_or(BUFFERED, Ordering::AcqRel) & BUFFERED == 0 {
                    postponed.candidates.push(self.table[candidate].node);
                }
                continue;
            }
            let bytes = self.bytes;
            self.trace(candidate);
            // And what it reaches, but for other candidates, whose turn comes.
            while next < self.table.len() {
                self.trace(next);
                next += 1;
            }
            // 1 bit for nothing: 0 means that nobody looked.
            let bits = 64 - (self.bytes - bytes).leading_zeros() + 1;
            let bits = u8::try_from(bits).unwrap_or(u8::MAX);
            header.weight.store(bits, Ordering::Relaxed);
        }
    }

    /// Adds a candidate that was taken off its list.
    fn add_candidate(
        &mut self,
        node: NonNull<Header>,
        postponed: &mut MutexGuard<'_, Postponed>,
        outcome: &mut Outcome,
    ) {
        // SAFETY: `BUFFERED` keeps the header.
        let header = unsafe { node.as_ref() };
        if header.word.load(Ordering::Acquire) & (DROPPING | DEAD) != 0 {
            // It died by its count, also if it was frozen.
            // SAFETY: the candidate was taken off its list by this run. Not used afterwards.
            unsafe { clear_flags(node, BUFFERED) };
        } else if header.has(marks::FROZEN) {
            outcome.postponed += 1;
            postponed.candidates.push(node);
        } else {
            // Before anything is traced: a drop from here on makes it a candidate again. One that
            // did not would go unseen if the edge it took away was traced before. A candidate was on
            // one list once, so it is not in the table, and the one flag is set and the other clear.
            header.word.fetch_xor(TABLED | BUFFERED, Ordering::AcqRel);
            self.push(node);
        }
    }

    fn trace(&mut self, at: usize) {
        prefetch(self.table.get(at + AHEAD).map(|entry| entry.node));
        self.table[at].first_version = position(self.versions.len());
        let first_edge = position(self.edges.len());
        if !self.read(at, |scan| Mode::Scan(scan)) {
            self.table[at].live = true;
        }
        let entry = &mut self.table[at];
        entry.edges = (first_edge, position(self.edges.len()));
        entry.word = self.word_read;
    }

    // ---- 2: snapshot -----------------------------------------------------------------------------

    /// Compares counts. The words are those at the end of each node's trace, which spares a pass over
    /// all nodes; or, `again`, those of now, if the trace took long.
    fn snapshot(&mut self, again: bool) {
        let mut live = Vec::new();
        let mut too_many = Vec::new();
        for at in 0..self.table.len() {
            if again {
                self.table[at].word = self.header(at).word.load(Ordering::SeqCst);
            }
            let entry = &mut self.table[at];
            let word = entry.word;
            if u64::from(entry.arriving) > word & COUNT && word & (DROPPING | DEAD) == 0 {
                too_many.push(at);
            }
            if entry.live
                || word & (DROPPING | DEAD) != 0
                || u64::from(entry.arriving) != word & COUNT
            {
                entry.live = true;
                live.push(at);
            }
        }
        if !too_many.is_empty() {
            self.report_double_edges(&too_many);
        }
        self.flood(live);
    }

    /// More edges than handles: an edge moved while it was looked at and was seen at both its
    /// places, or, if nothing has moved, a type reports one twice.
    fn report_double_edges(&mut self, targets: &[usize]) {
        let unmoved = (0..self.table.len()).all(|at| {
            let position = self.table[at].first_version as usize;
            self.read(at, |scan| Mode::Verify(scan, position))
        });
        if unmoved {
            for at in targets {
                let name = (self.header(*at).vtable.type_name)();
                note_panic(name, &"something that refers to it reports an edge twice");
            }
        }
    }

    /// Makes live what live nodes reach.
    fn flood(&mut self, mut work: Vec<usize>) {
        while let Some(at) = work.pop() {
            let (first, end) = self.table[at].edges;
            for edge in first..end {
                let to = self.edges[edge as usize] as usize;
                if !self.table[to].live {
                    self.table[to].live = true;
                    work.push(to);
                }
            }
        }
    }

    // ---- 3: validate -----------------------------------------------------------------------------

    fn validate(&mut self, window: &mut Window) {
        let mut live = Vec::new();
        for at in 0..self.table.len() {
            if at % 1024 == 0 && window.pass.elapsed() > NEXT_PASS {
                self.compare_words(window);
            }
            prefetch(self.table.get(at + AHEAD).map(|entry| entry.node));
            let entry = &self.table[at];
            if entry.live {
                continue;
            }
            let (word, position) = (entry.word, entry.first_version as usize);
            let is_unchanged = |now: u64| (now ^ word) & VERDICT == 0;
            let is_verified = self.read_if(at, CONDEMNED, is_unchanged, |scan| {
                Mode::Verify(scan, position)
            });
            if is_verified {
                let header = self.header(at);
                self.table[at].tells = has_callbacks(header)
                    || (header.vtable.finalize.is_some() && !header.has(marks::FINALIZED));
            } else {
                self.table[at].live = true;
                live.push(at);
            }
        }
        self.flood(live);
        window.passed(Instant::now());
    }

    /// Makes live what was cloned or dropped since the snapshot.
    fn compare_words(&mut self, window: &mut Window) {
        let began = Instant::now();
        let mut live = Vec::new();
        for at in 0..self.table.len() {
            if self.table[at].live {
                continue;
            }
            let word = self.header(at).word.load(Ordering::SeqCst);
            if word & VERDICT != self.table[at].word & VERDICT {
                self.table[at].live = true;
                live.push(at);
            }
        }
        self.flood(live);
        window.passed(began);
    }

    // ---- the end of looking ----------------------------------------------------------------------

    /// Sorts out the table: live nodes are let go, garbage is held and handed on.
    fn end(&mut self, void: bool, postponed: &mut MutexGuard<'_, Postponed>) -> Garbage {
        let to_tell = !void && self.table.iter().any(|entry| !entry.live && entry.tells);
        for node in self.busy.drain(..) {
            // SAFETY: `TABLED` keeps the header.
            let header = unsafe { node.as_ref() };
            if header.word.fetch_or(BUFFERED, Ordering::AcqRel) & BUFFERED == 0 {
                CANDIDATES.push(node);
            }
        }
        let mut told = Vec::new();
        let mut found = Vec::new();
        let mut late = Vec::new();
        for (at, entry) in self.table.iter().enumerate() {
            prefetch(self.table.get(at + AHEAD).map(|entry| entry.node));
            // SAFETY: `TABLED` keeps the header.
            let header = unsafe { entry.node.as_ref() };
            if void && !entry.live {
                // Nothing was concluded: a later run looks again.
                if header.word.fetch_or(BUFFERED, Ordering::AcqRel) & BUFFERED == 0 {
                    postponed.candidates.push(entry.node);
                }
            }
            if void || entry.live {
                // SAFETY: the entry is given up, and this run was the one that set them.
                unsafe { clear_flags(entry.node, TABLED | CONDEMNED) };
                continue;
            }
            // Nobody can reach the node, and weak handles on it wait or find nothing: so nobody else
            // changes the word, and it takes no atomic step to change it.
            let word = header.word.load(Ordering::Acquire);
            let held = word.wrapping_add(ONE_CLONE) & !(TABLED | CONDEMNED);
            if to_tell {
                told.push(entry.node);
                // Still condemned: whoever found this one by a weak handle could reach the others.
                header.word.store(held | CONDEMNED, Ordering::Release);
                continue;
            }
            // Not to be run here, under the lock.
            let callbacks = take_callbacks(header, true).into_iter();
            late.extend(callbacks.map(|callback| (entry.node, callback)));
            // While its slots are emptied, drops of handles on it need not make it a candidate: it
            // is looked at once more when it is let go.
            header.word.store(held | BUFFERED, Ordering::Release);
            found.push(Found {
                node: entry.node,
                buffered_here: word & BUFFERED == 0,
            });
        }
        self.table.clear();
        for node in &told {
            // SAFETY: a count of each is held.
            let header = unsafe { node.as_ref() };
            header.word.fetch_and(!CONDEMNED, Ordering::AcqRel);
        }
        if !told.is_empty() {
            Garbage::ToTell(told)
        } else if !found.is_empty() {
            Garbage::ToKill(found, late)
        } else {
            Garbage::None
        }
    }
}

// ---- 4: deaths -------------------------------------------------------------------------------------

/// Runs callbacks, then finalizers, and lets the nodes go as candidates: what nobody took up is
/// found again in the next round.
fn tell(nodes: &[NonNull<Header>]) {
    // SAFETY: a count of each is held.
    let header = |node: &NonNull<Header>| unsafe { node.as_ref() };
    for node in nodes {
        for callback in take_callbacks(header(node), false) {
            run_callback(header(node), callback);
        }
    }
    for node in nodes {
        if let Some(finalize) = header(node).vtable.finalize
            && header(node)
                .marks
                .fetch_or(marks::FINALIZED, Ordering::AcqRel)
                & marks::FINALIZED
                == 0
        {
            // SAFETY: the value is alive, since a count is held.
            run_foreign(header(node), || unsafe { finalize(*node) });
        }
    }
    for node in nodes {
        // SAFETY: the count that is held.
        unsafe { release(*node) };
    }
}

/// Nodes that are kept after all become candidates when their handles go.
fn unbuffer(nodes: &[Found]) {
    for found in nodes.iter().filter(|found| found.buffered_here) {
        // SAFETY: `BUFFERED` was set by `end` without the node being on the stack; it is kept by a
        // handle.
        unsafe { clear_flags(found.node, BUFFERED) };
    }
}

/// Empties the slots of garbage, and lets it go.
fn kill(nodes: &[Found]) {
    for (at, found) in nodes.iter().enumerate() {
        prefetch(nodes.get(at + AHEAD).map(|found| found.node));
        // SAFETY: a count of each is held.
        let header = unsafe { found.node.as_ref() };
        let mut tracer = Tracer::new(Mode::Sever);
        let trace = header.vtable.trace;
        // SAFETY: the value is alive, since a count is held.
        let severed = catch_unwind(AssertUnwindSafe(|| unsafe {
            trace(found.node, &mut tracer);
        }));
        if let Err(panic) = severed {
            note_panic((header.vtable.type_name)(), &*panic);
        }
    }
    for (at, found) in nodes.iter().enumerate() {
        prefetch(nodes.get(at + AHEAD).map(|found| found.node));
        if found.buffered_here {
            // SAFETY: the count that is held, and `BUFFERED` was set by `end`.
            unsafe { let_go(found.node) };
        } else {
            // SAFETY: the count that is held.
            unsafe { release(found.node) };
        }
    }
}

/// Gives back the count of a node that was killed. In most cases it was the last.
///
/// # Safety
///
/// The caller owns a count, and set `BUFFERED` without the node being on the stack.
unsafe fn let_go(node: NonNull<Header>) {
    // SAFETY: the caller's count keeps the header until the word is changed below.
    let header = unsafe { node.as_ref() };
    let mut word = header.word.load(Ordering::Relaxed);
    while word & COUNT == 1 {
        let last = ((word - 1) | DROPPING) & !BUFFERED;
        match header
            .word
            .compare_exchange_weak(word, last, Ordering::AcqRel, Ordering::Relaxed)
        {
            Ok(_) => {
                // SAFETY: this was the last handle; the flags are those before `DROPPING`.
                unsafe { last_dropped(node, word & !BUFFERED) };
                return;
            }
            Err(now) => word = now,
        }
    }
    // Something else still refers to it: an edge outside slots, or whoever a destructor gave a
    // handle to. It is a candidate like any other now.
    CANDIDATES.push(node);
    // SAFETY: the caller's count.
    unsafe { release(node) };
}

/// Asks the processor for a header that is needed soon. A million nodes are more than its caches
/// hold, and each pass comes to them in the order of the table.
#[inline]
fn prefetch(node: Option<NonNull<Header>>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(node) = node {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which touches nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(node.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = node;
}

/// How far ahead nodes are asked for.
const AHEAD: usize = 12;

/// Makes every postponed candidate an ordinary one again.
pub(super) fn requeue_postponed() {
    for node in std::mem::take(&mut lock(&COLLECTOR).candidates) {
        CANDIDATES.push(node);
    }
}

/// How many candidates wait for a thorough run.
pub(super) fn num_postponed() -> usize {
    lock(&COLLECTOR).candidates.len()
}

/// Whether there may be such candidates. Unlike [`num_postponed`], it does not wait.
pub(super) fn may_have_postponed() -> bool {
    COLLECTOR
        .try_lock()
        .map_or(true, |postponed| !postponed.candidates.is_empty())
}

/// Waits, no longer than `bound`, for collections on other threads to free what they have found.
pub(super) fn wait_for_deaths(bound: Duration) {
    let until = Instant::now() + bound;
    let mut num = lock(&KILLING.num);
    while *num > 0 {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        num = wait_timeout(&KILLING.changed, num, left);
    }
}

/// Whether this thread is inside a collection.
pub(super) fn is_inside() -> bool {
    COLLECTING.try_with(Cell::get).unwrap_or(true)
}

/// Whether this thread is inside a collection, or is the collector's own.
pub(super) fn is_collecting() -> bool {
    is_inside() || COLLECTOR_THREAD.try_with(Cell::get).unwrap_or(true)
}

thread_local! {
    static COLLECTOR_THREAD: Cell<bool> = Cell::new(false);
}

/// Marks this thread as the collector's own.
pub(super) fn mark_collector_thread() {
    COLLECTOR_THREAD.with(|this| this.set(true));
}

/// Candidates are pruned when there are so many, and then whenever they have doubled.
const MIN_PRUNED: usize = 1024;

/// Puts all candidates back, and lets go of those that have died meanwhile: when they have doubled
/// since the last time, so that the work is in proportion to the candidates that come.
pub(super) fn prune() {
    let mut collector = lock(&COLLECTOR);
    let Postponed {
        candidates,
        left_by_prune: left,
        ..
    } = &mut *collector;
    // A collection may have taken them since.
    *left = candidates.len().min(*left);
    candidates.append(&mut CANDIDATES.take());
    if candidates.len() < MIN_PRUNED.max(2 * *left) {
        return;
    }
    candidates.retain(|node| {
        // SAFETY: `BUFFERED` keeps the header.
        let word = unsafe { node.as_ref() }.word.load(Ordering::Acquire);
        let is_alive = word & (DROPPING | DEAD) == 0;
        if !is_alive {
            // SAFETY: the candidate is taken off its list here. Not used afterwards.
            unsafe { clear_flags(*node, BUFFERED) };
        }
        is_alive
    });
    *left = candidates.len();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::gc::{Gc, Slot};

    #[test]
    fn pruning_lets_go_of_candidates_that_died_after_it() {
        for _ in 0..50 {
            let nodes: Vec<Gc<Slot<Option<Gc<()>>>>> =
                (0..1000).map(|_| Gc::new(Slot::default())).collect();
            for node in &nodes {
                drop(node.clone());
            }
            prune(); // all alive: put back
            drop(nodes);
        }
        let kept = num_postponed();
        assert!(kept < 10_000, "{kept} of 50,000 headers are kept");
    }
}
