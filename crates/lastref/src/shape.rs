//! Shapes, strides and what views do to them. Pure arithmetic on numbers of elements.
//!
//! [`Shape`] is what a caller asks for and may be nonsense. [`Layout`] is what a tensor has, and
//! holds by construction:
//!
//! 1. `shape` and `strides` have the same length; no entry of either is negative.
//! 2. The number of elements times the size of an element fits in an `i64`.
//! 3. `offset` and, if there are elements, the last one's position fit in an `i64`.
//!
//! Every view of a layout stays within the elements of that layout.

use smallvec::SmallVec;

use crate::{Error, Result};

/// Sizes or strides, in elements.
pub(crate) type Dims = SmallVec<[i64; 5]>;

/// A shape as a caller gives it: checked by the call that takes it.
///
/// Made from arrays, slices and vectors of `i64`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shape(Dims);

impl Shape {
    /// The sizes.
    #[must_use]
    pub fn as_slice(&self) -> &[i64] {
        &self.0
    }

    pub(crate) fn into_dims(self) -> Dims {
        self.0
    }
}

impl<const N: usize> From<[i64; N]> for Shape {
    fn from(sizes: [i64; N]) -> Self {
        Self(Dims::from_slice(&sizes))
    }
}

impl<const N: usize> From<&[i64; N]> for Shape {
    fn from(sizes: &[i64; N]) -> Self {
        Self(Dims::from_slice(sizes))
    }
}

impl From<&[i64]> for Shape {
    fn from(sizes: &[i64]) -> Self {
        Self(Dims::from_slice(sizes))
    }
}

impl From<Vec<i64>> for Shape {
    fn from(sizes: Vec<i64>) -> Self {
        Self(Dims::from_vec(sizes))
    }
}

impl From<&Vec<i64>> for Shape {
    fn from(sizes: &Vec<i64>) -> Self {
        Self(Dims::from_slice(sizes))
    }
}

/// A count of elements or bytes as an index of host memory.
///
/// Holds on every target this builds for: what is counted is in memory, or was checked to fit.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts here are not negative and index memory that exists"
)]
pub(crate) const fn index(count: i64) -> usize {
    count as usize
}

/// A host length as a count of elements; no allocation is longer than `i64::MAX`.
#[expect(clippy::cast_possible_wrap, reason = "lengths are at most isize::MAX")]
pub(crate) const fn count(len: usize) -> i64 {
    len as i64
}

/// A count of elements, never negative, as bytes are counted.
#[expect(clippy::cast_sign_loss, reason = "invariant 1")]
pub(crate) const fn unsigned(count: i64) -> u64 {
    count as u64
}

/// A number of bytes of host memory as a length.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the bytes are in host memory, or the allocation of that many fails first"
)]
pub(crate) const fn length(bytes: u64) -> usize {
    bytes as usize
}

/// Shape, strides and offset of a tensor in its storage, in elements.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    pub(crate) shape: Dims,
    pub(crate) strides: Dims,
    pub(crate) offset: i64,
}

impl Layout {
    /// The row-major layout of `shape`, for elements of `element_bytes`.
    pub(crate) fn contiguous(call: &'static str, shape: Dims, element_bytes: u64) -> Result<Self> {
        if let Some(size) = shape.iter().find(|size| **size < 0) {
            return Err(Error::shape(
                call,
                format!("negative size {size} in shape {:?}", shape.as_slice()),
            ));
        }
        let overflow = || {
            Error::shape(
                call,
                format!("shape {:?} has more bytes than 2^63 - 1", shape.as_slice()),
            )
        };
        let mut strides = Dims::from_elem(1, shape.len());
        // Sizes of zero count as one, so that strides stay meaningful (torch does the same).
        let mut step = 1_i64;
        for (stride, size) in strides.iter_mut().zip(&shape).rev() {
            *stride = step;
            step = step.checked_mul((*size).max(1)).ok_or_else(overflow)?;
        }
        let bytes = unsigned(step)
            .checked_mul(element_bytes)
            .ok_or_else(overflow)?;
        if i64::try_from(bytes).is_err() {
            return Err(overflow());
        }
        Ok(Self {
            shape,
            strides,
            offset: 0,
        })
    }

    /// The same shape, row-major from 0. Cannot fail: this layout's elements were counted.
    pub(crate) fn to_contiguous(&self) -> Self {
        let mut strides = Dims::from_elem(1, self.shape.len());
        let mut step = 1_i64;
        for (stride, size) in strides.iter_mut().zip(&self.shape).rev() {
            *stride = step;
            step = step.saturating_mul((*size).max(1));
        }
        Self {
            shape: self.shape.clone(),
            strides,
            offset: 0,
        }
    }

    pub(crate) fn numel(&self) -> i64 {
        self.shape.iter().product()
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut step = 1;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size != 1 {
                if *stride != step {
                    return false;
                }
                step *= size;
            }
        }
        true
    }

    /// How many elements lie between the first and the last, both included.
    pub(crate) fn extent(&self) -> i64 {
        if self.shape.contains(&0) {
            return 0;
        }
        1 + self
            .shape
            .iter()
            .zip(&self.strides)
            .map(|(size, stride)| (size - 1) * stride)
            .sum::<i64>()
    }

    /// Whether two indices surely reach the same element.
    pub(crate) fn repeats_elements(&self) -> bool {
        !self.shape.contains(&0)
            && self
                .shape
                .iter()
                .zip(&self.strides)
                .any(|(size, stride)| *size > 1 && *stride == 0)
    }

    /// The size of dimension `dim`, which may count from the end.
    pub(crate) fn size(&self, call: &'static str, dim: i64) -> Result<i64> {
        let at = self.indexed_dim(call, dim)?;
        Ok(self.shape[at])
    }

    /// The position of dimension `dim`, which may count from the end.
    fn dim(&self, call: &'static str, dim: i64) -> Result<usize> {
        wrap_dim(call, dim, count(self.shape.len()))
    }

    /// The layout of `shape`, where one size may be -1, over the same elements in the same order;
    /// `None` if strides cannot express it.
    pub(crate) fn view(&self, call: &'static str, shape: &[i64]) -> Result<Option<Self>> {
        let shape = self.infer(call, shape)?;
        if self.shape.contains(&0) {
            let mut layout = Self::contiguous(call, shape, 1)?;
            layout.offset = self.offset;
            return Ok(Some(layout));
        }
        // Runs of dimensions that walk memory as one, innermost first: (elements, stride).
        let mut runs: SmallVec<[(i64, i64); 5]> = SmallVec::new();
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            match runs.last_mut() {
                _ if size == 1 => {}
                Some((elements, inner)) if *elements * *inner == stride => *elements *= size,
                _ => runs.push((size, stride)),
            }
        }
        let mut runs = runs.into_iter();
        let (mut left, mut stride) = (1, 1);
        let mut strides = Dims::from_elem(1, shape.len());
        for (place, &size) in strides.iter_mut().zip(&shape).rev() {
            if size != 1 {
                if left == 1 {
                    match runs.next() {
                        Some(run) => (left, stride) = run,
                        None => return Ok(None),
                    }
                }
                if left % size != 0 {
                    return Ok(None);
                }
                left /= size;
            }
            *place = stride;
            stride *= size;
        }
        Ok(Some(Self {
            shape,
            strides,
            offset: self.offset,
        }))
    }

    /// `shape` with its -1 replaced by what is left, checked against the number of elements.
    fn infer(&self, call: &'static str, shape: &[i64]) -> Result<Dims> {
        let numel = self.numel();
        let mut known = 1_i64;
        let mut open = None;
        for (dim, &size) in shape.iter().enumerate() {
            if size == -1 {
                if open.replace(dim).is_some() {
                    return Err(Error::shape(
                        call,
                        format!("only one size of shape {shape:?} can be -1"),
                    ));
                }
            } else if size < 0 {
                return Err(Error::shape(
                    call,
                    format!("negative size {size} in shape {shape:?}"),
                ));
            } else {
                known = known.checked_mul(size).ok_or_else(|| {
                    Error::shape(
                        call,
                        format!("shape {shape:?} has more than 2^63 - 1 elements"),
                    )
                })?;
            }
        }
        let mut inferred = Dims::from_slice(shape);
        let fits = match open {
            None => known == numel,
            Some(_) if known == 0 => {
                return Err(Error::shape(
                    call,
                    format!("the -1 in shape {shape:?} can be anything, as another size is 0"),
                ));
            }
            Some(dim) => {
                inferred[dim] = numel / known;
                numel % known == 0
            }
        };
        if fits {
            Ok(inferred)
        } else {
            Err(Error::shape(
                call,
                format!(
                    "shape {shape:?} does not fit {numel} elements of shape {:?}",
                    self.shape.as_slice()
                ),
            ))
        }
    }

    pub(crate) fn permute(&self, dims: &[i64]) -> Result<Self> {
        let call = "permute";
        if dims.len() != self.shape.len() {
            return Err(Error::shape(
                call,
                format!(
                    "{} dimensions given for a tensor of {}",
                    dims.len(),
                    self.shape.len()
                ),
            ));
        }
        let mut seen = SmallVec::<[bool; 5]>::from_elem(false, dims.len());
        let mut layout = self.clone();
        for (to, &dim) in dims.iter().enumerate() {
            let from = self.dim(call, dim)?;
            if std::mem::replace(&mut seen[from], true) {
                return Err(Error::shape(
                    call,
                    format!("dimension {dim} is given twice in {dims:?}"),
                ));
            }
            layout.shape[to] = self.shape[from];
            layout.strides[to] = self.strides[from];
        }
        Ok(layout)
    }

    pub(crate) fn transpose(&self, first: i64, second: i64) -> Result<Self> {
        let first = self.dim("transpose", first)?;
        let second = self.dim("transpose", second)?;
        let mut layout = self.clone();
        if !layout.shape.is_empty() {
            layout.shape.swap(first, second);
            layout.strides.swap(first, second);
        }
        Ok(layout)
    }

    pub(crate) fn narrow(&self, dim: i64, start: i64, len: i64) -> Result<Self> {
        let call = "narrow";
        let at = self.indexed_dim(call, dim)?;
        let size = self.shape[at];
        let first = if start < 0 { start + size } else { start };
        if first < 0 || first > size {
            return Err(Error::index(
                call,
                format!("start {start} is out of range for dimension {dim} of size {size}"),
            ));
        }
        if len < 0 || len > size - first {
            return Err(Error::index(
                call,
                format!(
                    "length {len} from start {start} is out of range for dimension {dim} of size \
                     {size}"
                ),
            ));
        }
        Ok(self.cut(at, first, len, 1))
    }

    pub(crate) fn select(&self, dim: i64, index: i64) -> Result<Self> {
        let call = "select";
        let at = self.indexed_dim(call, dim)?;
        let size = self.shape[at];
        let position = if index < 0 {
            index.saturating_add(size)
        } else {
            index
        };
        if position < 0 || position >= size {
            return Err(Error::index(
                call,
                format!("index {index} is out of range for dimension {dim} of size {size}"),
            ));
        }
        let mut layout = self.cut(at, position, 1, 1);
        layout.shape.remove(at);
        layout.strides.remove(at);
        Ok(layout)
    }

    pub(crate) fn slice(
        &self,
        dim: i64,
        start: Option<i64>,
        end: Option<i64>,
        step: i64,
    ) -> Result<Self> {
        let call = "slice";
        let at = self.indexed_dim(call, dim)?;
        if step <= 0 {
            return Err(Error::argument(
                call,
                format!("step {step} is not positive"),
            ));
        }
        let size = self.shape[at];
        let clamp = |position: i64| {
            let position = if position < 0 {
                position.saturating_add(size)
            } else {
                position
            };
            position.clamp(0, size)
        };
        let start = start.map_or(0, clamp);
        let end = end.map_or(size, clamp).max(start);
        let len = (end - start) / step + i64::from((end - start) % step != 0);
        Ok(self.cut(at, start, len, step))
    }

    /// Every `step`-th of the elements of dimension `at` from `first` on, `len` of them. In range.
    fn cut(&self, at: usize, first: i64, len: i64, step: i64) -> Self {
        let mut layout = self.clone();
        // Nothing is reached by an empty view: leave its offset where it surely fits.
        if !self.shape.contains(&0) && len > 0 {
            layout.offset += first * layout.strides[at];
        }
        layout.shape[at] = len;
        if len > 1 {
            layout.strides[at] *= step;
        }
        layout
    }

    pub(crate) fn squeeze(&self, dim: Option<i64>) -> Result<Self> {
        let only = match dim {
            Some(dim) => Some(self.dim("squeeze", dim)?),
            None => None,
        };
        let mut layout = Self {
            shape: Dims::new(),
            strides: Dims::new(),
            offset: self.offset,
        };
        for (at, (&size, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            if size != 1 || only.is_some_and(|only| only != at) {
                layout.shape.push(size);
                layout.strides.push(stride);
            }
        }
        Ok(layout)
    }

    pub(crate) fn unsqueeze(&self, dim: i64) -> Result<Self> {
        let at = wrap_dim("unsqueeze", dim, count(self.shape.len()) + 1)?;
        let mut layout = self.clone();
        let stride = self
            .shape
            .get(at)
            .map_or(1, |size| (*size).max(1).saturating_mul(self.strides[at]));
        layout.shape.insert(at, 1);
        layout.strides.insert(at, stride);
        Ok(layout)
    }

    /// The layout that reads as `shape`, repeating dimensions of size 1. -1 keeps a size.
    pub(crate) fn expand(&self, call: &'static str, shape: &[i64]) -> Result<Self> {
        let Some(lead) = shape.len().checked_sub(self.shape.len()) else {
            return Err(Error::shape(
                call,
                format!(
                    "cannot expand shape {:?} to the fewer dimensions of {shape:?}",
                    self.shape.as_slice()
                ),
            ));
        };
        let mut layout = Self {
            shape: Dims::from_slice(shape),
            strides: Dims::from_elem(0, shape.len()),
            offset: self.offset,
        };
        for (at, &size) in shape.iter().enumerate() {
            if at < lead {
                if size < 0 {
                    return Err(Error::shape(
                        call,
                        format!("size {size} of the new dimension {at} in {shape:?} is negative"),
                    ));
                }
                continue;
            }
            let own = self.shape[at - lead];
            if size == -1 || size == own {
                layout.shape[at] = own;
                layout.strides[at] = self.strides[at - lead];
            } else if own != 1 || size < 0 {
                return Err(Error::shape(
                    call,
                    format!(
                        "cannot expand shape {:?} to {shape:?}: dimension {at} is {own}, not 1 or \
                         {size}",
                        self.shape.as_slice()
                    ),
                ));
            }
        }
        // Invariant 2; 8 is the largest element.
        Self::contiguous(call, layout.shape.clone(), 8)?;
        Ok(layout)
    }

    /// The position of a dimension that must exist, as in `select`.
    fn indexed_dim(&self, call: &'static str, dim: i64) -> Result<usize> {
        if self.shape.is_empty() {
            return Err(Error::index(
                call,
                "a tensor without dimensions has none to index",
            ));
        }
        self.dim(call, dim)
    }
}

/// `dim` of a tensor with `ndim` dimensions, counted from the end if negative. A tensor without
/// dimensions takes 0 and -1, as in torch.
fn wrap_dim(call: &'static str, dim: i64, ndim: i64) -> Result<usize> {
    let range = ndim.max(1);
    if dim < -range || dim >= range {
        return Err(Error::index(
            call,
            format!(
                "dimension {dim} is out of range for a tensor of {ndim} dimensions, expected {} \
                 to {}",
                -range,
                range - 1
            ),
        ));
    }
    Ok(index(if dim < 0 { dim + range } else { dim }))
}
