//! What an allocation costs on the host, measured: works, those that are compared, and rounds.
//!
//! | module | what it is |
//! |---|---|
//! | [`work`] | what is measured, in nanoseconds a piece |
//! | [`peers`] | the allocators that do it, behind one trait |
//! | [`rounds`] | medians of interleaved rounds |
//!
//! `lastref bench` prints what this crate measures by itself; the project's own benchmark puts more peers
//! beside it. Times are host time on a simulated device, whose own time is left out: a stand-in for what a
//! program on a GPU pays before the GPU has anything to do.
//!
//! mimalloc is what lastref is compared with, and allocates nothing else: it is nobody's global allocator.

pub mod peers;
pub mod rounds;
pub mod work;

pub use self::peers::{Lastref, Mimalloc, Peer};
pub use self::rounds::{Limits, Measured, Measures};
pub use self::work::Work;
