//! The out-of-memory ladder: what is tried, in which order, before anyone sees an error.
//!
//! 1. **The caches of threads** are emptied into the heap.
//! 2. **Finished events**: each stream is asked how far it has come.
//! 3. **Free blocks of other streams**: the stream is made to wait, on the device, for those that still use
//!    a free block that is large enough.
//! 4. **Idle pages** of virtual memory, as many as are missing, are moved to where they are needed.
//! 5. **Purgers**: reclaimers that give up what is quickly made again.
//! 6. **Cached segments**, as many as are missing, go back to the device; if that was not enough,
//!    all of them.
//! 7. **Waiting** on the host for the streams that still use freed memory, then 4 or 6 again.
//! 8. **Collectors**: reclaimers that find memory which nothing uses. Called again as long as enough was
//!    freed and other threads took it, at most 1024 times.
//! 9. **Spillers**: reclaimers that give up something of value.
//!
//! After each reclaimer that gave something, and was not merely a purger, 1 to 4, 6 and 7 are repeated. The
//! free lists are searched after each rung that gave something.
//!
//! Rungs 1 to 4 are also what is done, in this order, before the heap grows past its slack: 3 and 4 as the
//! settings say, and an allocation may wait on the host for idle pages then, as in 7.
//!
//! The ladder is the same for a full device and for a limit set by the user. A rung that cannot
//! satisfy the request even at its best is skipped, and says so. The allocator's lock is held
//! neither while waiting on the host nor while a reclaimer runs.

use std::fmt;
use std::time::Duration;

use crate::device::DeviceIndex;
use crate::error::Bytes;

/// When a [`Reclaimer`] is called, relative to the others. Within a level: in the order in which
/// they were added.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum ReclaimLevel {
    /// Gives up memory that is quickly made again, such as a library's workspace.
    Purge,
    /// Finds memory that nothing uses, such as unreachable cycles.
    Collect,
    /// Gives up something of value, such as moving tensors to the host.
    Spill,
}

/// What a [`Reclaimer`] is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReclaimRequest {
    /// The device that is full.
    pub device: DeviceIndex,
    /// The size of the allocation that failed, in bytes, and twice as much each time that other
    /// threads took what was given. Giving less can still help.
    pub bytes_needed: u64,
}

/// Code that can make device memory free when an allocation would fail otherwise.
///
/// # Threads
///
/// Called on the allocating thread, with no lock of the allocator held: it may drop blocks, and it
/// may allocate. If an allocation it makes fails, reclaimers are not called again for that one.
/// Several threads may call it at once. A panic in it is caught and counts as giving nothing.
pub trait Reclaimer: Send + Sync {
    /// A short name for reports.
    fn name(&self) -> &str;

    /// When it is called.
    fn level(&self) -> ReclaimLevel;

    /// The most bytes that a call could give up now. It is not called for a request that those, with all
    /// that is free, cached or pending, could not satisfy. By default nothing is known of it.
    fn at_most(&self) -> u64 {
        u64::MAX
    }

    /// Makes memory free and returns how many bytes it gave up, as far as it knows.
    fn reclaim(&self, request: &ReclaimRequest) -> u64;
}

/// Names a reclaimer that was added, to remove it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ReclaimerId(pub(crate) u64);

/// A rung of the ladder.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Rung {
    /// The caches of threads were emptied.
    ThreadCaches,
    /// Streams were asked how far they have come.
    FinishedEvents,
    /// The stream was made to wait, on the device, for streams that used a free block.
    StreamWaits,
    /// Idle pages of virtual memory were moved to where memory was needed.
    MovePages,
    /// Cached segments were given back to the device.
    ReleaseCached,
    /// Streams that still used freed memory were waited for.
    WaitForStreams,
    /// A reclaimer, by name.
    Reclaimer(String),
}

impl Rung {
    /// All of them, reclaimers apart, in their order.
    pub const ALL: [Self; 6] = [
        Self::ThreadCaches,
        Self::FinishedEvents,
        Self::StreamWaits,
        Self::MovePages,
        Self::ReleaseCached,
        Self::WaitForStreams,
    ];

    /// Its name in the keys of statistics, such as `move_pages`.
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::ThreadCaches => "thread_caches".to_owned(),
            Self::FinishedEvents => "finished_events".to_owned(),
            Self::StreamWaits => "stream_waits".to_owned(),
            Self::MovePages => "move_pages".to_owned(),
            Self::ReleaseCached => "release_cached".to_owned(),
            Self::WaitForStreams => "wait_for_streams".to_owned(),
            Self::Reclaimer(name) => format!("reclaimer {name}"),
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThreadCaches => f.write_str("empty the caches of threads"),
            Self::FinishedEvents => f.write_str("ask streams how far they have come"),
            Self::StreamWaits => {
                f.write_str("wait on the device for streams that use a free block")
            }
            Self::MovePages => f.write_str("move idle pages to where they are needed"),
            Self::ReleaseCached => f.write_str("give cached memory back to the device"),
            Self::WaitForStreams => f.write_str("wait for streams that use freed memory"),
            Self::Reclaimer(name) => write!(f, "reclaimer \"{name}\""),
        }
    }
}

/// How a rung ended.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RungOutcome {
    /// It ran.
    Tried,
    /// It was skipped: even at its best it could not have satisfied the request.
    Skipped {
        /// Why.
        reason: &'static str,
    },
    /// It failed, with this text.
    Failed(String),
}

/// What one rung did for one allocation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RungReport {
    /// Which rung.
    pub rung: Rung,
    /// How it ended.
    pub outcome: RungOutcome,
    /// Bytes it gave: to the free lists by emptying caches and by waiting on the host, to the
    /// allocation by asking, by waiting on the device and by moving, to the device by releasing, and what a
    /// reclaimer says it gave up.
    pub bytes_freed: u64,
    /// How long it took.
    pub microseconds: u64,
}

impl RungReport {
    pub(crate) const fn skipped(rung: Rung, reason: &'static str) -> Self {
        Self {
            rung,
            outcome: RungOutcome::Skipped { reason },
            bytes_freed: 0,
            microseconds: 0,
        }
    }

    /// Whether it gave something.
    pub(crate) const fn gave(&self) -> bool {
        self.bytes_freed > 0
    }
}

impl fmt::Display for RungReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.rung)?;
        match &self.outcome {
            RungOutcome::Tried => {
                write!(
                    f,
                    "gave {} in {} us",
                    Bytes(self.bytes_freed),
                    self.microseconds
                )
            }
            RungOutcome::Skipped { reason } => write!(f, "skipped, {reason}"),
            RungOutcome::Failed(text) => write!(f, "failed, {text}"),
        }
    }
}

/// What a rung did for all allocations so far, failed ones or not.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RungTotals {
    /// How often it ran.
    pub num_tried: u64,
    /// How often it failed.
    pub num_failed: u64,
    /// Bytes it gave.
    pub bytes_freed: u64,
    /// How long it took, in all.
    pub microseconds: u64,
}

impl RungTotals {
    /// Adds one try: the bytes it gave, or that it failed, and how long it took.
    pub(crate) fn add<E>(&mut self, result: Result<u64, E>, time: Duration) {
        self.num_tried += 1;
        self.microseconds += microseconds(time);
        match result {
            Ok(bytes) => self.bytes_freed = self.bytes_freed.saturating_add(bytes),
            Err(_) => self.num_failed += 1,
        }
    }
}

pub(crate) fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
