//! A caching allocator for device memory, and a simulated device to run it on without a GPU.

pub mod device;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub mod sim;
mod sync;

pub use device::{
    Device, DeviceError, DeviceIndex, DeviceProperties, DevicePtr, DeviceResult, EventId, Extent2d,
    FillValue, MemoryInfo, PageId, StreamId,
};
