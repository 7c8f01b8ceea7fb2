//! The cycle collector: what counting cannot free.
//!
//! Counting frees a value at the moment its last handle goes. Values that refer to each other in a
//! circle keep each other: nobody can reach them, and no count falls to zero. The collector finds
//! such cycles and frees them, device memory included.
//!
//! ```
//! use lastref::gc::{self, Gc, Slot, Trace};
//! use lastref::{Tensor, cuda, sim, Device};
//!
//! #[derive(Trace)]
//! struct Layer {
//!     weights: Tensor,
//!     next: Slot<Option<Gc<Layer>>>,
//! }
//!
//! sim::enable("8GiB")?;
//! let weights = Tensor::empty_with([100 << 20], (lastref::DType::U8, Device::Cuda(0)))?;
//! let layer = Gc::new(Layer { weights, next: Slot::default() });
//! layer.next.set(Some(layer.clone())); // a cycle of one
//! drop(layer);
//! assert_eq!(cuda::memory_allocated(None)?, 100 << 20, "a dead cycle stays allocated");
//!
//! let report = gc::collect(2)?;
//! assert_eq!(report.device_bytes_freed, 100 << 20);
//! cuda::empty_cache()?; // and now nothing is left
//! assert_eq!(cuda::memory_reserved(None)?, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # It runs by itself
//!
//! On a thread of its own, when the bytes in use on a device have grown, when there are many
//! candidates, or when one has waited for some seconds: at no moment that a program could predict.
//! And before an allocation fails for want of memory, which [`disable`] does not prevent:
//! [`set_before_out_of_memory`] does.
//!
//! # It mirrors Python's `gc`
//!
//! | Python | here | differs in |
//! |---|---|---|
//! | `collect(generation=2)` | [`collect`] | returns a report; 0 looks at new candidates for 2 ms, 1 at all that wait, 2 takes its time |
//! | `enable`, `disable`, `isenabled` | [`enable`], [`disable`], [`is_enabled`] | |
//! | `set_threshold`, `get_threshold`, `get_count` | same names | counts candidates, not allocations |
//! | `get_stats` | [`stats`] | also bytes and microseconds |
//! | `get_objects`, `get_referrers`, `get_referents` | [`objects`], [`referrers`], [`Object::referents`] | |
//! | `is_tracked`, `is_finalized` | [`Object::is_tracked`], [`Object::is_finalized`] | |
//! | `freeze`, `unfreeze`, `get_freeze_count` | [`freeze`], [`unfreeze`], [`freeze_count`] | frozen nodes are roots, where a trace stops |
//! | `callbacks` | [`add_callback`], [`remove_callback`] | |
//! | `garbage`, `set_debug` | [`garbage`], [`set_debug`] | |
//! | | [`set_byte_threshold`] | growth of a device's bytes that wakes the collector |
//!
//! # What it cannot free
//!
//! Cycles through something that owns a handle and does not say so: an `Arc<Mutex<Gc<_>>>`, a
//! field marked `#[trace(skip)]`, a Python object, a closure. And what is frozen.

mod bytes;
mod collect;
mod explain;
mod header;
mod lock;
mod object;
mod ptr;
mod slab;
mod slot;
mod sync;
mod trace;
mod trigger;
mod weak;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use self::sync::plain::{AtomicBool, AtomicU32, AtomicU64};
use self::sync::{Mutex, Ordering, global, lock, thread_local};
use self::trigger::TRIGGER;

pub use self::bytes::device_bytes_freed_by;
pub(crate) use self::bytes::{added, removed, set_capacity};
pub use self::bytes::{foreign_bytes_freed, foreign_bytes_in_use, set_foreign_capacity};
pub use self::explain::{Cycle, find_cycle};
pub use self::object::Object;
pub use self::ptr::Gc;
pub use self::slot::{Slot, SlotGuard};
pub use self::trace::{Trace, Tracer};
pub use self::trigger::Reason;
pub use self::weak::Weak;
pub use lastref_derive::Trace;

/// What a type does once before its value dies; see [`Trace::finalize`]. For
/// `#[derive(Trace)] #[trace(finalize)]`.
pub trait Finalize {
    /// Runs once, on an intact value, before it dies.
    fn finalize(&self);
}

/// There are generations 0, 1 and 2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("invalid generation {0}, there are 0, 1 and 2")]
pub struct InvalidGeneration(pub u32);

/// What one collection did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CollectionReport {
    /// Why it ran.
    pub reason: Reason,
    /// How thorough it was: 0, 1 or 2.
    pub generation: u32,
    /// Objects found to be unreachable, and freed.
    pub objects: u64,
    /// Device bytes that went to the cache by it.
    pub device_bytes_freed: u64,
    /// Candidates that there were when it began.
    pub candidates: u64,
    /// Objects that it looked at.
    pub traced: u64,
    /// Candidates put back, since they are frozen or time had run out.
    pub postponed: u64,
    /// Objects that could not be judged, since somebody held one of their slots. They are
    /// candidates again.
    pub busy: u64,
    /// How long it took, destructors included.
    pub microseconds: u64,
}

/// Sums over the collections of one generation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct GenerationStats {
    /// Collections that ran.
    pub collections: u64,
    /// Objects freed.
    pub collected: u64,
    /// Panics of destructors, finalizers and traces, and edges reported twice.
    pub uncollectable: u64,
    /// Device bytes freed.
    pub device_bytes_freed: u64,
    /// Time taken.
    pub microseconds: u64,
}

/// Collects cycles now, on this thread, and returns what that did.
///
/// 0 looks at the candidates that are new since the last run, the heaviest first; 1 also at those
/// that were put back; 2 does the same and is what Python's default is called. When 1 or 2 returns,
/// everything has been freed that was unreachable when it began, was not frozen and whose slots
/// nobody held. Inside a collection (in a destructor, say) it does nothing and reports zeros.
///
/// # Errors
///
/// [`InvalidGeneration`] for 3 and up.
pub fn collect(generation: u32) -> Result<CollectionReport, InvalidGeneration> {
    if generation > 2 {
        return Err(InvalidGeneration(generation));
    }
    Ok(run(generation, Reason::Manual, None))
}

/// Does what [`collect`] does, and runs the foreign collector first, if there is one.
///
/// It is for the front end of the foreign collector's language, whose own `collect` means both. The
/// foreign collector is called on this thread, which must hold nothing that it waits for.
///
/// # Errors
///
/// [`InvalidGeneration`] for 3 and up.
pub fn collect_with_foreign(generation: u32) -> Result<CollectionReport, InvalidGeneration> {
    if generation > 2 {
        return Err(InvalidGeneration(generation));
    }
    Ok(run_with_foreign(generation, Reason::Manual))
}

/// A run of both collectors, or of this one alone, and its report.
fn run(
    generation: u32,
    reason: Reason,
    foreign: Option<Arc<dyn ForeignCollector>>,
) -> CollectionReport {
    let started = Instant::now();
    let candidates = header::CANDIDATES.num.load(Ordering::Relaxed) as u64;
    let mut report = CollectionReport {
        reason,
        generation,
        objects: 0,
        device_bytes_freed: 0,
        candidates,
        traced: 0,
        postponed: 0,
        busy: 0,
        microseconds: 0,
    };
    if collect::is_inside() {
        return report;
    }
    notify(Phase::Start, &report);
    let mut foreign_objects = 0;
    let (outcome, freed) = bytes::device_bytes_freed_by(|| {
        if let Some(foreign) = &foreign {
            header::run_named("foreign collector", || {
                foreign_objects = foreign.collect(generation, reason);
            });
        }
        collect::run(trigger::effort(generation, reason))
    });
    if let Some(foreign) = &foreign {
        bytes::ask_for_foreign_bytes(&**foreign);
    }
    if reason == Reason::Manual && generation > 0 {
        // What another run has found, this one could not.
        collect::wait_for_deaths(wait_bound());
    }
    let outcome = outcome.unwrap_or_default();
    report.objects = outcome.objects + foreign_objects;
    report.traced = outcome.traced;
    report.postponed = outcome.postponed;
    report.busy = outcome.busy;
    report.device_bytes_freed = freed;
    report.microseconds = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let panics = header::take_panics();
    {
        let mut stats = lock(&STATS);
        let sums = &mut stats[generation as usize];
        sums.collections += 1;
        sums.collected += report.objects;
        sums.uncollectable += panics.len() as u64;
        sums.device_bytes_freed += freed;
        sums.microseconds += report.microseconds;
    }
    lock(&GARBAGE).failures.extend(panics);
    if debug_flags() & DEBUG_STATS != 0 {
        print_stats(&report);
    }
    notify(Phase::Stop, &report);
    report
}

#[expect(
    clippy::print_stderr,
    reason = "what DEBUG_STATS asks for, as in Python"
)]
fn print_stats(report: &CollectionReport) {
    eprintln!(
        "gc: {} run of generation {}: {} objects and {} device bytes freed, {} traced, {} us",
        report.reason.as_str(),
        report.generation,
        report.objects,
        report.device_bytes_freed,
        report.traced,
        report.microseconds
    );
}

// ---- automatic runs --------------------------------------------------------------------------------

/// Lets the collector run by itself, as it does from the start.
pub fn enable() {
    TRIGGER.enabled.store(true, Ordering::Relaxed);
    trigger::rearm();
}

/// Keeps the collector from running by itself. It still runs before an allocation fails: see
/// [`set_before_out_of_memory`].
pub fn disable() {
    TRIGGER.enabled.store(false, Ordering::Relaxed);
}

/// Whether the collector runs by itself.
#[must_use]
pub fn is_enabled() -> bool {
    TRIGGER.enabled.load(Ordering::Relaxed)
}

/// Sets the number of candidates that starts a young run (0: none), of young runs that makes the
/// next one middle, and of middle ones that makes the next one old.
pub fn set_threshold(young: usize, middle: usize, old: usize) {
    TRIGGER.young.store(young, Ordering::Relaxed);
    TRIGGER.middle.store(middle, Ordering::Relaxed);
    TRIGGER.old.store(old, Ordering::Relaxed);
    trigger::rearm();
}

/// What [`set_threshold`] set.
#[must_use]
pub fn get_threshold() -> (usize, usize, usize) {
    let load = |threshold: &sync::AtomicUsize| threshold.load(Ordering::Relaxed);
    (
        load(&TRIGGER.young),
        load(&TRIGGER.middle),
        load(&TRIGGER.old),
    )
}

/// Candidates that are new, and candidates that were put back.
#[must_use]
pub fn get_count() -> (usize, usize) {
    (
        header::CANDIDATES.num.load(Ordering::Relaxed),
        collect::num_postponed(),
    )
}

/// Sets the growth of a device's bytes in use, since the last run, that wakes the collector. 0:
/// never; `None`: the default, 64 MiB or an eighth of the device, whichever is more.
pub fn set_byte_threshold(device: u32, bytes: Option<u64>) {
    bytes::set_threshold(device, bytes);
}

/// The growth that wakes the collector; 0 for never.
#[must_use]
pub fn get_byte_threshold(device: u32) -> u64 {
    bytes::threshold(device)
}

/// Whether a run could free anything.
fn has_work() -> bool {
    header::CANDIDATES.num.load(Ordering::Relaxed) > 0
        || collect::may_have_postponed()
        || has_foreign()
}

// ---- before an out-of-memory error -------------------------------------------------------------------

static BEFORE_OOM: AtomicBool = AtomicBool::new(true);
static BOUND_MS: AtomicU64 = AtomicU64::new(30_000);

/// Whether the collector runs before an allocation fails for want of memory; it does from the
/// start, whatever [`disable`] says about automatic runs.
pub fn set_before_out_of_memory(runs: bool) {
    BEFORE_OOM.store(runs, Ordering::Relaxed);
}

/// Whether the collector runs before an allocation fails.
#[must_use]
pub fn runs_before_out_of_memory() -> bool {
    BEFORE_OOM.load(Ordering::Relaxed)
}

/// Sets how long a failing allocation waits for the collector; 30 s from the start. A destructor
/// that wants a lock of the waiting thread makes it wait that long, and then fail.
pub fn set_wait_bound(bound: Duration) {
    BOUND_MS.store(
        u64::try_from(bound.as_millis()).unwrap_or(u64::MAX),
        Ordering::Relaxed,
    );
}

/// How long a failing allocation waits for the collector.
#[must_use]
pub fn wait_bound() -> Duration {
    Duration::from_millis(BOUND_MS.load(Ordering::Relaxed))
}

thread_local! {
    static WITHOUT_WAITING: Cell<bool> = Cell::new(false);
}

/// Runs `work`, in which no allocation of this thread waits for the collector: it fails instead.
///
/// For a thread that holds something the collector's thread needs, such as Python's interpreter
/// lock: try with it held, and on failure let go of it and try again.
pub fn without_waiting<R>(work: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            WITHOUT_WAITING.with(|flag| flag.set(self.0));
        }
    }
    let _restore = Restore(WITHOUT_WAITING.with(|flag| flag.replace(true)));
    work()
}

// ---- other collectors ----------------------------------------------------------------------------------

/// A collector of another language's objects, which may hold device memory too.
pub trait ForeignCollector: Send + Sync {
    /// Collects with no lock held, before cycles here are looked for, and returns how many objects
    /// it found to be unreachable. Automatic runs may be declined. The device bytes that it frees
    /// are counted by the caller, as far as it frees them on this thread; those of another
    /// allocator it must tell by [`foreign_bytes_freed`].
    fn collect(&self, generation: u32, reason: Reason) -> u64;

    /// The bytes in use on a device that another allocator serves and this crate does not count.
    /// Asked after a run, with no lock held, for the devices that [`foreign_bytes_in_use`] was told
    /// about.
    fn device_bytes(&self, _device: u32) -> u64 {
        0
    }
}

global! {
    static FOREIGN: Mutex<Option<Arc<dyn ForeignCollector>>> = Mutex::new(None);
}

/// Makes the collector's thread run another collector too. There is one at most; `None` removes
/// it.
pub fn set_foreign_collector(collector: Option<Arc<dyn ForeignCollector>>) {
    let before = std::mem::replace(&mut *lock(&FOREIGN), collector);
    drop(before);
}

/// Runs `work` on the collector's thread before its next run, and waits for the result.
///
/// There a foreign collector's language runs code that must interrupt nobody's operation, as
/// finalizers do. `None` if it was not done within `bound` (it is then not begun any more), if it
/// panicked, or if this thread is itself collecting, which cannot wait for that thread. The caller
/// holds nothing that the work or a collection may wait for.
pub fn on_collector_thread<R: Send + 'static>(
    bound: Duration,
    work: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    trigger::on_thread(bound, work)
}

fn has_foreign() -> bool {
    lock(&FOREIGN).is_some()
}

fn run_with_foreign(generation: u32, reason: Reason) -> CollectionReport {
    let foreign = lock(&FOREIGN).clone();
    run(generation, reason, foreign)
}

// ---- the rung ------------------------------------------------------------------------------------------

/// What became of a collection before an out-of-memory error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BeforeOutOfMemory {
    /// It ran.
    Ran {
        /// The device bytes that it freed.
        device_bytes_freed: u64,
    },
    /// It had not ended when [`wait_bound`] had passed.
    TimedOut,
    /// Not asked for: [`set_before_out_of_memory`] has switched it off, or the thread is inside
    /// [`without_waiting`].
    SwitchedOff,
    /// Not asked for: the thread is itself collecting, so that a destructor or finalizer allocates.
    Inside,
}

/// Has the collector's thread collect, and waits for it, as an allocation of this crate does before it
/// fails: young first and then more, until `bytes_needed` bytes are free. For other allocators of
/// device memory, which then try again. The caller holds no lock that a destructor may want.
///
/// ```
/// use lastref::gc::{self, BeforeOutOfMemory};
///
/// let done = gc::collect_before_out_of_memory(1 << 20);
/// assert_eq!(done, BeforeOutOfMemory::Ran { device_bytes_freed: 0 });
/// ```
pub fn collect_before_out_of_memory(bytes_needed: u64) -> BeforeOutOfMemory {
    if !BEFORE_OOM.load(Ordering::Relaxed) || WITHOUT_WAITING.with(Cell::get) {
        return BeforeOutOfMemory::SwitchedOff;
    }
    trigger::run_and_wait(bytes_needed, wait_bound())
}

/// The rung of the out-of-memory ladder that collects cycles: on the collector's thread, while the
/// allocating thread waits, within a bound, with no lock of the allocator held.
#[derive(Debug)]
pub(crate) struct CollectionRung;

impl crate::alloc::Reclaimer for CollectionRung {
    fn name(&self) -> &str {
        "cycle collection"
    }

    fn level(&self) -> crate::alloc::ReclaimLevel {
        crate::alloc::ReclaimLevel::Collect
    }

    fn reclaim(&self, request: &crate::alloc::ReclaimRequest) -> u64 {
        match collect_before_out_of_memory(request.bytes_needed) {
            BeforeOutOfMemory::Ran { device_bytes_freed } => device_bytes_freed,
            _ => 0,
        }
    }
}

// ---- looking around ------------------------------------------------------------------------------------

global! {
    static STATS: Mutex<[GenerationStats; 3]> = Mutex::new([GenerationStats::default(); 3]);
}

/// Sums by generation.
#[must_use]
pub fn stats() -> [GenerationStats; 3] {
    *lock(&STATS)
}

/// Handles on all nodes. Costs a walk over all memory for nodes.
#[must_use]
pub fn objects() -> Vec<Object> {
    object::all()
}

/// The nodes that refer to `target` directly. Costs a look at every node; nodes of which a slot is
/// locked meanwhile are left out.
#[must_use]
pub fn referrers(target: &Object) -> Vec<Object> {
    let refers = |object: &Object| {
        object
            .referents()
            .is_some_and(|referents| referents.contains(target))
    };
    object::all().into_iter().filter(refers).collect()
}

/// Makes all nodes that exist now roots that no run looks at, until [`unfreeze`].
pub fn freeze() {
    object::freeze();
}

/// Lets runs look at frozen nodes again.
pub fn unfreeze() {
    object::unfreeze();
}

/// How many nodes are frozen.
#[must_use]
pub fn freeze_count() -> usize {
    object::freeze_count()
}

// ---- callbacks and debugging -----------------------------------------------------------------------

/// When a callback is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// A collection begins; of the report only reason, generation and candidates are known.
    Start,
    /// A collection has ended.
    Stop,
}

type Observer = Arc<dyn Fn(Phase, &CollectionReport) + Send + Sync>;

/// Names a callback, to remove it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CallbackId(u64);

global! {
    static CALLBACKS: Mutex<Vec<(CallbackId, Observer)>> = Mutex::new(Vec::new());
}
static NEXT_CALLBACK: AtomicU64 = AtomicU64::new(0);

/// Calls `callback` at the start and end of every collection, on the thread where it runs, with no
/// lock held. A panic in it is kept, as one of a destructor is.
pub fn add_callback(
    callback: impl Fn(Phase, &CollectionReport) + Send + Sync + 'static,
) -> CallbackId {
    let id = CallbackId(NEXT_CALLBACK.fetch_add(1, Ordering::Relaxed));
    lock(&CALLBACKS).push((id, Arc::new(callback)));
    id
}

/// Removes a callback; false if it was not there.
pub fn remove_callback(id: CallbackId) -> bool {
    let mut callbacks = lock(&CALLBACKS);
    let at = callbacks.iter().position(|(other, _)| *other == id);
    let removed = at.map(|at| callbacks.remove(at));
    drop(callbacks);
    removed.is_some()
}

fn notify(phase: Phase, report: &CollectionReport) {
    let callbacks = lock(&CALLBACKS).clone();
    for (_, callback) in callbacks {
        header::run_named("callback", || callback(phase, report));
    }
}

/// Print what each collection did to standard error.
pub const DEBUG_STATS: u32 = 1;
/// Keep what is found in [`garbage`] instead of freeing it.
pub const DEBUG_SAVEALL: u32 = 32;

static DEBUG: AtomicU32 = AtomicU32::new(0);

/// Sets debugging flags: [`DEBUG_STATS`], [`DEBUG_SAVEALL`], or 0.
pub fn set_debug(flags: u32) {
    DEBUG.store(flags, Ordering::Relaxed);
}

/// The flags that [`set_debug`] set.
#[must_use]
pub fn get_debug() -> u32 {
    debug_flags()
}

fn debug_flags() -> u32 {
    DEBUG.load(Ordering::Relaxed)
}

/// What could not be freed, or was kept on request.
#[derive(Clone, Default, Debug)]
#[non_exhaustive]
pub struct Garbage {
    /// Nodes found unreachable while [`DEBUG_SAVEALL`] was set. They live as long as these handles.
    pub saved: Vec<Object>,
    /// Panics of destructors, finalizers, traces and callbacks, and types that report an edge
    /// twice: type and message.
    pub failures: Vec<String>,
}

global! {
    static GARBAGE: Mutex<Garbage> = Mutex::new(Garbage::default());
}

/// Takes what has gathered since the last call.
#[must_use]
pub fn garbage() -> Garbage {
    std::mem::take(&mut *lock(&GARBAGE))
}

/// Keeps garbage instead of freeing it, if the debugging flags say so.
fn save_all(objects: &mut dyn Iterator<Item = Object>) -> bool {
    let saves = debug_flags() & DEBUG_SAVEALL != 0;
    if saves {
        lock(&GARBAGE).saved.extend(objects);
    }
    saves
}
