//! Memory of a GPU that belongs to somebody else.

use std::any::Any;

use lastref_cuda::CudaDevice;

use crate::alloc::{Device, DevicePtr, StreamId};
use crate::cuda::{runtime, stream::current_id};
use crate::sync::{Mutex, lock};
use crate::{Error, Result};

/// Somebody else's memory on a GPU, and its owner, which is dropped once the streams that used the
/// memory are done.
pub(crate) struct ForeignMemory {
    device: &'static CudaDevice,
    ptr: DevicePtr,
    bytes: u64,
    /// Streams whose work may use it: the one that was current, and those that were recorded.
    streams: Mutex<Vec<StreamId>>,
    /// `None` while it is dropped.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

impl ForeignMemory {
    /// # Safety
    ///
    /// `bytes` bytes at `ptr` must be memory of the device until `owner` is dropped.
    pub(crate) unsafe fn new(
        call: &'static str,
        index: u32,
        ptr: u64,
        bytes: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // For the error of a device that is not there.
        runtime::device(call, index)?;
        let runtime = runtime::active().map_err(|missing| missing.into_error(call))?;
        let device = runtime.real.get(index as usize).ok_or_else(|| {
            Error::argument(
                call,
                format!("cuda:{index} is simulated, and has no memory but its own"),
            )
        })?;
        let ptr = DevicePtr(ptr);
        // SAFETY: the caller promises the memory until the owner goes, which is after the drop below.
        unsafe { device.tell_foreign(ptr, bytes) }?;
        Ok(Self {
            device,
            ptr,
            bytes,
            streams: Mutex::new(vec![current_id(index)]),
            owner: Some(owner),
        })
    }

    pub(crate) const fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn record_stream(&self, stream: StreamId) {
        let mut streams = lock(&self.streams);
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        self.device.forget_foreign(self.ptr, self.bytes);
        // Nothing may be waited for during a capture, so nothing can be given back.
        let is_done = !self.device.is_capturing()
            && lock(&self.streams)
                .iter()
                .all(|stream| self.device.synchronize_stream(*stream).is_ok());
        let owner = self.owner.take();
        if !is_done {
            // Better lost than used again while a stream still works on it.
            let _kept = owner.map(Box::leak);
        }
    }
}
