//! [`CudaDevice`]: a GPU, as [`Device`] wants it.
//!
//! ```text
//! CudaDevice (one a GPU and process, never dropped)
//!   ├─ context    the primary one, retained at the first use and kept: the CUDA runtime uses it too
//!   ├─ books      segments, ranges, pages: arguments are checked before the driver sees them
//!   └─ streams    StreamId → Arc<Stream>; the default stream is the driver's legacy one
//! EVENTS (of all devices) EventId → Arc<Event>
//! ```
//!
//! # Invariants
//!
//! 1. A stream or event is destroyed only by who holds the last `Arc`: a thread that uses one while
//!    another destroys it uses a live handle.
//! 2. A call leaves the thread's current context as it found it: the CUDA runtime, and so PyTorch,
//!    takes it for the current device.
//! 3. Numbers of streams, events and pages are not used again.
//! 4. Pinned memory that a copy uses goes to the cache with an event behind that copy, or is left to
//!    the system.
//!
//! Lock order: a device's table of streams, then its books, then the table of events, the list of
//! contexts and of peers, then the cache of pinned memory; none is held while another is taken,
//! except that books are held during calls that map and unmap, which do not wait.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::sys::CUresult;
use lastref_alloc::{
    Device, DeviceError, DeviceIndex, DeviceProperties, DevicePtr, DeviceResult, EventId, Extent2d,
    FillValue, MemoryInfo, PageId, StreamId,
};

use crate::books::Books;
use crate::driver::{self, Life, Unavailable};
use crate::pinned::{self, PinnedBuffer};
use crate::raw::{self, Context, Event, Failure, Ordinal, Stream, Uncaptured};
use crate::stats;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, RwLock, lock, read, write};

/// What memory is aligned to at least, as [`Device`] promises.
const ALIGNMENT: u64 = 512;
/// Bytes of one step of a copy between a host slice and a device: enough to hide the cost of a step.
const CHUNK_BYTES: usize = 4 << 20;
/// Steps of one copy that may be on their way.
const CHUNKS_IN_FLIGHT: usize = 3;

/// A GPU. A clone is another handle on the same.
///
/// # Threads and streams
///
/// As [`Device`] says. Each call makes the device's primary context current for its length, and the
/// one before it again.
///
/// # Graph capture
///
/// [`is_capturing`](Device::is_capturing) knows the streams made here, the default stream, and those
/// of others that were told (`adopt_stream`, with the feature `cudarc`). Memory may
/// be taken meanwhile. Copies from and to host slices on a captured stream are refused: a graph would read
/// the slice whenever it is run.
#[derive(Clone)]
pub struct CudaDevice(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    properties: DeviceProperties,
    ordinal: Ordinal,
    max_pitch: u64,
    context: OnceLock<Context>,
    retaining: Mutex<()>,
    /// The context was destroyed by somebody, or the device is lost: nothing is called any more.
    gone: AtomicBool,
    books: Mutex<Books>,
    default_stream: OnceLock<Arc<Stream>>,
    streams: RwLock<HashMap<StreamId, Arc<Stream>>>,
    /// Peers that access was asked for.
    peers: Mutex<HashSet<DeviceIndex>>,
    #[cfg(feature = "cudarc")]
    pub(crate) cudarc: crate::interop::Lent,
}

type Events = HashMap<EventId, (DeviceIndex, Arc<Event>)>;

fn events() -> &'static RwLock<Events> {
    static EVENTS: OnceLock<RwLock<Events>> = OnceLock::new();
    EVENTS.get_or_init(RwLock::default)
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice")
            .field("index", &self.0.properties.index.0)
            .field("name", &self.0.properties.name)
            .finish_non_exhaustive()
    }
}

/// A device's context is current while this lives, and the one before it afterwards (invariant 2).
#[derive(Debug)]
pub(crate) struct Entered(Option<Option<Context>>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.0
            && stats::may_call()
            && let Err(failure) = raw::set_current_context(before)
        {
            stats::failed_in_drop(failure);
        }
    }
}

fn invalid(call: &'static str, reason: impl Into<String>) -> DeviceError {
    DeviceError::InvalidArgument {
        call,
        reason: reason.into(),
    }
}

/// The GPUs of this process, in the driver's order, found at the first call. `CUDA_VISIBLE_DEVICES`
/// is the driver's to respect, and it does.
///
/// Takes no memory of a device: a context is made at the first use.
///
/// # Errors
///
/// Why there is none, the same at every call.
pub fn devices() -> Result<&'static [CudaDevice], &'static Unavailable> {
    static DEVICES: OnceLock<Result<Vec<CudaDevice>, Unavailable>> = OnceLock::new();
    let found = DEVICES.get_or_init(|| {
        let driver = driver::driver().map_err(Clone::clone)?;
        let devices = (0..driver.num_devices).map(CudaDevice::find);
        devices
            .collect::<Result<_, Failure>>()
            .map_err(|failure| failure.unavailable("libcuda"))
    });
    found.as_deref()
}

/// What the driver is for: 12090 is CUDA 12.9.
///
/// # Errors
///
/// As [`devices`].
pub fn driver_version() -> Result<i32, &'static Unavailable> {
    driver::driver().map(|driver| driver.version)
}

impl CudaDevice {
    fn find(index: i32) -> Result<Self, Failure> {
        let ordinal = Ordinal::get(index)?;
        let has_virtual_memory = ordinal
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
            != 0;
        let page_bytes = if has_virtual_memory {
            Some(ordinal.granularity()?)
        } else {
            None
        };
        let max_pitch = ordinal.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH)?;
        let properties = DeviceProperties {
            index: DeviceIndex(index.unsigned_abs()),
            name: ordinal.name()?,
            total_bytes: ordinal.total_bytes()?,
            page_bytes,
            simulated: false,
        };
        Ok(Self(Arc::new(Inner {
            books: Mutex::new(Books::new(page_bytes)),
            properties,
            ordinal,
            max_pitch: u64::from(max_pitch.unsigned_abs()),
            context: OnceLock::new(),
            retaining: Mutex::new(()),
            gone: AtomicBool::new(false),
            default_stream: OnceLock::new(),
            streams: RwLock::default(),
            peers: Mutex::default(),
            #[cfg(feature = "cudarc")]
            cudarc: crate::interop::Lent::default(),
        })))
    }

    /// Pinned host memory, from the cache if one of its size class is idle there.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn alloc_pinned(&self, bytes: usize) -> DeviceResult<PinnedBuffer> {
        PinnedBuffer::new(self, bytes)
    }

    /// Gives cached pinned memory that no work uses back to the system. Returns how many bytes that
    /// was. The cache is one for all devices.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn trim_pinned(&self) -> DeviceResult<u64> {
        let _entered = self.enter("trim_pinned")?;
        Ok(pinned::trim_entered())
    }

    /// Tells of `bytes` bytes of this device at `ptr` that somebody else allocated, so that copies
    /// and fills may name them. Told twice, they must be forgotten twice.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if they pass the end of the address space.
    ///
    /// # Safety
    ///
    /// The memory must stay there until [`forget_foreign`](Self::forget_foreign) is called, and the
    /// work that uses it is done.
    pub unsafe fn tell_foreign(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        lock(&self.0.books)
            .add_foreign(ptr.0, bytes)
            .map_err(|reason| invalid("tell_foreign", reason))
    }

    /// Takes back what [`tell_foreign`](Self::tell_foreign) was told.
    pub fn forget_foreign(&self, ptr: DevicePtr, bytes: u64) {
        lock(&self.0.books).remove_foreign(ptr.0, bytes);
    }

    // ---- entering -------------------------------------------------------------------------

    /// Makes the device's context current, if the driver may be called at all.
    pub(crate) fn enter(&self, call: &'static str) -> DeviceResult<Entered> {
        let refuse = |code: CUresult, text: &str| {
            Err(DeviceError::Driver {
                call,
                code: code as i32,
                text: text.to_owned(),
            })
        };
        match driver::life() {
            Life::On => {}
            Life::Forked => {
                return refuse(
                    CUresult::CUDA_ERROR_NOT_INITIALIZED,
                    "CUDA was started before this process was forked and cannot be used here; fork before the first use of a device, or start processes with `spawn`",
                );
            }
            Life::Exiting => {
                return refuse(
                    CUresult::CUDA_ERROR_DEINITIALIZED,
                    "the process is exiting, and the driver with it",
                );
            }
        }
        if self.0.gone.load(Ordering::Relaxed) {
            return refuse(
                CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
                "the device's context was destroyed, by a reset of the device perhaps; its memory went with it",
            );
        }
        let context = self.context()?;
        let before = raw::current_context().map_err(|failure| self.error(failure))?;
        if before == Some(context) {
            return Ok(Entered(None));
        }
        raw::set_current_context(Some(context)).map_err(|failure| self.error(failure))?;
        Ok(Entered(Some(before)))
    }

    /// Has this thread's calls be no concern of a capture that goes on elsewhere.
    pub(crate) fn uncaptured(&self) -> DeviceResult<Uncaptured> {
        Uncaptured::enter().map_err(|failure| self.error(failure))
    }

    /// The primary context, retained at the first call and never released.
    pub(crate) fn context(&self) -> DeviceResult<Context> {
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let _retaining = lock(&self.0.retaining);
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let retained = self.0.ordinal.retain_primary_context();
        let context = retained.map_err(|failure| self.error(failure))?;
        self.0
            .default_stream
            .get_or_init(|| Arc::new(Stream::default_of(context)));
        Ok(*self.0.context.get_or_init(|| context))
    }

    /// What a failed call means, for us and for the caller.
    pub(crate) fn error(&self, failure: Failure) -> DeviceError {
        if failure.is(CUresult::CUDA_ERROR_DEINITIALIZED) {
            driver::the_driver_is_going();
        } else if failure.is_end_of_context() {
            self.0.gone.store(true, Ordering::Relaxed);
        }
        failure.into()
    }

    /// The same for a call that takes memory.
    fn memory_error(&self, failure: Failure, requested: u64) -> DeviceError {
        if failure.is(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
            return self.full(failure.call, requested);
        }
        self.error(failure)
    }

    fn full(&self, call: &'static str, requested: u64) -> DeviceError {
        let total = self.0.properties.total_bytes;
        let (free, total) = raw::memory_info().unwrap_or((0, total));
        DeviceError::OutOfMemory {
            call,
            requested,
            free,
            total,
        }
    }

    pub(crate) fn stream(&self, call: &'static str, id: StreamId) -> DeviceResult<Arc<Stream>> {
        let found = if id == StreamId::DEFAULT {
            self.0.default_stream.get().cloned()
        } else {
            read(&self.0.streams).get(&id).cloned()
        };
        found.ok_or_else(|| {
            let device = self.0.properties.index;
            invalid(call, format!("cuda:{device} has no stream {id}"))
        })
    }

    pub(crate) fn add_stream(&self, stream: Stream) -> StreamId {
        let id = StreamId(next_id());
        write(&self.0.streams).insert(id, Arc::new(stream));
        id
    }

    /// An event, of this device or of any.
    fn event(&self, call: &'static str, id: EventId, of_any: bool) -> DeviceResult<Arc<Event>> {
        let own = self.0.properties.index;
        match read(events()).get(&id) {
            Some((device, event)) if of_any || *device == own => Ok(Arc::clone(event)),
            Some((device, _)) => Err(invalid(
                call,
                format!("event {} belongs to cuda:{device}, not to cuda:{own}", id.0),
            )),
            None => Err(invalid(call, format!("there is no event {}", id.0))),
        }
    }

    fn check(&self, call: &'static str, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        lock(&self.0.books)
            .check(ptr.0, bytes)
            .map_err(|reason| invalid(call, reason))
    }

    fn page_bytes(&self, call: &'static str) -> DeviceResult<u64> {
        let page_bytes = self.0.properties.page_bytes;
        page_bytes.ok_or(DeviceError::NotSupported { call })
    }

    // ---- copies by way of pinned memory ---------------------------------------------------

    /// A new event behind the work that `stream` has now; it cannot be timed.
    pub(crate) fn record_untimed(&self, stream: StreamId) -> DeviceResult<Arc<Event>> {
        let _entered = self.enter("record_stream")?;
        let stream = self.stream("record_stream", stream)?;
        self.mark(&stream)
    }

    fn mark(&self, stream: &Stream) -> DeviceResult<Arc<Event>> {
        let record = || {
            let event = Event::new(false)?;
            event.record(stream)?;
            Ok(Arc::new(event))
        };
        record().map_err(|failure| self.error(failure))
    }

    /// Has `buffer` wait in the cache for what `stream` does with it (invariant 4).
    fn behind(&self, mut buffer: PinnedBuffer, stream: &Stream) -> DeviceResult<PinnedBuffer> {
        let error = match self.mark(stream) {
            Ok(event) => {
                buffer.pending_on(event);
                return Ok(buffer);
            }
            Err(error) => error,
        };
        if stream.synchronize().is_err() {
            buffer.abandon();
        }
        Err(error)
    }

    /// Host bytes are no part of a graph.
    fn refuse_capture(
        &self,
        call: &'static str,
        id: StreamId,
        stream: &Stream,
    ) -> DeviceResult<()> {
        if stream
            .is_capturing()
            .map_err(|failure| self.error(failure))?
        {
            return Err(invalid(
                call,
                format!(
                    "stream {id} is being captured into a graph, which would use the host's bytes whenever it is run; copy before, or from pinned memory that you keep"
                ),
            ));
        }
        Ok(())
    }

    fn send(&self, dst: DevicePtr, src: &[u8], stream: &Stream) -> DeviceResult<()> {
        let mut on_their_way: VecDeque<PinnedBuffer> = VecDeque::new();
        for (at, part) in (0_u64..).step_by(CHUNK_BYTES).zip(src.chunks(CHUNK_BYTES)) {
            let first = if on_their_way.len() == CHUNKS_IN_FLIGHT {
                on_their_way.pop_front()
            } else {
                None
            };
            let mut buffer = match first {
                // All parts but the last have one size, and that is smaller.
                Some(mut first) => {
                    first.wait()?;
                    first
                }
                None => self.alloc_pinned(part.len())?,
            };
            buffer[..part.len()].copy_from_slice(part);
            // SAFETY: the buffer is kept, unchanged, until the event that `behind` records is done
            // (invariant 4).
            let sent = unsafe {
                buffer
                    .block()
                    .copy_to_device(dst.0 + at, part.len(), stream)
            };
            sent.map_err(|failure| self.error(failure))?;
            on_their_way.push_back(self.behind(buffer, stream)?);
            stats::staged(part.len());
        }
        Ok(())
    }

    fn fetch(&self, dst: &mut [u8], src: DevicePtr, stream: &Stream) -> DeviceResult<()> {
        let mut on_their_way: VecDeque<(PinnedBuffer, &mut [u8])> = VecDeque::new();
        let mut at = src.0;
        let mut parts = dst.chunks_mut(CHUNK_BYTES);
        loop {
            let part = parts.next();
            let is_last = part.is_none();
            if let Some(part) = part {
                let mut buffer = self.alloc_pinned(part.len())?;
                let block = buffer.block_mut();
                // SAFETY: the buffer is left alone until the event that `behind` records is done,
                // which is waited for below, or in the cache (invariant 4).
                let asked = unsafe { block.copy_from_device(at, part.len(), stream) };
                asked.map_err(|failure| self.error(failure))?;
                at += part.len() as u64;
                let buffer = self.behind(buffer, stream)?;
                on_their_way.push_back((buffer, part));
            }
            while on_their_way.len() >= CHUNKS_IN_FLIGHT || is_last {
                let Some((mut buffer, part)) = on_their_way.pop_front() else {
                    return Ok(());
                };
                buffer.wait()?;
                part.copy_from_slice(&buffer[..part.len()]);
                stats::staged(part.len());
            }
        }
    }

    /// Copies between the host and the `bytes` bytes at `ptr` by way of pinned buffers, as `copy` does.
    fn copy_staged(
        &self,
        call: &'static str,
        ptr: DevicePtr,
        bytes: u64,
        stream: StreamId,
        copy: impl FnOnce(&Stream) -> DeviceResult<()>,
    ) -> DeviceResult<()> {
        let _entered = self.enter(call)?;
        let on = self.stream(call, stream)?;
        self.check(call, ptr, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.refuse_capture(call, stream, &on)?;
        let _uncaptured = self.uncaptured()?;
        let copied = copy(&on);
        self.trim_if_overfull();
        copied
    }

    /// Gives pinned memory back that is more than the cache should hold.
    fn trim_if_overfull(&self) {
        if pinned::is_overfull() {
            pinned::trim_entered();
        }
    }

    // ---- rows -----------------------------------------------------------------------------

    /// Whether the driver takes these rows in one call.
    fn fits_one_call(&self, extent: Extent2d) -> bool {
        extent.dst_pitch.max(extent.src_pitch) <= self.0.max_pitch
    }

    fn copy_rows(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        extent: Extent2d,
        stream: &Stream,
    ) -> Result<(), Failure> {
        let width = extent.width_bytes;
        if extent.height == 1 || (extent.dst_pitch == width && extent.src_pitch == width) {
            return stream.copy(dst.0, src.0, width * extent.height);
        }
        if self.fits_one_call(extent) {
            return stream.copy_rows(dst.0, src.0, extent);
        }
        (0..extent.height).try_for_each(|row| {
            let (to, from) = (row * extent.dst_pitch, row * extent.src_pitch);
            stream.copy(dst.0 + to, src.0 + from, width)
        })
    }

    fn fill_rows(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: &Stream,
    ) -> Result<(), Failure> {
        let width = extent.width_bytes;
        if extent.height == 1 || extent.dst_pitch == width {
            return stream.fill(dst.0, value, width * extent.height / value.bytes());
        }
        if extent.dst_pitch <= self.0.max_pitch {
            return stream.fill_rows(dst.0, value, extent);
        }
        (0..extent.height).try_for_each(|row| {
            let to = dst.0 + row * extent.dst_pitch;
            stream.fill(to, value, width / value.bytes())
        })
    }

    fn copy_checked(
        &self,
        call: &'static str,
        dst: DevicePtr,
        src: DevicePtr,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let _entered = self.enter(call)?;
        let stream = self.stream(call, stream)?;
        let wrong = |reason| invalid(call, reason);
        let to_span = extent.span(extent.dst_pitch).map_err(wrong)?;
        let from_span = extent.span(extent.src_pitch).map_err(wrong)?;
        self.check(call, dst, to_span)?;
        self.check(call, src, from_span)?;
        if to_span == 0 {
            return Ok(());
        }
        if extent.rows_overlap(dst, src) {
            let reason = format!("{to_span} bytes at {dst} and {from_span} at {src} overlap");
            return Err(invalid(call, reason));
        }
        self.copy_rows(dst, src, extent, &stream)
            .map_err(|failure| self.error(failure))
    }

    fn fill_checked(
        &self,
        call: &'static str,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let _entered = self.enter(call)?;
        let stream = self.stream(call, stream)?;
        let wrong = |reason| invalid(call, reason);
        extent.check_fill(dst, value).map_err(wrong)?;
        let bytes = extent.span(extent.dst_pitch).map_err(wrong)?;
        self.check(call, dst, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.fill_rows(dst, value, extent, &stream)
            .map_err(|failure| self.error(failure))
    }

    /// Has the driver copy between the two directly, if it can. Without, it goes through the host.
    fn enable_peer_access(&self, peer: &Self) {
        let index = peer.0.properties.index;
        if !lock(&self.0.peers).insert(index) {
            return;
        }
        let enable = || {
            if self.0.ordinal.can_access(peer.0.ordinal)?
                && let Some(context) = peer.0.context.get()
            {
                match raw::enable_peer_access(*context) {
                    Err(failure)
                        if !failure.is(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) =>
                    {
                        return Err(failure);
                    }
                    _ => {}
                }
            }
            Ok(())
        };
        if let Err(failure) = enable() {
            let error = self.error(failure);
            log::warn!("lastref-cuda: copies from cuda:{index} go through the host: {error}");
        }
    }
}

// SAFETY: the driver hands out ranges that do not overlap and keeps them until they are given back;
// host slices are copied to or from pinned memory inside the call.
unsafe impl Device for CudaDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.0.properties
    }

    fn memory_info(&self) -> DeviceResult<MemoryInfo> {
        let _entered = self.enter("memory_info")?;
        let (free_bytes, total_bytes) =
            raw::memory_info().map_err(|failure| self.error(failure))?;
        Ok(MemoryInfo {
            free_bytes,
            total_bytes,
        })
    }

    fn is_capturing(&self) -> bool {
        if self.0.context.get().is_none() {
            return false;
        }
        // What cannot be asked will say so in the next call.
        let Ok(_entered) = self.enter("is_capturing") else {
            return false;
        };
        let is_capturing = |stream: &Arc<Stream>| stream.is_capturing().unwrap_or(false);
        self.0.default_stream.get().is_some_and(is_capturing)
            || read(&self.0.streams).values().any(is_capturing)
    }

    // ---- segments ----

    fn alloc_segment(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        const CALL: &str = "cuMemAlloc";
        if bytes == 0 {
            return Err(invalid(CALL, "0 bytes were asked for"));
        }
        let _entered = self.enter(CALL)?;
        if bytes > self.0.properties.total_bytes {
            return Err(self.full(CALL, bytes));
        }
        let _uncaptured = self.uncaptured()?;
        let ptr = raw::alloc(bytes.next_multiple_of(ALIGNMENT))
            .map_err(|failure| self.memory_error(failure, bytes))?;
        lock(&self.0.books).add_segment(ptr, bytes);
        if !ptr.is_multiple_of(ALIGNMENT) {
            self.free_segment(DevicePtr(ptr))?;
            return Err(DeviceError::Driver {
                call: CALL,
                code: 0,
                text: format!("the driver gave {ptr:#x}, which is not aligned to {ALIGNMENT}"),
            });
        }
        Ok(DevicePtr(ptr))
    }

    fn free_segment(&self, ptr: DevicePtr) -> DeviceResult<()> {
        const CALL: &str = "cuMemFree";
        let _entered = self.enter(CALL)?;
        let taken = lock(&self.0.books).take_segment(ptr.0);
        let bytes = taken.map_err(|reason| invalid(CALL, reason))?;
        // The driver waits by itself as a rule, and promises it nowhere.
        raw::synchronize_context()
            .and_then(|()| raw::free(ptr.0))
            .map_err(|failure| {
                lock(&self.0.books).add_segment(ptr.0, bytes);
                self.error(failure)
            })
    }

    // ---- virtual memory ----

    fn reserve_range(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        const CALL: &str = "cuMemAddressReserve";
        let page_bytes = self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let checked = lock(&self.0.books).check_range_size(bytes);
        checked.map_err(|reason| invalid(CALL, reason))?;
        let ptr = raw::reserve_range(bytes, page_bytes).map_err(|failure| self.error(failure))?;
        lock(&self.0.books).add_range(ptr, bytes);
        Ok(DevicePtr(ptr))
    }

    fn release_range(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        const CALL: &str = "cuMemAddressFree";
        self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let taken = lock(&self.0.books).take_range(ptr.0, bytes);
        taken.map_err(|reason| invalid(CALL, reason))?;
        raw::release_range(ptr.0, bytes).map_err(|failure| {
            lock(&self.0.books).add_range(ptr.0, bytes);
            self.error(failure)
        })
    }

    fn create_page(&self) -> DeviceResult<PageId> {
        const CALL: &str = "cuMemCreate";
        let page_bytes = self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let _uncaptured = self.uncaptured()?;
        let handle = self
            .0
            .ordinal
            .create_page(page_bytes)
            .map_err(|failure| self.memory_error(failure, page_bytes))?;
        Ok(PageId(lock(&self.0.books).add_page(handle)))
    }

    fn destroy_page(&self, page: PageId) -> DeviceResult<()> {
        const CALL: &str = "cuMemRelease";
        self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let taken = lock(&self.0.books).take_page(page.0);
        let handle = taken.map_err(|reason| invalid(CALL, reason))?;
        raw::destroy_page(handle).map_err(|failure| {
            lock(&self.0.books).put_page_back(page.0, handle);
            self.error(failure)
        })
    }

    fn map_page(&self, ptr: DevicePtr, page: PageId) -> DeviceResult<()> {
        const CALL: &str = "cuMemMap";
        let page_bytes = self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let mut books = lock(&self.0.books);
        let handle = books
            .check_map(ptr.0, page.0)
            .map_err(|reason| invalid(CALL, reason))?;
        raw::map(ptr.0, page_bytes, handle).map_err(|failure| self.error(failure))?;
        books.mapped(ptr.0, page.0);
        Ok(())
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        const CALL: &str = "cuMemSetAccess";
        self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let mut books = lock(&self.0.books);
        books
            .check_access(ptr.0, bytes)
            .map_err(|reason| invalid(CALL, reason))?;
        self.0
            .ordinal
            .set_access(ptr.0, bytes)
            .map_err(|failure| self.error(failure))?;
        books.opened(ptr.0, bytes);
        Ok(())
    }

    fn unmap_page(&self, ptr: DevicePtr) -> DeviceResult<()> {
        const CALL: &str = "cuMemUnmap";
        let page_bytes = self.page_bytes(CALL)?;
        let _entered = self.enter(CALL)?;
        let mut books = lock(&self.0.books);
        books
            .check_unmap(ptr.0)
            .map_err(|reason| invalid(CALL, reason))?;
        raw::unmap(ptr.0, page_bytes).map_err(|failure| self.error(failure))?;
        books.unmapped_at(ptr.0);
        Ok(())
    }

    /// One call for all of them: the driver takes a range that several mappings make up. Should one
    /// refuse that, it has unmapped nothing, and they are unmapped one by one.
    fn unmap_pages(&self, ptr: DevicePtr, count: usize) -> Result<(), (usize, DeviceError)> {
        const CALL: &str = "cuMemUnmap";
        let page_bytes = self.page_bytes(CALL).map_err(|error| (0, error))?;
        let addrs = || (0..count as u64).map(|number| ptr.0.wrapping_add(number * page_bytes));
        {
            let _entered = self.enter(CALL).map_err(|error| (0, error))?;
            let mut books = lock(&self.0.books);
            if count > 1 && addrs().all(|at| books.check_unmap(at).is_ok()) {
                match raw::unmap(ptr.0, count as u64 * page_bytes) {
                    Ok(()) => {
                        addrs().for_each(|at| books.unmapped_at(at));
                        return Ok(());
                    }
                    Err(failure) if failure.is(CUresult::CUDA_ERROR_INVALID_VALUE) => {}
                    Err(failure) => return Err((0, self.error(failure))),
                }
            }
        }
        for (done, at) in addrs().enumerate() {
            self.unmap_page(DevicePtr(at))
                .map_err(|error| (done, error))?;
        }
        Ok(())
    }

    // ---- streams and events ----

    fn create_stream(&self, priority: i32) -> DeviceResult<StreamId> {
        let _entered = self.enter("cuStreamCreateWithPriority")?;
        // The driver takes a priority out of its range as the nearest in it.
        let stream = Stream::new(self.context()?, priority);
        Ok(self.add_stream(stream.map_err(|failure| self.error(failure))?))
    }

    fn destroy_stream(&self, stream: StreamId) -> DeviceResult<()> {
        const CALL: &str = "cuStreamDestroy";
        let _entered = self.enter(CALL)?;
        let Some(taken) = write(&self.0.streams).remove(&stream) else {
            let what = if stream == StreamId::DEFAULT {
                "the default stream cannot be destroyed".to_owned()
            } else {
                let device = self.0.properties.index;
                format!("cuda:{device} has no stream {stream}")
            };
            return Err(invalid(CALL, what));
        };
        // Who else uses it now destroys it when done (invariant 1).
        let Some(mut last) = Arc::into_inner(taken) else {
            return Ok(());
        };
        last.destroy().map_err(|failure| {
            write(&self.0.streams).insert(stream, Arc::new(last));
            self.error(failure)
        })
    }

    fn query_stream(&self, stream: StreamId) -> DeviceResult<bool> {
        const CALL: &str = "cuStreamQuery";
        let _entered = self.enter(CALL)?;
        self.stream(CALL, stream)?
            .query()
            .map_err(|failure| self.error(failure))
    }

    fn synchronize_stream(&self, stream: StreamId) -> DeviceResult<()> {
        const CALL: &str = "cuStreamSynchronize";
        let _entered = self.enter(CALL)?;
        self.stream(CALL, stream)?
            .synchronize()
            .map_err(|failure| self.error(failure))
    }

    fn synchronize(&self) -> DeviceResult<()> {
        let _entered = self.enter("cuCtxSynchronize")?;
        raw::synchronize_context().map_err(|failure| self.error(failure))
    }

    fn create_event(&self) -> DeviceResult<EventId> {
        let _entered = self.enter("cuEventCreate")?;
        let event = Event::new(true).map_err(|failure| self.error(failure))?;
        let id = EventId(next_id());
        let own = self.0.properties.index;
        write(events()).insert(id, (own, Arc::new(event)));
        Ok(id)
    }

    fn destroy_event(&self, event: EventId) -> DeviceResult<()> {
        const CALL: &str = "cuEventDestroy";
        let _entered = self.enter(CALL)?;
        drop(self.event(CALL, event, false)?);
        let Some((own, taken)) = write(events()).remove(&event) else {
            return Err(invalid(CALL, format!("there is no event {}", event.0)));
        };
        let Some(mut last) = Arc::into_inner(taken) else {
            return Ok(());
        };
        last.destroy().map_err(|failure| {
            write(events()).insert(event, (own, Arc::new(last)));
            self.error(failure)
        })
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DeviceResult<()> {
        const CALL: &str = "cuEventRecord";
        let _entered = self.enter(CALL)?;
        let stream = self.stream(CALL, stream)?;
        self.event(CALL, event, false)?
            .record(&stream)
            .map_err(|failure| self.error(failure))
    }

    fn query_event(&self, event: EventId) -> DeviceResult<bool> {
        const CALL: &str = "cuEventQuery";
        let _entered = self.enter(CALL)?;
        self.event(CALL, event, false)?
            .query()
            .map_err(|failure| self.error(failure))
    }

    fn synchronize_event(&self, event: EventId) -> DeviceResult<()> {
        const CALL: &str = "cuEventSynchronize";
        let _entered = self.enter(CALL)?;
        self.event(CALL, event, false)?
            .synchronize()
            .map_err(|failure| self.error(failure))
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DeviceResult<()> {
        const CALL: &str = "cuStreamWaitEvent";
        let _entered = self.enter(CALL)?;
        let stream = self.stream(CALL, stream)?;
        let event = self.event(CALL, event, true)?;
        stream.wait(&event).map_err(|failure| self.error(failure))
    }

    fn elapsed_microseconds(&self, start: EventId, end: EventId) -> DeviceResult<f64> {
        const CALL: &str = "cuEventElapsedTime";
        let _entered = self.enter(CALL)?;
        let (first, last) = (
            self.event(CALL, start, false)?,
            self.event(CALL, end, false)?,
        );
        for (id, event) in [(start, &first), (end, &last)] {
            if !event.is_recorded() {
                return Err(invalid(CALL, format!("event {} was never recorded", id.0)));
            }
        }
        let milliseconds = first
            .milliseconds_to(&last)
            .map_err(|failure| self.error(failure))?;
        let milliseconds = milliseconds.ok_or_else(|| {
            let reason = format!("event {} or {} is not done yet", start.0, end.0);
            invalid(CALL, reason)
        })?;
        Ok(f64::from(milliseconds) * 1000.0)
    }

    // ---- moving bytes ----

    fn copy_from_host(&self, dst: DevicePtr, src: &[u8], stream: StreamId) -> DeviceResult<()> {
        self.copy_staged("copy_from_host", dst, src.len() as u64, stream, |on| {
            self.send(dst, src, on)
        })
    }

    fn copy_to_host(&self, dst: &mut [u8], src: DevicePtr, stream: StreamId) -> DeviceResult<()> {
        self.copy_staged("copy_to_host", src, dst.len() as u64, stream, |on| {
            self.fetch(dst, src, on)
        })
    }

    fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let extent = Extent2d::one_row(bytes);
        self.copy_checked("cuMemcpyDtoDAsync", dst, src, extent, stream)
    }

    fn copy_2d(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        self.copy_checked("cuMemcpy2DAsync", dst, src, extent, stream)
    }

    fn copy_from_peer(
        &self,
        dst: DevicePtr,
        peer: DeviceIndex,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        const CALL: &str = "cuMemcpyPeerAsync";
        if peer == self.0.properties.index {
            return self.copy(dst, src, bytes, stream);
        }
        let _entered = self.enter(CALL)?;
        let stream = self.stream(CALL, stream)?;
        let peers = devices().unwrap_or_default();
        let Some(peer) = peers.get(peer.0 as usize) else {
            let there = peers.len();
            return Err(invalid(
                CALL,
                format!("there is no device {peer}, only {there}"),
            ));
        };
        self.check(CALL, dst, bytes)?;
        peer.check(CALL, src, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let context = peer.context()?;
        self.enable_peer_access(peer);
        stream
            .copy_from_peer(dst.0, context, src.0, bytes)
            .map_err(|failure| self.error(failure))
    }

    fn fill(
        &self,
        dst: DevicePtr,
        value: FillValue,
        count: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        const CALL: &str = "fill";
        let size = value.bytes();
        let bytes = count.checked_mul(size).ok_or_else(|| {
            invalid(
                CALL,
                format!("{count} times {size} bytes pass the end of memory"),
            )
        })?;
        self.fill_checked(CALL, dst, value, Extent2d::one_row(bytes), stream)
    }

    fn fill_2d(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        self.fill_checked("fill_2d", dst, value, extent, stream)
    }
}
