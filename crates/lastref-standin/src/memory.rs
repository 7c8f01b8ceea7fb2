//! Memory: allocations, address ranges and physical memory, pools, host memory.
//!
//! # Invariants
//!
//! 1. A [`Region`] is memory that a caller may use now: `regions` has it by its start, and regions do not overlap.
//! 2. A [`Physical`] goes when it has neither a handle nor a mapping.

use std::ffi::c_int;

use lastref_alloc::sim::SimDevice;
use lastref_alloc::{
    AllocError, Block, CachingAllocator, Device as _, DeviceIndex, DevicePtr, MemoryInfo, PageId,
};

use crate::abi::{self, CUmemAccessDesc, CUmemAllocationProp};
use crate::error::{Code, Outcome};
use crate::log;
use crate::state::{Current, State};
use crate::streams::On;

/// The granularity of physical memory, as on NVIDIA's GPUs.
pub(crate) const PAGE_BYTES: u64 = 2 << 20;

/// What memory is, and what goes with it.
#[derive(Debug)]
pub(crate) enum Kind {
    Segment,
    /// Memory that the host may use too, which it can in any case.
    Managed,
    Mapped {
        physical: u64,
    },
    Pool {
        pool: u64,
        block: Block<SimDevice>,
    },
    Host {
        flags: u32,
        /// Keeps it; reached through its address alone.
        _memory: Vec<u8>,
    },
    /// The caller's own host memory.
    Registered,
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    pub(crate) context: u64,
    pub(crate) kind: Kind,
}

impl Region {
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host { .. } | Kind::Registered)
    }
}

#[derive(Debug)]
pub(crate) struct ReservedRange {
    bytes: u64,
    device: usize,
}

#[derive(Debug)]
pub(crate) struct Physical {
    pages: Vec<PageId>,
    device: usize,
    handles: u32,
    mappings: u32,
    pub(crate) prop: CUmemAllocationProp,
}

/// A memory pool: a caching allocator of this project's, so that memory is given out in the order of streams.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// Made when first needed.
    allocator: Option<CachingAllocator<SimDevice>>,
    /// What is kept beyond this when something waits goes back to the device.
    pub(crate) release_threshold: u64,
    /// The three flags about reuse, which change nothing here.
    pub(crate) reuse: [i32; 3],
}

impl Pool {
    pub(crate) fn new(device: usize) -> Self {
        Self {
            device,
            allocator: None,
            release_threshold: 0,
            reuse: [1; 3],
        }
    }

    fn allocator(&mut self, sim: &SimDevice) -> &CachingAllocator<SimDevice> {
        self.allocator
            .get_or_insert_with(|| CachingAllocator::new(sim.clone()))
    }

    /// Reserved and used bytes: now, and at most.
    pub(crate) fn stats(&self) -> [u64; 4] {
        self.allocator.as_ref().map_or([0; 4], |allocator| {
            let stats = allocator.stats();
            let (reserved, used) = (stats.reserved_bytes.all, stats.allocated_bytes.all);
            [reserved.current, reserved.peak, used.current, used.peak]
        })
    }

    pub(crate) fn reset_peaks(&self) {
        if let Some(allocator) = &self.allocator {
            allocator.reset_peak_stats();
        }
    }

    /// Gives free memory back if more than `kept` is held.
    pub(crate) fn trim(&self, kept: u64) -> Outcome {
        let [reserved, _, used, _] = self.stats();
        if let Some(allocator) = &self.allocator
            && reserved > kept
            && reserved > used
        {
            allocator.empty_cache()?;
        }
        Ok(())
    }
}

impl State {
    /// The memory that an address is in, with its start.
    pub(crate) fn region(&self, address: u64) -> Option<(u64, &Region)> {
        let (start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.bytes).then_some((*start, region))
    }

    /// What all processes have left of a device.
    pub(crate) fn memory_info(&mut self, device: usize) -> Result<MemoryInfo, Code> {
        self.see_others(device);
        Ok(self.gpus[device].sim.memory_info()?)
    }

    /// What this process holds of a device.
    pub(crate) fn used_bytes(&self, device: usize) -> u64 {
        self.gpus[device].sim.counters().held_bytes
    }

    /// Lets the device know what the processes of the same session hold.
    fn see_others(&mut self, device: usize) {
        let gpu = &self.gpus[device];
        if let (Some(session), Ok(settings)) = (&self.session, crate::settings::settings()) {
            let others = session.others(gpu.physical);
            gpu.sim
                .set_other_process_bytes(settings.other_bytes + others);
        }
    }

    /// Lets the processes of the same session know what this one holds.
    fn tell_others(&mut self, device: usize) {
        let used = self.used_bytes(device);
        let physical = self.gpus[device].physical;
        if let Some(session) = &mut self.session {
            session.tell(physical, used);
        }
    }

    // ---- allocations ----------------------------------------------------------------------------

    pub(crate) fn allocate(
        &mut self,
        current: Current,
        bytes: u64,
        kind: Kind,
    ) -> Result<u64, Code> {
        self.forbid_while_capturing()?;
        let Current { context, device } = current;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        self.see_others(device);
        let ptr = self.gpus[device].sim.alloc_segment(bytes)?;
        self.tell_others(device);
        let region = Region {
            bytes,
            device,
            context,
            kind,
        };
        self.regions.insert(ptr.0, region);
        Ok(ptr.0)
    }

    pub(crate) fn free(&mut self, address: u64) -> Outcome {
        if address == 0 {
            return Ok(());
        }
        self.forbid_while_capturing()?;
        let region = self.regions.get(&address).ok_or(Code::INVALID_VALUE)?;
        let device = region.device;
        match region.kind {
            Kind::Segment | Kind::Managed => {
                self.gpus[device].sim.free_segment(DevicePtr(address))?;
                self.regions.remove(&address);
            }
            Kind::Pool { .. } => {
                self.gpus[device].sim.synchronize()?;
                self.regions.remove(&address);
            }
            Kind::Mapped { .. } | Kind::Host { .. } | Kind::Registered => {
                return Err(Code::INVALID_VALUE);
            }
        }
        self.tell_others(device);
        // Freeing has waited for the device.
        self.check_work(device)
    }

    /// Gives back all memory of a context that is destroyed.
    pub(crate) fn free_all_of(&mut self, context: u64) -> Outcome {
        let device = self
            .contexts
            .get(&context)
            .ok_or(Code::INVALID_CONTEXT)?
            .device;
        let regions = self
            .regions
            .iter()
            .filter(|(_, region)| region.context == context);
        let starts: Vec<u64> = regions.map(|(start, _)| *start).collect();
        for start in starts {
            match self.regions.get(&start).map(|region| &region.kind) {
                Some(Kind::Segment | Kind::Managed) => {
                    self.gpus[device].sim.free_segment(DevicePtr(start))?;
                    self.regions.remove(&start);
                }
                Some(_) => {
                    self.regions.remove(&start);
                }
                None => {}
            }
        }
        for pool in self.pools.values().filter(|pool| pool.device == device) {
            pool.trim(0)?;
        }
        self.tell_others(device);
        Ok(())
    }

    // ---- host memory ------------------------------------------------------------------------------

    pub(crate) fn allocate_host(
        &mut self,
        current: Current,
        bytes: u64,
        flags: u32,
    ) -> Result<u64, Code> {
        const ALIGNMENT: usize = 4096;
        self.forbid_while_capturing()?;
        let padded = abi::size(bytes)
            .checked_add(ALIGNMENT)
            .ok_or(Code::OUT_OF_MEMORY)?;
        let mut memory: Vec<u8> = Vec::new();
        memory
            .try_reserve_exact(padded)
            .map_err(|_| Code::OUT_OF_MEMORY)?;
        let start = memory
            .as_mut_ptr()
            .expose_provenance()
            .next_multiple_of(ALIGNMENT) as u64;
        let kind = Kind::Host {
            flags,
            _memory: memory,
        };
        let region = Region {
            // An empty one has an address too.
            bytes: bytes.max(1),
            device: current.device,
            context: current.context,
            kind,
        };
        self.regions.insert(start, region);
        Ok(start)
    }

    pub(crate) fn free_host(&mut self, address: u64) -> Outcome {
        if address == 0 {
            return Ok(());
        }
        let is_host = |region: &Region| matches!(region.kind, Kind::Host { .. });
        if !self.regions.get(&address).is_some_and(is_host) {
            return Err(Code::INVALID_VALUE);
        }
        self.forbid_while_capturing()?;
        self.wait_for_all()?;
        self.regions.remove(&address);
        Ok(())
    }

    pub(crate) fn register_host(&mut self, current: Current, address: u64, bytes: u64) -> Outcome {
        if address == 0 || bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let before = self.region(address).is_some();
        if before || self.regions.range(address..end).next().is_some() {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let region = Region {
            bytes,
            device: current.device,
            context: current.context,
            kind: Kind::Registered,
        };
        self.regions.insert(address, region);
        Ok(())
    }

    pub(crate) fn unregister_host(&mut self, address: u64) -> Outcome {
        let is_registered = |region: &Region| matches!(region.kind, Kind::Registered);
        if !self.regions.get(&address).is_some_and(is_registered) {
            return Err(Code::HOST_MEMORY_NOT_REGISTERED);
        }
        self.wait_for_all()?;
        self.regions.remove(&address);
        Ok(())
    }

    /// Waits until no work can touch host memory any more.
    fn wait_for_all(&mut self) -> Outcome {
        for gpu in &self.gpus {
            gpu.sim.synchronize()?;
        }
        Ok(())
    }

    // ---- virtual memory -----------------------------------------------------------------------------

    pub(crate) fn reserve(&mut self, bytes: u64, alignment: u64) -> Result<u64, Code> {
        if alignment > PAGE_BYTES {
            log::note(&format!(
                "cuMemAddressReserve: an alignment of {alignment} bytes is not supported"
            ));
            return Err(Code::NOT_SUPPORTED);
        }
        // Perhaps not the device that it will be used for: see `map`.
        let device = self.current().map_or(0, |current| current.device);
        let start = self.gpus[device].sim.reserve_range(bytes)?.0;
        self.ranges.insert(start, ReservedRange { bytes, device });
        Ok(start)
    }

    pub(crate) fn release_range(&mut self, address: u64, bytes: u64) -> Outcome {
        let range = self
            .ranges
            .get(&address)
            .filter(|range| range.bytes == bytes);
        let device = range.ok_or(Code::INVALID_VALUE)?.device;
        self.gpus[device]
            .sim
            .release_range(DevicePtr(address), bytes)?;
        self.ranges.remove(&address);
        Ok(())
    }

    pub(crate) fn create_physical(
        &mut self,
        bytes: u64,
        prop: CUmemAllocationProp,
    ) -> Result<u64, Code> {
        const PINNED: i32 = 1;
        const ON_DEVICE: i32 = 1;
        /// Handles for other processes of this machine, which may be asked for and are never given out.
        const FILE_DESCRIPTOR: i32 = 1;
        let needs_virtual_memory = self
            .gpus
            .first()
            .and_then(|gpu| gpu.sim.properties().page_bytes);
        if needs_virtual_memory.is_none() {
            return Err(Code::NOT_SUPPORTED);
        }
        if prop.kind != PINNED || prop.location.kind != ON_DEVICE {
            log::note("cuMemCreate: only pinned memory of a device is supported");
            return Err(Code::NOT_SUPPORTED);
        }
        if prop.requested_handle_types & !FILE_DESCRIPTOR != 0 {
            log::note("cuMemCreate: there are no handles of this type for other processes");
            return Err(Code::NOT_SUPPORTED);
        }
        let device = self.device(prop.location.id)?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Code::INVALID_VALUE);
        }
        self.see_others(device);
        let sim = &self.gpus[device].sim;
        let count = abi::size(bytes / PAGE_BYTES);
        let mut pages = Vec::new();
        if let Err(error) = sim.create_pages(count, &mut pages) {
            for page in pages {
                sim.destroy_page(page)?;
            }
            return Err(error.into());
        }
        self.tell_others(device);
        let handle = self.new_handle();
        let physical = Physical {
            pages,
            device,
            handles: 1,
            mappings: 0,
            prop,
        };
        self.physical.insert(handle, physical);
        Ok(handle)
    }

    pub(crate) fn release_physical(&mut self, handle: u64) -> Outcome {
        let physical = self.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        if physical.handles == 0 {
            return Err(Code::INVALID_VALUE);
        }
        physical.handles -= 1;
        self.drop_physical_if_unused(handle)
    }

    /// Invariant 2.
    fn drop_physical_if_unused(&mut self, handle: u64) -> Outcome {
        let is_unused = |physical: &Physical| physical.handles == 0 && physical.mappings == 0;
        if !self.physical.get(&handle).is_some_and(is_unused) {
            return Ok(());
        }
        if let Some(physical) = self.physical.remove(&handle) {
            for page in physical.pages {
                self.gpus[physical.device].sim.destroy_page(page)?;
            }
            self.tell_others(physical.device);
        }
        Ok(())
    }

    pub(crate) fn retain_physical(&mut self, address: u64) -> Result<u64, Code> {
        let Some((
            _,
            Region {
                kind: Kind::Mapped { physical },
                ..
            },
        )) = self.region(address)
        else {
            return Err(Code::INVALID_VALUE);
        };
        let handle = *physical;
        let physical = self.physical.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        physical.handles += 1;
        Ok(handle)
    }

    pub(crate) fn map(&mut self, address: u64, bytes: u64, offset: u64, handle: u64) -> Outcome {
        let physical = self.physical.get(&handle).ok_or(Code::INVALID_VALUE)?;
        let device = physical.device;
        let aligned = [address, bytes, offset]
            .iter()
            .all(|number| number.is_multiple_of(PAGE_BYTES));
        if bytes == 0 || !aligned {
            return Err(Code::INVALID_VALUE);
        }
        let (first, count) = (
            abi::size(offset / PAGE_BYTES),
            abi::size(bytes / PAGE_BYTES),
        );
        let end = first.checked_add(count).ok_or(Code::INVALID_VALUE)?;
        let pages = physical
            .pages
            .get(first..end)
            .ok_or(Code::INVALID_VALUE)?
            .to_vec();
        let range = self.ranges.range_mut(..=address).next_back();
        let (_, range) = range
            .filter(|(start, range)| {
                address - *start < range.bytes && bytes <= range.bytes - (address - *start)
            })
            .ok_or(Code::INVALID_VALUE)?;
        if range.device != device {
            let from = DeviceIndex(u32::try_from(range.device).unwrap_or(u32::MAX));
            self.gpus[device].sim.take_range(from, DevicePtr(address))?;
            range.device = device;
        }
        let sim = &self.gpus[device].sim;
        if let Err((done, error)) = sim.map_pages(DevicePtr(address), &pages) {
            // What was mapped a moment ago can be unmapped.
            let _ = sim.unmap_pages(DevicePtr(address), done);
            return Err(error.into());
        }
        let region = Region {
            bytes,
            device,
            // Mappings belong to no context.
            context: 0,
            kind: Kind::Mapped { physical: handle },
        };
        self.regions.insert(address, region);
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.mappings += 1;
        }
        Ok(())
    }

    /// The mappings that make up a range, which must be whole ones, one behind the other.
    fn mappings(&self, address: u64, bytes: u64) -> Result<Vec<(u64, u64, usize, u64)>, Code> {
        let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let mut next = address;
        let mut found = Vec::new();
        for (&start, region) in self.regions.range(address..end) {
            let Kind::Mapped { physical } = region.kind else {
                return Err(Code::INVALID_VALUE);
            };
            if start != next || region.bytes > end - start {
                return Err(Code::INVALID_VALUE);
            }
            next = start + region.bytes;
            found.push((start, region.bytes, region.device, physical));
        }
        if bytes == 0 || next != end {
            return Err(Code::INVALID_VALUE);
        }
        Ok(found)
    }

    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Outcome {
        for (start, bytes, device, handle) in self.mappings(address, bytes)? {
            let count = abi::size(bytes / PAGE_BYTES);
            let unmapped = self.gpus[device].sim.unmap_pages(DevicePtr(start), count);
            unmapped.map_err(|(_, error)| error)?;
            self.regions.remove(&start);
            if let Some(physical) = self.physical.get_mut(&handle) {
                physical.mappings -= 1;
            }
            self.drop_physical_if_unused(handle)?;
        }
        Ok(())
    }

    pub(crate) fn set_access(
        &mut self,
        address: u64,
        bytes: u64,
        who: &[CUmemAccessDesc],
    ) -> Outcome {
        const ON_DEVICE: i32 = 1;
        const READ_WRITE: i32 = 3;
        // Mapped without a gap. What lies beyond the end of a mapping is not looked at by the device below either.
        let (_, region) = self.region(address).ok_or(Code::INVALID_VALUE)?;
        if !matches!(region.kind, Kind::Mapped { .. }) {
            return Err(Code::INVALID_VALUE);
        }
        let device = region.device;
        for one in who {
            if one.location.kind != ON_DEVICE || one.flags != READ_WRITE {
                log::note("cuMemSetAccess: only reading and writing by devices is supported");
                return Err(Code::NOT_SUPPORTED);
            }
            // Other devices reach the memory by copies, for which nothing need be set.
            if self.device(one.location.id)? == device {
                self.gpus[device]
                    .sim
                    .set_access(DevicePtr(address), bytes)?;
            }
        }
        Ok(())
    }

    // ---- pools ----------------------------------------------------------------------------------------

    pub(crate) fn pool(&mut self, handle: u64) -> Result<&mut Pool, Code> {
        self.pools.get_mut(&handle).ok_or(Code::INVALID_VALUE)
    }

    /// The pool that a device came with.
    pub(crate) fn default_pool(&self, device: c_int) -> Result<u64, Code> {
        Ok(self.gpus[self.device(device)?].default_pool)
    }

    /// The pool that a device allocates from in order with a stream.
    pub(crate) fn current_pool(&self, device: c_int) -> Result<u64, Code> {
        Ok(self.gpus[self.device(device)?].current_pool)
    }

    pub(crate) fn set_current_pool(&mut self, device: c_int, pool: u64) -> Outcome {
        let device = self.device(device)?;
        if self.pool(pool)?.device != device {
            return Err(Code::INVALID_VALUE);
        }
        self.gpus[device].current_pool = pool;
        Ok(())
    }

    /// What a device may do with a pool's memory: all of it with its own, nothing with others'.
    pub(crate) fn pool_access(&mut self, pool: u64, device: c_int) -> Result<c_int, Code> {
        let own = self.pool(pool)?.device;
        Ok(if self.device(device)? == own { 3 } else { 0 })
    }

    pub(crate) fn allocate_from_pool(
        &mut self,
        pool: u64,
        bytes: u64,
        on: On,
    ) -> Result<u64, Code> {
        let device = self.pool(pool)?.device;
        self.see_others(device);
        let sim = self.gpus[device].sim.clone();
        if device != on.device {
            log::note(
                "memory of one device's pool in the order of another device's stream is not supported",
            );
            return Err(Code::NOT_SUPPORTED);
        }
        let block = self.pool(pool)?.allocator(&sim).alloc(bytes, on.id);
        let block = block.map_err(|error| match error {
            AllocError::OutOfMemory(_) | AllocError::TooLarge { .. } => Code::OUT_OF_MEMORY,
            error => {
                log::note(&error.to_string());
                Code::UNKNOWN
            }
        })?;
        self.tell_others(device);
        let start = block.ptr().0;
        let region = Region {
            bytes: block.requested_bytes(),
            device,
            context: on.context,
            kind: Kind::Pool { pool, block },
        };
        self.regions.insert(start, region);
        Ok(start)
    }

    pub(crate) fn free_to_pool(&mut self, address: u64, on: On) -> Outcome {
        if address == 0 {
            return Ok(());
        }
        let Some(Region {
            kind: Kind::Pool { block, .. },
            device,
            ..
        }) = self.regions.get(&address)
        else {
            return Err(Code::INVALID_VALUE);
        };
        let device = *device;
        if device == on.device && block.stream() != on.id {
            block.record_stream(on.id)?;
        }
        self.regions.remove(&address);
        self.tell_others(device);
        Ok(())
    }

    /// Pools keep no more than their threshold once something has waited for the device.
    pub(crate) fn trim_pools(&mut self, device: usize) -> Outcome {
        for pool in self.pools.values().filter(|pool| pool.device == device) {
            pool.trim(pool.release_threshold)?;
        }
        self.tell_others(device);
        Ok(())
    }

    pub(crate) fn trim_pool(&mut self, handle: u64, kept: u64) -> Outcome {
        let pool = self.pool(handle)?;
        let device = pool.device;
        pool.trim(kept)?;
        self.tell_others(device);
        Ok(())
    }

    pub(crate) fn destroy_pool(&mut self, handle: u64) -> Outcome {
        if self.gpus.iter().any(|gpu| gpu.default_pool == handle) {
            return Err(Code::INVALID_VALUE);
        }
        let pool = self.pools.remove(&handle).ok_or(Code::INVALID_VALUE)?;
        pool.trim(0)?;
        for gpu in &mut self.gpus {
            if gpu.current_pool == handle {
                gpu.current_pool = gpu.default_pool;
            }
        }
        self.tell_others(pool.device);
        Ok(())
    }

    /// Pools forget a stream before it is destroyed.
    pub(crate) fn retire_stream(
        &mut self,
        device: usize,
        stream: lastref_alloc::StreamId,
    ) -> Outcome {
        for pool in self.pools.values().filter(|pool| pool.device == device) {
            if let Some(allocator) = &pool.allocator {
                allocator.retire_stream(stream)?;
            }
        }
        Ok(())
    }
}
