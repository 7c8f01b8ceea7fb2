//! A caching allocator for device memory, and a simulated device to run it on without a GPU.
//!
//! Freed device memory is kept in a cache, since asking the driver is slow and the program will
//! likely ask again. [`CachingAllocator`] is that cache, over anything that implements [`Device`]:
//!
//! ```
//! use lastref_alloc::{CachingAllocator, StreamId, sim::{SimDevice, SimOptions}};
//!
//! let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(8 << 30))?);
//! let weights = allocator.alloc(400 << 20, StreamId::DEFAULT)?;
//! let activations = allocator.alloc(300 << 20, StreamId::DEFAULT)?;
//! drop(activations); // freed at this moment, kept in the cache
//! assert_eq!(allocator.stats().reserved_bytes.all.current, 700 << 20);
//! let again = allocator.alloc(200 << 20, StreamId::DEFAULT)?; // no device call
//! assert_eq!(allocator.stats().reserved_bytes.all.current, 700 << 20);
//! # drop((weights, again));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Where to look
//!
//! | module | what it holds |
//! |---|---|
//! | [`device`] | what is asked of a device |
//! | `allocator`, `state` | the allocator: public face; what its lock protects |
//! | `pool` | private pools |
//! | `options` | settings, by builder or as text |
//! | `thread_cache` | the cache of small blocks that each thread has |
//! | `heap` | which addresses are live, free or unmapped |
//! | `clock` | when memory freed on one stream may be used on another |
//! | [`ladder`] | what is tried before an out-of-memory error |
//! | `error`, `pinning` | what the error says; which blocks are in the way |
//! | [`sim`] | the simulated device (Linux) |
//! | [`replay`] | running an allocation trace through the allocator |
//! | [`pytorch`] | PyTorch's own allocator as numbers, to compare with |

mod allocator;
mod anchor;
#[cfg(not(loom))]
#[expect(unreachable_pub, reason = "what its models use is public under loom")]
mod bias;
/// For its models.
#[cfg(loom)]
#[doc(hidden)]
pub mod bias;
mod block;
mod clock;
#[cfg(any(test, feature = "test-util"))]
pub mod contract;
pub mod device;
mod error;
mod heap;
mod history;
pub mod ladder;
mod options;
mod order;
mod owner;
mod pinning;
mod pool;
pub mod pytorch;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub mod replay;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub mod sim;
mod state;
mod stats;
mod sync;
mod thread_cache;

pub use allocator::{CachingAllocator, CheckLevel, InvariantViolation};
pub use block::Block;
pub use device::{
    BlockObserver, Device, DeviceError, DeviceIndex, DeviceProperties, DevicePtr, DeviceResult,
    EventId, Extent2d, FillValue, MemoryInfo, PageId, StreamId,
};
pub use error::{AllocError, Bytes, InvalidFraction, OutOfMemoryError, Pinned, PinningBlock};
pub use ladder::{ReclaimLevel, ReclaimRequest, Reclaimer, ReclaimerId};
pub use lastref_snapshot::Snapshot;
pub use options::{AllocatorOptions, Backing, CONF_VARIABLE, InvalidOption, StreamWaits};
pub use pool::{MemPool, PoolScope, PoolStats};
pub use stats::{EmptyCacheStats, MemoryStats, PoolKind, Stat, StatByPool};
