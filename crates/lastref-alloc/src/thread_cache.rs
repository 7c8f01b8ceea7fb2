//! The cache of small blocks that each thread has for each allocator it uses.
//!
//! ```text
//!  thread ── its caches ──▶ ThreadCache ◀── all caches of an allocator ── State
//!                            ├── attached: whether a thread has it
//!                            └── Owned<Inner>: entries, what was counted, history
//! ```
//!
//! An entry is a block that its caller has given back and the heap does not know of: for the heap it
//! is live. It is given out again for exactly the same size on the same stream, by the same thread,
//! which needs neither a lock nor a stamp: what the stream is given later runs later. Everything
//! else goes through the heap: blocks recorded on other streams, blocks freed by a thread that does
//! not allocate on their stream, and what finds no room.
//!
//! Anyone who holds the state's lock may look into any cache and empty it, and does so before the
//! heap grows, before the ladder, and whenever somebody looks: statistics, snapshots and checks see
//! every block as its caller does. A thread that ends leaves its cache to the next.
//!
//! # Invariants
//!
//! 1. The node of an entry is live in the heap, has the entry's stream alone, and was allocated for
//!    the entry's size. It is in one entry of one cache.
//! 2. What was counted since the last visit is in `Inner::flow`, and nowhere else.
//! 3. A stream is in `Inner::streams` only while blocks may be allocated on it.
//! 4. A stamp of the history is greater than those of all entries that must come before it.
//!
//! Lock order: the state's lock, then a cache's flag. Never the other way round.

use std::cell::RefCell;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::clock::StreamSlot;
use crate::device::StreamId;
use crate::heap::{MIN_BLOCK_BYTES, NodeId};
use crate::history::History;
use crate::owner::Owned;
use crate::stats::{Flow, PoolKind};
use crate::sync::{AtomicBool, Ordering, thread_local};

/// The most bytes in one cache. Small: a cached block keeps a page of 2 MiB from other uses.
const MAX_BYTES: u64 = 8 << 20;
const NUM_SETS: usize = 64;
const WAYS: usize = 4;

/// The largest request that is cached.
pub(crate) const MAX_REQUEST: u64 = PoolKind::MAX_SMALL_BYTES;

/// A block in a cache.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Entry {
    pub(crate) addr: u64,
    pub(crate) node: NodeId,
    pub(crate) slot: StreamSlot,
    /// What its caller asked for, and the next must ask for.
    pub(crate) requested: u32,
}

impl Entry {
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.requested).next_multiple_of(MIN_BLOCK_BYTES)
    }
}

/// What was counted for small blocks since the last visit.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Flows {
    pub(crate) blocks: Flow,
    pub(crate) bytes: Flow,
    pub(crate) requested: Flow,
}

/// Entries whose sizes and streams fall together, the oldest first; and which of those that fall
/// here were asked for last, in vain.
#[derive(Clone, Copy, Default, Debug)]
struct Set {
    entries: [Entry; WAYS],
    len: usize,
    missed: [Missed; WAYS],
    next_missed: usize,
}

/// A size and a stream that a request was not served for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Missed {
    requested: u32,
    slot: StreamSlot,
    again: bool,
}

impl Set {
    /// Notes a request that was not served. One that comes again is worth keeping blocks for; sizes
    /// that do not come again would only be in the way.
    fn note_missed(&mut self, requested: u32, slot: StreamSlot) {
        let same = |missed: &&mut Missed| missed.requested == requested && missed.slot == slot;
        if let Some(missed) = self.missed.iter_mut().find(same) {
            missed.again = true;
        } else {
            self.missed[self.next_missed] = Missed {
                requested,
                slot,
                again: false,
            };
            self.next_missed = (self.next_missed + 1) % WAYS;
        }
    }

    fn is_wanted(&self, entry: &Entry) -> bool {
        let wanted = Missed {
            requested: entry.requested,
            slot: entry.slot,
            again: true,
        };
        self.missed.contains(&wanted)
    }

    fn remove(&mut self, at: usize) -> Entry {
        let entry = self.entries[at];
        self.len -= 1;
        // Mostly none: the newest goes first.
        for at in at..self.len {
            self.entries[at] = self.entries[at + 1];
        }
        entry
    }
}

/// What became of a block that was freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Put {
    /// It is in the cache.
    Kept,
    /// It would be worth keeping, but others must make room.
    NoRoom,
    /// It must go to the heap.
    Unwanted,
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Take {
    /// A block, and the stamp of its allocation.
    Hit(Entry, u64),
    /// There is none, and nothing that the books do not know.
    Miss,
    /// There is none, and the cache is to be visited: there is none either, it does not know the
    /// stream, or it has counted something.
    MissToVisit,
}

/// What a cache's flag protects.
#[derive(Debug)]
pub(crate) struct Inner {
    sets: Box<[Set; NUM_SETS]>,
    bytes: u64,
    pub(crate) flow: Flows,
    pub(crate) history: History,
    streams: SmallVec<[(StreamId, StreamSlot); 2]>,
    /// Requests that were served, since the last visit.
    pub(crate) hits: u64,
}

fn set_of(requested: u32, slot: StreamSlot) -> usize {
    let key = u64::from(requested) ^ u64::from(slot.index()) << 32;
    #[expect(clippy::cast_possible_truncation, reason = "6 bits are left")]
    {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - NUM_SETS.ilog2())) as usize
    }
}

impl Inner {
    fn slot(&self, stream: StreamId) -> Option<StreamSlot> {
        let known = self.streams.iter().find(|(id, _)| *id == stream);
        known.map(|(_, slot)| *slot)
    }

    /// Gives out a block, and the stamp of its allocation.
    fn take(&mut self, requested: u32, stream: StreamId) -> Option<(Entry, u64)> {
        let slot = self.slot(stream)?;
        let set = &mut self.sets[set_of(requested, slot)];
        let fits = |entry: &Entry| entry.requested == requested && entry.slot == slot;
        let Some(at) = set.entries[..set.len].iter().rposition(fits) else {
            set.note_missed(requested, slot);
            return None;
        };
        let entry = set.remove(at);
        let bytes = entry.bytes();
        self.bytes -= bytes;
        self.hits += 1;
        self.flow.blocks.add(1);
        self.flow.bytes.add(bytes);
        self.flow.requested.add(u64::from(requested));
        let stamp = self
            .history
            .push_alloc(entry.addr, u64::from(requested), slot);
        Some((entry, stamp))
    }

    /// Takes a block in, allocated at `stamp`.
    pub(crate) fn put(&mut self, entry: Entry, stream: StreamId, stamp: u64) -> Put {
        let bytes = entry.bytes();
        if self.slot(stream) != Some(entry.slot) {
            return Put::Unwanted;
        }
        let set = &mut self.sets[set_of(entry.requested, entry.slot)];
        if !set.is_wanted(&entry) {
            return Put::Unwanted;
        }
        let Some(room) = set.entries.get_mut(set.len) else {
            return Put::NoRoom;
        };
        if self.bytes + bytes > MAX_BYTES {
            return Put::NoRoom;
        }
        *room = entry;
        set.len += 1;
        self.bytes += bytes;
        self.count_free(&entry);
        self.history.pass(stamp);
        self.history
            .push_free(entry.addr, u64::from(entry.requested), entry.slot);
        Put::Kept
    }

    fn count_free(&mut self, entry: &Entry) {
        self.flow.blocks.remove(1);
        self.flow.bytes.remove(entry.bytes());
        self.flow.requested.remove(u64::from(entry.requested));
    }

    /// Makes room for a block of this size: takes out the oldest one of its set, or half of all if
    /// there are too many bytes.
    pub(crate) fn make_room(&mut self, requested: u32, slot: StreamSlot, out: &mut Vec<Entry>) {
        let bytes = u64::from(requested).next_multiple_of(MIN_BLOCK_BYTES);
        if self.bytes + bytes > MAX_BYTES {
            self.drain_to(MAX_BYTES / 2, out);
        }
        let set = &mut self.sets[set_of(requested, slot)];
        if set.len == WAYS {
            let oldest = set.remove(0);
            self.bytes -= oldest.bytes();
            out.push(oldest);
        }
    }

    /// Takes out entries until at most `bytes` bytes are left.
    pub(crate) fn drain_to(&mut self, bytes: u64, out: &mut Vec<Entry>) {
        for set in self.sets.iter_mut() {
            if self.bytes <= bytes {
                break;
            }
            for entry in &set.entries[..set.len] {
                self.bytes -= entry.bytes();
                out.push(*entry);
            }
            set.len = 0;
        }
    }

    /// Allows blocks of a stream to be kept, on which so much is requested now.
    pub(crate) fn allow(&mut self, stream: StreamId, slot: StreamSlot, requested: u64) {
        if self.slot(stream).is_none() {
            self.streams.push((stream, slot));
            // That was not asked for here, for want of a cache or of the stream.
            if let Ok(requested) = u32::try_from(requested) {
                self.sets[set_of(requested, slot)].note_missed(requested, slot);
            }
        }
    }

    /// Allows no stream any more.
    pub(crate) fn forbid_all(&mut self) {
        self.streams.clear();
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct ThreadCache {
    allocator: u64,
    /// Whether a thread has it. Only says who uses it; what is in it is for the flag to protect.
    attached: AtomicBool,
    inner: Owned<Inner>,
}

impl ThreadCache {
    /// A cache that the calling thread has.
    pub(crate) fn new(allocator: u64, max_history_entries: usize) -> Self {
        let mut history = History::default();
        history.set_max_entries(max_history_entries);
        Self {
            allocator,
            attached: AtomicBool::new(true),
            inner: Owned::new(Inner {
                sets: Box::new([Set::default(); NUM_SETS]),
                bytes: 0,
                flow: Flows::default(),
                history,
                streams: SmallVec::new(),
                hits: 0,
            }),
        }
    }

    /// Takes over a cache whose thread has ended.
    pub(crate) fn adopt(&self) -> bool {
        // What is in it is for its flag to hand over.
        let relaxed = Ordering::Relaxed;
        self.attached
            .compare_exchange(false, true, relaxed, relaxed)
            .is_ok()
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        self.inner.with(f)
    }
}

/// A cache that a thread has.
struct Mine {
    cache: Arc<ThreadCache>,
    /// Whether it has counted something since this thread visited it under the state's lock.
    touched: bool,
}

/// The caches that a thread has, the one used last first.
struct Attached(RefCell<Vec<Mine>>);

impl Drop for Attached {
    fn drop(&mut self) {
        for mine in self.0.get_mut().drain(..) {
            mine.cache.attached.store(false, Ordering::Relaxed);
        }
    }
}

thread_local! {
    #[expect(
        clippy::missing_const_for_thread_local,
        reason = "loom's macro of this name knows no const initializer"
    )]
    static ATTACHED: Attached = Attached(RefCell::new(Vec::new()));
}

/// Runs `f` on this thread's cache for an allocator, if it has one.
#[inline]
fn with_mine<R>(allocator: u64, f: impl FnOnce(&mut Mine) -> R) -> Option<R> {
    let attached = ATTACHED.try_with(|attached| {
        let mut caches = attached.0.borrow_mut();
        if caches.first()?.cache.allocator != allocator {
            let at = caches
                .iter()
                .position(|mine| mine.cache.allocator == allocator)?;
            caches.swap(0, at);
        }
        Some(f(&mut caches[0]))
    });
    // A thread that is ending has no caches any more.
    attached.ok().flatten()
}

/// Visits this thread's cache for an allocator. False if it has none. To be called under the
/// state's lock, and what was counted is to be taken out.
pub(crate) fn visit_mine(allocator: u64, f: impl FnOnce(&mut Inner)) -> bool {
    let visited = with_mine(allocator, |mine| {
        mine.touched = false;
        mine.cache.with(f);
    });
    visited.is_some()
}

/// The same, if it has counted something since the last visit.
#[inline]
pub(crate) fn visit_mine_if_touched(allocator: u64, f: impl FnOnce(&mut Inner)) {
    with_mine(allocator, |mine| {
        if std::mem::take(&mut mine.touched) {
            mine.cache.with(f);
        }
    });
}

/// Gives this thread a cache. Those of allocators that are gone are dropped.
pub(crate) fn attach(cache: Arc<ThreadCache>) {
    // A thread that is ending takes none: its blocks come from the heap and go there.
    let _ = ATTACHED.try_with(|attached| {
        let mut caches = attached.0.borrow_mut();
        caches.retain(|mine| Arc::strong_count(&mine.cache) > 1);
        caches.push(Mine {
            cache: Arc::clone(&cache),
            touched: false,
        });
    });
}

/// Allocates from this thread's cache.
#[inline]
pub(crate) fn take(allocator: u64, requested: u64, stream: StreamId) -> Take {
    let requested = match u32::try_from(requested) {
        Ok(small) if requested <= MAX_REQUEST => small,
        _ => return Take::Miss,
    };
    let taken = with_mine(allocator, |mine| {
        let found = mine
            .cache
            .with(|inner| match inner.take(requested, stream) {
                Some((entry, stamp)) => Take::Hit(entry, stamp),
                None if inner.slot(stream).is_some() => Take::Miss,
                None => Take::MissToVisit,
            });
        match found {
            Take::Hit(..) => mine.touched = true,
            Take::Miss if mine.touched => return Take::MissToVisit,
            _ => {}
        }
        found
    });
    taken.unwrap_or(Take::MissToVisit)
}

/// Frees into this thread's cache.
#[inline]
pub(crate) fn put(allocator: u64, entry: Entry, stream: StreamId, stamp: u64) -> Put {
    let put = with_mine(allocator, |mine| {
        let put = mine.cache.with(|inner| inner.put(entry, stream, stamp));
        mine.touched |= put == Put::Kept;
        put
    });
    put.unwrap_or(Put::Unwanted)
}
