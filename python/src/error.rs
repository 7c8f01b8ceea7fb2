//! How errors of lastref become Python exceptions: of the types that PyTorch raises for the same.

use lastref::alloc::OutOfMemoryError as Report;
use pyo3::create_exception;
use pyo3::exceptions::{PyBufferError, PyIndexError, PyRuntimeError};
use pyo3::prelude::*;

use crate::gc;

create_exception!(
    lastref,
    OutOfMemoryError,
    PyRuntimeError,
    "The device is full, or a limit is reached, and nothing more could be given back.\n\n\
     The text says where all the memory is and what was tried. When the device was full, the\n\
     numbers are attributes too, each named with _bytes at the end: allocated + pending + cached +\n\
     other + device_free is capacity. What keeps Python's collector from freeing is in gc_frozen_count\n\
     and gc_saves_all."
);

/// An error on its way to Python: lastref's, or an exception that is one already.
#[derive(Debug)]
pub(crate) enum Failure {
    Lastref(lastref::Error),
    Python(PyErr),
}

/// The result of a call that can fail on either side.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl From<lastref::Error> for Failure {
    fn from(error: lastref::Error) -> Self {
        Self::Lastref(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        use lastref::Error;
        let error = match failure {
            Failure::Python(error) => return error,
            Failure::Lastref(Error::OutOfMemory(report)) => return out_of_memory(&report),
            // More than the device has: PyTorch says so with the same exception.
            Failure::Lastref(Error::Alloc(error)) if error.is_out_of_memory() => {
                return OutOfMemoryError::new_err(error.to_string());
            }
            Failure::Lastref(error) => error,
        };
        let text = error.to_string();
        match error {
            Error::IndexOutOfRange { .. } => PyIndexError::new_err(text),
            Error::Dlpack { .. } => PyBufferError::new_err(text),
            _ => PyRuntimeError::new_err(text),
        }
    }
}

/// The exception with the numbers of the report as attributes.
fn out_of_memory(report: &Report) -> PyErr {
    Python::attach(|py| {
        let mut text = report.to_string();
        let (obstacles, frozen, saves_all) = gc::obstacles(py).unwrap_or_default();
        for obstacle in obstacles {
            text.push_str("\n  python's gc ");
            text.push_str(&obstacle);
        }
        let error = OutOfMemoryError::new_err(text);
        let value = error.value(py);
        let fields = [
            ("requested_bytes", Some(report.requested)),
            ("capacity_bytes", Some(report.capacity)),
            ("device_free_bytes", Some(report.device_free)),
            ("allocated_bytes", Some(report.allocated)),
            ("pending_bytes", Some(report.pending)),
            ("cached_bytes", Some(report.cached)),
            ("other_bytes", Some(report.other)),
            ("largest_hole_bytes", Some(report.largest_hole)),
            ("limit_bytes", report.limit),
        ];
        let set = || {
            for (name, bytes) in fields {
                value.setattr(name, bytes)?;
            }
            value.setattr("gc_frozen_count", frozen)?;
            value.setattr("gc_saves_all", saves_all)
        };
        match set() {
            Ok(()) => error,
            Err(failed) => failed,
        }
    })
}
