//! Tensors whose GPU memory comes back when the last reference goes.
//!
//! A [`Tensor`] is a handle on a reference-counted [`Storage`]. Giving a variable a new value drops
//! one handle; when the last one goes, on whatever thread, the device memory is freed at once and
//! kept in a cache for the next tensor. [`cuda::empty_cache`] gives the cache back to the device.
//!
//! ```
//! use lastref::{Tensor, cuda, sim};
//!
//! sim::enable("8GiB")?; // or set LASTREF_SIM=8GiB; without either, only a real GPU counts
//! let mut t1 = Tensor::empty([4, 5])?.cuda()?;
//! assert!(t1.is_cuda());
//! assert_eq!(cuda::memory_allocated(None)?, 512);
//!
//! t1 = Tensor::empty([4, 5])?; // the tensor on the GPU has lost its last handle
//! assert!(!t1.is_cuda());
//! assert_eq!(cuda::memory_allocated(None)?, 0);
//! # Ok::<(), lastref::Error>(())
//! ```
//!
//! Names and meanings are torch's. It owns memory and moves bytes; arithmetic belongs to your own
//! kernels, or to other libraries through [`dlpack`].
//!
//! # Who owns what
//!
//! ```text
//! Tensor ──┐ shape, strides, offset, dtype
//! view   ──┼──▶ Storage (counted) ──▶ Block ──▶ CachingAllocator ──▶ Device
//! clone  ──┘        or host memory, or somebody else's through DLPack
//! ```
//!
//! A storage is a leaf: it refers to no tensor.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("lastref runs on 64-bit Linux");

// The derive macro names this crate as its users do.
#[cfg(test)]
extern crate self as lastref;

mod device;
pub mod dlpack;
mod dtype;
mod error;
#[cfg(feature = "holders")]
mod holders;
mod shape;
mod storage;
mod sync;
mod tensor;

pub mod cuda;
pub mod gc;
pub mod sim;

/// The allocator and the devices below.
pub use lastref_alloc as alloc;
/// cudarc, in the version that tensors and streams are lent to.
#[cfg(feature = "cudarc")]
pub use lastref_cuda::cudarc;

pub use device::Device;
pub use dtype::{DType, Element, Scalar};
pub use error::{Error, Result};
pub use shape::Shape;
pub use storage::Storage;
pub use tensor::{Tensor, TensorOptions, WeakTensor};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_may_go_to_any_thread() {
        fn check<T: Send + Sync + 'static>() {}
        check::<Tensor>();
        check::<WeakTensor>();
        check::<Storage>();
        check::<cuda::Stream>();
        check::<cuda::Event>();
        check::<Error>();
    }
}
