//! Making tensors.

use std::any::Any;

use crate::shape::{Layout, count, length, unsigned};
use crate::tensor::Tensor;
use crate::{DType, Device, Element, Error, Result, Scalar, Shape, Storage};

/// What a new tensor holds and where: made from a dtype, a device, or both.
///
/// ```
/// use lastref::{DType, Device, Tensor};
/// let a = Tensor::zeros_with([2, 3], DType::I64)?;
/// let b = Tensor::zeros_with([2, 3], (DType::F16, Device::Cpu))?;
/// assert_eq!((a.nbytes(), b.nbytes()), (48, 12));
/// # Ok::<(), lastref::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TensorOptions {
    /// The dtype; `None` for what the call gives without one.
    pub dtype: Option<DType>,
    /// Where.
    pub device: Device,
}

impl From<DType> for TensorOptions {
    fn from(dtype: DType) -> Self {
        Self {
            dtype: Some(dtype),
            device: Device::Cpu,
        }
    }
}

impl From<Device> for TensorOptions {
    fn from(device: Device) -> Self {
        Self {
            dtype: None,
            device,
        }
    }
}

impl From<(DType, Device)> for TensorOptions {
    fn from((dtype, device): (DType, Device)) -> Self {
        Self {
            dtype: Some(dtype),
            device,
        }
    }
}

/// Calls without options make tensors on the CPU. Those with options, `*_with`, take a [`DType`], a
/// [`Device`], both as a pair, or [`TensorOptions`]. On a device, memory comes from the current
/// stream's, and filling is submitted to it.
///
/// All fail with [`Error::InvalidShape`] for a negative size or more than 2^63 - 1 bytes,
/// [`Error::OutOfMemory`] or [`Error::HostOutOfMemory`] without memory, and
/// [`Error::NoSuchDevice`].
impl Tensor {
    /// A `float32` tensor that nobody has written to. It may hold anything.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn empty(shape: impl Into<Shape>) -> Result<Self> {
        Self::empty_with(shape, TensorOptions::default())
    }

    /// [`empty`](Self::empty) with a dtype or device.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn empty_with(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Self> {
        let options = options.into();
        new(
            "empty",
            shape.into(),
            options.dtype.unwrap_or_default(),
            options.device,
        )
    }

    /// A `float32` tensor of zeros.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn zeros(shape: impl Into<Shape>) -> Result<Self> {
        Self::zeros_with(shape, TensorOptions::default())
    }

    /// [`zeros`](Self::zeros) with a dtype or device.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn zeros_with(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Self> {
        let options = options.into();
        let tensor = new(
            "zeros",
            shape.into(),
            options.dtype.unwrap_or_default(),
            options.device,
        )?;
        if tensor.is_cuda() {
            tensor.zero_()?; // host memory is zeroed by the system
        }
        Ok(tensor)
    }

    /// A `float32` tensor of ones.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn ones(shape: impl Into<Shape>) -> Result<Self> {
        Self::ones_with(shape, TensorOptions::default())
    }

    /// [`ones`](Self::ones) with a dtype or device.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn ones_with(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Self> {
        let options = options.into();
        filled(
            "ones",
            shape.into(),
            Scalar::Int(1),
            options.dtype.unwrap_or_default(),
            options.device,
        )
    }

    /// A tensor of one value, with the dtype that follows from it: `bool`, `int64` or `float32`.
    ///
    /// ```
    /// use lastref::{DType, Tensor};
    /// assert_eq!(Tensor::full([2], 7)?.dtype(), DType::I64);
    /// assert_eq!(Tensor::full([2], 7.0)?.to_vec::<f32>()?, [7.0, 7.0]);
    /// # Ok::<(), lastref::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn full(shape: impl Into<Shape>, value: impl Into<Scalar>) -> Result<Self> {
        Self::full_with(shape, value, TensorOptions::default())
    }

    /// [`full`](Self::full) with a dtype or device.
    ///
    /// # Errors
    ///
    /// As all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn full_with(
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Self> {
        let (value, options) = (value.into(), options.into());
        filled(
            "full",
            shape.into(),
            value,
            options.dtype.unwrap_or(value.default_dtype()),
            options.device,
        )
    }

    /// The values from `start`, each `step` further, that lie before `end`: `int64` if all three
    /// are integers, else `float32`.
    ///
    /// ```
    /// use lastref::Tensor;
    /// assert_eq!(Tensor::arange(0, 10, 3)?.to_vec::<i64>()?, [0, 3, 6, 9]);
    /// assert_eq!(Tensor::arange(1, 0.0, -0.5)?.to_vec::<f32>()?, [1.0, 0.5]);
    /// # Ok::<(), lastref::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a step of zero, one that leads away from `end`, or a value
    /// that is not finite; else as all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
    ) -> Result<Self> {
        Self::arange_with(start, end, step, TensorOptions::default())
    }

    /// [`arange`](Self::arange) with a dtype or device.
    ///
    /// # Errors
    ///
    /// As `arange`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn arange_with(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Self> {
        let call = "arange";
        let (start, end, step) = (start.into(), end.into(), step.into());
        let options = options.into();
        let floats = [start, end, step]
            .iter()
            .any(|value| matches!(value, Scalar::Float(_)));
        let bad = |what: &str| {
            Error::argument(
                call,
                format!("start {start}, end {end}, step {step}: {what}"),
            )
        };
        let (from, to, by) = (start.to_f64(), end.to_f64(), step.to_f64());
        if !(from.is_finite() && to.is_finite() && by.is_finite()) {
            return Err(bad("not finite"));
        }
        if by == 0.0 {
            return Err(bad("the step is zero"));
        }
        if (to - from) * by < 0.0 {
            return Err(bad("the step leads away from the end"));
        }
        let len = if floats {
            let len = ((to - from) / by).ceil();
            // 2^62: above, bytes would not fit; far above any memory.
            if len > 4.6e18 {
                return Err(bad("too many values"));
            }
            Scalar::Float(len).to_i64()
        } else {
            let span = i128::from(end.to_i64()) - i128::from(start.to_i64());
            let by = i128::from(step.to_i64());
            let len = span / by + i128::from(span % by != 0);
            i64::try_from(len).map_err(|_| bad("too many values"))?
        };
        let dtype = options
            .dtype
            .unwrap_or(if floats { DType::F32 } else { DType::I64 });
        let host = new(call, [len].into(), dtype, Device::Cpu)?;
        if let Some(memory) = host.storage.host() {
            let size = length(dtype.size());
            let mut bytes = memory.write(0..memory.len());
            for (i, place) in (0..len).zip(bytes.chunks_exact_mut(size)) {
                let value = if floats {
                    Scalar::Float(Scalar::Int(i).to_f64().mul_add(by, from))
                } else {
                    // In range: every value lies between start and end.
                    Scalar::Int(start.to_i64() + i * step.to_i64())
                };
                place.copy_from_slice(&dtype.encode(value)[..size]);
            }
        }
        host.to_device(options.device)
    }

    /// A tensor with these elements, in row-major order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if the shape has another number of elements; else as all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn from_slice<T: Element>(data: &[T], shape: impl Into<Shape>) -> Result<Self> {
        Self::from_slice_with(data, shape, TensorOptions::default())
    }

    /// [`from_slice`](Self::from_slice) on a device, or converted to another dtype.
    ///
    /// # Errors
    ///
    /// As `from_slice`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn from_slice_with<T: Element>(
        data: &[T],
        shape: impl Into<Shape>,
        options: impl Into<TensorOptions>,
    ) -> Result<Self> {
        let options = options.into();
        let shape = shape.into();
        let layout = Layout::contiguous("from_slice", shape.clone().into_dims(), T::DTYPE.size())?;
        if layout.numel() != count(data.len()) {
            return Err(Error::shape(
                "from_slice",
                format!(
                    "{} elements do not fill shape {:?} of {}",
                    data.len(),
                    shape.as_slice(),
                    layout.numel()
                ),
            ));
        }
        let host = new("from_slice", shape, T::DTYPE, Device::Cpu)?;
        if let Some(memory) = host.storage.host() {
            let mut bytes = memory.write(0..memory.len());
            for (value, place) in data.iter().zip(bytes.chunks_exact_mut(size_of::<T>())) {
                value.store(place);
            }
        }
        host.to(options.device, options.dtype)
    }

    /// A tensor on the CPU with these bytes, in row-major order and the host's byte order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if the shape has another number of bytes; else as all of these.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn from_bytes(bytes: &[u8], dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let layout = Layout::contiguous("from_bytes", shape.clone().into_dims(), dtype.size())?;
        let expected = unsigned(layout.numel()) * dtype.size();
        if expected != bytes.len() as u64 {
            return Err(Error::shape(
                "from_bytes",
                format!(
                    "{} bytes do not fill shape {:?} of {dtype}, which has {expected}",
                    bytes.len(),
                    shape.as_slice()
                ),
            ));
        }
        let host = new("from_bytes", shape, dtype, Device::Cpu)?;
        if let Some(memory) = host.storage.host() {
            memory.write(0..memory.len()).copy_from_slice(bytes);
        }
        Ok(host)
    }

    /// A tensor on somebody else's memory on a GPU: `owner` keeps it, and is dropped with the last
    /// handle, once the streams that used the tensor are done ([`record_stream`](Self::record_stream)
    /// adds to the one that is current now). During a graph capture nothing can be waited for, and the
    /// owner is kept for good instead.
    ///
    /// The memory is not counted in the statistics, which are the allocator's.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`]; [`Error::NoSuchDevice`]; [`Error::InvalidArgument`] if the device is
    /// simulated, or `ptr` is not aligned to the dtype. The owner is dropped then.
    ///
    /// # Safety
    ///
    /// The elements must lie in memory of the device, and stay until `owner` is dropped. Work that
    /// others submitted on them must be done, or in order before the current stream.
    #[cfg_attr(feature = "holders", track_caller)]
    pub unsafe fn from_device_ptr(
        ptr: u64,
        shape: impl Into<Shape>,
        dtype: DType,
        device: u32,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let call = "from_device_ptr";
        let layout = Layout::contiguous(call, shape.into().into_dims(), dtype.size())?;
        if !ptr.is_multiple_of(dtype.size()) {
            return Err(Error::argument(
                call,
                format!("{ptr:#x} is not aligned to the bytes of {dtype}"),
            ));
        }
        let bytes = unsigned(layout.numel()) * dtype.size();
        // SAFETY: as the caller promises.
        let storage = unsafe { Storage::foreign_on_device(call, device, ptr, bytes, owner) }?;
        Ok(Self::from_parts(storage, layout, dtype))
    }
}

/// A contiguous tensor that nobody has written to.
#[cfg_attr(feature = "holders", track_caller)]
pub(crate) fn new(
    call: &'static str,
    shape: Shape,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let layout = Layout::contiguous(call, shape.into_dims(), dtype.size())?;
    let bytes = unsigned(layout.numel()) * dtype.size();
    let storage = Storage::new(call, device, bytes)?;
    Ok(Tensor::from_parts(storage, layout, dtype))
}

#[cfg_attr(feature = "holders", track_caller)]
fn filled(
    call: &'static str,
    shape: Shape,
    value: Scalar,
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let tensor = new(call, shape, dtype, device)?;
    tensor.fill_(value)?;
    Ok(tensor)
}
