//! Events: points in a stream's work that can be waited for and timed.

use std::sync::OnceLock;

use crate::alloc::EventId;
use crate::cuda::runtime;
use crate::cuda::stream::{Stream, current_stream};
use crate::{Error, Result};

/// A point in a stream's work. Created on its device when it is first recorded.
///
/// ```
/// use lastref::{Tensor, cuda};
/// # lastref::sim::enable("8GiB")?;
/// let (start, end) = (cuda::Event::new(), cuda::Event::new());
/// let stream = cuda::current_stream(None)?;
/// start.record(&stream)?;
/// let tensor = Tensor::zeros_with([1 << 20], lastref::Device::Cuda(0))?;
/// end.record(&stream)?;
/// end.synchronize()?;
/// assert!(start.elapsed_time(&end)? > 0.0);
/// # Ok::<(), lastref::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Event(OnceLock<(u32, EventId)>);

impl Event {
    /// An event that stands for no work yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// The device it was recorded on; `None` before.
    #[must_use]
    pub fn device(&self) -> Option<u32> {
        self.0.get().map(|(device, _)| *device)
    }

    /// Sets it to the work `stream` has now, forgetting what it stood for before.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if it was recorded on another device before; the device's.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let call = "event.record";
        let allocator = &runtime::device(call, stream.device())?.allocator;
        let device = allocator.device();
        if self.0.get().is_none() {
            let id = device.create_event()?;
            if self.0.set((stream.device(), id)).is_err() {
                // Another thread recorded first; its event stays.
                device.destroy_event(id)?;
            }
        }
        let Some(&(on, id)) = self.0.get() else {
            unreachable!("the event was set above")
        };
        if on != stream.device() {
            return Err(Error::argument(
                call,
                format!(
                    "the event belongs to cuda:{on}, the stream to cuda:{}",
                    stream.device()
                ),
            ));
        }
        // Through the allocator, which learns who comes after whom.
        Ok(allocator.record_event(id, stream.id())?)
    }

    /// [`record`](Self::record) on the current stream of the current device.
    ///
    /// # Errors
    ///
    /// As `record`.
    pub fn record_current(&self) -> Result<()> {
        self.record(&current_stream(self.device())?)
    }

    /// Whether the work it stands for is done; true if it was never recorded. Does not wait.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn query(&self) -> Result<bool> {
        let Some(&(device, id)) = self.0.get() else {
            return Ok(true);
        };
        let entry = runtime::device("event.query", device)?;
        Ok(entry.allocator.query_event(id)?)
    }

    /// Waits on the host until the work it stands for is done.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn synchronize(&self) -> Result<()> {
        let Some(&(device, id)) = self.0.get() else {
            return Ok(());
        };
        let entry = runtime::device("event.synchronize", device)?;
        Ok(entry.allocator.synchronize_event(id)?)
    }

    /// Makes work submitted to `stream` from now on wait for it. Does not wait on the host.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        let Some(&(device, id)) = self.0.get() else {
            return Ok(());
        };
        let allocator = &runtime::device("event.wait", stream.device())?.allocator;
        if device == stream.device() {
            allocator.wait_event(stream.id(), id)?;
        } else {
            allocator.device().wait_event(stream.id(), id)?;
        }
        Ok(())
    }

    /// Milliseconds of device time from this event to `end`. Both must be recorded and done.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if one was never recorded or they are on different devices;
    /// [`Error::Device`] if one is not done yet.
    pub fn elapsed_time(&self, end: &Self) -> Result<f64> {
        let call = "event.elapsed_time";
        let (Some(&(device, start)), Some(&(end_device, end))) = (self.0.get(), end.0.get()) else {
            return Err(Error::argument(call, "both events must be recorded first"));
        };
        if device != end_device {
            return Err(Error::argument(
                call,
                format!("the events are on different devices, cuda:{device} and cuda:{end_device}"),
            ));
        }
        let entry = runtime::device(call, device)?;
        let microseconds = entry.allocator.device().elapsed_microseconds(start, end)?;
        Ok(microseconds / 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(&(device, id)) = self.0.get()
            && let Ok(entry) = runtime::device("event.drop", device)
        {
            // An event that cannot be destroyed costs the driver a few bytes, and nobody can act
            // on it here.
            let _ = entry.allocator.destroy_event(id);
        }
    }
}
