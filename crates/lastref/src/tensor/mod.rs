//! [`Tensor`]: a handle on a storage, and how to read it.
//!
//! A tensor is a storage handle, a dtype and a layout. Nothing else refers to the storage, so its
//! reference count is the number of tensors, views and exports that can reach the bytes.
//!
//! Every element a layout reaches lies within its storage: creation makes them fit, views only
//! narrow (see the `shape` module), and imports are checked.

mod copy;
mod create;
mod fmt;
mod strided;
mod view;

use crate::cuda::{self, Stream};
use crate::dtype::with_element;
use crate::shape::{Layout, index, length, unsigned};
use crate::storage::WeakStorage;
use crate::{DType, Device, Element, Error, Result, Scalar, Storage};

pub use create::TensorOptions;

/// An n-dimensional array of one dtype, on the host or on a device.
///
/// A clone is another handle on the same bytes and copies none of them; [`copy`](Self::copy)
/// copies them. Views share the storage too. When the last handle goes, the memory is freed.
///
/// Tensors can be sent to and used from any thread. Two threads that write the same elements at
/// once leave either value in each byte.
///
/// ```
/// use lastref::Tensor;
/// let a = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], [2, 2])?;
/// let column = a.select(1, 0)?; // a view
/// assert_eq!(a.ref_count(), 2);
/// column.fill_(9)?;
/// assert_eq!(a.to_vec::<f32>()?, [9.0, 2.0, 9.0, 4.0]);
/// # Ok::<(), lastref::Error>(())
/// ```
pub struct Tensor {
    storage: Storage,
    layout: Layout,
    dtype: DType,
}

impl Clone for Tensor {
    #[cfg_attr(feature = "holders", track_caller)]
    fn clone(&self) -> Self {
        self.with_layout(self.layout.clone())
    }
}

impl Tensor {
    pub(crate) fn from_parts(storage: Storage, layout: Layout, dtype: DType) -> Self {
        debug_assert!(
            unsigned(layout.offset + layout.extent()) * dtype.size() <= storage.nbytes(),
            "every element lies within the storage"
        );
        Self {
            storage,
            layout,
            dtype,
        }
    }

    /// Another layout on the same storage.
    #[cfg_attr(feature = "holders", track_caller)]
    fn with_layout(&self, layout: Layout) -> Self {
        Self::from_parts(self.storage.clone(), layout, self.dtype)
    }

    /// The sizes of its dimensions.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.layout.shape
    }

    /// The size of dimension `dim`, which may count from the end.
    ///
    /// # Errors
    ///
    /// [`Error::IndexOutOfRange`].
    pub fn size(&self, dim: i64) -> Result<i64> {
        self.layout.size("size", dim)
    }

    /// For each dimension, how many elements of the storage lie from one index to the next.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.layout.strides
    }

    /// The position of its first element in the storage, in elements.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.layout.offset
    }

    /// The number of dimensions.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.layout.shape.len()
    }

    /// The number of elements.
    #[must_use]
    pub fn numel(&self) -> u64 {
        unsigned(self.layout.numel())
    }

    /// Bytes of one element.
    #[must_use]
    pub fn element_size(&self) -> u64 {
        self.dtype.size()
    }

    /// The number of elements times the size of one. The storage may be larger.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.numel() * self.dtype.size()
    }

    /// The type of its elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where its memory is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// Whether its memory is on a CUDA device, real or simulated.
    #[must_use]
    pub fn is_cuda(&self) -> bool {
        self.device().is_cuda()
    }

    /// Whether its elements lie in row-major order without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// The address of its first element, on the host or on its device.
    ///
    /// It stays valid as long as a handle on the storage lives. On a device, work on it must be
    /// ordered with the streams that use the tensor.
    #[must_use]
    pub fn data_ptr(&self) -> u64 {
        self.storage.data_ptr() + unsigned(self.layout.offset) * self.dtype.size()
    }

    /// Its storage.
    #[must_use]
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Whether both are on the same storage, as a tensor and its view.
    #[must_use]
    pub fn same_storage(&self, other: &Self) -> bool {
        self.storage.same(&other.storage)
    }

    /// Handles on its storage: this tensor, its clones, views and exports.
    #[must_use]
    pub fn ref_count(&self) -> usize {
        self.storage.ref_count()
    }

    /// Where the handles on its storage were made, the oldest first: this tensor, its clones, views
    /// and exports. Needs the feature `holders`.
    ///
    /// For a handle made by `clone()`, a view, a copy or a constructor it is the line that called
    /// that. A clone made by other code, as that of a `Vec` of tensors or a derived `Clone`, is known by
    /// the line in there. Handles of imported DLPack tensors and of Python are known by lastref's own.
    ///
    /// ```
    /// use lastref::Tensor;
    ///
    /// let tensor = Tensor::empty([4, 5])?;
    /// let forgotten = tensor.clone();
    /// let places = tensor.holders();
    /// assert_eq!(places.len(), 2);
    /// assert_eq!(places[1].line(), places[0].line() + 1);
    /// # drop(forgotten);
    /// # Ok::<(), lastref::Error>(())
    /// ```
    #[cfg(feature = "holders")]
    #[must_use]
    pub fn holders(&self) -> Vec<&'static std::panic::Location<'static>> {
        self.storage.holders()
    }

    /// A handle that does not keep the memory.
    #[must_use]
    pub fn downgrade(&self) -> WeakTensor {
        WeakTensor {
            storage: self.storage.downgrade(),
            layout: self.layout.clone(),
            dtype: self.dtype,
        }
    }

    /// Says that `stream` uses this tensor's memory: after the last handle goes, the memory is
    /// used again only when the work `stream` has at that moment is done.
    ///
    /// Needed for a stream other than the one the tensor was made on; without it, memory may be
    /// given to a new tensor while `stream` still reads the old one.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the tensor is not on the stream's device.
    pub fn record_stream(&self, stream: &Stream) -> Result<()> {
        cuda::same_device("record_stream", self.device(), stream)?;
        self.storage.record_stream(stream.id())
    }

    /// The value of a tensor of one element. Waits for the current stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] for any other number of elements; [`Error::DTypeMismatch`] if `T`
    /// is not its dtype; the device's.
    pub fn item<T: Element>(&self) -> Result<T> {
        self.expect_dtype::<T>("item")?;
        Ok(T::from_scalar(self.item_scalar()?))
    }

    /// [`item`](Self::item) for any dtype.
    ///
    /// # Errors
    ///
    /// As `item`, without the dtype.
    pub fn item_scalar(&self) -> Result<Scalar> {
        if self.numel() != 1 {
            return Err(Error::shape(
                "item",
                format!(
                    "a tensor of {} elements, shape {:?}, is not one value",
                    self.numel(),
                    self.shape()
                ),
            ));
        }
        Ok(self.dtype.decode(&self.to_bytes()?))
    }

    /// All elements in row-major order. Waits for the current stream.
    ///
    /// # Errors
    ///
    /// [`Error::DTypeMismatch`] if `T` is not its dtype; the device's.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype::<T>("to_vec")?;
        let bytes = self.to_bytes()?;
        let mut values = copy::host_vec(self.numel(), self.nbytes())?;
        values.extend(bytes.chunks_exact(size_of::<T>()).map(T::load));
        Ok(values)
    }

    /// All elements in row-major order, for any dtype. Waits for the current stream.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn to_scalars(&self) -> Result<Vec<Scalar>> {
        let bytes = self.to_bytes()?;
        let mut values = copy::host_vec(self.numel(), self.numel() * size_of::<Scalar>() as u64)?;
        with_element!(self.dtype, T => values.extend(
            bytes.chunks_exact(size_of::<T>()).map(|chunk| T::load(chunk).to_scalar())
        ));
        Ok(values)
    }

    pub(crate) fn expect_dtype<T: Element>(&self, call: &'static str) -> Result<()> {
        if T::DTYPE == self.dtype {
            return Ok(());
        }
        Err(Error::DTypeMismatch {
            call,
            expected: T::DTYPE,
            found: self.dtype,
        })
    }

    /// The bytes of the storage from the first element to the last, as a range of host memory.
    fn host_range(&self) -> std::ops::Range<usize> {
        let size = length(self.dtype.size());
        let first = index(self.layout.offset) * size;
        first..first + index(self.layout.extent()) * size
    }
}

/// A handle that does not keep the memory. See [`Tensor::downgrade`].
#[derive(Clone)]
pub struct WeakTensor {
    storage: WeakStorage,
    layout: Layout,
    dtype: DType,
}

impl WeakTensor {
    /// The tensor, if some handle still keeps its memory.
    #[must_use]
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn upgrade(&self) -> Option<Tensor> {
        let storage = self.storage.upgrade()?;
        Some(Tensor::from_parts(storage, self.layout.clone(), self.dtype))
    }

    /// Handles that keep the memory; 0 once it is freed.
    #[must_use]
    pub fn ref_count(&self) -> usize {
        self.storage.ref_count()
    }
}

impl std::fmt::Debug for WeakTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeakTensor")
            .field("shape", &self.layout.shape.as_slice())
            .field("dtype", &self.dtype)
            .field("ref_count", &self.ref_count())
            .finish()
    }
}
