//! One function for each call to the driver, and the handles that they make.
//!
//! # Invariants
//!
//! 1. Whoever calls a function here has a [`Driver`](crate::driver::Driver), or has got a handle from
//!    one: the function is there (invariant 1 of [`driver`](crate::driver)).
//! 2. A handle here was made by the driver and is not destroyed before it is dropped. So a borrow of
//!    one is a live handle.
//! 3. Out-parameters are locals, valid for the call.
//! 4. Device addresses are numbers to the driver: wrong ones are refused, or end the context with an
//!    error, and touch no memory of the host.
//! 5. The context that a call needs is current on the calling thread, which
//!    [`Entered`](crate::device) sees to. Without one the driver refuses, and nothing is touched.
//!
//! Which codes there are is cudarc's knowledge: a driver that returns a code which the bindings of
//! CUDA 12.9 do not list, from one of these calls, would be outside what Rust allows of an enum. The
//! codes that CUDA 13 adds belong to other calls.

use std::ffi::{CStr, c_void};
use std::mem::size_of;
use std::ptr::NonNull;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use lastref_alloc::{DeviceError, Extent2d, FillValue};

use crate::stats;
use crate::sync::{AtomicBool, Ordering};

/// A call that failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    pub(crate) code: DriverError,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn code(self) -> i32 {
        self.code.0 as i32
    }

    pub(crate) fn is(self, code: sys::CUresult) -> bool {
        self.code.0 == code
    }

    /// The driver's name for the code, and its text. What earlier work did is reported by whatever
    /// call comes next, which the text says.
    pub(crate) fn text(self) -> String {
        let known = |text: &CStr| text.to_string_lossy().into_owned();
        let name = self.code.error_name().map(known);
        let mut text = match (name, self.code.error_string().map(known)) {
            (Ok(name), Ok(text)) => format!("{name}: {text}"),
            (Ok(text), Err(_)) | (Err(_), Ok(text)) => text,
            (Err(_), Err(_)) => "which the driver has no text for".to_owned(),
        };
        if self.is_sticky() {
            text += " (by work submitted earlier; this device is lost to this process)";
        }
        text
    }

    /// Whether every later call on the same context will say the same.
    pub(crate) fn is_sticky(self) -> bool {
        use sys::CUresult as R;
        matches!(
            self.code.0,
            R::CUDA_ERROR_ILLEGAL_ADDRESS
                | R::CUDA_ERROR_LAUNCH_TIMEOUT
                | R::CUDA_ERROR_ASSERT
                | R::CUDA_ERROR_HARDWARE_STACK_ERROR
                | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | R::CUDA_ERROR_MISALIGNED_ADDRESS
                | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | R::CUDA_ERROR_INVALID_PC
                | R::CUDA_ERROR_LAUNCH_FAILED
                | R::CUDA_ERROR_ECC_UNCORRECTABLE
                | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | R::CUDA_ERROR_EXTERNAL_DEVICE
        )
    }

    /// Whether the context is gone for good.
    pub(crate) fn is_end_of_context(self) -> bool {
        use sys::CUresult as R;
        matches!(
            self.code.0,
            R::CUDA_ERROR_CONTEXT_IS_DESTROYED | R::CUDA_ERROR_INVALID_CONTEXT
        )
    }
}

impl From<Failure> for DeviceError {
    fn from(failure: Failure) -> Self {
        Self::Driver {
            call: failure.call,
            code: failure.code(),
            text: failure.text(),
        }
    }
}

/// Names the call in an error.
trait Named<T> {
    fn named(self, call: &'static str) -> Outcome<T>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &'static str) -> Outcome<T> {
        self.map_err(|code| Failure { call, code })
    }
}

// ---- the driver and its devices -----------------------------------------------------------

pub(crate) fn init() -> Outcome<()> {
    result::init().named("cuInit")
}

pub(crate) fn device_count() -> Outcome<i32> {
    result::device::get_count().named("cuDeviceGetCount")
}

/// A device, as the driver numbers them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ordinal(sys::CUdevice);

impl Ordinal {
    pub(crate) fn get(index: i32) -> Outcome<Self> {
        result::device::get(index).named("cuDeviceGet").map(Self)
    }

    pub(crate) fn name(self) -> Outcome<String> {
        result::device::get_name(self.0).named("cuDeviceGetName")
    }

    pub(crate) fn total_bytes(self) -> Outcome<u64> {
        // SAFETY: `get` made the handle (invariant 2).
        let total = unsafe { result::device::total_mem(self.0) };
        total.named("cuDeviceTotalMem").map(|bytes| bytes as u64)
    }

    pub(crate) fn attribute(self, attribute: sys::CUdevice_attribute) -> Outcome<i32> {
        // SAFETY: as above.
        let value = unsafe { result::device::get_attribute(self.0, attribute) };
        value.named("cuDeviceGetAttribute")
    }

    pub(crate) fn can_access(self, peer: Self) -> Outcome<bool> {
        let mut can = 0;
        // SAFETY: both are devices (invariant 2), the result is a local (invariant 3).
        let result = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.0, peer.0) };
        result.result().named("cuDeviceCanAccessPeer")?;
        Ok(can != 0)
    }

    /// The size in which physical memory is created.
    pub(crate) fn granularity(self) -> Outcome<u64> {
        let property = self.page_property();
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: both pointers are to locals (invariant 3).
        let result = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const property, minimum)
        };
        result.result().named("cuMemGetAllocationGranularity")?;
        Ok(bytes as u64)
    }

    fn location(self) -> sys::CUmemLocation {
        // SAFETY: a plain C structure of integers, for which zeros are valid.
        let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
        location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        location.id = self.0;
        location
    }

    /// Pinned memory of this device, for this process alone.
    fn page_property(self) -> sys::CUmemAllocationProp {
        // SAFETY: a C structure of integers, enums that have a zero, and a pointer that may be null.
        let mut property: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        property.location = self.location();
        property
    }

    pub(crate) fn retain_primary_context(self) -> Outcome<Context> {
        // SAFETY: a device (invariant 2).
        let context = unsafe { result::primary_ctx::retain(self.0) };
        context.named("cuDevicePrimaryCtxRetain").map(Context)
    }

    // ---- virtual memory, for which no context need be current -----------------------------

    pub(crate) fn create_page(self, bytes: u64) -> Outcome<u64> {
        let property = self.page_property();
        let mut page = 0;
        // SAFETY: both pointers are to locals (invariant 3).
        let result =
            unsafe { sys::cuMemCreate(&raw mut page, host(bytes), &raw const property, 0) };
        result.result().named("cuMemCreate")?;
        Ok(page)
    }

    pub(crate) fn set_access(self, ptr: u64, bytes: u64) -> Outcome<()> {
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the description is a local (invariant 3), of which there is one.
        let result = unsafe { sys::cuMemSetAccess(ptr, host(bytes), &raw const access, 1) };
        result.result().named("cuMemSetAccess")
    }
}

/// A byte count as the host counts. The crate exists only where `usize` has 64 bits.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the crate is compiled only where usize has 64 bits"
)]
pub(crate) const fn host(bytes: u64) -> usize {
    bytes as usize
}

pub(crate) fn reserve_range(bytes: u64, align: u64) -> Outcome<u64> {
    let mut ptr = 0;
    // SAFETY: the result is a local (invariant 3); no address is asked for.
    let result = unsafe { sys::cuMemAddressReserve(&raw mut ptr, host(bytes), host(align), 0, 0) };
    result.result().named("cuMemAddressReserve")?;
    Ok(ptr)
}

pub(crate) fn release_range(ptr: u64, bytes: u64) -> Outcome<()> {
    // SAFETY: a device address (invariant 4).
    let result = unsafe { sys::cuMemAddressFree(ptr, host(bytes)) };
    result.result().named("cuMemAddressFree")
}

pub(crate) fn map(ptr: u64, bytes: u64, page: u64) -> Outcome<()> {
    // SAFETY: a device address (invariant 4); the handle is a number the driver knows or refuses.
    let result = unsafe { sys::cuMemMap(ptr, host(bytes), 0, page, 0) };
    result.result().named("cuMemMap")
}

pub(crate) fn unmap(ptr: u64, bytes: u64) -> Outcome<()> {
    // SAFETY: a device address (invariant 4).
    let result = unsafe { sys::cuMemUnmap(ptr, host(bytes)) };
    result.result().named("cuMemUnmap")
}

pub(crate) fn destroy_page(page: u64) -> Outcome<()> {
    // SAFETY: the handle is a number the driver knows or refuses.
    let result = unsafe { sys::cuMemRelease(page) };
    result.result().named("cuMemRelease")
}

// ---- contexts -----------------------------------------------------------------------------

/// A context, which this process keeps to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Context(sys::CUcontext);

// SAFETY: a context is an address for the driver alone, and may be used on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The context that is current on this thread.
pub(crate) fn current_context() -> Outcome<Option<Context>> {
    let current = result::ctx::get_current().named("cuCtxGetCurrent")?;
    Ok(current.map(Context))
}

pub(crate) fn set_current_context(context: Option<Context>) -> Outcome<()> {
    let raw = context.map_or(std::ptr::null_mut(), |context| context.0);
    // SAFETY: the context was made by the driver (invariant 2), or null, which leaves none current.
    let result = unsafe { result::ctx::set_current(raw) };
    result.named("cuCtxSetCurrent")
}

pub(crate) fn synchronize_context() -> Outcome<()> {
    result::ctx::synchronize().named("cuCtxSynchronize")
}

pub(crate) fn enable_peer_access(peer: Context) -> Outcome<()> {
    // SAFETY: a context of ours (invariant 2).
    let result = unsafe { sys::cuCtxEnablePeerAccess(peer.0, 0) };
    result.result().named("cuCtxEnablePeerAccess")
}

/// Lets this thread call what is refused while any stream is captured, until dropped: taking memory
/// and asking our own events is no part of a graph.
#[derive(Debug)]
pub(crate) struct Uncaptured(sys::CUstreamCaptureMode);

impl Uncaptured {
    pub(crate) fn enter() -> Outcome<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        exchange_capture_mode(&mut mode)?;
        Ok(Self(mode))
    }
}

impl Drop for Uncaptured {
    fn drop(&mut self) {
        if let Err(failure) = exchange_capture_mode(&mut self.0) {
            stats::failed_in_drop(failure);
        }
    }
}

fn exchange_capture_mode(mode: &mut sys::CUstreamCaptureMode) -> Outcome<()> {
    // SAFETY: the mode is a local of the caller (invariant 3).
    let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) };
    result.result().named("cuThreadExchangeStreamCaptureMode")
}

// ---- memory -------------------------------------------------------------------------------

/// Free bytes and all bytes.
pub(crate) fn memory_info() -> Outcome<(u64, u64)> {
    let (free, total) = result::mem_get_info().named("cuMemGetInfo")?;
    Ok((free as u64, total as u64))
}

pub(crate) fn alloc(bytes: u64) -> Outcome<u64> {
    // SAFETY: the memory is reached by device address only (invariant 4), and holds anything.
    let ptr = unsafe { result::malloc_sync(host(bytes)) };
    ptr.named("cuMemAlloc")
}

pub(crate) fn free(ptr: u64) -> Outcome<()> {
    // SAFETY: the address came from `alloc` and was not given back, which the caller's books say;
    // else the driver refuses (invariant 4).
    let result = unsafe { result::free_sync(ptr) };
    result.named("cuMemFree")
}

/// Host memory that the device reads and writes directly. Zeroed, and freed when dropped.
#[derive(Debug)]
pub(crate) struct HostBlock {
    ptr: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory of the process, bound to no thread; reached through borrows of the owner only.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    pub(crate) fn new(bytes: usize) -> Outcome<Self> {
        const CALL: &str = "cuMemHostAlloc";
        // Portable: every context may use it.
        // SAFETY: the memory is owned by the value made here.
        let ptr = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let ptr = ptr.named(CALL)?.cast::<u8>();
        let Some(ptr) = NonNull::new(ptr) else {
            let code = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            return Err(Failure { call: CALL, code });
        };
        // SAFETY: so many bytes were allocated there, and nobody else has them.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(Self { ptr, bytes })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Gives the memory up without freeing it; how much that was.
    pub(crate) fn leak(mut self) -> usize {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is there and was written (in `new`); nobody writes during the borrow.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) }
    }

    /// Submits a copy of the first `bytes` bytes to `dst`.
    ///
    /// # Safety
    ///
    /// The block must not be written or dropped before the stream has come that far.
    pub(crate) unsafe fn copy_to_device(
        &self,
        dst: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Outcome<()> {
        let source = &self.bytes()[..bytes];
        // SAFETY: the bytes stay as the caller promises; a device address (invariant 4).
        let result = unsafe { result::memcpy_htod_async(dst, source, stream.raw) };
        result.named("cuMemcpyHtoDAsync")
    }

    /// Submits a copy of `bytes` bytes from `src` to the start of the block.
    ///
    /// # Safety
    ///
    /// The block must not be read, written or dropped before the stream has come that far.
    pub(crate) unsafe fn copy_from_device(
        &mut self,
        src: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Outcome<()> {
        let target = &mut self.bytes_mut()[..bytes];
        // SAFETY: as above.
        let result = unsafe { result::memcpy_dtoh_async(target, src, stream.raw) };
        result.named("cuMemcpyDtoHAsync")
    }
}

impl Default for HostBlock {
    /// No memory at all.
    fn default() -> Self {
        Self {
            ptr: NonNull::dangling(),
            bytes: 0,
        }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if self.bytes > 0 && stats::may_release() {
            // SAFETY: allocated by the driver in `new`, and freed once.
            let result = unsafe { result::free_host(self.ptr.as_ptr().cast::<c_void>()) };
            if let Err(failure) = result.named("cuMemFreeHost") {
                stats::failed_in_drop(failure);
            }
        }
    }
}

// ---- streams ------------------------------------------------------------------------------

/// A stream. Destroyed when dropped, if it is ours.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: sys::CUstream,
    is_owned: bool,
    context: Context,
}

// SAFETY: a stream is an address for the driver alone, and may be used on any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The stream of the current context, `context`, that exists without being created. It does not
    /// wait for those created here, nor they for it.
    pub(crate) const fn default_of(context: Context) -> Self {
        Self {
            raw: std::ptr::null_mut(),
            is_owned: false,
            context,
        }
    }

    /// A new stream of the current context, `context`.
    pub(crate) fn new(context: Context, priority: i32) -> Outcome<Self> {
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create_with_priority(kind, priority);
        Ok(Self {
            raw: raw.named("cuStreamCreateWithPriority")?,
            is_owned: true,
            context,
        })
    }

    /// Somebody else's stream.
    ///
    /// # Safety
    ///
    /// It must be a stream of `context` that lives as long as what is made here.
    #[cfg(feature = "cudarc")]
    pub(crate) const unsafe fn foreign(raw: sys::CUstream, context: Context) -> Self {
        Self {
            raw,
            is_owned: false,
            context,
        }
    }

    #[cfg(feature = "cudarc")]
    pub(crate) const fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Destroys it, to be dropped next. Its work is still done.
    pub(crate) fn destroy(&mut self) -> Outcome<()> {
        if !self.is_owned {
            return Ok(());
        }
        // SAFETY: a stream of ours (invariant 2), which nobody else borrows; the flag below sees to
        // it that this is done once.
        let result = unsafe { result::stream::destroy(self.raw) };
        result.named("cuStreamDestroy")?;
        self.is_owned = false;
        Ok(())
    }

    pub(crate) fn query(&self) -> Outcome<bool> {
        // SAFETY: a live stream (invariant 2).
        let result = unsafe { sys::cuStreamQuery(self.raw) };
        done(result, "cuStreamQuery")
    }

    pub(crate) fn synchronize(&self) -> Outcome<()> {
        // SAFETY: a live stream (invariant 2).
        let result = unsafe { result::stream::synchronize(self.raw) };
        result.named("cuStreamSynchronize")
    }

    pub(crate) fn wait(&self, event: &Event) -> Outcome<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: a live stream and a live event (invariant 2).
        let result = unsafe { result::stream::wait_event(self.raw, event.raw, flags) };
        result.named("cuStreamWaitEvent")
    }

    /// Whether its work goes into a graph. The default stream says so too while another is captured
    /// in a way that forbids its use.
    pub(crate) fn is_capturing(&self) -> Outcome<bool> {
        // SAFETY: a live stream (invariant 2).
        let status = unsafe { result::stream::is_capturing(self.raw) };
        match status.named("cuStreamIsCapturing") {
            Ok(status) => Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
            Err(failure) if failure.is(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) => {
                Ok(true)
            }
            Err(failure) => Err(failure),
        }
    }

    // ---- copies and fills ----

    pub(crate) fn copy(&self, dst: u64, src: u64, bytes: u64) -> Outcome<()> {
        // SAFETY: device addresses (invariant 4), a live stream (invariant 2).
        let result = unsafe { result::memcpy_dtod_async(dst, src, host(bytes), self.raw) };
        result.named("cuMemcpyDtoDAsync")
    }

    pub(crate) fn copy_rows(&self, dst: u64, src: u64, extent: Extent2d) -> Outcome<()> {
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: src,
            srcArray: std::ptr::null_mut(),
            srcPitch: host(extent.src_pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: dst,
            dstArray: std::ptr::null_mut(),
            dstPitch: host(extent.dst_pitch),
            WidthInBytes: host(extent.width_bytes),
            Height: host(extent.height),
        };
        // SAFETY: device addresses (invariant 4), a live stream (invariant 2), a local (invariant 3).
        let result = unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw) };
        result.result().named("cuMemcpy2DAsync")
    }

    pub(crate) fn copy_from_peer(
        &self,
        dst: u64,
        peer: Context,
        src: u64,
        bytes: u64,
    ) -> Outcome<()> {
        // SAFETY: device addresses (invariant 4), live handles (invariant 2).
        let result = unsafe {
            result::memcpy_peer_async(self.context.0, dst, peer.0, src, host(bytes), self.raw)
        };
        result.named("cuMemcpyPeerAsync")
    }

    pub(crate) fn fill(&self, dst: u64, value: FillValue, count: u64) -> Outcome<()> {
        let count = host(count);
        let (result, call) = match value {
            FillValue::U8(value) => {
                // SAFETY: a device address (invariant 4), a live stream (invariant 2).
                let result = unsafe { sys::cuMemsetD8Async(dst, value, count, self.raw) };
                (result, "cuMemsetD8Async")
            }
            FillValue::U16(value) => {
                // SAFETY: as above.
                let result = unsafe { sys::cuMemsetD16Async(dst, value, count, self.raw) };
                (result, "cuMemsetD16Async")
            }
            FillValue::U32(value) => {
                // SAFETY: as above.
                let result = unsafe { sys::cuMemsetD32Async(dst, value, count, self.raw) };
                (result, "cuMemsetD32Async")
            }
        };
        result.result().named(call)
    }

    pub(crate) fn fill_rows(&self, dst: u64, value: FillValue, extent: Extent2d) -> Outcome<()> {
        let (pitch, height) = (host(extent.dst_pitch), host(extent.height));
        let width = host(extent.width_bytes / value.bytes());
        let (result, call) = match value {
            FillValue::U8(value) => {
                // SAFETY: a device address (invariant 4), a live stream (invariant 2).
                let result =
                    unsafe { sys::cuMemsetD2D8Async(dst, pitch, value, width, height, self.raw) };
                (result, "cuMemsetD2D8Async")
            }
            FillValue::U16(value) => {
                // SAFETY: as above.
                let result =
                    unsafe { sys::cuMemsetD2D16Async(dst, pitch, value, width, height, self.raw) };
                (result, "cuMemsetD2D16Async")
            }
            FillValue::U32(value) => {
                // SAFETY: as above.
                let result =
                    unsafe { sys::cuMemsetD2D32Async(dst, pitch, value, width, height, self.raw) };
                (result, "cuMemsetD2D32Async")
            }
        };
        result.result().named(call)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_owned
            && stats::may_release()
            && let Err(failure) = self.destroy()
        {
            stats::failed_in_drop(failure);
        }
    }
}

/// "Not yet" is an answer, not a failure.
fn done(result: sys::CUresult, call: &'static str) -> Outcome<bool> {
    if result == sys::CUresult::CUDA_ERROR_NOT_READY {
        return Ok(false);
    }
    result.result().named(call).map(|()| true)
}

// ---- events -------------------------------------------------------------------------------

/// An event, destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Event {
    raw: sys::CUevent,
    is_owned: bool,
    /// Whether it was ever recorded.
    recorded: AtomicBool,
}

// SAFETY: an event is an address for the driver alone, and may be used on any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event of the current context. Recording one that can be timed costs a little more.
    pub(crate) fn new(timed: bool) -> Outcome<Self> {
        let flags = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        Ok(Self {
            raw: result::event::create(flags).named("cuEventCreate")?,
            is_owned: true,
            recorded: AtomicBool::new(false),
        })
    }

    /// Destroys it, to be dropped next. Waits that were submitted with it still hold.
    pub(crate) fn destroy(&mut self) -> Outcome<()> {
        // SAFETY: an event of ours (invariant 2), which nobody else borrows; the flag below sees to
        // it that this is done once.
        let result = unsafe { result::event::destroy(self.raw) };
        result.named("cuEventDestroy")?;
        self.is_owned = false;
        Ok(())
    }

    pub(crate) fn record(&self, stream: &Stream) -> Outcome<()> {
        // SAFETY: a live event and a live stream (invariant 2).
        let result = unsafe { result::event::record(self.raw, stream.raw) };
        result.named("cuEventRecord")?;
        self.recorded.store(true, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn is_recorded(&self) -> bool {
        self.recorded.load(Ordering::Relaxed)
    }

    pub(crate) fn query(&self) -> Outcome<bool> {
        // SAFETY: a live event (invariant 2).
        let result = unsafe { sys::cuEventQuery(self.raw) };
        done(result, "cuEventQuery")
    }

    pub(crate) fn synchronize(&self) -> Outcome<()> {
        // SAFETY: a live event (invariant 2).
        let result = unsafe { result::event::synchronize(self.raw) };
        result.named("cuEventSynchronize")
    }

    /// Milliseconds up to `end`; `None` if one of them is not done.
    pub(crate) fn milliseconds_to(&self, end: &Self) -> Outcome<Option<f32>> {
        // SAFETY: live events (invariant 2).
        let result = unsafe { result::event::elapsed(self.raw, end.raw) };
        match result.named("cuEventElapsedTime") {
            Ok(milliseconds) => Ok(Some(milliseconds)),
            Err(failure) if failure.is(sys::CUresult::CUDA_ERROR_NOT_READY) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.is_owned
            && stats::may_release()
            && let Err(failure) = self.destroy()
        {
            stats::failed_in_drop(failure);
        }
    }
}

const _: () = assert!(size_of::<usize>() == 8);
