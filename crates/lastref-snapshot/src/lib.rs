//! What GPU memory looked like, as data.
//!
//! * [`Snapshot`]: every segment and block of an allocator at one moment, and its history. The
//!   field names it serializes to are those of PyTorch's `torch.cuda.memory._snapshot()`, so that
//!   tools made for one read the other.
//! * [`trace`]: the allocation traces of programs, that is what a program asked for and when it
//!   let go, read from CSV and checked; [`program`] makes one from a snapshot's history.
//! * [`report`]: what `lastref.torch` says of one process, read from its files.
//! * [`generate`]: made-up traces of programs that are hard on allocators.
//!
//! This crate knows no device and no allocator, and does no input or output beyond
//! [`std::io::Read`].
//!
//! ```
//! use lastref_snapshot::trace::Trace;
//!
//! let csv = "op,id,bytes,stream,phase,label\n\
//!            alloc,1,1024,0,init,weights\n\
//!            alloc,2,512,0,step,activations\n\
//!            free,2,0,0,step,\n";
//! let trace = Trace::read(csv.as_bytes())?;
//! assert_eq!(trace.operations().len(), 3);
//! assert_eq!(trace.peak_live_bytes(), 1536);
//! # Ok::<(), lastref_snapshot::trace::TraceError>(())
//! ```
#![forbid(unsafe_code)]

pub mod diff;
pub mod dump;
pub mod explain;
pub mod generate;
pub mod place;
pub mod program;
pub mod read;
pub mod rebuild;
pub mod report;
mod snapshot;
pub mod stats;
pub mod timeline;
pub mod trace;
mod write;

pub use dump::Dump;
pub use snapshot::{
    AllocatorSettings, BlockRecord, BlockState, Segment, SegmentKind, Snapshot, TraceAction,
    TraceEntry,
};
