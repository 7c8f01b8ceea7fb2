//! Between cudarc's types and ours: its version, its contexts and streams over ours, and its slices
//! on our memory.
//!
//! # Invariants
//!
//! 1. A slice made on our memory is never dropped as cudarc would, which would free it through the
//!    driver: [`BorrowedSlice`] lends views of it only, and takes it apart itself.
//! 2. A stream that was lent stays with the driver for good, whoever holds cudarc's handle on it.
//! 3. The context that is lent does not track events: order between streams is ours to keep, by
//!    [`Device::wait_event`](lastref_alloc::Device::wait_event) and `record_stream`.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr};
use lastref_alloc::{DeviceError, DevicePtr, DeviceResult, StreamId};

use crate::device::CudaDevice;
use crate::raw::{self, Failure, Stream};
use crate::sync::{Mutex, lock};

/// What was lent of one device.
#[derive(Debug, Default)]
pub(crate) struct Lent {
    context: OnceLock<Arc<CudaContext>>,
    /// Kept for good (invariant 2).
    streams: Mutex<Vec<Arc<Stream>>>,
}

impl CudaDevice {
    /// This device's primary context as cudarc has it, to load modules in. One for all callers; it
    /// does not track events (invariant of the module `interop`): order streams as lastref does.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn cudarc_context(&self) -> DeviceResult<Arc<CudaContext>> {
        let _entered = self.enter("cudarc_context")?;
        if let Some(context) = self.0.cudarc.context.get() {
            return Ok(Arc::clone(context));
        }
        let index = raw::host(u64::from(self.index()));
        let call = "CudaContext::new";
        let context = CudaContext::new(index).map_err(|code| self.error(Failure { call, code }))?;
        // SAFETY: streams are put in order by lastref's callers (invariant 3).
        unsafe { context.disable_event_tracking() };
        // `new` leaves the context current, which is what `_entered` has made it and will undo.
        Ok(Arc::clone(self.0.cudarc.context.get_or_init(|| context)))
    }

    /// One of our streams as cudarc has it, to launch kernels on. It is never destroyed from now on.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such stream; the driver's.
    pub fn cudarc_stream(&self, stream: StreamId) -> DeviceResult<Arc<CudaStream>> {
        let context = self.cudarc_context()?;
        let ours = self.stream("cudarc_stream", stream)?;
        let mut lent = lock(&self.0.cudarc.streams);
        if !lent.iter().any(|other| Arc::ptr_eq(other, &ours)) {
            lent.push(Arc::clone(&ours));
        }
        // SAFETY: a stream of this context, which is kept for good (invariant 2).
        Ok(unsafe { context.wrap_borrowed_stream(ours.raw()) })
    }

    /// Tells of somebody else's stream of this device, and gives it a number here: memory may then be
    /// allocated for it, work submitted to it, and its capture into a graph is seen.
    ///
    /// # Safety
    ///
    /// The stream must belong to the device's primary context and stay there until
    /// [`destroy_stream`](lastref_alloc::Device::destroy_stream) is called with the number, which
    /// leaves the stream itself alone.
    ///
    /// # Errors
    ///
    /// The driver's, if the context cannot be had.
    pub unsafe fn adopt_stream(&self, stream: sys::CUstream) -> DeviceResult<StreamId> {
        let context = self.context()?;
        // SAFETY: the caller promises that it lives so long.
        let stream = unsafe { Stream::foreign(stream, context) };
        Ok(self.add_stream(stream))
    }

    /// Memory of this device as a slice for cudarc, on one of our streams.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such stream or `ptr` is not aligned to `T`; the
    /// driver's.
    ///
    /// # Safety
    ///
    /// The memory must hold `len` values of `T`, and stay while the slice does. Work through the slice
    /// must be in order with all other work on it, as on one stream.
    pub unsafe fn borrow_slice<T: DeviceRepr>(
        &self,
        ptr: DevicePtr,
        len: usize,
        stream: StreamId,
    ) -> DeviceResult<BorrowedSlice<T>> {
        if !ptr.0.is_multiple_of(align_of::<T>() as u64) {
            return Err(DeviceError::InvalidArgument {
                call: "borrow_slice",
                reason: format!("{ptr} is not aligned to {} bytes", align_of::<T>()),
            });
        }
        let stream = self.cudarc_stream(stream)?;
        // SAFETY: the caller promises the memory; the slice never gets to free it (invariant 1). No
        // event is made, which could fail: the context tracks none (invariant 3).
        let slice = unsafe { stream.upgrade_device_ptr(ptr.0, len) };
        Ok(BorrowedSlice(ManuallyDrop::new(slice)))
    }

    fn index(&self) -> u32 {
        lastref_alloc::Device::properties(self).index.0
    }
}

/// Our memory as cudarc's kernels and copies take it. Dropping it frees nothing.
pub struct BorrowedSlice<T>(ManuallyDrop<CudaSlice<T>>);

impl<T> BorrowedSlice<T> {
    /// All of it, to be read.
    #[must_use]
    pub fn view(&self) -> CudaView<'_, T> {
        self.0.as_view()
    }

    /// All of it, to be written.
    #[must_use]
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.0.as_view_mut()
    }

    /// The stream it belongs to, which is one of ours.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.0.stream()
    }

    /// How many values it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T> Drop for BorrowedSlice<T> {
    fn drop(&mut self) {
        // SAFETY: the value is being dropped, and nobody takes its slice afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.0) };
        // Drops all but the memory (invariant 1).
        let _ = slice.leak();
    }
}

impl<T> fmt::Debug for BorrowedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BorrowedSlice")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
