//! The class `Tensor`: a Python object around a [`lastref::Tensor`].
//!
//! ```text
//! Tensor object ──▶ lastref::Tensor (shape, strides) ──▶ Storage ──▶ device or host memory
//!       └──────▶ __dict__: attributes that users set, which Python's cycle collector visits
//! ```
//!
//! 1. The Rust side holds no reference to a Python object, except through the owner of an imported
//!    DLPack array. What can be in a cycle is the `__dict__` alone; PyO3 visits and clears it.
//! 2. The object is frozen: nothing of its Rust side changes after it was made, so any thread may
//!    use it. What the memory holds is guarded by the storage.
//! 3. When the object goes, its handle on the storage goes first, then the attributes: the memory
//!    is free before any finalizer of an attribute runs.

use lastref::{DType, Device, Scalar, Storage, Tensor};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList, PyMemoryView, PyTuple, PyType};

use crate::args::{self, Number};
use crate::buffer;
use crate::cuda::PyStream;
use crate::device::PyDevice;
use crate::dlpack;
use crate::dtype::{self, DTypeArg, PyDType};
use crate::error::{Failure, Outcome};
use crate::{create, index};

/// An array of numbers of one type, on the host or on a device.
///
/// Made by `lastref.empty`, `zeros`, `ones`, `full`, `arange`, `tensor`, `from_numpy` and
/// `from_dlpack`. Views such as `t[1:3]`, `t.view(...)` and `t.T` are tensors on the same memory,
/// which is freed at the moment the last tensor on it goes.
///
/// There is no arithmetic, not even `==`: `t.numpy()`, `numpy.from_dlpack(t)`, `torch.from_dlpack(t)`
/// compute on the same memory. Tensors can be in sets and be keys, by identity.
///
/// `Tensor(t)` is another tensor on the memory of `t`; a subclass can be made so.
#[pyclass(name = "Tensor", module = "lastref", frozen, dict, weakref, subclass)]
#[derive(Debug)]
pub(crate) struct PyTensor(pub(crate) Tensor);

/// `lastref.Size`, which is written in Python.
fn size_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static SIZE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    SIZE.import(py, "lastref._size", "Size")
}

fn size<'py>(py: Python<'py>, sizes: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    size_type(py)?.call1((PyTuple::new(py, sizes)?,))
}

fn type_error(text: impl Into<String>) -> Failure {
    Failure::Python(PyTypeError::new_err(text.into()))
}

impl PyTensor {
    /// `this` itself where dtype and device are right already and no copy is asked for.
    pub(crate) fn to<'py>(
        this: &Bound<'py, Self>,
        dtype: Option<DType>,
        device: Option<Device>,
        copy: bool,
    ) -> Outcome<Bound<'py, Self>> {
        let tensor = &this.get().0;
        let dtype = dtype.unwrap_or_else(|| tensor.dtype());
        let device = device.unwrap_or_else(|| tensor.device());
        if dtype == tensor.dtype() && device == tensor.device() {
            if !copy {
                return Ok(this.clone());
            }
            let copied = this.py().detach(|| tensor.copy())?;
            return Ok(Bound::new(this.py(), Self(copied))?);
        }
        let moved = this.py().detach(|| tensor.to(device, dtype))?;
        Ok(Bound::new(this.py(), Self(moved))?)
    }

    fn to_dtype<'py>(this: &Bound<'py, Self>, dtype: DType) -> Outcome<Bound<'py, Self>> {
        Self::to(this, Some(dtype), None, false)
    }

    /// The one element, refused where there are more or none.
    fn one(&self, py: Python<'_>) -> Outcome<Scalar> {
        if self.0.numel() != 1 {
            return Err(Failure::Python(PyRuntimeError::new_err(format!(
                "a tensor with {} elements cannot be converted to one number; only one with a \
                 single element can",
                self.0.numel()
            ))));
        }
        Ok(py.detach(|| self.0.item_scalar())?)
    }
}

/// A number of Python's from one of lastref's.
fn to_python(py: Python<'_>, value: Scalar) -> PyResult<Bound<'_, PyAny>> {
    Ok(match value {
        Scalar::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Scalar::Int(value) => value.into_pyobject(py)?.into_any(),
        Scalar::Float(value) => value.into_pyobject(py)?.into_any(),
    })
}

/// `flat` cut into nested lists by `shape`.
fn nested<'py>(py: Python<'py>, shape: &[i64], flat: &[Scalar]) -> PyResult<Bound<'py, PyAny>> {
    let Some((&len, inner)) = shape.split_first() else {
        return to_python(py, flat[0]);
    };
    let len = usize::try_from(len).unwrap_or(0);
    if inner.is_empty() {
        let values = flat
            .iter()
            .map(|value| to_python(py, *value))
            .collect::<PyResult<Vec<_>>>()?;
        return Ok(PyList::new(py, values)?.into_any());
    }
    let list = PyList::empty(py);
    let step = flat.len().checked_div(len).unwrap_or(0);
    for row in 0..len {
        list.append(nested(py, inner, &flat[row * step..(row + 1) * step])?)?;
    }
    Ok(list.into_any())
}

#[pymethods]
impl PyTensor {
    #[new]
    fn new(data: &Bound<'_, Self>) -> Self {
        Self(data.get().0.clone())
    }

    // What it is.

    /// The size of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        size(py, self.0.shape())
    }

    /// The shape, or the size of one dimension.
    #[pyo3(signature = (dim=None))]
    fn size<'py>(&self, py: Python<'py>, dim: Option<i64>) -> Outcome<Bound<'py, PyAny>> {
        let Some(dim) = dim else {
            return Ok(size(py, self.0.shape())?);
        };
        let at = dimension("size", dim, self.0.dim())?;
        Ok(self.0.shape()[at]
            .into_pyobject(py)
            .map_err(PyErr::from)?
            .into_any())
    }

    /// How many elements lie between neighbours along each dimension, or along one.
    #[pyo3(signature = (dim=None))]
    fn stride<'py>(&self, py: Python<'py>, dim: Option<i64>) -> Outcome<Bound<'py, PyAny>> {
        let Some(dim) = dim else {
            return Ok(PyTuple::new(py, self.0.strides())?.into_any());
        };
        let at = dimension("stride", dim, self.0.dim())?;
        Ok(self.0.strides()[at]
            .into_pyobject(py)
            .map_err(PyErr::from)?
            .into_any())
    }

    /// The position of the first element in the storage, in elements.
    fn storage_offset(&self) -> i64 {
        self.0.offset()
    }

    /// The type of the elements.
    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Py<PyDType>> {
        Ok(dtype::interned(py, self.0.dtype())?.clone().unbind())
    }

    /// Where the memory is.
    #[getter]
    fn device(&self) -> PyDevice {
        self.0.device().into()
    }

    /// Whether the memory is on a CUDA device, real or simulated.
    #[getter]
    fn is_cuda(&self) -> bool {
        self.0.is_cuda()
    }

    /// Whether the memory is the host's.
    #[getter]
    fn is_cpu(&self) -> bool {
        !self.0.is_cuda()
    }

    /// Always False: lastref has no gradients.
    #[getter]
    fn requires_grad(&self) -> bool {
        false
    }

    /// The number of dimensions.
    fn dim(&self) -> usize {
        self.0.dim()
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.0.dim()
    }

    /// The number of elements.
    fn numel(&self) -> u64 {
        self.0.numel()
    }

    /// Bytes of all elements. The storage may be larger.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    /// Bytes of one element.
    fn element_size(&self) -> u64 {
        self.0.element_size()
    }

    /// Bytes of one element.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.0.element_size()
    }

    /// The address of the first element, on the device the tensor is on.
    fn data_ptr(&self) -> u64 {
        self.0.data_ptr()
    }

    /// The memory, which views share.
    fn untyped_storage(&self) -> PyStorage {
        PyStorage(self.0.storage().clone())
    }

    /// Whether both are the same part of the same memory, read with the same strides.
    fn is_set_to(&self, tensor: &Bound<'_, Self>) -> bool {
        let other = &tensor.get().0;
        self.0.same_storage(other)
            && self.0.offset() == other.offset()
            && self.0.shape() == other.shape()
            && self.0.strides() == other.strides()
    }

    /// Whether the elements lie in memory in the order of their indices, without gaps.
    fn is_contiguous(&self) -> bool {
        self.0.is_contiguous()
    }

    // Views: other tensors on the same memory.

    /// The same elements in another shape, in which one size may be -1.
    ///
    /// Raises RuntimeError where strides cannot express it: `reshape` copies then.
    ///
    /// >>> import lastref
    /// >>> lastref.arange(6).view(2, -1)
    /// tensor([[0, 1, 2],
    ///         [3, 4, 5]])
    #[pyo3(signature = (*shape))]
    fn view(&self, shape: &Bound<'_, PyTuple>) -> Outcome<Self> {
        Ok(Self(self.0.view(&*args::dims("view", shape)?)?))
    }

    /// The same elements in another shape: a view where possible, else a copy.
    #[pyo3(signature = (*shape))]
    fn reshape(&self, py: Python<'_>, shape: &Bound<'_, PyTuple>) -> Outcome<Self> {
        let shape = args::dims("reshape", shape)?;
        Ok(Self(py.detach(|| self.0.reshape(&*shape))?))
    }

    /// All dimensions in another order.
    #[pyo3(signature = (*dims))]
    fn permute(&self, dims: &Bound<'_, PyTuple>) -> Outcome<Self> {
        Ok(Self(self.0.permute(&*args::dims("permute", dims)?)?))
    }

    /// Two dimensions swapped.
    fn transpose(&self, dim0: i64, dim1: i64) -> Outcome<Self> {
        Ok(Self(self.0.transpose(dim0, dim1)?))
    }

    /// The two dimensions swapped, of a tensor with at most two.
    fn t(&self) -> Outcome<Self> {
        match self.0.dim() {
            0 | 1 => Ok(Self(self.0.clone())),
            2 => Ok(Self(self.0.transpose(0, 1)?)),
            ndim => Err(Failure::Python(PyRuntimeError::new_err(format!(
                "t: expected at most 2 dimensions, not {ndim}; use transpose or permute"
            )))),
        }
    }

    /// All dimensions in the reverse order.
    #[getter]
    #[expect(non_snake_case, reason = "PyTorch's name")]
    fn T(&self) -> Outcome<Self> {
        let last = i64::try_from(self.0.dim()).unwrap_or(i64::MAX);
        let dims: Vec<i64> = (0..last).rev().collect();
        Ok(Self(self.0.permute(&dims)?))
    }

    /// `length` indices from `start` on along a dimension.
    fn narrow(&self, dim: i64, start: i64, length: i64) -> Outcome<Self> {
        Ok(Self(self.0.narrow(dim, start, length)?))
    }

    /// One index along a dimension, which goes away.
    fn select(&self, dim: i64, index: i64) -> Outcome<Self> {
        Ok(Self(self.0.select(dim, index)?))
    }

    /// Without dimensions of size 1, or without one dimension if its size is 1.
    #[pyo3(signature = (dim=None))]
    fn squeeze(&self, dim: Option<i64>) -> Outcome<Self> {
        Ok(Self(self.0.squeeze(dim)?))
    }

    /// With a dimension of size 1 put in.
    fn unsqueeze(&self, dim: i64) -> Outcome<Self> {
        Ok(Self(self.0.unsqueeze(dim)?))
    }

    /// Dimensions of size 1 repeated, without copying; -1 keeps a size.
    #[pyo3(signature = (*sizes))]
    fn expand(&self, sizes: &Bound<'_, PyTuple>) -> Outcome<Self> {
        Ok(Self(self.0.expand(&*args::dims("expand", sizes)?)?))
    }

    /// A tuple of the views along a dimension.
    #[pyo3(signature = (dim=0))]
    fn unbind<'py>(&self, py: Python<'py>, dim: i64) -> Outcome<Bound<'py, PyTuple>> {
        let at = dimension("unbind", dim, self.0.dim())?;
        let size = *self.0.shape().get(at).ok_or_else(|| {
            Failure::Python(PyRuntimeError::new_err(
                "unbind: a tensor without dimensions has nothing to take apart",
            ))
        })?;
        let views = (0..size)
            .map(|index| Ok(Bound::new(py, Self(self.0.select(dim, index)?))?))
            .collect::<Outcome<Vec<_>>>()?;
        Ok(PyTuple::new(py, views)?)
    }

    /// Another tensor on the same memory. In PyTorch it has no gradient; here none has.
    fn detach(&self) -> Self {
        Self(self.0.clone())
    }

    // Copies and moves.

    /// The tensor itself if it is contiguous, else a contiguous copy.
    fn contiguous<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        let tensor = &slf.get().0;
        if tensor.is_contiguous() {
            return Ok(slf.clone());
        }
        let py = slf.py();
        Ok(Bound::new(py, Self(py.detach(|| tensor.contiguous())?))?)
    }

    /// A copy with memory of its own. (Another handle on the same memory is `detach`.)
    fn clone(&self, py: Python<'_>) -> Outcome<Self> {
        Ok(Self(py.detach(|| self.0.copy())?))
    }

    /// Another tensor of the same class on the same memory, with the same attributes.
    fn __copy__<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, PyAny>> {
        let copied = of_class(&slf.get_type(), slf.get().0.clone())?;
        set_attributes(&copied, &slf.getattr("__dict__")?)?;
        Ok(copied)
    }

    #[pyo3(signature = (memo, /))]
    fn __deepcopy__<'py>(
        slf: &Bound<'py, Self>,
        memo: &Bound<'py, PyAny>,
    ) -> Outcome<Bound<'py, PyAny>> {
        let py = slf.py();
        let tensor = &slf.get().0;
        let copied = of_class(&slf.get_type(), py.detach(|| tensor.copy())?)?;
        // Attributes may lead back to the tensor, so it is in the memo before they are copied.
        memo.set_item(slf.as_ptr().addr(), &copied)?;
        let attributes = py
            .import("copy")?
            .call_method1("deepcopy", (slf.getattr("__dict__")?, memo))?;
        set_attributes(&copied, &attributes)?;
        Ok(copied)
    }

    /// Pickled as the bytes of its elements, its device and its attributes.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, PyTuple>> {
        let py = slf.py();
        let tensor = &slf.get().0;
        let bytes = py.detach(|| tensor.to_bytes())?;
        let arguments = (
            slf.get_type(),
            PyBytes::new(py, &bytes),
            dtype::interned(py, tensor.dtype())?,
            PyTuple::new(py, tensor.shape())?,
            PyDevice::from(tensor.device()),
        );
        let rebuild = py.import("lastref._lastref")?.getattr("rebuild_tensor")?;
        let parts = (rebuild, arguments, slf.getattr("__dict__")?);
        Ok(parts.into_pyobject(py)?)
    }

    /// Copies the elements of `src`, expanded and converted as needed, into this tensor.
    #[pyo3(signature = (src, non_blocking=false))]
    fn copy_<'py>(
        slf: &Bound<'py, Self>,
        src: &Bound<'py, Self>,
        non_blocking: bool,
    ) -> Outcome<Bound<'py, Self>> {
        let _ = non_blocking;
        let (to, from) = (&slf.get().0, &src.get().0);
        slf.py().detach(|| to.copy_(from))?;
        Ok(slf.clone())
    }

    /// Sets every element to a value.
    fn fill_<'py>(slf: &Bound<'py, Self>, value: Number) -> Outcome<Bound<'py, Self>> {
        let tensor = &slf.get().0;
        args::check_fits(value.0, tensor.dtype())?;
        slf.py().detach(|| tensor.fill_(value.0))?;
        Ok(slf.clone())
    }

    /// Sets every element to zero.
    fn zero_<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        let tensor = &slf.get().0;
        slf.py().detach(|| tensor.zero_())?;
        Ok(slf.clone())
    }

    /// The tensor with another dtype, on another device, or both: `to(dtype)`, `to(device)`,
    /// `to(device, dtype)`, `to(other)`. The tensor itself where nothing changes, unless `copy`.
    ///
    /// >>> import lastref
    /// >>> t = lastref.ones(2)
    /// >>> t.to("cpu") is t, t.to(lastref.int64)
    /// (True, tensor([1, 1]))
    #[pyo3(name = "to", signature = (*args, dtype=None, device=None, non_blocking=false, copy=false))]
    fn py_to<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
        dtype: Option<DTypeArg>,
        device: Option<PyDevice>,
        non_blocking: bool,
        copy: bool,
    ) -> Outcome<Bound<'py, Self>> {
        let _ = non_blocking;
        let mut dtype = dtype.map(|dtype| dtype.0);
        let mut device = device.map(PyDevice::resolve);
        for (position, arg) in args.iter().enumerate() {
            let (new_dtype, new_device) = if let Ok(other) = arg.cast::<Self>() {
                let other = &other.get().0;
                (Some(other.dtype()), Some(other.device()))
            } else if arg.is_none() {
                continue;
            } else if let Ok(dtype) = arg.extract::<DTypeArg>() {
                (Some(dtype.0), None)
            } else if position == 0 {
                (None, Some(arg.extract::<PyDevice>()?.resolve()))
            } else {
                return Err(type_error(format!(
                    "to: expected a dtype as second argument, not {arg:?}"
                )));
            };
            if (new_dtype.is_some() && dtype.is_some())
                || (new_device.is_some() && device.is_some())
            {
                return Err(type_error("to: the dtype or the device is given twice"));
            }
            dtype = dtype.or(new_dtype);
            device = device.or(new_device);
        }
        Self::to(slf, dtype, device, copy)
    }

    /// The tensor on a CUDA device, by default the current one: itself if it is there already.
    #[pyo3(signature = (device=None, non_blocking=false))]
    fn cuda<'py>(
        slf: &Bound<'py, Self>,
        device: Option<PyDevice>,
        non_blocking: bool,
    ) -> Outcome<Bound<'py, Self>> {
        let _ = non_blocking;
        let device = match device.map(PyDevice::resolve) {
            None => Device::Cuda(lastref::cuda::current_device()),
            Some(Device::Cpu) => {
                return Err(Failure::Python(PyRuntimeError::new_err(
                    "cuda: expected a CUDA device, not cpu",
                )));
            }
            Some(device) => device,
        };
        Self::to(slf, None, Some(device), false)
    }

    /// The tensor in host memory: itself if it is there already.
    fn cpu<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to(slf, None, Some(Device::Cpu), false)
    }

    /// The tensor as float64.
    fn double<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::F64)
    }

    /// The tensor as float32.
    fn float<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::F32)
    }

    /// The tensor as float16.
    fn half<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::F16)
    }

    /// The tensor as bfloat16.
    fn bfloat16<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::BF16)
    }

    /// The tensor as int64.
    fn long<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::I64)
    }

    /// The tensor as int32.
    fn int<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::I32)
    }

    /// The tensor as int16.
    fn short<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::I16)
    }

    /// The tensor as bool: whether each element is not zero.
    fn bool<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, Self>> {
        Self::to_dtype(slf, DType::Bool)
    }

    /// Tells the allocator that another stream uses the memory: after the last tensor on it goes,
    /// it is not used again before that stream is done with what it has then.
    fn record_stream(&self, stream: &PyStream) -> Outcome {
        Ok(self.0.record_stream(&stream.0)?)
    }

    // To Python and NumPy.

    /// The one element as a number of Python's.
    fn item<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        Ok(to_python(py, self.one(py)?)?)
    }

    /// The elements as nested lists; the number itself of a tensor without dimensions.
    fn tolist<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        let flat = py.detach(|| self.0.to_scalars())?;
        Ok(nested(py, self.0.shape(), &flat)?)
    }

    /// A NumPy array on the same memory, which keeps it alive. For a tensor in host memory.
    ///
    /// >>> import lastref
    /// >>> t = lastref.zeros(2)
    /// >>> t.numpy()[:] = 3
    /// >>> t
    /// tensor([3., 3.])
    fn numpy<'py>(slf: &Bound<'py, Self>) -> Outcome<Bound<'py, PyAny>> {
        buffer::exportable(&slf.get().0)
            .map_err(|reason| type_error(format!("numpy: {reason}")))?;
        let view = PyMemoryView::from(slf.as_any())?;
        Ok(slf.py().import("numpy")?.call_method1("asarray", (view,))?)
    }

    #[pyo3(signature = (dtype=None, *, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> Outcome<Bound<'py, PyAny>> {
        let py = slf.py();
        let array = Self::numpy(slf)?;
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        Ok(py
            .import("numpy")?
            .call_method("array", (array,), Some(&options))?)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> Outcome<Bound<'py, PyAny>> {
        dlpack::export(py, &self.0, stream.as_ref(), max_version, dl_device, copy)
    }

    fn __dlpack_device__(&self) -> Outcome<(u32, i32)> {
        dlpack::device(&self.0)
    }

    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut pyo3::ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> PyResult<()> {
        // SAFETY: CPython hands in a view to fill, or null, which `get` refuses.
        unsafe { buffer::get(slf.as_any(), &slf.get().0, view, flags) }
    }

    unsafe fn __releasebuffer__(&self, view: *mut pyo3::ffi::Py_buffer) {
        // SAFETY: CPython hands in a view that `__getbuffer__` filled, once.
        unsafe { buffer::release(view) }
    }

    // Python's own operations.

    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> Outcome<Self> {
        Ok(Self(index::view(&self.0, index)?))
    }

    fn __setitem__(&self, index: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> Outcome {
        let py = index.py();
        let view = index::view(&self.0, index)?;
        if let Some(number) = args::number(value) {
            let number = number?.0;
            args::check_fits(number, view.dtype())?;
            return Ok(py.detach(|| view.fill_(number))?);
        }
        let source = match create::array(value)? {
            Some(source) => source,
            None => create::from_values(value, Some(view.dtype()))?,
        };
        Ok(py.detach(|| view.copy_(&source))?)
    }

    fn __len__(&self) -> Outcome<usize> {
        match self.0.shape().first() {
            Some(size) => Ok(usize::try_from(*size).unwrap_or(usize::MAX)),
            None => Err(type_error("len() of a tensor without dimensions")),
        }
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyIterator>> {
        if self.0.dim() == 0 {
            return Err(type_error("iteration over a tensor without dimensions"));
        }
        Ok(self.unbind(py, 0)?.try_iter()?)
    }

    fn __contains__(&self, element: &Bound<'_, PyAny>) -> Outcome<bool> {
        let _ = element;
        Err(type_error(
            "`in` compares elements, which is arithmetic; use NumPy: x in t.numpy()",
        ))
    }

    /// Comparing elements is arithmetic, and comparing objects is `is`: so neither happens silently.
    fn __richcmp__(
        &self,
        py: Python<'_>,
        other: &Bound<'_, PyAny>,
        op: CompareOp,
    ) -> Outcome<Py<PyAny>> {
        let is_elementwise = other.is_instance_of::<Self>() || args::number(other).is_some();
        if matches!(op, CompareOp::Eq | CompareOp::Ne) && is_elementwise {
            return Err(type_error(
                "`==` and `!=` compare elements, which is arithmetic; use NumPy: t.numpy() == x, or \
                 `is` to ask whether two names refer to one tensor",
            ));
        }
        // Arrays of NumPy and others know how to compare themselves with a tensor.
        Ok(py.NotImplemented())
    }

    fn __hash__(slf: &Bound<'_, Self>) -> usize {
        // By identity, so that tensors can be in sets and be keys.
        slf.as_ptr().addr() >> 4
    }

    fn __bool__(&self, py: Python<'_>) -> Outcome<bool> {
        Ok(self.one(py)?.to_bool())
    }

    fn __float__(&self, py: Python<'_>) -> Outcome<f64> {
        Ok(self.one(py)?.to_f64())
    }

    fn __int__<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyAny>> {
        Ok(self.item(py)?.call_method0("__int__")?)
    }

    fn __index__(&self, py: Python<'_>) -> Outcome<i64> {
        if self.0.dtype().is_floating_point() || self.0.numel() != 1 {
            // Of this type, so that `bytes(t)` goes on to the buffer.
            return Err(type_error(format!(
                "only an integer tensor of one element can be an index, not {} elements of {}",
                self.0.numel(),
                self.0.dtype()
            )));
        }
        Ok(self.one(py)?.to_i64())
    }

    fn __repr__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static FORMAT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        FORMAT
            .import(slf.py(), "lastref._format", "format_tensor")?
            .call1((slf,))
    }
}

/// A tensor of a class that may be a subclass, whose own `__init__` is not run.
fn of_class<'py>(class: &Bound<'py, PyType>, tensor: Tensor) -> PyResult<Bound<'py, PyAny>> {
    let py = class.py();
    let tensor = Bound::new(py, PyTensor(tensor))?;
    if class.is(tensor.get_type()) {
        return Ok(tensor.into_any());
    }
    class.call_method1("__new__", (class, tensor))
}

fn set_attributes(tensor: &Bound<'_, PyAny>, attributes: &Bound<'_, PyAny>) -> PyResult<()> {
    tensor
        .getattr("__dict__")?
        .call_method1("update", (attributes,))?;
    Ok(())
}

/// What a pickled tensor calls to come back.
#[pyfunction]
#[pyo3(signature = (cls, data, dtype, shape, device, /))]
pub(crate) fn rebuild_tensor<'py>(
    cls: &Bound<'py, PyType>,
    data: &[u8],
    dtype: DTypeArg,
    shape: &Bound<'py, PyTuple>,
    device: PyDevice,
) -> Outcome<Bound<'py, PyAny>> {
    let shape = args::ints("rebuild_tensor", shape)?;
    let device = device.resolve();
    let tensor = cls
        .py()
        .detach(|| Tensor::from_bytes(data, dtype.0, &*shape)?.to_device(device))?;
    Ok(of_class(cls, tensor)?)
}

/// A dimension counted from the end if negative, as a position.
fn dimension(call: &str, dim: i64, ndim: usize) -> Outcome<usize> {
    let range = i64::try_from(ndim.max(1)).unwrap_or(i64::MAX);
    let at = if dim < 0 { dim + range } else { dim };
    usize::try_from(at)
        .ok()
        .filter(|_| at < range && ndim > 0)
        .ok_or_else(|| {
            Failure::Python(pyo3::exceptions::PyIndexError::new_err(format!(
                "{call}: dimension {dim} is out of range for a tensor of {ndim} dimensions"
            )))
        })
}

/// The memory of a tensor, which its views share: bytes without a type.
///
/// Two are equal if they are the same memory.
#[pyclass(name = "UntypedStorage", module = "lastref", frozen, weakref)]
#[derive(Debug)]
pub(crate) struct PyStorage(Storage);

#[pymethods]
impl PyStorage {
    /// Where the memory is.
    #[getter]
    fn device(&self) -> PyDevice {
        self.0.device().into()
    }

    /// The address of the first byte, on its device.
    fn data_ptr(&self) -> u64 {
        self.0.data_ptr()
    }

    /// How many bytes it has.
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    /// How many handles there are on the memory: tensors, views, exported arrays, and this object.
    fn ref_count(&self) -> usize {
        self.0.ref_count()
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.0.nbytes()).unwrap_or(usize::MAX)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Self>()
            .is_ok_and(|other| self.0.same(&other.get().0))
    }

    fn __hash__(&self) -> u64 {
        self.0.data_ptr()
    }

    fn __repr__(&self) -> String {
        format!(
            "<lastref.UntypedStorage of {} bytes on {} at {:#x}>",
            self.0.nbytes(),
            self.0.device(),
            self.0.data_ptr()
        )
    }
}
