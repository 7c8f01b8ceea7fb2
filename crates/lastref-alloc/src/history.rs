//! The history: a ring of the latest things that happened, stamped by sequence.
//!
//! Entries are stamped by sequence and not by time, since reading the clock costs more than an
//! allocation.

use std::collections::VecDeque;

use lastref_snapshot::{TraceAction, TraceEntry};

use crate::device::{DevicePtr, StreamId};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct History {
    entries: VecDeque<TraceEntry>,
    max_entries: usize,
    sequence: u64,
}

impl History {
    /// Sets how many entries are kept; 0 turns the history off and forgets it.
    pub(crate) fn set_max_entries(&mut self, max_entries: usize) {
        self.max_entries = max_entries;
        let surplus = self.entries.len().saturating_sub(max_entries);
        self.entries.drain(..surplus);
    }

    pub(crate) fn push(
        &mut self,
        action: TraceAction,
        ptr: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) {
        if self.max_entries == 0 {
            return;
        }
        if self.entries.len() == self.max_entries {
            self.entries.pop_front();
        }
        self.entries.push_back(TraceEntry {
            action,
            address: ptr.0,
            bytes,
            stream: stream.0,
            sequence: self.sequence,
            time_us: None,
        });
        self.sequence += 1;
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &TraceEntry> {
        self.entries.iter()
    }
}
