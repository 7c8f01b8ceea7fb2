//! What stands between the brackets of `t[...]`, as a chain of views.

use lastref::Tensor;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyEllipsis, PySlice, PyTuple};

use crate::error::{Failure, Outcome};

/// The view that `index` selects: ints, slices, `...`, `None`, or a tuple of these.
pub(crate) fn view(tensor: &Tensor, index: &Bound<'_, PyAny>) -> Outcome<Tensor> {
    match index.cast::<PyTuple>() {
        Ok(tuple) => apply(tensor, tuple),
        Err(_) => apply(tensor, &PyTuple::new(index.py(), [index])?),
    }
}

fn apply(tensor: &Tensor, items: &Bound<'_, PyTuple>) -> Outcome<Tensor> {
    let is_ellipsis = |item: &Bound<'_, PyAny>| item.is_instance_of::<PyEllipsis>();
    // How many dimensions of the tensor the items take: all but `None` and `...` take one.
    let taken = items
        .iter()
        .filter(|item| !item.is_none() && !is_ellipsis(item))
        .count();
    let ndim = tensor.dim();
    if taken > ndim {
        return Err(Failure::Python(PyIndexError::new_err(format!(
            "too many indices: {taken} for a tensor of {ndim} dimensions"
        ))));
    }
    if items.iter().filter(is_ellipsis).count() > 1 {
        return Err(Failure::Python(PyIndexError::new_err(
            "an index can only have a single ellipsis ('...')",
        )));
    }
    // Starts as another handle, so that `t[...]` is a view as well.
    let mut view = tensor.clone();
    let mut dim = 0_i64;
    for item in items.iter() {
        if item.is_none() {
            view = view.unsqueeze(dim)?;
            dim += 1;
        } else if is_ellipsis(&item) {
            dim += i64::try_from(ndim - taken).unwrap_or(i64::MAX);
        } else if let Ok(slice) = item.cast::<PySlice>() {
            view = sliced(&view, dim, slice)?;
            dim += 1;
        } else {
            view = view.select(dim, position(&item)?)?;
        }
    }
    Ok(view)
}

fn sliced(tensor: &Tensor, dim: i64, slice: &Bound<'_, PySlice>) -> Outcome<Tensor> {
    let size = tensor.shape()[usize::try_from(dim).unwrap_or(usize::MAX)];
    let indices = slice.indices(isize::try_from(size).unwrap_or(isize::MAX))?;
    if indices.step <= 0 {
        return Err(Failure::Python(PyValueError::new_err(format!(
            "the step of a slice must be greater than zero, not {}",
            indices.step
        ))));
    }
    let (start, stop, step) = (
        indices.start as i64,
        indices.stop as i64,
        indices.step as i64,
    );
    Ok(tensor.slice(dim, start, stop.max(start), step)?)
}

fn position(item: &Bound<'_, PyAny>) -> Outcome<i64> {
    let refuse = || {
        let name = item
            .get_type()
            .name()
            .map_or_else(|_| "it".to_owned(), |name| name.to_string());
        Failure::Python(PyTypeError::new_err(format!(
            "an index is an int, a slice, `...`, None or a tuple of these, not {name}; for other \
             indices use NumPy: t.numpy()[...]"
        )))
    };
    // `True` would pass for 1, but means something else to PyTorch and NumPy.
    if item.is_instance_of::<PyBool>() || item.hasattr("__len__")? {
        return Err(refuse());
    }
    item.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyTypeError>(item.py()) {
            refuse()
        } else {
            Failure::Python(PyIndexError::new_err(format!(
                "index {item} is out of range"
            )))
        }
    })
}
