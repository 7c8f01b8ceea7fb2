//! The history: a ring of the latest things that happened, stamped by sequence.
//!
//! Entries are stamped by sequence and not by time, since reading the clock costs more than an
//! allocation. They are kept packed, for the same reason: with a million of them each push is a miss
//! of the cache. A free that is completed at once, as most are, takes one record and reads back as
//! two entries.
//!
//! Each thread's cache has a history of its own, and the heap has one. A record's *stamp* is greater
//! than those of all that must come before it: the earlier ones of its history, those that its thread
//! has made in any other, and what happened to the same memory, whose stamps a history
//! [passes](History::pass) when memory comes from there (Lamport's clock). No counter is shared between
//! threads for that. Read together they are sorted by it.

use lastref_snapshot::{TraceAction, TraceEntry};

use crate::clock::StreamSlot;
use crate::device::{DevicePtr, StreamId};
use crate::sync::next_stamp;

/// What [`TraceAction`] is without its numbers, so that a record is three words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Code {
    Alloc,
    Free,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Snapshot,
    Oom,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    address: u64,
    bytes: u64,
    stamp: u64,
    slot: StreamSlot,
    code: Code,
}

const _: () = assert!(size_of::<Record>() == 32);

impl Record {
    /// Of no meaning.
    const NOTHING: Self = Self {
        address: 0,
        bytes: 0,
        stamp: 0,
        slot: StreamSlot::DEFAULT,
        code: Code::Snapshot,
    };

    /// The entries it stands for: one, or two.
    const fn actions(&self) -> (TraceAction, Option<TraceAction>) {
        let action = match self.code {
            Code::Alloc => TraceAction::Alloc,
            Code::Free => {
                let completed = Some(TraceAction::FreeCompleted);
                return (TraceAction::FreeRequested, completed);
            }
            Code::FreeRequested => TraceAction::FreeRequested,
            Code::FreeCompleted => TraceAction::FreeCompleted,
            Code::SegmentAlloc => TraceAction::SegmentAlloc,
            Code::SegmentFree => TraceAction::SegmentFree,
            Code::SegmentMap => TraceAction::SegmentMap,
            Code::SegmentUnmap => TraceAction::SegmentUnmap,
            Code::Snapshot => TraceAction::Snapshot,
            // Such an entry has no address.
            Code::Oom => TraceAction::Oom {
                device_free_bytes: self.address,
            },
        };
        (action, None)
    }
}

/// So many records are added at a time: few enough to stay in the nearest cache until they are written.
const RECORDS_AT_ONCE: usize = 256;

/// See the [module](self).
///
/// No two numbers that a push counts up are neighbours: the compiler would write each by itself in one
/// place and both as one in another, which the processor cannot read back before they are in memory.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct History {
    /// Frees completed at once that were ever pushed. Each is two entries.
    frees: u64,
    /// Grows to `max_records`, then is a ring. Before that, those from `next` on are of no meaning.
    records: Vec<Record>,
    /// Where the next record goes: at the oldest, or at the end, where room is added or the ring closes.
    next: usize,
    max_records: usize,
    is_closed: bool,
    /// The latest stamp.
    clock: u64,
    /// Records that were pushed before the one that is first in `records` now.
    before: u64,
}

impl History {
    /// Sets how many entries are kept; 0 turns the history off and forgets it.
    pub(crate) fn set_max_entries(&mut self, max_entries: usize) {
        let mut records: Vec<Record> = self.in_order().copied().collect();
        let surplus = records.len().saturating_sub(max_entries);
        records.drain(..surplus);
        // Not more than it may come to need, and for a long history not all of it at once.
        records.reserve_exact(max_entries.min(1 << 20) - records.len().min(1 << 20));
        self.before = self.num_records() - records.len() as u64;
        (self.next, self.max_records) = (records.len(), max_entries);
        self.is_closed = false;
        self.records = records;
    }

    fn in_order(&self) -> impl Iterator<Item = &Record> {
        let (newer, rest) = self.records.split_at(self.next);
        let older = if self.is_closed { rest } else { &[] };
        older.iter().chain(newer)
    }

    pub(crate) fn push(
        &mut self,
        action: TraceAction,
        ptr: DevicePtr,
        bytes: u64,
        slot: StreamSlot,
    ) {
        let (code, address) = match action {
            TraceAction::Alloc => (Code::Alloc, ptr.0),
            TraceAction::FreeRequested => (Code::FreeRequested, ptr.0),
            TraceAction::FreeCompleted => (Code::FreeCompleted, ptr.0),
            TraceAction::SegmentAlloc => (Code::SegmentAlloc, ptr.0),
            TraceAction::SegmentFree => (Code::SegmentFree, ptr.0),
            TraceAction::SegmentMap => (Code::SegmentMap, ptr.0),
            TraceAction::SegmentUnmap => (Code::SegmentUnmap, ptr.0),
            TraceAction::Snapshot => (Code::Snapshot, ptr.0),
            TraceAction::Oom { device_free_bytes } => (Code::Oom, device_free_bytes),
        };
        self.push_record(address, bytes, slot, code);
    }

    /// Pushes an allocation and returns its stamp.
    #[inline]
    pub(crate) fn push_alloc(&mut self, address: u64, bytes: u64, slot: StreamSlot) -> u64 {
        self.push_record(address, bytes, slot, Code::Alloc);
        self.clock
    }

    /// The latest stamp.
    pub(crate) const fn clock(&self) -> u64 {
        self.clock
    }

    /// Makes later stamps greater than this one.
    #[inline]
    pub(crate) fn pass(&mut self, stamp: u64) {
        self.clock = self.clock.max(stamp);
    }

    /// Pushes the two entries of a free that is completed at once.
    #[inline]
    pub(crate) fn push_free(&mut self, address: u64, bytes: u64, slot: StreamSlot) {
        self.frees += 1;
        self.push_record(address, bytes, slot, Code::Free);
    }

    #[inline]
    fn push_record(&mut self, address: u64, bytes: u64, slot: StreamSlot, code: Code) {
        self.clock = next_stamp(self.clock);
        if self.next == self.records.len() {
            self.make_next();
        }
        if let Some(next) = self.records.get_mut(self.next) {
            // Field by field: a record that is put together first and then copied is read back from
            // memory before it is there.
            next.address = address;
            next.bytes = bytes;
            next.stamp = self.clock;
            next.slot = slot;
            next.code = code;
            self.next += 1;
        } else {
            // The history is off.
            self.before += 1;
        }
    }

    /// Adds room for more records, or closes the ring.
    #[cold]
    fn make_next(&mut self) {
        let room = self.max_records - self.records.len();
        if room > 0 {
            let more = room.min(RECORDS_AT_ONCE);
            self.records
                .resize(self.records.len() + more, Record::NOTHING);
        } else if self.max_records > 0 {
            self.before += self.next as u64;
            self.next = 0;
            self.is_closed = true;
        }
    }

    /// Records that were ever pushed.
    const fn num_records(&self) -> u64 {
        self.before + self.next as u64
    }

    /// Entries that were ever pushed.
    const fn sequence(&self) -> u64 {
        self.num_records() + self.frees
    }

    /// What it holds, for [`read`].
    pub(crate) fn part(&self) -> Part {
        Part {
            records: self.in_order().copied().collect(),
            sequence: self.sequence(),
        }
    }

    pub(crate) const fn max_entries(&self) -> usize {
        self.max_records
    }
}

/// One of several histories that are read together.
#[derive(Debug)]
pub(crate) struct Part {
    records: Vec<Record>,
    sequence: u64,
}

/// The latest `max_entries` entries of several histories, oldest first.
pub(crate) fn read(
    parts: Vec<Part>,
    max_entries: usize,
    stream: impl Fn(StreamSlot) -> StreamId,
) -> Vec<TraceEntry> {
    let end: u64 = parts.iter().map(|part| part.sequence).sum();
    let mut records: Vec<Record> = parts.into_iter().flat_map(|part| part.records).collect();
    records.sort_by_key(|record| record.stamp);
    let mut entries = Vec::with_capacity(records.len());
    for record in records {
        let (first, second) = record.actions();
        entries.extend(
            std::iter::once(first)
                .chain(second)
                .map(|action| TraceEntry {
                    action,
                    address: if record.code == Code::Oom {
                        0
                    } else {
                        record.address
                    },
                    bytes: record.bytes,
                    stream: stream(record.slot).0,
                    sequence: 0,
                    time_us: None,
                }),
        );
    }
    entries.drain(..entries.len().saturating_sub(max_entries));
    let first = end - entries.len() as u64;
    for (sequence, entry) in (first..).zip(&mut entries) {
        entry.sequence = sequence;
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(at: u64) -> [(TraceAction, u64); 2] {
        [
            (TraceAction::FreeRequested, at),
            (TraceAction::FreeCompleted, at),
        ]
    }

    fn read(history: &History) -> Vec<(TraceAction, u64)> {
        let entries = super::read(vec![history.part()], history.max_records, |_| {
            StreamId::DEFAULT
        });
        for pair in entries.windows(2) {
            assert_eq!(pair[0].sequence + 1, pair[1].sequence);
        }
        assert!(
            entries
                .last()
                .is_none_or(|last| last.sequence + 1 == history.sequence())
        );
        let entries = entries.iter();
        entries
            .map(|entry| (entry.action, entry.address + entry.bytes))
            .collect()
    }

    #[test]
    fn the_latest_entries_read_back_exactly() {
        for max_entries in 0..12 {
            let mut history = History::default();
            history.set_max_entries(max_entries);
            let mut expected = Vec::new();
            for n in 0..40 {
                if n % 3 == 1 {
                    history.push_free(1000, n, StreamSlot::DEFAULT);
                    expected.extend(free(1000 + n));
                } else {
                    let action = if n % 3 == 0 {
                        TraceAction::Alloc
                    } else {
                        TraceAction::SegmentMap
                    };
                    history.push(action, DevicePtr(1000), n, StreamSlot::DEFAULT);
                    expected.push((action, 1000 + n));
                }
                let kept = expected.len().saturating_sub(max_entries);
                assert_eq!(read(&history), expected[kept..]);
            }
        }
    }

    #[test]
    fn histories_are_read_together_by_what_must_come_before_what() {
        let (mut one, mut other) = (History::default(), History::default());
        one.set_max_entries(3);
        other.set_max_entries(3);
        let alloc = |history: &mut History, at| history.push_alloc(at, 0, StreamSlot::DEFAULT);
        alloc(&mut one, 1);
        alloc(&mut one, 2);
        let stamp = alloc(&mut one, 3);
        // Memory of the first goes to the other, and back.
        other.pass(stamp);
        other.push_free(3, 0, StreamSlot::DEFAULT);
        one.pass(other.clock());
        alloc(&mut one, 3);
        let entries = super::read(vec![other.part(), one.part()], 3, |_| StreamId::DEFAULT);
        let read: Vec<_> = entries
            .iter()
            .map(|entry| (entry.sequence, entry.action))
            .collect();
        assert_eq!(
            read,
            [
                (3, TraceAction::FreeRequested),
                (4, TraceAction::FreeCompleted),
                (5, TraceAction::Alloc)
            ]
        );
    }

    #[test]
    fn every_action_reads_back_as_it_was() {
        let actions = [
            TraceAction::Alloc,
            TraceAction::FreeRequested,
            TraceAction::FreeCompleted,
            TraceAction::SegmentAlloc,
            TraceAction::SegmentFree,
            TraceAction::SegmentMap,
            TraceAction::SegmentUnmap,
            TraceAction::Snapshot,
            TraceAction::Oom {
                device_free_bytes: 77,
            },
        ];
        let mut history = History::default();
        history.set_max_entries(100);
        for action in actions {
            history.push(action, DevicePtr::NULL, 5, StreamSlot::DEFAULT);
        }
        assert_eq!(read(&history), actions.map(|action| (action, 5)));
    }

    #[test]
    fn a_history_can_be_made_shorter_and_longer() {
        let mut history = History::default();
        history.set_max_entries(4);
        for n in 0..6 {
            history.push(TraceAction::Alloc, DevicePtr(n), 0, StreamSlot::DEFAULT);
        }
        let allocs = |range: std::ops::Range<u64>| -> Vec<_> {
            range.map(|n| (TraceAction::Alloc, n)).collect()
        };
        history.set_max_entries(2);
        assert_eq!(read(&history), allocs(4..6));
        history.set_max_entries(3);
        for n in 6..8 {
            history.push(TraceAction::Alloc, DevicePtr(n), 0, StreamSlot::DEFAULT);
        }
        assert_eq!(read(&history), allocs(5..8));
        history.set_max_entries(0);
        history.push(TraceAction::Alloc, DevicePtr(9), 0, StreamSlot::DEFAULT);
        assert_eq!(read(&history), []);
        assert_eq!(history.sequence(), 9, "it is counted all the same");
    }
}
