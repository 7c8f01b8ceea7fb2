//! What lastref asks of a device: the [`Device`] trait, its identifiers and its errors.
//!
//! A device owns memory, streams and events, and moves bytes. It does not cache anything and keeps
//! no policy: [`CachingAllocator`](crate::CachingAllocator) does. Two kinds of memory exist:
//!
//! * **segments**, one contiguous range a call, as `cuMemAlloc` gives;
//! * **virtual memory**, where an address range is reserved first and physical *pages* are created
//!   and mapped into it one at a time, as `cuMemAddressReserve`, `cuMemCreate` and `cuMemMap` do.
//!
//! Every device has segments; [`DeviceProperties::page_bytes`] says whether it has virtual memory.
//!
//! # Order and threads
//!
//! All calls may be made from any thread at once. Work on one stream happens in the order of
//! submission; between streams only events order it. [`StreamId::DEFAULT`] is a stream like any
//! other here: it does not wait for the others (PyTorch's streams behave so too, they are created
//! non-blocking). A call that returns [`DeviceError`] has changed nothing, unless it says otherwise.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use thiserror::Error;

/// The position of a device among the devices of its kind, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceIndex(pub u32);

impl fmt::Display for DeviceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An address in device memory. Never a Rust pointer: only the device can follow it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address of nothing; what an allocation of zero bytes has.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    ///
    /// # Panics
    ///
    /// In debug builds, if the sum passes the end of the address space.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }

    /// Whether this is [`DevicePtr::NULL`].
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream of one device. Identifiers are never used again after the stream is destroyed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StreamId(pub u64);

impl StreamId {
    /// The stream that exists without being created.
    pub const DEFAULT: Self = Self(0);
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A stream event: a point in a stream's work that can be waited for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EventId(pub u64);

/// One physical page of device memory, [`DeviceProperties::page_bytes`] long.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageId(pub u64);

/// What a device is. Does not change while the device exists.
#[derive(Clone, Debug)]
pub struct DeviceProperties {
    /// Its position among the devices of its kind.
    pub index: DeviceIndex,
    /// Its name for people. A simulated device says that it is simulated.
    pub name: String,
    /// All the memory it has, in bytes.
    pub total_bytes: u64,
    /// The size of a physical page of virtual memory in bytes; `None` where there is none.
    pub page_bytes: Option<u64>,
    /// Whether the memory behind it is host memory, at the same addresses.
    pub simulated: bool,
}

/// How much memory the device says it has, for all processes together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that no process holds.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

/// Two-dimensional copies and fills: `height` rows of `width_bytes`, each row starting a pitch
/// after the one before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent2d {
    /// Bytes in a row that are copied or filled.
    pub width_bytes: u64,
    /// Number of rows.
    pub height: u64,
    /// Bytes from the start of a destination row to the start of the next; at least `width_bytes`.
    pub dst_pitch: u64,
    /// The same for the source; ignored by fills.
    pub src_pitch: u64,
}

impl Extent2d {
    /// A plain copy or fill of `bytes` bytes, as one row.
    #[must_use]
    pub const fn one_row(bytes: u64) -> Self {
        Self {
            width_bytes: bytes,
            height: 1,
            dst_pitch: bytes,
            src_pitch: bytes,
        }
    }

    /// Bytes from the start of the first row to the end of the last one, for rows of this `pitch`.
    ///
    /// # Errors
    ///
    /// What is wrong: rows that overlap, or that pass the end of the address space.
    pub fn span(self, pitch: u64) -> Result<u64, String> {
        if self.height > 1 && pitch < self.width_bytes {
            return Err(format!(
                "pitch {pitch} is less than the width, {}",
                self.width_bytes
            ));
        }
        if self.width_bytes == 0 || self.height == 0 {
            return Ok(0);
        }
        (self.height - 1)
            .checked_mul(pitch)
            .and_then(|rows| rows.checked_add(self.width_bytes))
            .ok_or_else(|| {
                format!(
                    "{} rows of pitch {pitch} pass the end of memory",
                    self.height
                )
            })
    }

    /// Whether a row of a copy's destination shares a byte with a row of its source. Both spans
    /// must end inside the address space.
    #[must_use]
    pub fn rows_overlap(self, dst: DevicePtr, src: DevicePtr) -> bool {
        let Self {
            width_bytes: width,
            height,
            dst_pitch,
            src_pitch,
        } = self;
        (0..height).any(|row| {
            let start = dst.0 + row * dst_pitch;
            // The last source row that starts before this row ends.
            let Some(reach) = (start + width).checked_sub(src.0 + 1) else {
                return false;
            };
            let last = if height > 1 {
                (reach / src_pitch).min(height - 1)
            } else {
                0
            };
            src.0 + last * src_pitch + width > start
        })
    }

    /// That a fill with `value` from `dst` on writes whole values.
    ///
    /// # Errors
    ///
    /// What is no multiple of the value's size.
    pub fn check_fill(self, dst: DevicePtr, value: FillValue) -> Result<(), String> {
        let size = value.bytes();
        // Of one row the pitch does not matter.
        let pitch = if self.height > 1 { self.dst_pitch } else { 0 };
        let multiples = [
            ("address", dst.0),
            ("width", self.width_bytes),
            ("pitch", pitch),
        ];
        for (what, number) in multiples {
            if !number.is_multiple_of(size) {
                return Err(format!(
                    "the {what} {number} is no multiple of the value's {size} bytes"
                ));
            }
        }
        Ok(())
    }
}

/// The value a fill repeats. The destination must be aligned to its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillValue {
    /// One byte.
    U8(u8),
    /// Two bytes, in the host's order.
    U16(u16),
    /// Four bytes, in the host's order.
    U32(u32),
}

impl FillValue {
    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8(_) => 1,
            Self::U16(_) => 2,
            Self::U32(_) => 4,
        }
    }
}

/// Why a device call failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has not enough memory left for this call.
    #[error("{call}: out of device memory, {requested} bytes requested, {free} of {total} free")]
    OutOfMemory {
        /// The call that failed.
        call: &'static str,
        /// Bytes it asked for.
        requested: u64,
        /// Bytes the device had free.
        free: u64,
        /// Bytes the device has.
        total: u64,
    },
    /// An argument does not fit: an address nobody allocated, a stream that does not exist.
    #[error("{call}: {reason}")]
    InvalidArgument {
        /// The call that failed.
        call: &'static str,
        /// What was wrong with it, with the numbers.
        reason: String,
    },
    /// The driver refused for a reason of its own.
    #[error("{call}: error {code}, {text}")]
    Driver {
        /// The call that failed.
        call: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's text.
        text: String,
    },
    /// This device cannot do that.
    #[error("{call}: not supported by this device")]
    NotSupported {
        /// The call that failed.
        call: &'static str,
    },
}

impl DeviceError {
    /// Whether the device said that it is full, as opposed to any other failure.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }
}

/// The result of a device call.
pub type DeviceResult<T> = Result<T, DeviceError>;

/// Is told of the blocks of an allocator, to check how they are used. A device that has one, such as
/// the simulated device's race detector, returns it from [`Device::block_observer`].
///
/// # Threads
///
/// Called on the allocating, freeing or recording thread, with no lock of the allocator held.
pub trait BlockObserver: Send + Sync + fmt::Debug {
    /// `bytes` bytes at `ptr` were handed out for use on `stream`, to the caller at `at`.
    fn allocated(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        stream: StreamId,
        at: &'static Location<'static>,
    );

    /// `stream` was recorded for the block at `ptr`.
    fn stream_recorded(&self, ptr: DevicePtr, stream: StreamId);

    /// The block of `bytes` bytes at `ptr` is about to be freed. Returns streams that were not
    /// recorded and still use it: the allocator takes them as recorded, so that a faulty program
    /// goes on with memory of its own.
    fn freed(&self, ptr: DevicePtr, bytes: u64) -> Vec<StreamId>;
}

/// A device: memory, streams, events and copies. See the [module](self) for order and threads.
///
/// # Safety
///
/// Implementors promise that ranges they hand out do not overlap while held, that a range stays
/// usable until it is given back, and that host slices are neither read nor written after the call
/// they were passed to has returned.
pub unsafe trait Device: Send + Sync + 'static {
    /// What this device is.
    fn properties(&self) -> &DeviceProperties;

    /// What the device says is free, for all processes together.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn memory_info(&self) -> DeviceResult<MemoryInfo>;

    /// Whether work of some stream of this device is being captured into a graph. Meanwhile nothing
    /// may be asked of the device's streams and events, and nothing waited for.
    fn is_capturing(&self) -> bool {
        false
    }

    /// Who wants to be told of an allocator's blocks on this device. Asked once, when the allocator
    /// is made.
    fn block_observer(&self) -> Option<Arc<dyn BlockObserver>> {
        None
    }

    // ---- segments -------------------------------------------------------------------------

    /// Allocates one contiguous range of at least `bytes` bytes, aligned to at least 512.
    ///
    /// # Errors
    ///
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::InvalidArgument`] for zero bytes.
    fn alloc_segment(&self, bytes: u64) -> DeviceResult<DevicePtr>;

    /// Gives back a range from [`alloc_segment`](Self::alloc_segment). Waits first until the
    /// device has finished all work submitted so far, as `cuMemFree` does.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if `ptr` is not the start of a segment.
    fn free_segment(&self, ptr: DevicePtr) -> DeviceResult<()>;

    // ---- virtual memory -------------------------------------------------------------------

    /// Reserves an address range of `bytes` bytes, a multiple of the page size and aligned to it.
    /// Takes no device memory.
    ///
    /// # Errors
    ///
    /// [`DeviceError::NotSupported`] without virtual memory; the driver's.
    fn reserve_range(&self, bytes: u64) -> DeviceResult<DevicePtr>;

    /// Gives back a reserved range. Nothing may be mapped in it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if it is not such a range or something is mapped in it.
    fn release_range(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()>;

    /// Creates one physical page. This is the call that takes device memory.
    ///
    /// # Errors
    ///
    /// [`DeviceError::OutOfMemory`]; [`DeviceError::NotSupported`] without virtual memory.
    fn create_page(&self) -> DeviceResult<PageId>;

    /// Destroys a physical page that is mapped nowhere. Its memory goes back to the device.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such page or it is mapped.
    fn destroy_page(&self, page: PageId) -> DeviceResult<()>;

    /// Maps a page at `ptr`, page-aligned, inside a reserved range. Usable only after
    /// [`set_access`](Self::set_access).
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if something is mapped there or `ptr` is in no range.
    fn map_page(&self, ptr: DevicePtr, page: PageId) -> DeviceResult<()>;

    /// Makes the mapped pages in `bytes` bytes from `ptr` readable and writable by this device.
    /// One call may cover many pages.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if some page in the range is not mapped.
    fn set_access(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()>;

    /// Unmaps the page at `ptr`. Does **not** wait for work that still uses it: the caller must.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if no page is mapped there.
    fn unmap_page(&self, ptr: DevicePtr) -> DeviceResult<()>;

    /// Creates `count` pages and adds them to `pages`, as that many calls of
    /// [`create_page`](Self::create_page) do.
    ///
    /// # Errors
    ///
    /// As there, from the first call that fails; `pages` has what was created before.
    fn create_pages(&self, count: usize, pages: &mut Vec<PageId>) -> DeviceResult<()> {
        for _ in 0..count {
            pages.push(self.create_page()?);
        }
        Ok(())
    }

    /// Maps pages one behind the other from `ptr` on, as [`map_page`](Self::map_page) does.
    ///
    /// # Errors
    ///
    /// As there, from the first call that fails, with the number of pages that were mapped before.
    fn map_pages(&self, ptr: DevicePtr, pages: &[PageId]) -> Result<(), (usize, DeviceError)> {
        let page_bytes = self.properties().page_bytes.unwrap_or(0);
        for (done, page) in pages.iter().enumerate() {
            let at = ptr.offset(done as u64 * page_bytes);
            self.map_page(at, *page).map_err(|error| (done, error))?;
        }
        Ok(())
    }

    /// Unmaps `count` pages one behind the other from `ptr` on, as
    /// [`unmap_page`](Self::unmap_page) does, but by one call where the device can: most of what
    /// unmapping costs is the same for one page and for many.
    ///
    /// # Errors
    ///
    /// As there, from the first call that fails, with the number of pages that were unmapped before.
    fn unmap_pages(&self, ptr: DevicePtr, count: usize) -> Result<(), (usize, DeviceError)> {
        let page_bytes = self.properties().page_bytes.unwrap_or(0);
        for done in 0..count {
            let at = ptr.offset(done as u64 * page_bytes);
            self.unmap_page(at).map_err(|error| (done, error))?;
        }
        Ok(())
    }

    // ---- streams and events ---------------------------------------------------------------

    /// Creates a stream. A lower `priority` is served first, as in CUDA.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn create_stream(&self, priority: i32) -> DeviceResult<StreamId>;

    /// Destroys a stream. Work already submitted to it is still done.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such stream or it is the default stream.
    fn destroy_stream(&self, stream: StreamId) -> DeviceResult<()>;

    /// Whether all work submitted to `stream` so far is done. Does not wait.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such stream.
    fn query_stream(&self, stream: StreamId) -> DeviceResult<bool>;

    /// Waits until all work submitted to `stream` so far is done.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such stream.
    fn synchronize_stream(&self, stream: StreamId) -> DeviceResult<()>;

    /// Waits until all work submitted to the device so far is done.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn synchronize(&self) -> DeviceResult<()>;

    /// Creates an event that has not been recorded yet.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn create_event(&self) -> DeviceResult<EventId>;

    /// Destroys an event. Waits that were submitted with it still hold.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such event.
    fn destroy_event(&self, event: EventId) -> DeviceResult<()>;

    /// Sets `event` to the work submitted to `stream` so far, forgetting what it stood for before.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such event or stream.
    fn record_event(&self, event: EventId, stream: StreamId) -> DeviceResult<()>;

    /// Whether the work `event` stands for is done; true if it was never recorded. Does not wait.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such event.
    fn query_event(&self, event: EventId) -> DeviceResult<bool>;

    /// Waits until the work `event` stands for is done; returns at once if it was never recorded.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such event.
    fn synchronize_event(&self, event: EventId) -> DeviceResult<()>;

    /// Makes work submitted to `stream` from now on wait for `event`. The event may belong to
    /// another device of the same kind. Does not wait on the host.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such event or stream.
    fn wait_event(&self, stream: StreamId, event: EventId) -> DeviceResult<()>;

    /// Microseconds of device time between two recorded, finished events of this device.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if either is missing, not recorded or not finished.
    fn elapsed_microseconds(&self, start: EventId, end: EventId) -> DeviceResult<f64>;

    // ---- moving bytes ---------------------------------------------------------------------
    //
    // Copies from and to host slices have read or written the slice when they return, whatever
    // the stream: host memory here is pageable, and CUDA stages it the same way. These calls know
    // their caller, for the reports of a device that looks for races.

    /// Copies `src` to `dst`, after the work submitted to `stream`.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not device memory or the stream unknown.
    #[track_caller]
    fn copy_from_host(&self, dst: DevicePtr, src: &[u8], stream: StreamId) -> DeviceResult<()>;

    /// Copies `src` to `dst` after the work submitted to `stream`, and waits for it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not device memory or the stream unknown.
    #[track_caller]
    fn copy_to_host(&self, dst: &mut [u8], src: DevicePtr, stream: StreamId) -> DeviceResult<()>;

    /// Submits a copy inside this device. The ranges may not overlap.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if a range is not device memory, the ranges overlap, or
    /// the stream is unknown.
    #[track_caller]
    fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()>;

    /// Submits a copy of rows inside this device.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy); also if a pitch is less than the width.
    #[track_caller]
    fn copy_2d(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()>;

    /// Submits a copy from device `peer` of the same kind to this one, on a stream of this one.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy); also if there is no such peer.
    #[track_caller]
    fn copy_from_peer(
        &self,
        dst: DevicePtr,
        peer: DeviceIndex,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()>;

    /// Submits a fill of `count` times `value` from `dst` on.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not device memory, `dst` is not aligned to
    /// the value, or the stream is unknown.
    #[track_caller]
    fn fill(
        &self,
        dst: DevicePtr,
        value: FillValue,
        count: u64,
        stream: StreamId,
    ) -> DeviceResult<()>;

    /// Submits a fill of rows. Width and pitch must be multiples of the value's size.
    ///
    /// # Errors
    ///
    /// As [`fill`](Self::fill).
    #[track_caller]
    fn fill_2d(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()>;
}

// SAFETY: every call goes to the same inner device, which makes the promise.
unsafe impl<D: Device + ?Sized> Device for Arc<D> {
    fn properties(&self) -> &DeviceProperties {
        (**self).properties()
    }
    fn memory_info(&self) -> DeviceResult<MemoryInfo> {
        (**self).memory_info()
    }
    fn is_capturing(&self) -> bool {
        (**self).is_capturing()
    }
    fn block_observer(&self) -> Option<Arc<dyn BlockObserver>> {
        (**self).block_observer()
    }
    fn alloc_segment(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        (**self).alloc_segment(bytes)
    }
    fn free_segment(&self, ptr: DevicePtr) -> DeviceResult<()> {
        (**self).free_segment(ptr)
    }
    fn reserve_range(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        (**self).reserve_range(bytes)
    }
    fn release_range(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        (**self).release_range(ptr, bytes)
    }
    fn create_page(&self) -> DeviceResult<PageId> {
        (**self).create_page()
    }
    fn destroy_page(&self, page: PageId) -> DeviceResult<()> {
        (**self).destroy_page(page)
    }
    fn map_page(&self, ptr: DevicePtr, page: PageId) -> DeviceResult<()> {
        (**self).map_page(ptr, page)
    }
    fn set_access(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        (**self).set_access(ptr, bytes)
    }
    fn unmap_page(&self, ptr: DevicePtr) -> DeviceResult<()> {
        (**self).unmap_page(ptr)
    }
    fn create_pages(&self, count: usize, pages: &mut Vec<PageId>) -> DeviceResult<()> {
        (**self).create_pages(count, pages)
    }
    fn map_pages(&self, ptr: DevicePtr, pages: &[PageId]) -> Result<(), (usize, DeviceError)> {
        (**self).map_pages(ptr, pages)
    }
    fn unmap_pages(&self, ptr: DevicePtr, count: usize) -> Result<(), (usize, DeviceError)> {
        (**self).unmap_pages(ptr, count)
    }
    fn create_stream(&self, priority: i32) -> DeviceResult<StreamId> {
        (**self).create_stream(priority)
    }
    fn destroy_stream(&self, stream: StreamId) -> DeviceResult<()> {
        (**self).destroy_stream(stream)
    }
    fn query_stream(&self, stream: StreamId) -> DeviceResult<bool> {
        (**self).query_stream(stream)
    }
    fn synchronize_stream(&self, stream: StreamId) -> DeviceResult<()> {
        (**self).synchronize_stream(stream)
    }
    fn synchronize(&self) -> DeviceResult<()> {
        (**self).synchronize()
    }
    fn create_event(&self) -> DeviceResult<EventId> {
        (**self).create_event()
    }
    fn destroy_event(&self, event: EventId) -> DeviceResult<()> {
        (**self).destroy_event(event)
    }
    fn record_event(&self, event: EventId, stream: StreamId) -> DeviceResult<()> {
        (**self).record_event(event, stream)
    }
    fn query_event(&self, event: EventId) -> DeviceResult<bool> {
        (**self).query_event(event)
    }
    fn synchronize_event(&self, event: EventId) -> DeviceResult<()> {
        (**self).synchronize_event(event)
    }
    fn wait_event(&self, stream: StreamId, event: EventId) -> DeviceResult<()> {
        (**self).wait_event(stream, event)
    }
    fn elapsed_microseconds(&self, start: EventId, end: EventId) -> DeviceResult<f64> {
        (**self).elapsed_microseconds(start, end)
    }
    fn copy_from_host(&self, dst: DevicePtr, src: &[u8], stream: StreamId) -> DeviceResult<()> {
        (**self).copy_from_host(dst, src, stream)
    }
    fn copy_to_host(&self, dst: &mut [u8], src: DevicePtr, stream: StreamId) -> DeviceResult<()> {
        (**self).copy_to_host(dst, src, stream)
    }
    fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        (**self).copy(dst, src, bytes, stream)
    }
    fn copy_2d(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        (**self).copy_2d(dst, src, extent, stream)
    }
    fn copy_from_peer(
        &self,
        dst: DevicePtr,
        peer: DeviceIndex,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        (**self).copy_from_peer(dst, peer, src, bytes, stream)
    }
    fn fill(
        &self,
        dst: DevicePtr,
        value: FillValue,
        count: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        (**self).fill(dst, value, count, stream)
    }
    fn fill_2d(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        (**self).fill_2d(dst, value, extent, stream)
    }
}
