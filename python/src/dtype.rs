//! The class `dtype`: one object for each [`DType`], made once, so that `is` compares them.

use lastref::DType;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt, PyType};

/// The type of a tensor's elements.
///
/// There is one object for each: `lastref.float32`, `lastref.int64`, `lastref.bool` and so on.
///
/// >>> import lastref
/// >>> lastref.zeros(2).dtype is lastref.float32
/// True
/// >>> lastref.bfloat16.itemsize, lastref.bfloat16.is_floating_point
/// (2, True)
#[pyclass(name = "dtype", module = "lastref", frozen)]
#[derive(Debug)]
pub(crate) struct PyDType(pub(crate) DType);

#[pymethods]
impl PyDType {
    /// Bytes of one element.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.0.size()
    }

    /// Whether it is one of the four float types.
    #[getter]
    fn is_floating_point(&self) -> bool {
        self.0.is_floating_point()
    }

    /// Whether it holds negative values.
    #[getter]
    fn is_signed(&self) -> bool {
        !matches!(self.0, DType::U8 | DType::Bool)
    }

    fn __repr__(&self) -> String {
        format!("lastref.{}", self.0)
    }

    /// Pickled by name, so that it stays the one object.
    fn __reduce__(&self) -> &'static str {
        self.0.name()
    }
}

static INTERNED: PyOnceLock<[Py<PyDType>; DType::ALL.len()]> = PyOnceLock::new();

/// The one object for `dtype`.
pub(crate) fn interned(py: Python<'_>, dtype: DType) -> PyResult<&Bound<'_, PyDType>> {
    let all = INTERNED.get_or_try_init(py, || {
        let objects = DType::ALL
            .into_iter()
            .map(|dtype| Py::new(py, PyDType(dtype)))
            .collect::<PyResult<Vec<_>>>()?;
        Ok::<_, PyErr>(objects.try_into().expect("as many as there are dtypes"))
    })?;
    let position = DType::ALL
        .iter()
        .position(|other| *other == dtype)
        .expect("ALL has every dtype");
    Ok(all[position].bind(py))
}

/// Puts the objects into the module, under PyTorch's names.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for dtype in DType::ALL {
        module.add(dtype.name(), interned(py, dtype)?)?;
    }
    for (name, dtype) in [
        ("double", DType::F64),
        ("float", DType::F32),
        ("half", DType::F16),
        ("long", DType::I64),
        ("int", DType::I32),
        ("short", DType::I16),
    ] {
        module.add(name, interned(py, dtype)?)?;
    }
    Ok(())
}

/// A `dtype` argument: a dtype, or Python's own `float`, `int` or `bool`, as in PyTorch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DTypeArg(pub(crate) DType);

impl<'py> FromPyObject<'_, 'py> for DTypeArg {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if let Ok(dtype) = object.cast::<PyDType>() {
            return Ok(Self(dtype.get().0));
        }
        for (class, dtype) in [
            (PyType::new::<PyFloat>(py), DType::F64),
            (PyType::new::<PyInt>(py), DType::I64),
            (PyType::new::<PyBool>(py), DType::Bool),
        ] {
            if object.is(&class) {
                return Ok(Self(dtype));
            }
        }
        Err(PyTypeError::new_err(format!(
            "dtype: expected one such as lastref.float32, not {}",
            object.get_type().name()?
        )))
    }
}
