//! PyTorch's own caching allocator as numbers: what it would reserve, and when it would fail.
//!
//! [`NativeAllocator`] does to a count of bytes what the native backend of PyTorch 2.13 to 2.15 does to
//! a device: it has the same pools, takes the same block, splits and merges it in the same way, and
//! asks for and gives back the same segments and pages at the same moments. It owns no memory and calls
//! no device, so that a program's allocations can be tried under settings that it did not run with.
//! [`Settings`] reads the text of `PYTORCH_CUDA_ALLOC_CONF`; [`replay`] and [`smallest`] run a trace.
//!
//! That it does the same is tested, not assumed: `cargo xtask test --torch` replays traces through the
//! real allocator too and compares the peak of reserved bytes and the count of device allocations.
//!
//! # What a block is chosen by
//!
//! 1. A request is rounded up to 512 bytes, or to a step between powers of two
//!    (`roundup_power2_divisions`). Up to 1 MiB it belongs to the small pool of its stream, else to the
//!    large one. Pools share nothing.
//! 2. The smallest free block that is large enough is taken; of those of one size, the one in the
//!    segment that is the oldest, and there the one at the lowest address. Addresses that the driver
//!    gave play no part. A block at the growing edge of an expandable segment counts as what it
//!    could grow to.
//! 3. What is left is split off if it is 512 bytes or more in the small pool and in expandable segments,
//!    more than 1 MiB else. Blocks of `max_split_size_mb` and more are neither split nor given to
//!    smaller requests.
//! 4. A freed block merges with free neighbours in its segment. While an event of another stream is
//!    pending it does not.
//!
//! # What is asked of the device
//!
//! 5. A segment: 2 MiB for the small pool, `large_segment_size_mb` below 10 MiB, else the request
//!    rounded up to 2 MiB. Or pages, with `expandable_segments`: of 2 MiB or `large_segment_size_mb`,
//!    at the lowest address where, with what is free there, the request fits.
//! 6. If that fails: with `max_split_size_mb`, cached segments at least that large, as few as
//!    will do; then all pending events are waited for, and all that is wholly free goes back. Each is
//!    followed by one more try. The free blocks are not searched again.
//!
//! What a thing depends on that no trace says is left out: graph captures, private pools, memory that
//! libraries take beside the allocator.

mod native;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod replay;
mod settings;

pub use native::{Exhausted, NativeAllocator, NativeBlock, NativeStats};
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub use replay::{UNLIMITED, replay, smallest};
pub use settings::{InvalidSettings, SETTINGS_VARIABLE, Settings};
