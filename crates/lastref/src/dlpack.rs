//! Tensors to and from other libraries without a copy, by the DLPack protocol.
//!
//! [`export`] makes a managed tensor that keeps the storage until its deleter runs; [`import`]
//! makes a tensor that keeps somebody else's managed tensor until its last handle goes. The
//! structures come from [`dlpark`].
//!
//! A simulated device's memory is host memory, and is exported as such (`kDLCPU`), never as CUDA,
//! after the current stream has finished. Who reads it later must order that with lastref's own
//! work on the device.

use std::ptr::NonNull;

use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};

use crate::shape::{Dims, Layout, unsigned};
use crate::{DType, Device, Error, Result, Storage, Tensor, cuda};

/// The types of the protocol.
pub use dlpark;

/// Exports a tensor: `M` is `DLManagedTensorVersioned` or `DLManagedTensor`.
///
/// The result and the tensor share memory. The storage counts it as a handle until the result, or
/// the consumer it was handed to, runs the deleter, which may happen on any thread.
///
/// # Errors
///
/// [`Error::Dlpack`] for a device whose memory cannot be exported; the device's, while waiting for
/// the current stream.
pub fn export<M: ManagedTensorBase>(tensor: &Tensor) -> Result<Managed<M>> {
    let device = export_device(tensor)?;
    if let Device::Cuda(index) = tensor.device() {
        cuda::current_stream(index)?.synchronize()?;
    }
    let metadata = Dynamic::new(tensor.shape(), tensor.strides())
        .prepare_as::<M>()
        .map_err(|error| Error::dlpack(error.to_string()))?;
    let mut initialized = metadata.initialize(Box::new(tensor.storage().clone()));
    // DLPack wants a null pointer where there are no elements.
    let data = if tensor.numel() == 0 {
        std::ptr::null_mut()
    } else {
        std::ptr::with_exposed_provenance_mut(crate::shape::length(tensor.data_ptr()))
    };
    initialized
        .set_data(data)
        .set_device(device)
        .set_dtype(to_dlpack(tensor.dtype()));
    // SAFETY: shape and strides were copied into the allocation, the data pointer stays valid while
    // the storage in the context lives, and the flags are empty: shared, writable memory.
    Ok(unsafe { initialized.finish() })
}

/// Where an exported tensor will say it is.
///
/// # Errors
///
/// [`Error::Dlpack`] for a device whose memory cannot be exported.
pub fn export_device(tensor: &Tensor) -> Result<DLDevice> {
    let Some(index) = tensor.device().index() else {
        return Ok(DLDevice::CPU);
    };
    let properties = crate::cuda::get_device_properties(index)?;
    if properties.simulated {
        return Ok(DLDevice::CPU);
    }
    let index = i32::try_from(properties.index.0)
        .map_err(|_| Error::dlpack(format!("device index {} is too large", properties.index)))?;
    Ok(DLDevice::cuda(index))
}

/// Makes a tensor of somebody else's managed tensor, without a copy.
///
/// The managed tensor is dropped with the last handle on the storage, or at once if this fails.
///
/// # Safety
///
/// `managed` must describe memory as the protocol demands: shape and strides readable, and every
/// element they reach valid for reads and writes until the deleter runs. Nobody else may access the
/// elements while lastref does.
///
/// # Errors
///
/// [`Error::Dlpack`], naming what does not fit: the device, the dtype, a read-only flag, a null or
/// unaligned pointer, a negative or overflowing size or stride.
pub unsafe fn import<M>(managed: Managed<M>) -> Result<Tensor>
where
    M: ManagedTensorBase + 'static,
{
    let view = managed
        .validate()
        .map_err(|error| Error::dlpack(error.to_string()))?;
    let device = view.device();
    if device.device_type != DLDeviceType::CPU {
        return Err(Error::dlpack(format!(
            "the tensor is on device type {}, index {}; only host memory (type 1) can be imported",
            device.device_type.0, device.device_id
        )));
    }
    if managed.flags().contains(DlpackFlags::READ_ONLY) {
        return Err(Error::dlpack(
            "the tensor is read-only and tensors here can be written; import a copy of it",
        ));
    }
    let dtype = from_dlpack(view.dtype())?;
    let strides = view
        .strides_or_compact()
        .map_err(|error| Error::dlpack(error.to_string()))?;
    let layout = checked_layout(view.shape(), &strides, dtype)?;
    let bytes = unsigned(layout.extent()) * dtype.size();
    let address = (view.data_ptr().addr() as u64)
        .checked_add(view.byte_offset())
        .filter(|address| address.checked_add(bytes).is_some())
        .ok_or_else(|| Error::dlpack("the data pointer and byte offset pass the address space"))?;
    let data = view.data_ptr();
    let ptr = if bytes == 0 {
        NonNull::<u64>::dangling().cast()
    } else {
        if data.is_null() {
            return Err(Error::dlpack(format!(
                "the data pointer is null for shape {:?}",
                view.shape()
            )));
        }
        if address % dtype.size() != 0 {
            return Err(Error::dlpack(format!(
                "the data pointer {address:#x} is not aligned to the {} bytes of {dtype}",
                dtype.size()
            )));
        }
        let data = data.cast_mut().cast::<u8>();
        let start = data.wrapping_add(crate::shape::length(view.byte_offset()));
        NonNull::new(start).ok_or_else(|| Error::dlpack("the data pointer is null"))?
    };
    // SAFETY: the caller promises that the elements stay valid until the deleter runs, and the
    // deleter runs when the owner is dropped.
    let storage = unsafe { Storage::foreign(ptr, bytes, Box::new(managed)) };
    Ok(Tensor::from_parts(storage, layout, dtype))
}

/// The layout an import asks for, if every position in it can be counted.
fn checked_layout(shape: &[i64], strides: &[i64], dtype: DType) -> Result<Layout> {
    if let Some(stride) = strides.iter().find(|stride| **stride < 0) {
        return Err(Error::dlpack(format!(
            "negative stride {stride} in strides {strides:?}"
        )));
    }
    Layout::contiguous("dlpack", Dims::from_slice(shape), dtype.size())
        .map_err(|error| Error::dlpack(error.to_string()))?;
    let layout = Layout {
        shape: Dims::from_slice(shape),
        strides: Dims::from_slice(strides),
        offset: 0,
    };
    let empty = shape.contains(&0);
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(0_i64, |last, (size, stride)| {
            if empty {
                return Some(0);
            }
            last.checked_add((size - 1).checked_mul(*stride)?)
        });
    let bytes = last
        .and_then(|last| last.checked_add(1))
        .and_then(|elements| unsigned(elements).checked_mul(dtype.size()))
        .filter(|bytes| i64::try_from(*bytes).is_ok());
    if bytes.is_none() {
        return Err(Error::dlpack(format!(
            "shape {shape:?} with strides {strides:?} reaches beyond 2^63 - 1 bytes"
        )));
    }
    Ok(layout)
}

/// The protocol's name for a dtype.
#[must_use]
pub fn to_dlpack(dtype: DType) -> DLDataType {
    let (code, bits) = match dtype {
        DType::F64 => (DLDataTypeCode::FLOAT, 64),
        DType::F32 => (DLDataTypeCode::FLOAT, 32),
        DType::F16 => (DLDataTypeCode::FLOAT, 16),
        DType::BF16 => (DLDataTypeCode::BFLOAT, 16),
        DType::I64 => (DLDataTypeCode::INT, 64),
        DType::I32 => (DLDataTypeCode::INT, 32),
        DType::I16 => (DLDataTypeCode::INT, 16),
        DType::I8 => (DLDataTypeCode::INT, 8),
        DType::U8 => (DLDataTypeCode::UINT, 8),
        DType::Bool => (DLDataTypeCode::BOOL, 8),
    };
    DLDataType::scalar(code, bits)
}

fn from_dlpack(foreign: DLDataType) -> Result<DType> {
    DType::ALL
        .into_iter()
        .find(|dtype| to_dlpack(*dtype) == foreign)
        .ok_or_else(|| {
            Error::dlpack(format!(
                "no dtype for type code {}, {} bits, {} lanes",
                foreign.code.0, foreign.bits, foreign.lanes
            ))
        })
}

impl Tensor {
    /// [`export`] under the current version of the protocol.
    ///
    /// ```
    /// use lastref::{Tensor, dlpack};
    /// let a = Tensor::ones([2, 3])?;
    /// let exported = a.to_dlpack()?;
    /// assert_eq!(a.ref_count(), 2);
    /// // SAFETY: the tensor was exported here, and nobody else uses it.
    /// let b = unsafe { dlpack::import(exported) }?;
    /// a.fill_(5)?;
    /// assert_eq!(b.select(0, 1)?.to_vec::<f32>()?, [5.0, 5.0, 5.0]);
    /// # Ok::<(), lastref::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As `export`.
    pub fn to_dlpack(&self) -> Result<dlpark::versioned::Dlpack> {
        export(self)
    }
}
