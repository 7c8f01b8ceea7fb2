//! The buffer protocol: host memory of a tensor as NumPy, `memoryview` and others see it.
//!
//! ```text
//! Py_buffer ──obj──▶ Tensor object ──▶ Storage ──▶ the bytes
//!     └──internal──▶ Metadata: the shape and strides that the buffer points to
//! ```
//!
//! 1. A filled buffer holds a reference to the tensor object, which is frozen; so the bytes stay
//!    valid, and where they are, until CPython releases the buffer.
//! 2. `internal` comes from `Box::into_raw` in [`get`] and goes back in [`release`], once.
//!
//! # Safety
//!
//! The bytes can be written through a buffer while lastref reads or writes them: by the rules of
//! the buffer protocol that is the program's to avoid, as it is with NumPy's own arrays.

use std::ffi::{CStr, c_int};

use lastref::{DType, Tensor};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// What a buffer points to besides the bytes.
struct Metadata {
    shape: Vec<ffi::Py_ssize_t>,
    /// In bytes.
    strides: Vec<ffi::Py_ssize_t>,
}

/// The element's code in the `struct` module, where it has one.
fn format(dtype: DType) -> Option<&'static CStr> {
    Some(match dtype {
        DType::F64 => c"d",
        DType::F32 => c"f",
        DType::F16 => c"e",
        // `l` is what NumPy calls int64 where C's long has 64 bits.
        DType::I64 if size_of::<std::ffi::c_long>() == 8 => c"l",
        DType::I64 => c"q",
        DType::I32 => c"i",
        DType::I16 => c"h",
        DType::I8 => c"b",
        DType::U8 => c"B",
        DType::Bool => c"?",
        _ => return None,
    })
}

/// The format of a tensor that has a buffer, or why it has none.
pub(crate) fn exportable(tensor: &Tensor) -> Result<&'static CStr, String> {
    if tensor.is_cuda() {
        return Err(format!(
            "the tensor is on {}; copy it to host memory first, with cpu()",
            tensor.device()
        ));
    }
    format(tensor.dtype()).ok_or_else(|| {
        format!(
            "there is no array of {}; convert the tensor first, for example with float()",
            tensor.dtype()
        )
    })
}

fn refuse(reason: impl Into<String>) -> PyErr {
    PyBufferError::new_err(reason.into())
}

/// Fills `view` with the memory of `tensor`, which `owner` keeps alive.
///
/// # Safety
///
/// `view` is null or valid for writing. `owner` is the frozen object around `tensor`.
pub(crate) unsafe fn get(
    owner: &Bound<'_, PyAny>,
    tensor: &Tensor,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(refuse("no buffer to fill"));
    }
    let format = exportable(tensor).map_err(refuse)?;
    let asks = |flag: c_int| flags & flag == flag;
    let contiguous = tensor.is_contiguous();
    let fortran = || tensor.dim() < 2 || reversed_is_contiguous(tensor);
    if !contiguous
        && (asks(ffi::PyBUF_C_CONTIGUOUS)
            || !asks(ffi::PyBUF_STRIDES)
            || (asks(ffi::PyBUF_ANY_CONTIGUOUS) && !fortran()))
    {
        return Err(refuse(
            "the tensor is not contiguous; copy it first, with contiguous()",
        ));
    }
    if asks(ffi::PyBUF_F_CONTIGUOUS) && !fortran() {
        return Err(refuse("the tensor is not contiguous in Fortran's order"));
    }
    let element = isize::try_from(tensor.element_size()).map_err(|_| refuse("element size"))?;
    let to_isize = |value: &i64| isize::try_from(*value).map_err(|_| refuse("a size is too large"));
    let mut metadata = Box::new(Metadata {
        shape: tensor
            .shape()
            .iter()
            .map(to_isize)
            .collect::<PyResult<_>>()?,
        strides: tensor
            .strides()
            .iter()
            .map(|stride| Ok(to_isize(stride)?.saturating_mul(element)))
            .collect::<PyResult<_>>()?,
    });
    let len = isize::try_from(tensor.nbytes()).map_err(|_| refuse("too many bytes"))?;
    let ndim = c_int::try_from(tensor.dim()).map_err(|_| refuse("too many dimensions"))?;
    let address = usize::try_from(tensor.data_ptr()).map_err(|_| refuse("address"))?;
    let filled = ffi::Py_buffer {
        buf: std::ptr::with_exposed_provenance_mut(address),
        obj: owner.clone().into_ptr(),
        len,
        itemsize: element,
        readonly: 0,
        ndim,
        format: if asks(ffi::PyBUF_FORMAT) {
            format.as_ptr().cast_mut()
        } else {
            std::ptr::null_mut()
        },
        shape: if asks(ffi::PyBUF_ND) {
            metadata.shape.as_mut_ptr()
        } else {
            std::ptr::null_mut()
        },
        strides: if asks(ffi::PyBUF_STRIDES) {
            metadata.strides.as_mut_ptr()
        } else {
            std::ptr::null_mut()
        },
        suboffsets: std::ptr::null_mut(),
        internal: Box::into_raw(metadata).cast(),
    };
    // SAFETY: not null, so valid for writing, as the caller promises.
    unsafe { view.write(filled) };
    Ok(())
}

/// Whether the elements lie in memory in the order of their reversed indices, without gaps.
fn reversed_is_contiguous(tensor: &Tensor) -> bool {
    let last = i64::try_from(tensor.dim()).unwrap_or(i64::MAX);
    let dims: Vec<i64> = (0..last).rev().collect();
    tensor
        .permute(&dims)
        .is_ok_and(|reversed| reversed.is_contiguous())
}

/// Frees what [`get`] made. CPython drops the reference to the tensor afterwards.
///
/// # Safety
///
/// `view` was filled by [`get`] and has not been released.
pub(crate) unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: filled by `get`, so it can be read.
    let internal = unsafe { (*view).internal };
    // SAFETY: invariant 2.
    drop(unsafe { Box::from_raw(internal.cast::<Metadata>()) });
}
