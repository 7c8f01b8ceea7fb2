//! The class `device`, and what may stand for one in an argument.

use lastref::{Device, cuda};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

/// Where a tensor's memory is: `device("cpu")`, `device("cuda:0")`, `device("cuda", 0)`.
///
/// `device("cuda")` has no index; it means the current device of the thread that uses it.
///
/// >>> import lastref
/// >>> lastref.device("cuda:1")
/// device(type='cuda', index=1)
/// >>> lastref.zeros(2).device == lastref.device("cpu")
/// True
#[pyclass(name = "device", module = "lastref", frozen, eq, hash)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PyDevice {
    cuda: bool,
    index: Option<u32>,
}

impl From<Device> for PyDevice {
    fn from(device: Device) -> Self {
        Self {
            cuda: device.is_cuda(),
            index: device.index(),
        }
    }
}

impl PyDevice {
    fn parse(text: &str) -> PyResult<Self> {
        let unknown = || {
            PyRuntimeError::new_err(format!(
                "device: cannot read {text:?}, expected cpu, cuda or cuda:N such as cuda:0"
            ))
        };
        let (name, index) = match text.split_once(':') {
            None => (text, None),
            Some((name, digits)) => {
                if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(unknown());
                }
                (name, Some(digits.parse().map_err(|_| unknown())?))
            }
        };
        match name {
            "cuda" => Ok(Self { cuda: true, index }),
            "cpu" if index.unwrap_or(0) == 0 => Ok(Self { cuda: false, index }),
            _ => Err(unknown()),
        }
    }

    fn cuda(index: i64) -> PyResult<Self> {
        let index = u32::try_from(index)
            .map_err(|_| PyRuntimeError::new_err(format!("device: no device has index {index}")))?;
        Ok(Self {
            cuda: true,
            index: Some(index),
        })
    }

    /// The device it means for this thread, now.
    pub(crate) fn resolve(self) -> Device {
        match self {
            Self { cuda: false, .. } => Device::Cpu,
            Self { index, .. } => Device::Cuda(index.unwrap_or_else(cuda::current_device)),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for PyDevice {
    type Error = PyErr;

    /// A device, its name, or the index of a CUDA device.
    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // The name as it is in nearly all programs: compilers make one object of it.
        if object.is(intern!(object.py(), "cuda")) {
            Ok(Self {
                cuda: true,
                index: None,
            })
        } else if let Ok(device) = object.cast::<Self>() {
            Ok(*device.get())
        } else if let Ok(name) = object.cast::<PyString>() {
            Self::parse(&name.to_cow()?)
        } else if let Ok(index) = object.extract::<i64>() {
            Self::cuda(index)
        } else {
            Err(PyTypeError::new_err(format!(
                "device: expected a lastref.device, a name such as \"cuda:0\" or an index, not {}",
                object.get_type().name()?
            )))
        }
    }
}

#[pymethods]
impl PyDevice {
    #[new]
    #[pyo3(signature = (r#type, index=None))]
    fn new(r#type: Self, index: Option<i64>) -> PyResult<Self> {
        match (r#type, index) {
            (device, None) => Ok(device),
            (Self { index: Some(_), .. }, Some(_)) => Err(PyRuntimeError::new_err(
                "device: the type has an index already, so no other can be given",
            )),
            (Self { cuda: true, .. }, Some(index)) => Self::cuda(index),
            (Self { cuda: false, .. }, Some(0)) => Ok(Self {
                cuda: false,
                index: Some(0),
            }),
            (Self { cuda: false, .. }, Some(index)) => Err(PyRuntimeError::new_err(format!(
                "device: there is one cpu, so its index is 0, not {index}"
            ))),
        }
    }

    /// `"cpu"` or `"cuda"`.
    #[getter]
    fn r#type(&self) -> &'static str {
        if self.cuda { "cuda" } else { "cpu" }
    }

    /// The index among the devices of the type, or None.
    #[getter]
    fn index(&self) -> Option<u32> {
        self.index
    }

    fn __repr__(&self) -> String {
        match self.index {
            None => format!("device(type='{}')", self.r#type()),
            Some(index) => format!("device(type='{}', index={index})", self.r#type()),
        }
    }

    fn __str__(&self) -> String {
        match self.index {
            None => self.r#type().to_owned(),
            Some(index) => format!("{}:{index}", self.r#type()),
        }
    }

    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> (Bound<'py, PyType>, (&'static str, Option<u32>)) {
        (py.get_type::<Self>(), (self.r#type(), self.index))
    }
}

/// The `device` argument of a function of `lastref.cuda`: `None` is the current device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaIndex(pub(crate) Option<u32>);

impl<'py> FromPyObject<'_, 'py> for CudaIndex {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_none() {
            return Ok(Self(None));
        }
        match object.extract::<PyDevice>()? {
            PyDevice { cuda: true, index } => Ok(Self(index)),
            PyDevice { cuda: false, .. } => Err(PyValueError::new_err(
                "device: expected a CUDA device, not cpu",
            )),
        }
    }
}
