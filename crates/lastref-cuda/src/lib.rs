//! CUDA devices for lastref: [`CudaDevice`] implements
//! [`lastref_alloc::Device`] over NVIDIA's driver, through [cudarc]'s bindings.
//!
//! The driver is loaded when [`devices`] is first called. So one program runs with a GPU and
//! without: then `devices` says why there is none, nothing is printed, and nothing is slower.
//!
//! ```
//! use lastref_alloc::{CachingAllocator, Device, StreamId};
//!
//! match lastref_cuda::devices() {
//!     Ok(devices) => {
//!         let allocator = CachingAllocator::new(devices[0].clone());
//!         let block = allocator.alloc(1 << 20, StreamId::DEFAULT)?;
//!         println!("1 MiB on {} at {}", devices[0].properties().name, block.ptr());
//!     }
//!     Err(unavailable) => println!("{unavailable}"),
//! }
//! # Ok::<(), lastref_alloc::AllocError>(())
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | `driver` | finding the driver, looking it over, knowing when it is dead |
//! | `raw` | one function for each call to it, and the handles these make; most unsafe code is there |
//! | `books` | what a device has given out: arguments are checked before the driver sees them |
//! | `device` | the device itself |
//! | `pinned` | host memory that the device reads directly, cached by size |
//! | `stats` | what went wrong where nobody could be told |
//! | `interop` | between cudarc's types and ours, with the feature `cudarc` |
//!
//! # At the end
//!
//! When the process exits, in a forked child, and when somebody has destroyed the device's context
//! (`cudaDeviceReset`), the driver is not called any more: calls return an error that says so, and
//! what is held goes with the process. An error that the work of a kernel left behind (illegal
//! address, say) is returned by each later call on that device; other devices, host memory and
//! destructors are not concerned.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

mod books;
mod device;
mod driver;
#[cfg(feature = "cudarc")]
mod interop;
mod pinned;
mod raw;
mod stats;
mod sync;

#[cfg(feature = "cudarc")]
pub use cudarc;

pub use device::{CudaDevice, devices, driver_version};
pub use driver::{MIN_CUDA_VERSION, SYMBOLS, Unavailable};
#[cfg(feature = "cudarc")]
pub use interop::BorrowedSlice;
pub use pinned::PinnedBuffer;
pub use stats::{CudaStats, stats};
