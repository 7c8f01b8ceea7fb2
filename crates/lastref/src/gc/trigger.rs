//! When the collector runs by itself.
//!
//! Automatic runs happen on a thread of the collector's own, so that no destructor runs in the
//! middle of somebody's operation. It is started when first needed, sleeps while there is nothing
//! to do, and is started anew in a forked child.
//!
//! In this order of weight:
//!
//! 1. **Device bytes**: when the bytes in use on a device have grown by a threshold since the last
//!    run, and there is a candidate.
//! 2. **Counts**: when there are as many candidates as the young threshold says.
//! 3. **Time**: when a candidate has waited for some seconds.
//!
//! A run that frees little makes the next one wait longer; one that frees much, less long.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::BeforeOutOfMemory;
use super::collect::{self, Effort};
use super::header::CANDIDATES;
use super::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, global, lock, wait_timeout};

/// Candidates that start a young run; Python's default.
const DEFAULT_YOUNG: usize = 700;
const DEFAULT_MIDDLE: usize = 10;
const DEFAULT_OLD: usize = 10;
/// How long a candidate may wait.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// The time that an automatic run takes new candidates for.
const BUDGET: Duration = Duration::from_millis(2);
/// The young threshold is stretched by at most this factor when runs find nothing.
const MAX_STRETCH: usize = 64;

/// Why a collection ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// [`collect`](super::collect) was called.
    Manual,
    /// The bytes in use on a device had grown.
    Bytes,
    /// There were enough candidates.
    Count,
    /// A candidate had waited long enough.
    Time,
    /// An allocation was about to fail.
    OutOfMemory,
}

impl Reason {
    /// One word for it, as reports print it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::Bytes => "bytes",
            Self::Count => "count",
            Self::Time => "time",
            Self::OutOfMemory => "oom",
        }
    }
}

pub(super) struct Trigger {
    pub(super) enabled: AtomicBool,
    pub(super) young: AtomicUsize,
    pub(super) middle: AtomicUsize,
    pub(super) old: AtomicUsize,
    /// The number of candidates that wakes the thread; the maximum while it is awake.
    wake_at: AtomicUsize,
    /// How much the young threshold is stretched, since runs found nothing.
    stretch: AtomicUsize,
    requests: Mutex<Requests>,
    changed: Condvar,
}

#[derive(Default)]
struct Requests {
    /// What the next run is for.
    wanted: Option<Reason>,
    /// Runs begun and ended by the thread.
    begun: u64,
    ended: u64,
    /// The process whose thread it is; a forked child has none.
    process: Option<u32>,
    /// The bytes that the threads which wait want together.
    bytes_needed: u64,
    /// Bytes that the latest run freed.
    freed: u64,
    /// Work that others want done on the thread, before its next run.
    jobs: VecDeque<Box<dyn FnOnce() + Send>>,
}

global! {
    pub(super) static TRIGGER: Trigger = Trigger {
        enabled: AtomicBool::new(true),
        young: AtomicUsize::new(DEFAULT_YOUNG),
        middle: AtomicUsize::new(DEFAULT_MIDDLE),
        old: AtomicUsize::new(DEFAULT_OLD),
        wake_at: AtomicUsize::new(DEFAULT_YOUNG),
        stretch: AtomicUsize::new(1),
        requests: Mutex::new(Requests::default()),
        changed: Condvar::new(),
    };
}

/// Called for each new candidate, with how many there are.
pub(super) fn candidate_pushed(num: usize) {
    if cfg!(loom) {
        return; // Models start their own threads.
    }
    if num >= TRIGGER.wake_at.load(Ordering::Relaxed) {
        // Until the thread has run: not once more for each candidate that comes meanwhile.
        TRIGGER.wake_at.store(usize::MAX, Ordering::Relaxed);
        wake(Reason::Count);
    } else if num == 1 && TRIGGER.enabled.load(Ordering::Relaxed) {
        // The first one: the thread's clock starts. Under the lock: the thread either sees the
        // candidate before it sleeps, or is woken.
        start(&mut lock(&TRIGGER.requests));
        TRIGGER.changed.notify_all();
    }
}

/// The thresholds have changed.
pub(super) fn rearm() {
    let young = TRIGGER.young.load(Ordering::Relaxed);
    let stretched = young.saturating_mul(TRIGGER.stretch.load(Ordering::Relaxed));
    let wake_at = if young == 0 { usize::MAX } else { stretched };
    TRIGGER.wake_at.store(wake_at, Ordering::Relaxed);
}

/// Asks for a run and does not wait for it.
pub(super) fn wake(reason: Reason) {
    let mut requests = lock(&TRIGGER.requests);
    if requests.wanted != Some(Reason::OutOfMemory) {
        requests.wanted = Some(reason);
    }
    start(&mut requests);
    drop(requests);
    TRIGGER.changed.notify_all();
}

/// Asks for a thorough run and waits until one that began after the call has ended, frees included,
/// but no longer than `bound`. Returns the bytes it freed. Does nothing on a thread that is itself
/// collecting.
pub(super) fn run_and_wait(bytes_needed: u64, bound: Duration) -> BeforeOutOfMemory {
    if collect::is_collecting() {
        return BeforeOutOfMemory::Inside;
    }
    let until = Instant::now() + bound;
    let mut requests = lock(&TRIGGER.requests);
    // A run that has begun may have looked before this thread's garbage was made.
    let awaited = requests.begun + 1;
    requests.wanted = Some(Reason::OutOfMemory);
    requests.bytes_needed = requests.bytes_needed.saturating_add(bytes_needed);
    start(&mut requests);
    TRIGGER.changed.notify_all();
    while requests.ended < awaited {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return BeforeOutOfMemory::TimedOut;
        }
        requests = wait_timeout(&TRIGGER.changed, requests, left);
    }
    BeforeOutOfMemory::Ran {
        device_bytes_freed: requests.freed,
    }
}

/// Has `work` done by the thread, and waits for it.
pub(super) fn on_thread<R: Send + 'static>(
    bound: Duration,
    work: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    if collect::is_collecting() {
        return None;
    }
    let (done, result) = mpsc::sync_channel(1);
    let process = std::process::id();
    let until = Instant::now() + bound;
    let mut requests = lock(&TRIGGER.requests);
    requests.jobs.push_back(Box::new(move || {
        // Else nobody waits any more, or the one who does is in the process that this one was forked
        // from.
        if Instant::now() < until && std::process::id() == process {
            let _ = done.send(work());
        }
    }));
    start(&mut requests);
    drop(requests);
    TRIGGER.changed.notify_all();
    // An error is also that `work` has panicked, and that the thread could not be started.
    result.recv_timeout(bound).ok()
}

/// Starts the thread, unless this process has one.
fn start(requests: &mut Requests) {
    let process = std::process::id();
    if requests.process == Some(process) {
        return;
    }
    let thread = std::thread::Builder::new().name("lastref-collector".into());
    if thread.spawn(thread_main).is_ok() {
        requests.process = Some(process);
        // A child of fork has its parent's counts, of which no run will ever end.
        requests.begun = requests.ended;
    }
}

fn thread_main() {
    collect::mark_collector_thread();
    let mut young_runs = 0;
    let mut middle_runs = 0;
    let mut requests = lock(&TRIGGER.requests);
    loop {
        if let Some(job) = requests.jobs.pop_front() {
            drop(requests);
            super::header::run_named("work for the collector's thread", job);
            requests = lock(&TRIGGER.requests);
            continue;
        }
        let Some(reason) = requests.wanted.take() else {
            let waiting = CANDIDATES.num.load(Ordering::Relaxed) > 0
                && TRIGGER.enabled.load(Ordering::Relaxed);
            // With nothing to collect there is nothing to wake up for.
            let wait = if waiting {
                MAX_WAIT
            } else {
                Duration::from_secs(3600)
            };
            let slept = Instant::now();
            requests = wait_timeout(&TRIGGER.changed, requests, wait);
            if waiting && slept.elapsed() >= MAX_WAIT && requests.wanted.is_none() {
                requests.wanted = Some(Reason::Time);
            }
            continue;
        };
        requests.begun += 1;
        let bytes_needed = std::mem::take(&mut requests.bytes_needed);
        drop(requests);
        let generation = match reason {
            Reason::OutOfMemory | Reason::Manual => 2,
            Reason::Bytes => 1,
            Reason::Count | Reason::Time => {
                young_runs += 1;
                if young_runs <= TRIGGER.middle.load(Ordering::Relaxed) {
                    0
                } else {
                    young_runs = 0;
                    middle_runs += 1;
                    if middle_runs <= TRIGGER.old.load(Ordering::Relaxed) {
                        1
                    } else {
                        middle_runs = 0;
                        2
                    }
                }
            }
        };
        let freed = match reason {
            Reason::OutOfMemory => until_enough(bytes_needed),
            _ if TRIGGER.enabled.load(Ordering::Relaxed) => {
                let report = super::run_with_foreign(generation, reason);
                adapt(report.objects, report.candidates);
                report.device_bytes_freed
            }
            _ => {
                collect::prune();
                0
            }
        };
        rearm();
        super::bytes::rearm();
        requests = lock(&TRIGGER.requests);
        requests.ended += 1;
        requests.freed = freed;
        TRIGGER.changed.notify_all();
    }
}

/// Runs with rising generations until enough is free. What is cheap to find comes first: a young
/// run of a foreign collector takes microseconds, a full one may take a second.
fn until_enough(bytes_needed: u64) -> u64 {
    let mut freed = 0;
    for generation in if super::has_foreign() { 0..=2 } else { 2..=2 } {
        freed += super::run_with_foreign(generation, Reason::OutOfMemory).device_bytes_freed;
        if freed >= bytes_needed {
            return freed;
        }
    }
    // What a manual collection has found, it frees.
    collect::wait_for_deaths(super::wait_bound());
    freed
}

/// Stretches the young threshold when a run found little among its candidates.
fn adapt(objects: u64, candidates: u64) {
    let stretch = TRIGGER.stretch.load(Ordering::Relaxed);
    let next = if objects * 10 < candidates {
        stretch * 2
    } else {
        stretch / 2
    };
    TRIGGER
        .stretch
        .store(next.clamp(1, MAX_STRETCH), Ordering::Relaxed);
}

/// The effort of an automatic or manual run of a generation.
pub(super) fn effort(generation: u32, reason: Reason) -> Effort {
    let automatic = matches!(reason, Reason::Count | Reason::Time);
    Effort {
        postponed: generation > 0,
        budget: (automatic && generation < 2).then_some(BUDGET),
    }
}
