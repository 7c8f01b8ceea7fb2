//! The DLPack protocol: `__dlpack__` for consumers, and the import of other libraries' arrays.
//!
//! The memory of a simulated device is host memory, and says so. An export waits for the current
//! stream, so the consumer's stream need not wait for anything.
//!
//! # Safety
//!
//! What an array says about its memory is believed once it is consistent: the protocol has no way to
//! check an address. That the array's memory is not written while lastref reads it is the
//! program's to see to, as between any two users of shared memory.

use dlpark::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use dlpark::python::{ExportAbi, ExportRequest, ImportedDlpack, from_dlpack};
use dlpark::{DlpackFlags, Managed};
use lastref::{Tensor, dlpack};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::error::{Failure, Outcome};

fn refuse(text: String) -> Failure {
    Failure::Python(PyBufferError::new_err(text))
}

/// A tensor on the memory of `object`, which is a capsule or offers `__dlpack__`.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> Outcome<Tensor> {
    if !object.is_instance_of::<PyCapsule>() && !object.hasattr("__dlpack__")? {
        return Err(Failure::Python(PyTypeError::new_err(format!(
            "from_dlpack: expected an object with the method __dlpack__, not {:?}",
            object.get_type()
        ))));
    }
    match from_dlpack(object.as_borrowed(), None, None)? {
        // SAFETY: the capsule was made for a consumer, and this is the one; see the module.
        ImportedDlpack::Legacy(managed) => Ok(unsafe { dlpack::import(managed) }?),
        // SAFETY: as above.
        ImportedDlpack::Versioned(managed) => Ok(unsafe { dlpack::import(managed) }?),
    }
}

/// Where an export will say that it is, as the protocol numbers devices.
pub(crate) fn device(tensor: &Tensor) -> Outcome<(u32, i32)> {
    let device = dlpack::export_device(tensor)?;
    Ok((device.device_type.0, device.device_id))
}

/// What `__dlpack__` returns: a capsule that holds the memory until its consumer lets go of it.
pub(crate) fn export<'py>(
    py: Python<'py>,
    tensor: &Tensor,
    stream: Option<&Bound<'py, PyAny>>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(u32, i32)>,
    copy: Option<bool>,
) -> Outcome<Bound<'py, PyAny>> {
    let request = ExportRequest::parse(stream, max_version, dl_device, copy)?;
    let device = dlpack::export_device(tensor)?;
    let moved = match request.device() {
        Some(wanted) if wanted != device => {
            if wanted != dlpark::ffi::DLDevice::CPU || copy == Some(false) {
                return Err(refuse(format!(
                    "__dlpack__: the tensor is on device type {}, index {}; it cannot be exported \
                     to type {}, index {}{}",
                    device.device_type.0,
                    device.device_id,
                    wanted.device_type.0,
                    wanted.device_id,
                    if copy == Some(false) {
                        " without a copy"
                    } else {
                        ""
                    }
                )));
            }
            Some(py.detach(|| tensor.cpu())?)
        }
        _ if copy == Some(true) => Some(py.detach(|| tensor.copy())?),
        _ => None,
    };
    let is_copied = moved.is_some();
    let tensor = moved.as_ref().unwrap_or(tensor);
    match request.abi() {
        ExportAbi::Legacy => {
            let managed: Managed<DLManagedTensor> = py.detach(|| dlpack::export(tensor))?;
            Ok(managed.into_pyobject(py)?.into_any())
        }
        ExportAbi::Versioned => {
            let mut managed: Managed<DLManagedTensorVersioned> =
                py.detach(|| dlpack::export(tensor))?;
            if is_copied {
                // SAFETY: the copy was made above, and nothing else refers to it.
                unsafe { managed.flags_mut() }.insert(DlpackFlags::IS_COPIED);
            }
            Ok(managed.into_pyobject(py)?.into_any())
        }
    }
}
