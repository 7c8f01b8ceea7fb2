//! A caching allocator for device memory, and a simulated device to run it on without a GPU.

pub mod device;
mod sync;

pub use device::{
    Device, DeviceError, DeviceIndex, DeviceProperties, DevicePtr, DeviceResult, EventId, Extent2d,
    FillValue, MemoryInfo, PageId, StreamId,
};
