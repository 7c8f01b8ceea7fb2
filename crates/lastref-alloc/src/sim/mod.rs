//! A simulated device: real bytes in host memory, streams that are really asynchronous, costs that
//! add up without waiting, and failures on demand. It runs everything that a GPU would, without
//! one. Linux on 64-bit machines only.
//!
//! # Memory
//!
//! Device memory is host memory, mapped lazily: a device of 80 GiB costs what is touched. A
//! [`DevicePtr`] is the host address. Physical pages are slots of a sparse memory file; mapping one
//! puts it at its address, and destroying one gives its memory back to the host. Contents survive
//! being mapped elsewhere. Segments take device memory in steps of 2 MiB, as `cuMemAlloc` does for
//! all but small requests. Touching more than the host has ends as it does for any process.
//!
//! # Time
//!
//! Copies, fills, event records and waits are queued, and are pending when the call returns. Every
//! device call first runs a random few pieces of pending work of any stream (at most
//! [`SimOptions::max_ops_per_step`]), chosen by a seeded generator; synchronising calls run what
//! they wait for. The same calls in the same order with the same seed give the same interleaving.
//! Work never runs outside a call, so nothing here sleeps and no thread is started.
//!
//! Each stream has a clock in microseconds that its work advances by the [`LatencyTable`]; waiting
//! for an event takes the later clock. Event times are read from it.
//!
//! # Faulty work
//!
//! Ranges are checked when work is submitted. They are checked again when it runs, against what is
//! mapped and allocated *since before it was submitted*: unmapping or freeing memory under pending
//! work is therefore found even where something else has taken its place. Such work is skipped and
//! reported by [`SimDevice::errors`]; it never touches memory it has no right to.
//!
//! # Races
//!
//! With [`SimOptions::find_races`], every use of memory is checked against the earlier uses of the
//! same bytes: two that no event, wait or synchronisation puts in order are a [`Race`], whatever
//! order they ran in, and so is memory that an allocator on top hands out too early, a block freed
//! while a stream that was not recorded uses it, and memory unmapped under work.
//! [`SimDevice::races`] has the reports, with both sites and the cure. Kernels take part through
//! [`SimDevice::launch`], which says what they read and write. [`SimDevice::read_bytes`] and
//! [`SimDevice::write_bytes`] look from outside and take no part.
//!
//! # Locks
//!
//! One lock for all devices of a [group](SimDevice::group). No other lock is taken, and no code of
//! a caller runs, while it is held.
//!
//! # Examples
//!
//! ```
//! use lastref_alloc::sim::{SimDevice, SimOptions};
//! use lastref_alloc::{Device, StreamId};
//!
//! let device = SimDevice::new(SimOptions::new(80 << 30))?;
//! let ptr = device.alloc_segment(1 << 20)?;
//! device.copy_from_host(ptr, b"bytes", StreamId::DEFAULT)?;
//! assert_eq!(device.pending_ops(), 1);
//!
//! let mut back = [0; 5];
//! device.copy_to_host(&mut back, ptr, StreamId::DEFAULT)?;
//! assert_eq!(&back, b"bytes");
//! device.free_segment(ptr)?;
//! # Ok::<(), lastref_alloc::DeviceError>(())
//! ```

mod calls;
mod memory;
mod races;
mod world;

use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

pub use calls::{Call, Cost, Fault, LatencyTable};
pub use memory::HostMemory;
pub use races::{BlockSite, MemoryUse, Race};
pub use world::{KernelUse, SimCounters, SimGraph};

use crate::device::{
    BlockObserver, Device, DeviceError, DeviceIndex, DeviceProperties, DevicePtr, DeviceResult,
    EventId, Extent2d, FillValue, MemoryInfo, PageId, StreamId,
};
use crate::sync::{Mutex, MutexGuard, lock};
use memory::{Memory, PAGE_BYTES};
use world::{Asked, DeviceState, Rng, World};

/// How a [`SimDevice`] is made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SimOptions {
    /// All the memory it has, in bytes.
    pub capacity_bytes: u64,
    /// Whether it has virtual memory; it has segments anyway.
    pub virtual_memory: bool,
    /// Whether what is written can be read again. Without, device memory takes no host memory and
    /// no calls of the host's; it reads as zeros, and its addresses are not to be followed.
    pub keeps_contents: bool,
    /// Seed of the scheduler. A group mixes the seeds of its devices.
    pub seed: u64,
    /// What calls and work cost.
    pub latencies: LatencyTable,
    /// Its name. `(simulated)` is added where the name does not say so.
    pub name: Option<String>,
    /// The most pieces of pending work that a call lets run before its own. With 0, work runs only
    /// when something waits for it or in [`SimDevice::step`]; polling an event with work before it
    /// then never ends.
    pub max_ops_per_step: u32,
    /// Whether races are looked for. One device of a group that asks for it asks for all.
    pub find_races: bool,
}

impl SimOptions {
    /// A device of `capacity_bytes` bytes with virtual memory, seed 0, the latencies of an A100,
    /// and at most 2 pieces of work a call.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            virtual_memory: true,
            keeps_contents: true,
            seed: 0,
            latencies: LatencyTable::default(),
            name: None,
            max_ops_per_step: 2,
            find_races: false,
        }
    }

    /// With or without virtual memory.
    #[must_use]
    pub fn with_virtual_memory(mut self, virtual_memory: bool) -> Self {
        self.virtual_memory = virtual_memory;
        self
    }

    /// With or without [contents](Self#structfield.keeps_contents). Without, an allocator's own time
    /// can be measured: the host's caches are not disturbed by mapping pages.
    #[must_use]
    pub fn with_contents(mut self, keeps_contents: bool) -> Self {
        self.keeps_contents = keeps_contents;
        self
    }

    /// With another seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// With other latencies.
    #[must_use]
    pub fn with_latencies(mut self, latencies: LatencyTable) -> Self {
        self.latencies = latencies;
        self
    }

    /// With a name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// With another [`max_ops_per_step`](Self::max_ops_per_step).
    #[must_use]
    pub fn with_max_ops_per_step(mut self, max_ops_per_step: u32) -> Self {
        self.max_ops_per_step = max_ops_per_step;
        self
    }

    /// With or without looking for [races](self#races). It costs a few microseconds for each piece
    /// of work; off, the default, it costs nothing.
    #[must_use]
    pub fn with_races(mut self, find_races: bool) -> Self {
        self.find_races = find_races;
        self
    }
}

/// A simulated device. See the [module](self).
///
/// Cloning gives another handle on the same device. When the last handle on any device of its group
/// goes, all its memory is unmapped and pending work is forgotten.
#[derive(Clone, Debug)]
pub struct SimDevice(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    world: Arc<Mutex<World>>,
    device: usize,
    properties: DeviceProperties,
    find_races: bool,
}

/// A device call in progress: the world, locked, and the time since it began.
struct Entered<'a> {
    world: MutexGuard<'a, World>,
    device: usize,
    started: Option<Instant>,
}

impl Entered<'_> {
    fn memory(&mut self) -> &mut Memory {
        let device = self.device;
        &mut self.world.devices[device].memory
    }
}

impl Deref for Entered<'_> {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl DerefMut for Entered<'_> {
    fn deref_mut(&mut self) -> &mut World {
        &mut self.world
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(started) = self.started {
            let nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.world.devices[self.device].host_nanoseconds += nanoseconds + clock_nanoseconds();
        }
    }
}

/// What reading the clock costs, to be counted once for each measured call: of the two readings one
/// lies outside of what is measured.
fn clock_nanoseconds() -> u64 {
    static COST: OnceLock<u64> = OnceLock::new();
    *COST.get_or_init(|| {
        let reading = (0..64).map(|_| Instant::now().elapsed().as_nanos()).min();
        reading
            .and_then(|cost| u64::try_from(cost).ok())
            .unwrap_or(0)
    })
}

impl SimDevice {
    /// Makes a device without peers; its index is 0.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Driver`] if the host refuses a memory file of that
    /// size.
    pub fn new(options: SimOptions) -> DeviceResult<Self> {
        let mut devices = Self::group(vec![options])?;
        Ok(devices.swap_remove(0))
    }

    /// Makes devices that are peers, with indices from 0. They share one scheduler and one space of
    /// events: a stream of one can wait for an event of another.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Driver`] if the host refuses a memory file of that
    /// size.
    pub fn group(options: Vec<SimOptions>) -> DeviceResult<Vec<Self>> {
        let mut seed = Rng(0);
        let find_races = options.iter().any(|options| options.find_races);
        let mut states = Vec::with_capacity(options.len());
        let mut properties = Vec::with_capacity(options.len());
        for (index, options) in (0..).zip(options) {
            seed = Rng(seed.next() ^ options.seed);
            properties.push(DeviceProperties {
                index: DeviceIndex(index),
                name: device_name(options.name),
                total_bytes: options.capacity_bytes,
                page_bytes: options.virtual_memory.then_some(PAGE_BYTES),
                simulated: true,
            });
            states.push(DeviceState::new(
                Memory::new(
                    options.capacity_bytes,
                    options.virtual_memory,
                    options.keeps_contents,
                )?,
                options.latencies,
                options.max_ops_per_step,
            ));
        }
        let world = Arc::new(Mutex::new(World::new(states, seed.next(), find_races)));
        Ok(properties
            .into_iter()
            .enumerate()
            .map(|(device, properties)| {
                Self(Arc::new(Handle {
                    world: Arc::clone(&world),
                    device,
                    properties,
                    find_races,
                }))
            })
            .collect())
    }

    /// Begins a device call that names `bytes` bytes.
    fn enter(&self, call: Call, bytes: u64) -> DeviceResult<Entered<'_>> {
        let mut entered = self.lock(call.is_timed());
        entered.begin(self.0.device, call, bytes)?;
        Ok(entered)
    }

    /// Takes the world's lock, for one call or for many of one kind.
    fn lock(&self, is_timed: bool) -> Entered<'_> {
        let started = is_timed.then(Instant::now);
        Entered {
            world: lock(&self.0.world),
            device: self.0.device,
            started,
        }
    }

    /// The device's own state, without it being a device call.
    fn with_state<R>(&self, f: impl FnOnce(&mut DeviceState) -> R) -> R {
        f(&mut lock(&self.0.world).devices[self.0.device])
    }

    // ---- failures on demand ---------------------------------------------------------------

    /// Makes a call fail later. The failing call changes nothing. Several faults may wait at once;
    /// each counts the calls it matches.
    pub fn inject(&self, fault: Fault) {
        self.with_state(|state| state.faults.push(fault));
    }

    /// Makes events recorded from now on late: each needs `queries` queries that say no, once its
    /// turn on the stream has come, before it may finish. Work behind it on its stream waits too.
    /// A synchronising call does not wait for the queries.
    pub fn delay_events(&self, queries: u32) {
        self.with_state(|state| state.late_queries = queries);
    }

    /// Forgets the faults that have not fired, and records events on time again.
    pub fn clear_faults(&self) {
        self.with_state(|state| {
            state.faults.clear();
            state.late_queries = 0;
        });
    }

    /// Sets what another process holds of the device, in bytes. It lowers what is free, down to 0.
    pub fn set_other_process_bytes(&self, bytes: u64) {
        self.with_state(|state| state.memory.set_other_process_bytes(bytes));
    }

    // ---- observation ----------------------------------------------------------------------

    /// What the device was asked since the last [reset](Self::reset_counters), and what it holds.
    #[must_use]
    pub fn counters(&self) -> SimCounters {
        self.with_state(|state| state.counters())
    }

    /// Counts from 0 again; the peak begins at what is held now.
    pub fn reset_counters(&self) {
        self.with_state(DeviceState::reset_counters);
    }

    /// Work on this device that was submitted and has not run.
    #[must_use]
    pub fn pending_ops(&self) -> usize {
        self.with_state(|state| state.pending_ops())
    }

    /// Runs one piece of pending work of the group. False if nothing was pending.
    pub fn step(&self) -> bool {
        lock(&self.0.world).step()
    }

    /// Work of this device's streams that touched memory it had no right to, in the order it ran.
    #[must_use]
    pub fn errors(&self) -> Vec<String> {
        self.with_state(|state| state.errors.clone())
    }

    /// How much work [`errors`](Self::errors) has.
    #[must_use]
    pub fn num_errors(&self) -> usize {
        self.with_state(|state| state.errors.len())
    }

    /// Submits a copy of lent host memory to `dst`. Unlike [`Device::copy_from_host`], which has read the
    /// source when it returns, this reads it when the stream comes to it. Counted as a call of that.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not device memory or the stream unknown.
    #[track_caller]
    pub fn copy_from_lent(
        &self,
        dst: DevicePtr,
        src: HostMemory,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let mut entered = self.enter(Call::CopyFromHost, src.bytes())?;
        let on = (self.0.device, stream);
        entered.copy_lent(on, asked(Call::CopyFromHost), dst, src, false)
    }

    /// Submits a copy of device memory to lent host memory. Unlike [`Device::copy_to_host`], it does not wait.
    /// Counted as a call of that.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not device memory or the stream unknown.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::sim::{HostMemory, SimDevice, SimOptions};
    /// use lastref_alloc::{Device, StreamId};
    ///
    /// let device = SimDevice::new(SimOptions::new(1 << 30).with_max_ops_per_step(0))?;
    /// let ptr = device.alloc_segment(4)?;
    /// let mut host = vec![1, 2, 3, 4];
    /// // SAFETY: the vector is not used until the stream has been waited for.
    /// let lent = unsafe { HostMemory::new(host.as_mut_ptr(), 4) };
    /// device.copy_to_lent(lent, ptr, StreamId::DEFAULT)?;
    /// assert_eq!(device.pending_ops(), 1);
    /// device.synchronize_stream(StreamId::DEFAULT)?;
    /// assert_eq!(host, [0; 4]);
    /// # Ok::<(), lastref_alloc::DeviceError>(())
    /// ```
    #[track_caller]
    pub fn copy_to_lent(
        &self,
        dst: HostMemory,
        src: DevicePtr,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let mut entered = self.enter(Call::CopyToHost, dst.bytes())?;
        let on = (self.0.device, stream);
        entered.copy_lent(on, asked(Call::CopyToHost), src, dst, true)
    }

    /// Takes a reserved range, in which nothing is mapped, from another device of the group: as with CUDA's
    /// driver, addresses are no device's until something is mapped there. Not a call of [`Device`].
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if `ptr` is in no range of `from`'s, or a page is mapped in it.
    pub fn take_range(&self, from: DeviceIndex, ptr: DevicePtr) -> DeviceResult<()> {
        let mut world = lock(&self.0.world);
        let (to, from) = (self.0.device, from.0 as usize);
        let pair = world.devices.get_disjoint_mut([to, from]);
        let [to, from] = pair.map_err(|_| {
            memory::invalid(
                Call::ReserveRange,
                format!("there is no other device {from}"),
            )
        })?;
        to.memory.take_range(&mut from.memory, ptr)
    }

    /// Runs a kernel on `stream` for `microseconds` of device time, which uses memory as `uses` say
    /// and computes nothing. `name` is for reports. Not a call of [`Device`]: it is not counted and
    /// fails on no demand.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if a range is not
    /// memory of this device or there is no such stream.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::sim::{KernelUse, SimDevice, SimOptions};
    /// use lastref_alloc::{CachingAllocator, Device, StreamId};
    ///
    /// let device = SimDevice::new(SimOptions::new(1 << 30).with_races(true))?;
    /// let side = device.create_stream(0)?;
    /// let allocator = CachingAllocator::new(device.clone());
    /// let block = allocator.alloc(64 << 20, StreamId::DEFAULT)?;
    /// device.launch("matmul", &[KernelUse::read(block.ptr(), 64 << 20)], 10.0, side)?;
    /// drop(block); // the side stream still reads it
    ///
    /// let races = device.races();
    /// assert_eq!(races.len(), 1);
    /// assert!(races[0].to_string().contains("freed without record_stream"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn launch(
        &self,
        name: &'static str,
        uses: &[KernelUse],
        microseconds: f64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let asked = Asked {
            call: name,
            at: Location::caller(),
            in_graph: false,
        };
        let on = (self.0.device, stream);
        lock(&self.0.world).launch(on, asked, uses, microseconds)
    }

    /// Captures the work submitted to `stream` from now on into a graph, instead of running it.
    ///
    /// As with a CUDA stream that is captured in global mode, until
    /// [`end_capture`](Self::end_capture) nothing on this device may be asked for or waited for: a
    /// query, a synchronising call, a copy to the host or the freeing of a segment fails with CUDA's
    /// error 900 and breaks the capture. So do events on this stream, which CUDA would capture.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such
    /// stream or it is captured already.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::sim::{SimDevice, SimOptions};
    /// use lastref_alloc::{Device, FillValue, StreamId};
    ///
    /// let device = SimDevice::new(SimOptions::new(1 << 30))?;
    /// let ptr = device.alloc_segment(4)?;
    /// device.begin_capture(StreamId::DEFAULT)?;
    /// device.fill(ptr, FillValue::U8(7), 4, StreamId::DEFAULT)?;
    /// let graph = device.end_capture(StreamId::DEFAULT)?;
    ///
    /// device.launch_graph(&graph, StreamId::DEFAULT)?;
    /// device.synchronize()?;
    /// assert_eq!(device.read_bytes(ptr, 4)?, [7; 4]);
    /// # Ok::<(), lastref_alloc::DeviceError>(())
    /// ```
    pub fn begin_capture(&self, stream: StreamId) -> DeviceResult<()> {
        lock(&self.0.world).begin_capture(self.0.device, stream)
    }

    /// Ends a capture and returns its graph.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Driver`], CUDA's error 901, if a forbidden call
    /// was made meanwhile; [`DeviceError::InvalidArgument`] if
    /// the stream is not captured.
    pub fn end_capture(&self, stream: StreamId) -> DeviceResult<SimGraph> {
        lock(&self.0.world).end_capture(self.0.device, stream)
    }

    /// Submits the work of a graph to `stream`. It uses the addresses that it was captured with.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if there is no such
    /// stream or the graph is another device's.
    #[track_caller]
    pub fn launch_graph(&self, graph: &SimGraph, stream: StreamId) -> DeviceResult<()> {
        let on = (self.0.device, stream);
        lock(&self.0.world).launch_graph(on, graph, Location::caller())
    }

    /// The races found so far in the whole group, in the order in which they were found; the first
    /// 1000 (see [`races_left_out`](Self::races_left_out)). Empty unless
    /// [`SimOptions::find_races`] is set.
    #[must_use]
    pub fn races(&self) -> Vec<Race> {
        let world = lock(&self.0.world);
        world
            .races
            .as_ref()
            .map_or_else(Vec::new, |races| races.found().to_vec())
    }

    /// How many races were found beyond those that [`races`](Self::races) returns.
    #[must_use]
    pub fn races_left_out(&self) -> u64 {
        let world = lock(&self.0.world);
        world.races.as_ref().map_or(0, |races| races.left_out())
    }

    /// Forgets the races found so far.
    pub fn clear_races(&self) {
        if let Some(races) = &mut lock(&self.0.world).races {
            races.clear();
        }
    }

    /// Host memory behind the device's pages, in bytes. Segments are not in it.
    #[must_use]
    pub fn host_page_bytes(&self) -> u64 {
        self.with_state(|state| state.memory.host_page_bytes())
    }

    /// Reads device memory as it is now, whatever work is pending. Not a device call.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not
    /// memory of this device.
    pub fn read_bytes(&self, ptr: DevicePtr, bytes: usize) -> DeviceResult<Vec<u8>> {
        let mut read = vec![0; bytes];
        self.with_state(|state| state.memory.read(&mut read, ptr, u64::MAX))
            .map_err(|reason| memory::invalid(Call::CopyToHost, reason))?;
        Ok(read)
    }

    /// Writes device memory now, whatever work is pending. Not a device call.
    ///
    /// # Errors
    ///
    /// [`DeviceError::InvalidArgument`] if the range is not
    /// memory of this device.
    pub fn write_bytes(&self, ptr: DevicePtr, bytes: &[u8]) -> DeviceResult<()> {
        self.with_state(|state| state.memory.write(ptr, bytes, u64::MAX))
            .map_err(|reason| memory::invalid(Call::CopyFromHost, reason))
    }
}

/// Tells the race detector of an allocator's blocks.
#[derive(Debug)]
struct Blocks(SimDevice);

impl BlockObserver for Blocks {
    fn allocated(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        stream: StreamId,
        at: &'static Location<'static>,
    ) {
        let world = &mut *lock(&self.0.0.world);
        let device = self.0.0.device;
        let places = world.devices[device].memory.places(ptr, bytes);
        if let Some(races) = &mut world.races {
            races.allocated((device, stream), ptr, bytes, at, &places);
        }
    }

    fn stream_recorded(&self, ptr: DevicePtr, stream: StreamId) {
        if let Some(races) = &mut lock(&self.0.0.world).races {
            races.stream_recorded(self.0.0.device, ptr, stream);
        }
    }

    fn freed(&self, ptr: DevicePtr, bytes: u64) -> Vec<StreamId> {
        let world = &mut *lock(&self.0.0.world);
        let device = self.0.0.device;
        let places = world.devices[device].memory.places(ptr, bytes);
        let races = world.races.as_mut();
        races.map_or_else(Vec::new, |races| races.freed(device, ptr, &places))
    }
}

fn device_name(name: Option<String>) -> String {
    match name {
        None => "lastref simulated GPU".to_owned(),
        Some(name) if name.to_lowercase().contains("simulated") => name,
        Some(name) => format!("{name} (simulated)"),
    }
}

/// A call, and the caller of the function that this is called in.
#[track_caller]
const fn asked(call: Call) -> Asked {
    Asked {
        call: call.name(),
        at: Location::caller(),
        in_graph: false,
    }
}

// SAFETY: ranges come from the host's `mmap` and stay this device's until they are given back, so
// they do not overlap (invariant 1 of `memory`). Host slices are read into a copy, or written,
// before the call returns.
unsafe impl Device for SimDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.0.properties
    }

    fn block_observer(&self) -> Option<Arc<dyn BlockObserver>> {
        self.0.find_races.then(|| {
            let observer: Arc<dyn BlockObserver> = Arc::new(Blocks(self.clone()));
            observer
        })
    }

    fn is_capturing(&self) -> bool {
        lock(&self.0.world).is_capturing(self.0.device)
    }

    fn memory_info(&self) -> DeviceResult<MemoryInfo> {
        let mut entered = self.enter(Call::MemoryInfo, 0)?;
        let memory = entered.memory();
        Ok(MemoryInfo {
            free_bytes: memory.free_bytes(),
            total_bytes: memory.capacity_bytes(),
        })
    }

    fn alloc_segment(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        let mut entered = self.enter(Call::AllocSegment, bytes)?;
        let born = entered.tick();
        let ptr = entered.memory().alloc_segment(bytes, born)?;
        entered.devices[self.0.device].note_held_bytes();
        Ok(ptr)
    }

    fn free_segment(&self, ptr: DevicePtr) -> DeviceResult<()> {
        let mut entered = self.enter(Call::FreeSegment, 0)?;
        entered.memory().check_segment(ptr)?;
        entered.forbid_while_capturing(self.0.device, Call::FreeSegment)?;
        entered.finish_device(self.0.device);
        entered.note_freeing_segment(self.0.device, ptr);
        entered.memory().free_segment(ptr)
    }

    fn reserve_range(&self, bytes: u64) -> DeviceResult<DevicePtr> {
        let mut entered = self.enter(Call::ReserveRange, bytes)?;
        entered.memory().reserve_range(bytes)
    }

    fn release_range(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        let mut entered = self.enter(Call::ReleaseRange, bytes)?;
        entered.memory().release_range(ptr, bytes)
    }

    fn create_page(&self) -> DeviceResult<PageId> {
        let mut entered = self.enter(Call::CreatePage, PAGE_BYTES)?;
        let page = entered.memory().create_page()?;
        entered.devices[self.0.device].note_held_bytes();
        Ok(page)
    }

    fn destroy_page(&self, page: PageId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::DestroyPage, PAGE_BYTES)?;
        entered.destroy_page(self.0.device, page)
    }

    fn map_page(&self, ptr: DevicePtr, page: PageId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::MapPage, PAGE_BYTES)?;
        let born = entered.tick();
        entered.memory().map_page(ptr, page, born)
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        let mut entered = self.enter(Call::SetAccess, bytes)?;
        entered.memory().set_access(ptr, bytes)
    }

    fn unmap_page(&self, ptr: DevicePtr) -> DeviceResult<()> {
        let mut entered = self.enter(Call::UnmapPage, PAGE_BYTES)?;
        entered.note_unmapping(self.0.device, ptr);
        entered.memory().unmap_page(ptr)
    }

    // Many pages at once count as that many calls, any of which can fail, but the host's time is
    // measured once: reading the clock for each would cost more than what the allocator does for it.

    fn create_pages(&self, count: usize, pages: &mut Vec<PageId>) -> DeviceResult<()> {
        let mut entered = self.lock(true);
        for _ in 0..count {
            entered.begin(self.0.device, Call::CreatePage, PAGE_BYTES)?;
            pages.push(entered.memory().create_page()?);
            entered.devices[self.0.device].note_held_bytes();
        }
        Ok(())
    }

    fn map_pages(&self, ptr: DevicePtr, pages: &[PageId]) -> Result<(), (usize, DeviceError)> {
        let mut entered = self.lock(true);
        for (done, page) in pages.iter().enumerate() {
            let at = ptr.offset(done as u64 * PAGE_BYTES);
            entered
                .begin(self.0.device, Call::MapPage, PAGE_BYTES)
                .map_err(|error| (done, error))?;
            let born = entered.tick();
            let mapped = entered.memory().map_page(at, *page, born);
            mapped.map_err(|error| (done, error))?;
        }
        Ok(())
    }

    fn unmap_pages(&self, ptr: DevicePtr, count: usize) -> Result<(), (usize, DeviceError)> {
        let mut entered = self.lock(true);
        for done in 0..count {
            let at = ptr.offset(done as u64 * PAGE_BYTES);
            let begun = match done {
                0 => entered.begin(self.0.device, Call::UnmapPage, PAGE_BYTES),
                _ => entered.begin_more(self.0.device, Call::UnmapPage, PAGE_BYTES),
            };
            begun.map_err(|error| (done, error))?;
            entered.note_unmapping(self.0.device, at);
            let unmapped = entered.memory().unmap_page(at);
            unmapped.map_err(|error| (done, error))?;
        }
        Ok(())
    }

    fn create_stream(&self, priority: i32) -> DeviceResult<StreamId> {
        let mut entered = self.enter(Call::CreateStream, 0)?;
        Ok(entered.create_stream(self.0.device, priority))
    }

    fn destroy_stream(&self, stream: StreamId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::DestroyStream, 0)?;
        entered.destroy_stream(self.0.device, stream)
    }

    fn query_stream(&self, stream: StreamId) -> DeviceResult<bool> {
        let mut entered = self.enter(Call::QueryStream, 0)?;
        entered.query_stream(self.0.device, stream)
    }

    fn synchronize_stream(&self, stream: StreamId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::SynchronizeStream, 0)?;
        entered.synchronize_stream(self.0.device, stream)
    }

    fn synchronize(&self) -> DeviceResult<()> {
        let mut entered = self.enter(Call::Synchronize, 0)?;
        entered.forbid_while_capturing(self.0.device, Call::Synchronize)?;
        entered.finish_device(self.0.device);
        Ok(())
    }

    fn create_event(&self) -> DeviceResult<EventId> {
        let mut entered = self.enter(Call::CreateEvent, 0)?;
        Ok(entered.create_event(self.0.device))
    }

    fn destroy_event(&self, event: EventId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::DestroyEvent, 0)?;
        entered.destroy_event(event)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::RecordEvent, 0)?;
        entered.record_event(self.0.device, event, stream)
    }

    fn query_event(&self, event: EventId) -> DeviceResult<bool> {
        let mut entered = self.enter(Call::QueryEvent, 0)?;
        entered.query_event(self.0.device, event)
    }

    fn synchronize_event(&self, event: EventId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::SynchronizeEvent, 0)?;
        entered.synchronize_event(self.0.device, event)
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::WaitEvent, 0)?;
        entered.wait_event(self.0.device, stream, event)
    }

    fn elapsed_microseconds(&self, start: EventId, end: EventId) -> DeviceResult<f64> {
        let entered = self.enter(Call::ElapsedMicroseconds, 0)?;
        entered.elapsed_microseconds(self.0.device, start, end)
    }

    fn copy_from_host(&self, dst: DevicePtr, src: &[u8], stream: StreamId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::CopyFromHost, src.len() as u64)?;
        entered.copy_from_host(self.0.device, dst, src, stream, Location::caller())
    }

    fn copy_to_host(&self, dst: &mut [u8], src: DevicePtr, stream: StreamId) -> DeviceResult<()> {
        let mut entered = self.enter(Call::CopyToHost, dst.len() as u64)?;
        entered.copy_to_host(self.0.device, dst, src, stream, Location::caller())
    }

    fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let device = self.0.device;
        let mut entered = self.enter(Call::Copy, bytes)?;
        let on = (device, stream);
        entered.copy_rows(
            on,
            asked(Call::Copy),
            dst,
            device,
            src,
            Extent2d::one_row(bytes),
        )
    }

    fn copy_2d(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let device = self.0.device;
        let bytes = extent.width_bytes.saturating_mul(extent.height);
        let mut entered = self.enter(Call::Copy2d, bytes)?;
        let asked = asked(Call::Copy2d);
        entered.copy_rows((device, stream), asked, dst, device, src, extent)
    }

    fn copy_from_peer(
        &self,
        dst: DevicePtr,
        peer: DeviceIndex,
        src: DevicePtr,
        bytes: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let mut entered = self.enter(Call::CopyFromPeer, bytes)?;
        let on = (self.0.device, stream);
        let from = peer.0 as usize;
        entered.copy_rows(
            on,
            asked(Call::CopyFromPeer),
            dst,
            from,
            src,
            Extent2d::one_row(bytes),
        )
    }

    fn fill(
        &self,
        dst: DevicePtr,
        value: FillValue,
        count: u64,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let bytes = count.checked_mul(value.bytes());
        let mut entered = self.enter(Call::Fill, bytes.unwrap_or(u64::MAX))?;
        let bytes = bytes.ok_or_else(|| {
            let size = value.bytes();
            let reason = format!("{count} times {size} bytes pass the end of memory");
            memory::invalid(Call::Fill, reason)
        })?;
        entered.fill_rows(
            (self.0.device, stream),
            asked(Call::Fill),
            dst,
            value,
            Extent2d::one_row(bytes),
        )
    }

    fn fill_2d(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        stream: StreamId,
    ) -> DeviceResult<()> {
        let bytes = extent.width_bytes.saturating_mul(extent.height);
        let mut entered = self.enter(Call::Fill2d, bytes)?;
        let on = (self.0.device, stream);
        entered.fill_rows(on, asked(Call::Fill2d), dst, value, extent)
    }
}
