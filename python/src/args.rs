//! Arguments that several calls take: shapes and numbers.

use lastref::{DType, Scalar};
use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PySequence, PyString, PyTuple};
use smallvec::{SmallVec, smallvec};

use crate::error::{Failure, Outcome};

/// Sizes, strides or dimensions.
pub(crate) type Dims = SmallVec<[i64; 5]>;

/// One int of a shape or a list of dimensions.
fn int(call: &str, object: &Bound<'_, PyAny>) -> PyResult<i64> {
    // `True` would pass for 1; PyTorch refuses it too.
    if object.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!(
            "{call}: expected an int, not {object}"
        )));
    }
    object.extract().map_err(|error: PyErr| {
        let py = object.py();
        if error.is_instance_of::<PyOverflowError>(py) {
            PyRuntimeError::new_err(format!("{call}: {object} does not fit in 64 bits"))
        } else if error.is_instance_of::<PyTypeError>(py) {
            PyTypeError::new_err(format!("{call}: expected an int, not {object:?}"))
        } else {
            error
        }
    })
}

/// The ints of a sequence.
pub(crate) fn ints(call: &str, object: &Bound<'_, PyAny>) -> PyResult<Dims> {
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return tuple.iter_borrowed().map(|item| int(call, &item)).collect();
    }
    if object.is_instance_of::<PyString>() || object.cast::<PySequence>().is_err() {
        return Err(PyTypeError::new_err(format!(
            "{call}: expected ints or a sequence of ints, not {}",
            object.get_type().name()?
        )));
    }
    object.try_iter()?.map(|item| int(call, &item?)).collect()
}

/// The ints of arguments that may be given one by one or as one sequence: `f(2, 3)`, `f((2, 3))`.
pub(crate) fn dims(call: &str, args: &Bound<'_, PyTuple>) -> PyResult<Dims> {
    if args.len() == 1 {
        let only = args.get_borrowed_item(0)?;
        // What is asked for most, without the detours of the rest.
        if only.is_exact_instance_of::<PyInt>() {
            return Ok(smallvec![int(call, &only)?]);
        }
        if !only.is_instance_of::<PyInt>() && only.cast::<PySequence>().is_ok() {
            return ints(call, &only);
        }
    }
    ints(call, args)
}

/// A number argument: a bool, an int or a float, or what converts to one by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number(pub(crate) Scalar);

impl<'py> FromPyObject<'_, 'py> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        number(&object).ok_or_else(|| {
            PyTypeError::new_err(format!("expected a number, not {:?}", object.get_type()))
        })?
    }
}

/// `object` as a number, if it is one.
pub(crate) fn number(object: &Bound<'_, PyAny>) -> Option<PyResult<Number>> {
    if let Ok(value) = object.cast::<PyBool>() {
        return Some(Ok(Number(Scalar::Bool(value.is_true()))));
    }
    if let Ok(value) = object.cast::<PyFloat>() {
        return Some(Ok(Number(Scalar::Float(value.value()))));
    }
    let has = |name| object.hasattr(name).unwrap_or(false);
    if object.cast::<PyInt>().is_err() {
        // Arrays and tensors have these methods too, but they have a length.
        if has("__len__") {
            return None;
        }
        // A scalar of NumPy: its `item()` is a number of Python's.
        if has("item") && has("dtype") {
            return match object.call_method0("item") {
                Ok(item) if item.get_type().is(object.get_type()) => None,
                Ok(item) => number(&item),
                Err(error) => Some(Err(error)),
            };
        }
        if !has("__index__") {
            return has("__float__")
                .then(|| object.extract().map(|value| Number(Scalar::Float(value))));
        }
    }
    Some(match object.extract() {
        Ok(value) => Ok(Number(Scalar::Int(value))),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Err(
            PyRuntimeError::new_err(format!("the number {object} does not fit in 64 bits")),
        ),
        Err(error) => Err(error),
    })
}

/// Refuses a value that an integer dtype cannot hold, where PyTorch does. Fractions are cut off.
pub(crate) fn check_fits(value: Scalar, dtype: DType) -> Outcome {
    let range = match dtype {
        DType::I64 => i64::MIN..=i64::MAX,
        DType::I32 => i32::MIN.into()..=i32::MAX.into(),
        DType::I16 => i16::MIN.into()..=i16::MAX.into(),
        DType::I8 => i8::MIN.into()..=i8::MAX.into(),
        DType::U8 => 0..=255,
        _ => return Ok(()),
    };
    let fits = match value {
        // 2^63 is the first float beyond the range.
        Scalar::Float(float) => {
            let whole = float.trunc();
            (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&whole)
                && range.contains(&value.to_i64())
        }
        _ => range.contains(&value.to_i64()),
    };
    if fits {
        return Ok(());
    }
    Err(Failure::Python(PyRuntimeError::new_err(format!(
        "the value {value} does not fit in {dtype}"
    ))))
}
