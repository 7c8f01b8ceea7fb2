//! Errors of the allocator, and the out-of-memory report.

use std::fmt;

use thiserror::Error;

use crate::device::{DeviceError, DeviceIndex, DevicePtr, StreamId};
use crate::ladder::RungReport;

/// Why an allocation failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The memory is full now, and nothing that was tried made enough of it free.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemoryError>),
    /// The request can never be satisfied, however much is freed.
    #[error(
        "cannot allocate {} on device {device}: that is more than {} ({}); \
         no freeing can help, ask for less{}",
        Bytes(*requested),
        if *limited { "the memory limit set for this process" } else { "the device has" },
        Bytes(*most),
        if *limited { " or raise the limit" } else { "" }
    )]
    TooLarge {
        /// Bytes asked for.
        requested: u64,
        /// The most bytes that could ever be given.
        most: u64,
        /// Whether `most` is a limit set by the user, as opposed to the size of the device.
        limited: bool,
        /// The device.
        device: DeviceIndex,
    },
    /// The stream was retired, and must not be given memory any more.
    #[error("cannot allocate on stream {stream}: it is being destroyed")]
    RetiredStream {
        /// The stream.
        stream: StreamId,
    },
    /// A device call failed for another reason than full memory.
    #[error("device call failed during an allocation: {0}")]
    Device(#[from] DeviceError),
}

impl AllocError {
    /// Whether memory was the reason: full now, or never enough.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory(_) | Self::TooLarge { .. })
    }
}

/// A fraction of the device's memory must be a number from 0 to 1.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
#[error("memory fraction must be from 0 to 1, got {0}")]
pub struct InvalidFraction(pub f64);

/// What the memory held when an allocation failed, and what was tried.
///
/// The parts add up: `allocated + pending + cached + other + device_free = capacity`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OutOfMemoryError {
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes that would have been taken, rounding included.
    pub rounded: u64,
    /// The device.
    pub device: DeviceIndex,
    /// Its name.
    pub device_name: String,
    /// All memory of the device.
    pub capacity: u64,
    /// Bytes the device had free.
    pub device_free: u64,
    /// The limit on what this allocator may reserve, if one was set.
    pub limit: Option<u64>,
    /// Bytes in blocks that callers hold.
    pub allocated: u64,
    /// Bytes given back by callers that a stream may still use.
    pub pending: u64,
    /// Bytes that are free but not given back to the device.
    pub cached: u64,
    /// Bytes that neither this allocator holds nor the device has free: other processes, contexts,
    /// other allocators.
    pub other: u64,
    /// The largest contiguous free block among the cached bytes.
    pub largest_hole: u64,
    /// If enough is free but in pieces: the blocks that lie between.
    pub pinned: Option<Pinned>,
    /// What was tried, in order.
    pub rungs: Vec<RungReport>,
}

/// Free memory that cannot be used for a request, and the blocks that pin it: those that would have
/// to go to make one free piece large enough, or to let partly free segments go back.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Pinned {
    /// The blocks, in the order of their addresses within a segment.
    pub blocks: Vec<PinningBlock>,
    /// Free bytes between them.
    pub free_bytes: u64,
}

/// A block that keeps free memory from being used.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PinningBlock {
    /// Where it is.
    pub ptr: DevicePtr,
    /// Its size.
    pub bytes: u64,
    /// The stream it was allocated on.
    pub stream: StreamId,
    /// Whether it was given back, and a stream may still use it.
    pub pending: bool,
}

/// Pinning blocks that are named in the text.
const MAX_NAMED: usize = 10;

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.blocks.iter().map(|block| block.bytes).sum();
        write!(
            f,
            "{} of it is pinned by {} block{} of {} in all:",
            Bytes(self.free_bytes),
            self.blocks.len(),
            if self.blocks.len() == 1 { "" } else { "s" },
            Bytes(held)
        )?;
        for block in self.blocks.iter().take(MAX_NAMED) {
            write!(
                f,
                "\n    {:>12}  at {} on stream {}{}",
                Bytes(block.bytes).to_string(),
                block.ptr,
                block.stream,
                if block.pending { ", pending" } else { "" }
            )?;
        }
        if self.blocks.len() > MAX_NAMED {
            write!(f, "\n    and {} more", self.blocks.len() - MAX_NAMED)?;
        }
        Ok(())
    }
}

impl OutOfMemoryError {
    /// Bytes this allocator has obtained from the device.
    #[must_use]
    pub const fn reserved(&self) -> u64 {
        self.allocated + self.pending + self.cached
    }

    /// Whether all that is free would do, were it in one piece.
    pub(crate) fn is_fragmented(&self) -> bool {
        !self.is_limited() && self.pending + self.cached + self.device_free >= self.rounded
    }

    /// Whether it would fit but for the limit.
    fn is_limited(&self) -> bool {
        self.limit.is_some_and(|limit| {
            limit.saturating_sub(self.allocated) < self.rounded && self.device_free >= self.rounded
        })
    }

    /// What a person could do about it, from the numbers.
    fn advice(&self) -> &'static str {
        if self.is_limited() {
            "the limit set for this process is what stands in the way: raise it, or free tensors"
        } else if self.is_fragmented() {
            "enough is free, but in pieces: free tensors that lie between the holes, or ask for less \
             at a time"
        } else if self.other > self.allocated {
            "most of the memory is held outside this allocator: look for other processes on this \
             device"
        } else {
            "drop references to tensors that are no longer needed, or ask for less at a time"
        }
    }
}

impl fmt::Display for OutOfMemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            requested,
            device,
            device_name,
            capacity,
            ..
        } = self;
        write!(
            f,
            "out of memory on device {device} ({device_name}): tried to allocate {}",
            Bytes(*requested)
        )?;
        if let Some(limit) = self.limit {
            write!(f, " under a limit of {}", Bytes(limit))?;
        }
        let lines = [
            ("allocated", self.allocated, "held by callers"),
            (
                "pending",
                self.pending,
                "given back, a stream may still use it",
            ),
            (
                "cached",
                self.cached,
                "total cached free, kept by this allocator",
            ),
            (
                "other",
                self.other,
                "other processes, contexts and allocators",
            ),
            ("free", self.device_free, "free on the device"),
        ];
        write!(f, "\n  capacity  {:>12}", Bytes(*capacity).to_string())?;
        for (name, bytes, what) in lines {
            write!(f, "\n  {name:<9} {:>12}  {what}", Bytes(bytes).to_string())?;
            if name == "cached" && bytes > 0 {
                write!(f, ", largest free block {}", Bytes(self.largest_hole))?;
            }
        }
        if let Some(pinned) = &self.pinned {
            write!(f, "\n  in pieces: {pinned}")?;
        }
        if self.rungs.is_empty() {
            f.write_str("\n  tried: nothing could have helped")?;
        } else {
            f.write_str("\n  tried:")?;
            for (n, rung) in (1..).zip(&self.rungs) {
                write!(f, "\n    {n}. {rung}")?;
            }
        }
        write!(f, "\n  what to do: {}", self.advice())
    }
}

impl std::error::Error for OutOfMemoryError {}

/// Bytes for people: `512 B`, `1.50 MiB`. Units are powers of 1024.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // 1023.995 and up would print as 1024.00.
        while value >= 1023.995 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.2} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_in_powers_of_1024() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(1024), "1.00 KiB");
        assert_eq!(shown(1 << 20), "1.00 MiB");
        assert_eq!(shown((1 << 30) - 1), "1.00 GiB");
        assert_eq!(shown(3 << 29), "1.50 GiB");
        assert_eq!(shown(u64::MAX), "16.00 EiB");
    }
}
