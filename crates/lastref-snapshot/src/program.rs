//! What a program asked for, taken from the history in its memory snapshot: a trace to replay.
//!
//! A history has each block that a caller got, and the moment when it could be used again. What it
//! does not have is what came before its first entry. Blocks that were there already are told by their
//! frees, or by being there at the end without having been allocated; the trace begins with their
//! allocations, in the order of their addresses.
//!
//! A free is taken to be where the history says `free_completed`: between that and `free_requested` a
//! block waits for another stream, under any allocator.

use std::collections::{HashMap, HashSet};
use std::ops::AddAssign;

use crate::dump::{Action, Dump, Entry, History, StackId};
use crate::trace::{Builder, Named, Trace, TraceError};

/// A program's allocations on one device, and what is not known about them.
#[derive(Clone, Debug)]
pub struct Program {
    /// The index of the device.
    pub device: u32,
    /// The allocations.
    pub trace: Trace,
    /// What the history leaves open.
    pub gaps: Gaps,
}

/// What a history does not say. All zero if it has the program from its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Gaps {
    /// Blocks that were there before the first entry.
    pub blocks_before: u64,
    /// Bytes that were asked for with them.
    pub bytes_before: u64,
    /// Allocations at an address whose block was never freed in the history: frees are missing.
    pub missing_frees: u64,
    /// Allocations in private pools, of CUDA graphs and `MemPool`.
    pub in_private_pools: u64,
    /// Allocations that failed.
    pub out_of_memory: u64,
}

/// Allocations that have no free yet, by address.
type Open = HashMap<u64, Known>;

#[derive(Clone, Copy)]
struct Known {
    id: u64,
    bytes: u64,
    stream: u64,
}

/// A block that was there before the first entry.
struct Before {
    address: u64,
    known: Known,
    stack: StackId,
}

impl Program {
    /// The programs of a snapshot, one for each device that has a history with allocations.
    ///
    /// # Errors
    ///
    /// [`TraceError::TooLarge`] if a history has more operations than a trace may have.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_snapshot::{Dump, program::Program};
    ///
    /// let json = r#"{"segments": [], "device_traces": [[
    ///     {"action": "alloc", "addr": 512, "size": 100, "stream": 0},
    ///     {"action": "free_requested", "addr": 512, "size": 100, "stream": 0},
    ///     {"action": "free_completed", "addr": 512, "size": 100, "stream": 0}
    /// ]]}"#;
    /// let programs = Program::of(&Dump::read(json.as_bytes())?)?;
    /// assert_eq!(programs[0].trace.operations().len(), 2);
    /// assert_eq!(programs[0].gaps, Default::default());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(dump: &Dump) -> Result<Vec<Self>, TraceError> {
        let histories = dump.histories().iter();
        let with_allocations = histories.filter(|history| {
            let mut entries = dump.entries_of(history).iter();
            entries.any(|entry| entry.action == Action::Alloc)
        });
        with_allocations
            .map(|history| Self::of_history(dump, history))
            .collect()
    }

    fn of_history(dump: &Dump, history: &History) -> Result<Self, TraceError> {
        let mut gaps = Gaps::default();
        let mut writer = Writer {
            dump,
            builder: Builder::default(),
            operations: 0,
        };
        let before = before(dump, history);
        let mut open = Open::with_capacity(before.len());
        for Before {
            address,
            known,
            stack,
        } in before
        {
            gaps.blocks_before += 1;
            gaps.bytes_before = gaps.bytes_before.saturating_add(known.bytes);
            writer.alloc(known, stack, "before the history")?;
            open.insert(address, known);
        }
        let mut next_id = gaps.blocks_before;
        for entry in dump.entries_of(history) {
            match entry.action {
                Action::Alloc => {
                    let known = Known::of(entry, next_id);
                    next_id += 1;
                    if let Some(lost) = open.insert(entry.address, known) {
                        gaps.missing_frees.add_assign(1);
                        writer.free(lost.id)?;
                    }
                    let private = dump.pool(entry.pool).is_some_and(|pool| pool != (0, 0));
                    gaps.in_private_pools += u64::from(private);
                    writer.alloc(known, entry.stack, "")?;
                }
                Action::FreeCompleted => {
                    // Of a block from before, whose allocation was put first, it is there too.
                    if let Some(known) = open.remove(&entry.address) {
                        writer.free(known.id)?;
                    }
                }
                Action::Oom => gaps.out_of_memory += 1,
                _ => {}
            }
        }
        Ok(Self {
            device: history.device,
            trace: writer.builder.finish(),
            gaps,
        })
    }
}

impl Known {
    const fn of(entry: &Entry, id: u64) -> Self {
        Self {
            id,
            bytes: entry.bytes,
            stream: entry.stream,
        }
    }
}

/// The blocks that were there before the first entry, by address, with ids in that order.
fn before(dump: &Dump, history: &History) -> Vec<Before> {
    // Addresses that the history speaks of: what is there first says whether there was a block.
    let mut seen: HashSet<u64> = HashSet::new();
    let mut before = Vec::new();
    for entry in dump.entries_of(history) {
        let is_alloc = entry.action == Action::Alloc;
        if !is_alloc && entry.action != Action::FreeCompleted {
            continue;
        }
        let first = seen.insert(entry.address);
        if first && !is_alloc {
            before.push(Before {
                address: entry.address,
                known: Known::of(entry, 0),
                stack: StackId::default(),
            });
        }
    }
    for segment in dump.segments_of(history.device) {
        for block in dump.blocks_of(segment) {
            if block.is_active() && !seen.contains(&block.address) {
                before.push(Before {
                    address: block.address,
                    known: Known {
                        id: 0,
                        bytes: block.requested_bytes,
                        stream: segment.stream,
                    },
                    stack: block.stack,
                });
            }
        }
    }
    before.sort_by_key(|block| block.address);
    before.dedup_by_key(|block| block.address);
    for (id, block) in (0..).zip(&mut before) {
        block.known.id = id;
    }
    before
}

/// Writes operations, each under the line that it would have in a file.
struct Writer<'a> {
    dump: &'a Dump,
    builder: Builder,
    operations: usize,
}

impl Writer<'_> {
    fn line(&mut self) -> u64 {
        self.operations += 1;
        Trace::line(self.operations - 1)
    }

    fn alloc(&mut self, known: Known, stack: StackId, phase: &str) -> Result<(), TraceError> {
        let line = self.line();
        let label = match self.dump.stack(stack) {
            [] => String::new(),
            [innermost, ..] => self.dump.frame_text(*innermost).to_string(),
        };
        let named = Named {
            phase,
            label: &label,
        };
        let Known { id, bytes, stream } = known;
        self.builder.alloc(line, id, bytes, stream, &named)
    }

    fn free(&mut self, id: u64) -> Result<(), TraceError> {
        let line = self.line();
        self.builder.free(line, id, "", "")
    }
}
