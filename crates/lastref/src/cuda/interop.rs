//! Tensors and streams as cudarc has them, with the feature `cudarc`.

use std::sync::Arc;

use lastref_cuda::BorrowedSlice;
use lastref_cuda::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr as _, DeviceRepr,
};

use crate::alloc::{DeviceError, DevicePtr};
use crate::cuda::{Stream, current_device, current_stream, runtime};
use crate::shape::{Layout, length, unsigned};
use crate::{Device, Element, Error, Result, Shape, Tensor};

/// The GPU behind device `index`, which must not be simulated.
fn gpu(call: &'static str, index: u32) -> Result<&'static lastref_cuda::CudaDevice> {
    runtime::device(call, index)?;
    let runtime = runtime::active().map_err(|missing| missing.into_error(call))?;
    runtime.real.get(index as usize).ok_or_else(|| {
        Error::argument(
            call,
            format!("cuda:{index} is simulated, and cudarc cannot use it"),
        )
    })
}

/// The primary context of `device`, by default of the current one, as cudarc has it: to load modules
/// in. One for all callers. It does not track events: streams are put in order as lastref does.
///
/// # Errors
///
/// [`Error::NoSuchDevice`]; [`Error::InvalidArgument`] for a simulated device; the device's.
pub fn cudarc_context(device: impl Into<Option<u32>>) -> Result<Arc<CudaContext>> {
    let index = device.into().unwrap_or_else(current_device);
    Ok(gpu("cudarc_context", index)?.cudarc_context()?)
}

impl Stream {
    /// This stream as cudarc has it, to launch kernels on.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a stream of a simulated device; the device's.
    pub fn to_cudarc(&self) -> Result<Arc<CudaStream>> {
        Ok(gpu("to_cudarc", self.device())?.cudarc_stream(self.id())?)
    }
}

/// A tensor's memory as cudarc's kernels and copies take it. It keeps the memory as a handle does.
#[derive(Debug)]
pub struct TensorSlice<T> {
    // Dropped first: a slice never outlives the memory.
    slice: BorrowedSlice<T>,
    tensor: Tensor,
}

impl<T> TensorSlice<T> {
    /// All elements, to be read.
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.view()
    }

    /// All elements, to be written.
    #[must_use]
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.view_mut()
    }

    /// The stream to launch on: the one that was current when this was made.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.slice.stream()
    }

    /// The tensor.
    #[must_use]
    pub const fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Tensor {
    /// This tensor for cudarc, on the current stream. The stream is recorded
    /// ([`record_stream`](Self::record_stream)), so that a kernel may still run when the last handle goes.
    ///
    /// Work on another stream is the caller's to put in order, as everywhere.
    ///
    /// # Errors
    ///
    /// [`Error::DTypeMismatch`]; [`Error::InvalidArgument`] if it is not contiguous, not on a device, or
    /// on a simulated one; the device's.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn cudarc_slice<T: Element + DeviceRepr>(&self) -> Result<TensorSlice<T>> {
        let call = "cudarc_slice";
        self.expect_dtype::<T>(call)?;
        let Device::Cuda(index) = self.device() else {
            return Err(Error::argument(call, "the tensor is on the CPU"));
        };
        if !self.is_contiguous() {
            return Err(Error::argument(
                call,
                format!(
                    "the tensor is not contiguous: strides {:?} for shape {:?}; call contiguous first",
                    self.strides(),
                    self.shape()
                ),
            ));
        }
        let device = gpu(call, index)?;
        let stream = current_stream(index)?;
        self.record_stream(&stream)?;
        let len = length(self.numel());
        let ptr = DevicePtr(self.data_ptr());
        // SAFETY: the handle keeps the memory, which holds so many values of the dtype; any bits are a
        // value to a kernel. Order between streams is as for every operation on a tensor.
        let slice = unsafe { device.borrow_slice(ptr, len, stream.id()) }?;
        Ok(TensorSlice {
            slice,
            tensor: self.clone(),
        })
    }

    /// Takes over what cudarc allocated. With the last handle it goes back the way it came: cudarc gives
    /// it to the driver, after the streams that used the tensor are done. It is not counted in the
    /// statistics, which are the allocator's.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if the shape has another number of elements; [`Error::InvalidArgument`]
    /// for a simulated device; the device's. The slice is dropped then.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn from_cudarc<T>(slice: CudaSlice<T>, shape: impl Into<Shape>) -> Result<Self>
    where
        T: Element + DeviceRepr,
    {
        let call = "from_cudarc";
        let shape = shape.into();
        let index = u32::try_from(slice.ordinal())
            .map_err(|_| Error::argument(call, "the device's number is too large"))?;
        let layout = Layout::contiguous(call, shape.clone().into_dims(), T::DTYPE.size())?;
        let numel = unsigned(layout.numel());
        if numel != slice.len() as u64 {
            return Err(Error::shape(
                call,
                format!(
                    "the slice has {} elements, shape {:?} has {numel}",
                    slice.len(),
                    shape.as_slice()
                ),
            ));
        }
        // What cudarc's stream does with the slice comes first.
        gpu(call, index)?;
        let ours = current_stream(index)?.to_cudarc()?;
        ours.join(slice.stream()).map_err(|error| {
            Error::Device(DeviceError::Driver {
                call: "cuStreamWaitEvent",
                code: error.0 as i32,
                text: error.to_string(),
            })
        })?;
        let ptr = slice.device_ptr(&ours).0;
        // SAFETY: the slice owns the memory, and is kept as its owner.
        unsafe { Self::from_device_ptr(ptr, shape, T::DTYPE, index, Box::new(slice)) }
    }
}
