//! The cache of small blocks that each thread has for each allocator it uses.
//!
//! ```text
//!  thread ── its caches ── Owner ──▶ Inner ◀── Visitor ── all caches of an allocator ── State
//!                                     entries, what was counted, history
//! ```
//!
//! An entry is a block that its caller has given back and the heap does not know of: for the heap it
//! is live. It is given out again for exactly the same size on the same stream, by the same thread,
//! which needs neither a lock nor a stamp: what the stream is given later runs later. Everything
//! else goes through the heap: blocks recorded on other streams, blocks freed by a thread that does
//! not allocate on their stream, and what finds no room. What sizes a thread asks for, and so which
//! blocks are worth keeping, only the thread knows: it finds out without the flag that there is nothing
//! for it to look for, or to put in.
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
//! 5. `Asked::may_hold` is true if the set of those keys holds something: only the thread that has the
//!    cache puts blocks in.
//!
//! Lock order: the state's lock, then a cache's flag. Never the other way round.

use std::cell::RefCell;

use smallvec::SmallVec;

use crate::clock::StreamSlot;
use crate::device::StreamId;
use crate::heap::{NodeId, rounded};
use crate::history::History;
use crate::owner::{Owner, Visitor};
use crate::stats::{Flow, PoolKind};
use crate::sync::thread_local_const;

/// The most bytes in one cache. Small: a cached block keeps a page of 2 MiB from other uses.
const MAX_BYTES: u64 = 8 << 20;
const NUM_SETS: usize = 64;
const WAYS: usize = 4;

/// The largest request that is cached.
pub(crate) const MAX_REQUEST: u64 = PoolKind::MAX_SMALL_BYTES;

/// A block in a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) addr: u64,
    pub(crate) node: NodeId,
    pub(crate) slot: StreamSlot,
    /// What its caller asked for, and the next must ask for.
    pub(crate) requested: u32,
}

/// A size and a stream in one word: what a request and a block must have in common. Never 0 for those,
/// since no request of zero bytes comes here.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Key(u64);

impl Key {
    /// Where there is nothing.
    const NONE: Self = Self(0);

    #[inline]
    const fn new(requested: u32, slot: StreamSlot) -> Self {
        Self((slot.index() as u64) << 32 | requested as u64)
    }

    const fn bytes(self) -> u64 {
        rounded(self.0 & u32::MAX as u64)
    }

    /// The set that it falls into.
    #[inline]
    const fn set(self) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "6 bits are left")]
        {
            (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - NUM_SETS.ilog2())) as usize
        }
    }
}

/// What was counted for small blocks since the last visit.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Flows {
    pub(crate) blocks: Flow,
    pub(crate) bytes: Flow,
    pub(crate) requested: Flow,
}

/// Entries whose keys fall together, the oldest first.
#[derive(Clone, Copy, Debug)]
struct Set {
    /// [`Key::NONE`] from `len` on.
    keys: [Key; WAYS],
    addrs: [u64; WAYS],
    nodes: [NodeId; WAYS],
    len: usize,
}

impl Set {
    const EMPTY: Self = Self {
        keys: [Key::NONE; WAYS],
        addrs: [0; WAYS],
        nodes: [0; WAYS],
        len: 0,
    };

    /// The newest entry with this key.
    #[inline]
    fn find(&self, key: Key) -> Option<usize> {
        (0..WAYS).rev().find(|at| self.keys[*at] == key)
    }

    #[inline]
    fn remove(&mut self, at: usize) -> (u64, NodeId) {
        let removed = (self.addrs[at], self.nodes[at]);
        self.len -= 1;
        // Mostly none: the newest goes first.
        for at in at..self.len.min(WAYS - 1) {
            self.keys[at] = self.keys[at + 1];
            self.addrs[at] = self.addrs[at + 1];
            self.nodes[at] = self.nodes[at + 1];
        }
        self.keys[self.len.min(WAYS - 1)] = Key::NONE;
        removed
    }
}

/// What a thread has asked for of late, of keys that fall together. What it has asked for more than
/// once is worth keeping blocks for; sizes that do not come again would only be in the way.
#[derive(Clone, Copy, Debug)]
struct Asked {
    keys: [Key; WAYS],
    again: [bool; WAYS],
    next: usize,
    /// Whether the set of these keys may hold something. Only the thread puts something in.
    may_hold: bool,
}

type AllAsked = [Asked; NUM_SETS];

impl Asked {
    const NOTHING: Self = Self {
        keys: [Key::NONE; WAYS],
        again: [false; WAYS],
        next: 0,
        may_hold: false,
    };

    /// Notes a request. True if it is the second one.
    #[inline]
    fn note(&mut self, key: Key) -> bool {
        for at in 0..WAYS {
            if self.keys[at] == key {
                return !std::mem::replace(&mut self.again[at], true);
            }
        }
        let next = self.next % WAYS;
        (self.keys[next], self.again[next]) = (key, false);
        self.next = next + 1;
        false
    }

    /// Whether it was asked for more than once.
    #[inline]
    fn is_wanted(&self, key: Key) -> bool {
        (0..WAYS).any(|at| self.keys[at] == key && self.again[at])
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
    /// There is none, and the cache is to be visited: there is none either, it is to keep blocks of
    /// the stream from now on, it has counted something, or it refused a block.
    MissToVisit,
}

/// What a cache's flag protects.
#[derive(Debug)]
pub(crate) struct Inner {
    bytes: u64,
    pub(crate) flow: Flows,
    pub(crate) history: History,
    /// The streams whose blocks may be kept.
    streams: SmallVec<[StreamSlot; 2]>,
    sets: [Set; NUM_SETS],
    /// What was asked for, while no thread has it.
    asked: Option<Box<AllAsked>>,
}

impl Inner {
    pub(crate) fn new(max_history_entries: usize) -> Self {
        let mut history = History::default();
        history.set_max_entries(max_history_entries);
        Self {
            bytes: 0,
            flow: Flows::default(),
            history,
            streams: SmallVec::new(),
            sets: [Set::EMPTY; NUM_SETS],
            asked: Some(Box::new([Asked::NOTHING; NUM_SETS])),
        }
    }

    /// Gives out a block, and the stamp of its allocation.
    #[inline]
    fn take(&mut self, requested: u32, slot: StreamSlot) -> Option<(Entry, u64)> {
        let key = Key::new(requested, slot);
        let set = &mut self.sets[key.set()];
        let at = set.find(key)?;
        let (addr, node) = set.remove(at);
        let (bytes, requested_bytes) = (key.bytes(), u64::from(requested));
        self.bytes -= bytes;
        self.flow.blocks.add(1);
        self.flow.bytes.add(bytes);
        self.flow.requested.add(requested_bytes);
        let stamp = self.history.push_alloc(addr, requested_bytes, slot);
        let entry = Entry {
            addr,
            node,
            slot,
            requested,
        };
        Some((entry, stamp))
    }

    /// Takes a block in, allocated at `stamp`.
    #[inline]
    pub(crate) fn put(&mut self, entry: &Entry, stamp: u64) -> Put {
        if !self.may_keep(entry.slot) {
            return Put::Unwanted;
        }
        let key = Key::new(entry.requested, entry.slot);
        let bytes = key.bytes();
        let set = &mut self.sets[key.set()];
        let at = set.len;
        if at >= WAYS || self.bytes + bytes > MAX_BYTES {
            // One of a kind is worth more than one more.
            return match set.find(key) {
                Some(_) => Put::Unwanted,
                None => Put::NoRoom,
            };
        }
        (set.keys[at], set.addrs[at], set.nodes[at]) = (key, entry.addr, entry.node);
        set.len = at + 1;
        self.bytes += bytes;
        let requested = u64::from(entry.requested);
        self.flow.blocks.remove(1);
        self.flow.bytes.remove(bytes);
        self.flow.requested.remove(requested);
        self.history.pass(stamp);
        self.history.push_free(entry.addr, requested, entry.slot);
        Put::Kept
    }

    /// Makes room for a block of this size: takes out the oldest one of its set, or half of all if
    /// there are too many bytes.
    pub(crate) fn make_room(&mut self, entry: &Entry, out: &mut Vec<NodeId>) {
        let key = Key::new(entry.requested, entry.slot);
        if self.bytes + key.bytes() > MAX_BYTES {
            self.drain_to(MAX_BYTES / 2, out);
        }
        let set = &mut self.sets[key.set()];
        if set.len == WAYS {
            self.bytes -= set.keys[0].bytes();
            out.push(set.remove(0).1);
        }
    }

    /// Takes out blocks until at most `bytes` bytes are left.
    pub(crate) fn drain_to(&mut self, bytes: u64, out: &mut Vec<NodeId>) {
        for set in &mut self.sets {
            if self.bytes <= bytes {
                break;
            }
            for at in 0..set.len {
                self.bytes -= set.keys[at].bytes();
                out.push(set.nodes[at]);
            }
            *set = Set::EMPTY;
        }
    }

    #[inline]
    fn may_keep(&self, slot: StreamSlot) -> bool {
        self.streams.contains(&slot)
    }

    /// Allows blocks of a stream to be kept.
    fn allow(&mut self, slot: StreamSlot) {
        if !self.may_keep(slot) {
            self.streams.push(slot);
        }
    }

    /// Allows no stream any more.
    pub(crate) fn forbid_all(&mut self) {
        self.streams.clear();
    }
}

/// A cache as the state has it; see the [module](self).
pub(crate) type ThreadCache = Visitor<Inner>;

/// A cache that a thread has, and what only that thread knows, so that it needs no flag.
struct Mine {
    allocator: u64,
    cache: Owner<Inner>,
    /// Whether this thread is to visit the cache under the state's lock: since the last visit it has
    /// counted something, or refused a block.
    to_visit: bool,
    /// The stream that was used last.
    recent: Option<(StreamId, StreamSlot)>,
    /// All that this thread has used. They stay true: neither streams nor slots are used again.
    streams: Vec<(StreamId, StreamSlot)>,
    asked: Box<AllAsked>,
}

impl Mine {
    #[inline]
    fn slot(&mut self, stream: StreamId) -> Option<StreamSlot> {
        match self.recent {
            Some((recent, slot)) if recent == stream => Some(slot),
            _ => self.other_slot(stream),
        }
    }

    #[cold]
    fn other_slot(&mut self, stream: StreamId) -> Option<StreamSlot> {
        let known = self.streams.iter().find(|(id, _)| *id == stream);
        self.recent = Some(*known?);
        known.map(|(_, slot)| *slot)
    }

    #[inline]
    fn note(&mut self, requested: u32, slot: StreamSlot) {
        let key = Key::new(requested, slot);
        self.asked[key.set()].note(key);
    }

    #[inline]
    fn take(&mut self, requested: u32, stream: StreamId) -> Take {
        let Some(slot) = self.slot(stream) else {
            return Take::MissToVisit;
        };
        let key = Key::new(requested, slot);
        let asked = &mut self.asked[key.set()];
        let is_second = asked.note(key);
        if asked.may_hold {
            let (hit, holds) = self.cache.with(|inner| {
                let hit = inner.take(requested, slot);
                (hit, inner.sets[key.set()].len > 0)
            });
            asked.may_hold = holds;
            if let Some((entry, stamp)) = hit {
                self.to_visit = true;
                return Take::Hit(entry, stamp);
            }
        }
        // From the second time on blocks are kept: the cache must know the stream.
        if self.to_visit || is_second {
            Take::MissToVisit
        } else {
            Take::Miss
        }
    }

    #[inline]
    fn put(&mut self, entry: &Entry, stamp: u64) -> Put {
        let key = Key::new(entry.requested, entry.slot);
        let asked = &mut self.asked[key.set()];
        if !asked.is_wanted(key) {
            return Put::Unwanted;
        }
        asked.may_hold = true;
        // What it counts by this is to be looked at, and if it is refused the cache does not know
        // the stream.
        self.to_visit = true;
        self.cache.with(|inner| inner.put(entry, stamp))
    }
}

/// The caches that a thread has, the one used last apart from the others.
struct Caches {
    recent: Option<Mine>,
    others: Vec<Mine>,
}

impl Caches {
    /// Makes the cache for an allocator the one used last. False if there is none.
    #[cold]
    fn bring(&mut self, allocator: u64) -> bool {
        let is_its = |mine: &Mine| mine.allocator == allocator;
        let Some(at) = self.others.iter().position(is_its) else {
            return false;
        };
        match &mut self.recent {
            Some(recent) => std::mem::swap(recent, &mut self.others[at]),
            None => self.recent = Some(self.others.swap_remove(at)),
        }
        true
    }
}

struct Attached(RefCell<Caches>);

impl Drop for Attached {
    fn drop(&mut self) {
        let Caches { recent, others } = self.0.get_mut();
        for mut mine in recent.take().into_iter().chain(others.drain(..)) {
            // From then on it has no owner.
            mine.cache.with(|inner| inner.asked = Some(mine.asked));
        }
    }
}

thread_local_const! {
    static ATTACHED: Attached = Attached(RefCell::new(Caches {
        recent: None,
        others: Vec::new(),
    }));
}

/// Runs `f` on this thread's cache for an allocator, if it has one.
#[inline]
fn with_mine<R>(allocator: u64, f: impl FnOnce(&mut Mine) -> R) -> Option<R> {
    let attached = ATTACHED.try_with(|attached| {
        let mut caches = attached.0.borrow_mut();
        let is_recent = matches!(&caches.recent, Some(mine) if mine.allocator == allocator);
        if !is_recent && !caches.bring(allocator) {
            return None;
        }
        caches.recent.as_mut().map(f)
    });
    // A thread that is ending has no caches any more.
    attached.ok().flatten()
}

/// Visits this thread's cache for an allocator, which then keeps blocks of the stream too if `f` says
/// so. False if it has none. To be called under the state's lock, and what was counted is to be taken out.
pub(crate) fn visit_mine(
    allocator: u64,
    (stream, slot): (StreamId, StreamSlot),
    requested: u64,
    f: impl FnOnce(&mut Inner) -> bool,
) -> bool {
    let visited = with_mine(allocator, |mine| {
        mine.to_visit = false;
        mine.cache.with(|inner| {
            if f(inner) {
                inner.allow(slot);
            }
        });
        if mine.slot(stream).is_none() {
            mine.streams.push((stream, slot));
            // That was not asked for here, for want of a cache or of the stream.
            if let Ok(requested) = u32::try_from(requested) {
                mine.note(requested, slot);
            }
        }
    });
    visited.is_some()
}

/// Visits this thread's cache for an allocator, if it has one. Else as [`visit_mine`].
pub(crate) fn look_at_mine(allocator: u64, f: impl FnOnce(&mut Inner)) {
    with_mine(allocator, |mine| {
        mine.to_visit = false;
        mine.cache.with(f);
    });
}

/// The same, if a visit is due.
#[inline]
pub(crate) fn look_at_mine_if_due(allocator: u64, f: impl FnOnce(&mut Inner)) {
    with_mine(allocator, |mine| {
        if std::mem::take(&mut mine.to_visit) {
            mine.cache.with(f);
        }
    });
}

/// Gives this thread a cache. Those of allocators that are gone are dropped.
pub(crate) fn attach(allocator: u64, mut cache: Owner<Inner>) {
    // A thread that is ending takes none: its blocks come from the heap and go there.
    let _ = ATTACHED.try_with(|attached| {
        let Some(asked) = cache.with(|inner| inner.asked.take()) else {
            return;
        };
        let mut caches = attached.0.borrow_mut();
        let is_used = |mine: &mut Mine| mine.cache.has_visitor();
        caches.others.retain_mut(is_used);
        let before = caches.recent.take_if(is_used);
        caches.others.extend(before);
        caches.recent = Some(Mine {
            allocator,
            cache,
            to_visit: false,
            recent: None,
            streams: Vec::new(),
            asked,
        });
    });
}

/// Allocates from this thread's cache.
#[inline]
pub(crate) fn take(allocator: u64, requested: u64, stream: StreamId) -> Take {
    let requested = match u32::try_from(requested) {
        // A key is never 0.
        Ok(small) if small > 0 && requested <= MAX_REQUEST => small,
        _ => return Take::Miss,
    };
    let taken = with_mine(allocator, |mine| mine.take(requested, stream));
    taken.unwrap_or(Take::MissToVisit)
}

/// Frees into this thread's cache.
#[inline]
pub(crate) fn put(allocator: u64, entry: &Entry, stamp: u64) -> Put {
    let put = with_mine(allocator, |mine| mine.put(entry, stamp));
    put.unwrap_or(Put::Unwanted)
}
