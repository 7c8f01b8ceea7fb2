//! Views: other shapes on the same bytes.

use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// Views share the storage and keep it whole: a view of one element of a large tensor keeps all of
/// its memory. Dimensions and positions may be negative and then count from the end.
///
/// All fail with [`Error::IndexOutOfRange`] for a dimension or position that is not there.
impl Tensor {
    /// The same elements in another shape, where one size may be -1.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if the numbers of elements differ, or strides cannot express it;
    /// [`reshape`](Self::reshape) copies then.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn view(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        match self.layout.view("view", shape.as_slice())? {
            Some(layout) => Ok(self.with_layout(layout)),
            None => Err(Error::shape(
                "view",
                format!(
                    "shape {:?} with strides {:?} cannot be seen as {:?} without a copy; use \
                     reshape",
                    self.shape(),
                    self.strides(),
                    shape.as_slice()
                ),
            )),
        }
    }

    /// The same elements in another shape: a view where strides can express it, else a copy.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if the numbers of elements differ; without memory, as
    /// [`empty`](Self::empty).
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        match self.layout.view("reshape", shape.as_slice())? {
            Some(layout) => Ok(self.with_layout(layout)),
            None => self.copy()?.view(shape),
        }
    }

    /// The dimensions in another order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if `dims` does not name each dimension once.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn permute(&self, dims: impl Into<Shape>) -> Result<Self> {
        Ok(self.with_layout(self.layout.permute(dims.into().as_slice())?))
    }

    /// Two dimensions swapped.
    ///
    /// # Errors
    ///
    /// As all views.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn transpose(&self, first: i64, second: i64) -> Result<Self> {
        Ok(self.with_layout(self.layout.transpose(first, second)?))
    }

    /// The `len` positions of dimension `dim` from `start` on.
    ///
    /// # Errors
    ///
    /// As all views.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn narrow(&self, dim: i64, start: i64, len: i64) -> Result<Self> {
        Ok(self.with_layout(self.layout.narrow(dim, start, len)?))
    }

    /// One position of dimension `dim`, which the view no longer has.
    ///
    /// # Errors
    ///
    /// As all views.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn select(&self, dim: i64, index: i64) -> Result<Self> {
        Ok(self.with_layout(self.layout.select(dim, index)?))
    }

    /// Every `step`-th position of dimension `dim` from `start` up to `end`. As in Python's
    /// slices, positions beyond the size are cut to it and `None` means the whole side.
    ///
    /// ```
    /// use lastref::Tensor;
    /// let a = Tensor::arange(0, 10, 1)?;
    /// assert_eq!(a.slice(0, 1, -1, 3)?.to_vec::<i64>()?, [1, 4, 7]);
    /// assert_eq!(a.slice(0, None, None, 5)?.to_vec::<i64>()?, [0, 5]);
    /// # Ok::<(), lastref::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a step that is not positive.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn slice(
        &self,
        dim: i64,
        start: impl Into<Option<i64>>,
        end: impl Into<Option<i64>>,
        step: i64,
    ) -> Result<Self> {
        Ok(self.with_layout(self.layout.slice(dim, start.into(), end.into(), step)?))
    }

    /// Without dimension `dim` if its size is 1; with `None`, without all dimensions of size 1.
    ///
    /// # Errors
    ///
    /// As all views.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn squeeze(&self, dim: impl Into<Option<i64>>) -> Result<Self> {
        Ok(self.with_layout(self.layout.squeeze(dim.into())?))
    }

    /// With a new dimension of size 1 before `dim`.
    ///
    /// # Errors
    ///
    /// As all views.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn unsqueeze(&self, dim: i64) -> Result<Self> {
        Ok(self.with_layout(self.layout.unsqueeze(dim)?))
    }

    /// A larger shape, in which dimensions of size 1 and new leading ones repeat the same
    /// elements; -1 keeps a size. No memory is used.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if another size would have to change.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<Self> {
        Ok(self.with_layout(self.layout.expand("expand", shape.into().as_slice())?))
    }
}
