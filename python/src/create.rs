//! The functions that make tensors.

use lastref::{DType, Device, Scalar, Tensor};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySequence, PyString, PyTuple};

use crate::args::{self, Dims, Number, number};
use crate::device::PyDevice;
use crate::dlpack;
use crate::dtype::DTypeArg;
use crate::error::{Failure, Outcome};
use crate::gc::without_lock_if_full;
use crate::tensor::PyTensor;

/// Above this many bytes an allocation lets go of the interpreter lock, since obtaining or filling
/// the memory may take long. Below, it keeps it: what the cache serves takes well under a
/// microsecond, and a thread that has let go of the lock may wait for a switch interval, 5 ms, to get
/// it back from one that computes.
const DETACH_BYTES: u64 = 1 << 20;

/// What every creation function takes besides the shape.
struct Options {
    dtype: Option<DType>,
    device: Option<Device>,
}

impl Options {
    fn new(
        dtype: Option<DTypeArg>,
        device: Option<PyDevice>,
        requires_grad: bool,
    ) -> PyResult<Self> {
        if requires_grad {
            return Err(PyRuntimeError::new_err(
                "requires_grad=True: lastref has no gradients; it owns memory and moves bytes",
            ));
        }
        Ok(Self {
            dtype: dtype.map(|dtype| dtype.0),
            device: device.map(PyDevice::resolve),
        })
    }

    fn dtype(&self) -> DType {
        self.dtype.unwrap_or_default()
    }

    fn device(&self) -> Device {
        self.device.unwrap_or_default()
    }
}

/// Runs `make`, without the interpreter lock if a tensor of this shape is large or the device is
/// full.
fn allocate(
    py: Python<'_>,
    shape: &[i64],
    dtype: DType,
    make: impl Fn() -> lastref::Result<Tensor> + Send + Sync,
) -> Outcome<PyTensor> {
    let bytes = shape.iter().fold(dtype.size(), |bytes, size| {
        bytes.saturating_mul(size.unsigned_abs())
    });
    let tensor = if bytes > DETACH_BYTES {
        py.detach(make)
    } else {
        without_lock_if_full(py, make)
    };
    Ok(PyTensor(tensor?))
}

/// A tensor whose elements are whatever the memory held.
///
/// The size is given as ints or as one sequence: `empty(2, 3)`, `empty((2, 3))`. On a CUDA device
/// the memory belongs to this thread's current stream.
///
/// >>> import lastref
/// >>> lastref.empty(4, 5).shape
/// lastref.Size([4, 5])
#[pyfunction]
#[pyo3(signature = (*size, dtype=None, device=None, requires_grad=false))]
pub(crate) fn empty(
    size: &Bound<'_, PyTuple>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let options = Options::new(dtype, device, requires_grad)?;
    let shape = args::dims("empty", size)?;
    let (dtype, device) = (options.dtype(), options.device());
    allocate(size.py(), &shape, dtype, || {
        Tensor::empty_with(&*shape, (dtype, device))
    })
}

/// A tensor of zeros.
///
/// >>> import lastref
/// >>> lastref.zeros(2, 2, dtype=lastref.int64)
/// tensor([[0, 0],
///         [0, 0]])
#[pyfunction]
#[pyo3(signature = (*size, dtype=None, device=None, requires_grad=false))]
pub(crate) fn zeros(
    size: &Bound<'_, PyTuple>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let options = Options::new(dtype, device, requires_grad)?;
    let shape = args::dims("zeros", size)?;
    let (dtype, device) = (options.dtype(), options.device());
    allocate(size.py(), &shape, dtype, || {
        Tensor::zeros_with(&*shape, (dtype, device))
    })
}

/// A tensor of ones.
///
/// >>> import lastref
/// >>> lastref.ones(3)
/// tensor([1., 1., 1.])
#[pyfunction]
#[pyo3(signature = (*size, dtype=None, device=None, requires_grad=false))]
pub(crate) fn ones(
    size: &Bound<'_, PyTuple>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let options = Options::new(dtype, device, requires_grad)?;
    let shape = args::dims("ones", size)?;
    let (dtype, device) = (options.dtype(), options.device());
    allocate(size.py(), &shape, dtype, || {
        Tensor::ones_with(&*shape, (dtype, device))
    })
}

/// A tensor that holds one value everywhere. Without a dtype, the value's type decides.
///
/// >>> import lastref
/// >>> lastref.full((2, 2), 7)
/// tensor([[7, 7],
///         [7, 7]])
#[pyfunction]
#[pyo3(signature = (size, fill_value, *, dtype=None, device=None, requires_grad=false))]
pub(crate) fn full(
    size: &Bound<'_, PyAny>,
    fill_value: Number,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let options = Options::new(dtype, device, requires_grad)?;
    let shape = args::ints("full", size)?;
    let dtype = options
        .dtype
        .unwrap_or_else(|| fill_value.0.default_dtype());
    args::check_fits(fill_value.0, dtype)?;
    let device = options.device();
    allocate(size.py(), &shape, dtype, || {
        Tensor::full_with(&*shape, fill_value.0, (dtype, device))
    })
}

/// The values from `start` up to but not including `end`, `step` apart.
///
/// `arange(end)`, `arange(start, end)`, `arange(start, end, step)`. Ints make int64, floats float32.
///
/// >>> import lastref
/// >>> lastref.arange(5)
/// tensor([0, 1, 2, 3, 4])
/// >>> lastref.arange(1, 2, 0.5)
/// tensor([1.0000, 1.5000])
#[pyfunction]
#[pyo3(signature = (start, end=None, step=Number(Scalar::Int(1)), *, dtype=None, device=None, requires_grad=false),
       text_signature = "(start, end=None, step=1, *, dtype=None, device=None, requires_grad=False)")]
pub(crate) fn arange(
    py: Python<'_>,
    start: Number,
    end: Option<Number>,
    step: Number,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let options = Options::new(dtype, device, requires_grad)?;
    let (start, end) = match end {
        Some(end) => (start.0, end.0),
        None => (Scalar::Int(0), start.0),
    };
    let step = step.0;
    let has_float = [start, end, step]
        .iter()
        .any(|value| matches!(value, Scalar::Float(_)));
    let dtype = options
        .dtype
        .unwrap_or(if has_float { DType::F32 } else { DType::I64 });
    let device = options.device();
    Ok(PyTensor(without_lock_if_full(py, || {
        Tensor::arange_with(start, end, step, (dtype, device))
    })?))
}

/// An uninitialized tensor of the shape, dtype and device of another, each unless given.
#[pyfunction]
#[pyo3(signature = (input, *, dtype=None, device=None, requires_grad=false))]
pub(crate) fn empty_like(
    py: Python<'_>,
    input: &Bound<'_, PyTensor>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let (dtype, device, shape) = like(input, dtype, device, requires_grad)?;
    allocate(py, &shape, dtype, || {
        Tensor::empty_with(&*shape, (dtype, device))
    })
}

/// A tensor of zeros of the shape, dtype and device of another, each unless given.
#[pyfunction]
#[pyo3(signature = (input, *, dtype=None, device=None, requires_grad=false))]
pub(crate) fn zeros_like(
    py: Python<'_>,
    input: &Bound<'_, PyTensor>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let (dtype, device, shape) = like(input, dtype, device, requires_grad)?;
    allocate(py, &shape, dtype, || {
        Tensor::zeros_with(&*shape, (dtype, device))
    })
}

/// A tensor of ones of the shape, dtype and device of another, each unless given.
#[pyfunction]
#[pyo3(signature = (input, *, dtype=None, device=None, requires_grad=false))]
pub(crate) fn ones_like(
    py: Python<'_>,
    input: &Bound<'_, PyTensor>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let (dtype, device, shape) = like(input, dtype, device, requires_grad)?;
    allocate(py, &shape, dtype, || {
        Tensor::ones_with(&*shape, (dtype, device))
    })
}

/// A tensor of one value, of the shape, dtype and device of another, each unless given.
#[pyfunction]
#[pyo3(signature = (input, fill_value, *, dtype=None, device=None, requires_grad=false))]
pub(crate) fn full_like(
    py: Python<'_>,
    input: &Bound<'_, PyTensor>,
    fill_value: Number,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let (dtype, device, shape) = like(input, dtype, device, requires_grad)?;
    args::check_fits(fill_value.0, dtype)?;
    allocate(py, &shape, dtype, || {
        Tensor::full_with(&*shape, fill_value.0, (dtype, device))
    })
}

fn like(
    input: &Bound<'_, PyTensor>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<(DType, Device, Dims)> {
    let options = Options::new(dtype, device, requires_grad)?;
    let input = &input.get().0;
    Ok((
        options.dtype.unwrap_or_else(|| input.dtype()),
        options.device.unwrap_or_else(|| input.device()),
        Dims::from_slice(input.shape()),
    ))
}

/// A tensor with a copy of `data`: numbers in nested sequences, a tensor, or an array that offers
/// DLPack, such as NumPy's.
///
/// Without a dtype, bools make bool, ints int64, floats float32, and arrays keep theirs.
///
/// >>> import lastref
/// >>> lastref.tensor([[1, 2], [3, 4]])
/// tensor([[1, 2],
///         [3, 4]])
#[pyfunction]
#[pyo3(signature = (data, *, dtype=None, device=None, requires_grad=false))]
pub(crate) fn tensor(
    data: &Bound<'_, PyAny>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
    requires_grad: bool,
) -> Outcome<PyTensor> {
    let options = Options::new(dtype, device, requires_grad)?;
    let source = match array(data)? {
        Some(source) => source,
        None => {
            let host = from_values(data, options.dtype)?;
            let device = options.device();
            return Ok(PyTensor(without_lock_if_full(data.py(), || {
                host.to_device(device)
            })?));
        }
    };
    let dtype = options.dtype.unwrap_or_else(|| source.dtype());
    let device = options
        .device
        .unwrap_or_else(|| match data.cast::<PyTensor>() {
            Ok(_) => source.device(),
            Err(_) => Device::Cpu,
        });
    Ok(PyTensor(data.py().detach(|| {
        // One of the two conversions copies, or neither, and then `copy` does.
        let converted = source.to(device, dtype)?;
        if converted.same_storage(&source) {
            converted.copy()
        } else {
            Ok(converted)
        }
    })?))
}

/// As `tensor`, but shares the memory of a tensor or array where dtype and device are right already.
///
/// >>> import lastref
/// >>> t = lastref.zeros(3)
/// >>> lastref.as_tensor(t) is t
/// True
#[pyfunction]
#[pyo3(signature = (data, dtype=None, device=None))]
pub(crate) fn as_tensor<'py>(
    data: &Bound<'py, PyAny>,
    dtype: Option<DTypeArg>,
    device: Option<PyDevice>,
) -> Outcome<Bound<'py, PyTensor>> {
    let py = data.py();
    let options = Options::new(dtype, device, false)?;
    if let Ok(tensor) = data.cast::<PyTensor>() {
        return PyTensor::to(tensor, options.dtype, options.device, false);
    }
    let tensor = match array(data)? {
        None => {
            let host = from_values(data, options.dtype)?;
            without_lock_if_full(py, || host.to_device(options.device()))?
        }
        Some(source) => py.detach(|| source.to(options.device(), options.dtype))?,
    };
    Ok(Bound::new(py, PyTensor(tensor))?)
}

/// A tensor that shares the memory of a NumPy array: each sees what the other writes.
///
/// >>> import lastref, numpy
/// >>> a = numpy.zeros(2, dtype=numpy.float32)
/// >>> t = lastref.from_numpy(a)
/// >>> a[0] = 5
/// >>> t
/// tensor([5., 0.])
#[pyfunction]
pub(crate) fn from_numpy(ndarray: &Bound<'_, PyAny>) -> Outcome<PyTensor> {
    let py = ndarray.py();
    if !ndarray.is_instance(&py.import("numpy")?.getattr("ndarray")?)? {
        return Err(Failure::Python(PyTypeError::new_err(format!(
            "from_numpy: expected a numpy.ndarray, not {}",
            ndarray.get_type().name()?
        ))));
    }
    dlpack::import(ndarray).map(PyTensor)
}

/// A tensor that shares the memory of an array of another library, through DLPack.
///
/// `ext_tensor` has the method `__dlpack__`, or is a DLPack capsule. The array stays alive as long as
/// a tensor uses its memory.
///
/// >>> import lastref, numpy
/// >>> lastref.from_dlpack(numpy.arange(3))
/// tensor([0, 1, 2])
#[pyfunction]
#[pyo3(signature = (ext_tensor, /))]
pub(crate) fn from_dlpack(ext_tensor: &Bound<'_, PyAny>) -> Outcome<PyTensor> {
    dlpack::import(ext_tensor).map(PyTensor)
}

/// Whether the object is a tensor.
#[pyfunction]
#[pyo3(signature = (obj, /))]
pub(crate) fn is_tensor(obj: &Bound<'_, PyAny>) -> bool {
    obj.is_instance_of::<PyTensor>()
}

/// `data` as a tensor on the same memory, if it is a tensor or offers DLPack.
pub(crate) fn array(data: &Bound<'_, PyAny>) -> Outcome<Option<Tensor>> {
    if let Ok(tensor) = data.cast::<PyTensor>() {
        return Ok(Some(tensor.get().0.clone()));
    }
    if data.hasattr("__dlpack__")? {
        return dlpack::import(data).map(Some);
    }
    Ok(None)
}

/// Numbers in nested sequences, flat, and the shape of the nest.
#[derive(Default)]
struct Values {
    shape: Dims,
    flat: Vec<Scalar>,
}

impl Values {
    /// Deeper nests are taken for a sequence that holds itself.
    const MAX_DIMS: usize = 64;

    /// Adds `data`, which is `depth` sequences deep in the nest.
    fn add(&mut self, data: &Bound<'_, PyAny>, depth: usize) -> Outcome {
        if let Some(value) = number(data) {
            return self.add_number(value?.0, depth);
        }
        if let Some(tensor) = array(data)? {
            if tensor.dim() != 0 {
                // A row that is a tensor or an array: its elements are numbers.
                let rows = Bound::new(data.py(), PyTensor(tensor))?.call_method0("tolist")?;
                return self.add(&rows, depth);
            }
            return self.add_number(tensor.item_scalar()?, depth);
        }
        let is_text = data.is_instance_of::<PyString>() || data.is_instance_of::<PyBytes>();
        let Ok(sequence) = data.cast::<PySequence>() else {
            return Err(not_a_number(data));
        };
        if is_text {
            return Err(not_a_number(data));
        }
        if depth == Self::MAX_DIMS {
            return Err(Failure::Python(PyValueError::new_err(format!(
                "tensor: more than {} sequences are nested",
                Self::MAX_DIMS
            ))));
        }
        let len = i64::try_from(sequence.len()?).unwrap_or(i64::MAX);
        match self.shape.get(depth) {
            None if self.flat.is_empty() => self.shape.push(len),
            None => return Err(ragged(depth, "a number", "a sequence")),
            Some(expected) if *expected == len => {}
            Some(expected) => {
                return Err(ragged(
                    depth,
                    format!("a sequence of length {expected}"),
                    format!("one of length {len}"),
                ));
            }
        }
        sequence
            .try_iter()?
            .try_for_each(|item| self.add(&item?, depth + 1))
    }

    fn add_number(&mut self, value: Scalar, depth: usize) -> Outcome {
        if depth != self.shape.len() {
            return Err(ragged(depth, "a sequence", "a number"));
        }
        self.flat.push(value);
        Ok(())
    }

    fn default_dtype(&self) -> DType {
        let rank = |value: &Scalar| match value {
            Scalar::Bool(_) => 0,
            Scalar::Int(_) => 1,
            Scalar::Float(_) => 2,
        };
        self.flat
            .iter()
            .max_by_key(|value| rank(value))
            .map_or_else(DType::default, |value| value.default_dtype())
    }
}

fn not_a_number(data: &Bound<'_, PyAny>) -> Failure {
    Failure::Python(PyTypeError::new_err(format!(
        "tensor: expected numbers, sequences of numbers or an array, not {:?}",
        data.get_type()
    )))
}

fn ragged(dim: usize, expected: impl AsRef<str>, found: impl AsRef<str>) -> Failure {
    Failure::Python(PyValueError::new_err(format!(
        "tensor: expected {} in dimension {dim}, as before, not {}",
        expected.as_ref(),
        found.as_ref()
    )))
}

/// A tensor in host memory of numbers in nested sequences; `None` lets them decide the dtype.
pub(crate) fn from_values(data: &Bound<'_, PyAny>, dtype: Option<DType>) -> Outcome<Tensor> {
    let mut values = Values::default();
    values.add(data, 0)?;
    let Values { shape, flat } = &values;
    let dtype = dtype.unwrap_or_else(|| values.default_dtype());
    for value in flat {
        args::check_fits(*value, dtype)?;
    }
    // By way of the widest type of the kind, which loses nothing that the dtype could keep.
    Ok(if dtype == DType::Bool {
        let flat: Vec<bool> = flat.iter().map(|value| value.to_bool()).collect();
        Tensor::from_slice(&flat, &**shape)?
    } else if dtype.is_floating_point() {
        let flat: Vec<f64> = flat.iter().map(|value| value.to_f64()).collect();
        Tensor::from_slice_with(&flat, &**shape, dtype)?
    } else {
        let flat: Vec<i64> = flat.iter().map(|value| value.to_i64()).collect();
        Tensor::from_slice_with(&flat, &**shape, dtype)?
    })
}
