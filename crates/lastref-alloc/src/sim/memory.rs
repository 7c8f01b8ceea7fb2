//! The memory of one simulated device: its page table, its segments, and the bytes behind them.
//!
//! ```text
//! Memory ── pages     PageId → slot of 2 MiB in the memory file (sparse, one per device)
//!        ── ranges    start → reserved host addresses, inaccessible until a page is there
//!        ── mapped    address → page that is mapped there
//!        ── segments  start → host addresses of their own
//! ```
//!
//! A [`DevicePtr`] of this device is the host address. All raw memory access of the simulated
//! device is in this file; what it offers to the rest is safe, because every access goes through
//! the page table first.
//!
//! # Invariants
//!
//! 1. A [`HostRange`] owns its addresses from construction to drop: nothing else in the process
//!    maps, unmaps or protects them. Ranges therefore never overlap.
//! 2. The addresses of an entry of `mapped` lie inside one entry of `ranges`, hold the page's slot
//!    of the memory file, and are readable and writable exactly if `access` is set.
//! 3. The addresses of an entry of `segments` are readable and writable.
//! 4. All bytes are reached through `&self` or `&mut self` of the `Memory`, which lives behind the
//!    world's lock, or by the owner of an exported pointer, who synchronises first. No Rust
//!    reference to device memory outlives the function that made it.
//! 5. A slot is in `free_slots`, or at least `next_slot`, or owned by exactly one page.
//! 6. `held_bytes` is what pages and segments take, and never passes `capacity_bytes`.
//! 7. A [`HostMemory`] is readable and writable until the work it was lent for has run, by the promise of
//!    who made it.
//!    A device that keeps no contents has no memory file: its addresses are reserved, and never
//!    accessible. Invariants 2 and 3 are then about the tables alone, and no byte is reached.
//! 8. `host_mappings` is the number of places in `mapped` where one host mapping ends and another
//!    begins. It stays under `max_host_mappings`, which leaves the rest of the process some: at the
//!    host's limit nothing could be unmapped either.
//!
//! # Safety
//!
//! Accesses are checked against the table (invariants 2 and 3) in the same call that performs
//! them, so they touch only memory that is there. The device is not to be used in a forked child:
//! the memory file would be shared with the parent.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use smallvec::SmallVec;

use super::Call;
use crate::device::{DeviceError, DevicePtr, DeviceResult, Extent2d, FillValue, PageId};

/// The size of a physical page, and the granularity in which a segment takes memory: both are
/// 2 MiB on NVIDIA GPUs since Volta.
pub(super) const PAGE_BYTES: u64 = 2 << 20;

/// What errors call the making of a device.
const NEW: &str = "new_device";

/// A byte count as the host counts. The module exists only where `usize` has 64 bits.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the module is compiled only where usize has 64 bits"
)]
const fn host(bytes: u64) -> usize {
    bytes as usize
}

/// The host pointer for an address of device memory.
fn at(ptr: u64) -> *mut u8 {
    // The address comes from `mmap`, whose provenance `HostRange` exposed.
    std::ptr::with_exposed_provenance_mut(host(ptr))
}

pub(super) fn invalid(call: impl Into<&'static str>, reason: impl Into<String>) -> DeviceError {
    DeviceError::InvalidArgument {
        call: call.into(),
        reason: reason.into(),
    }
}

/// The host refused. Not an out-of-memory error: the simulated device is not what is full.
fn refused(call: &'static str, what: &str, errno: Errno) -> DeviceError {
    let hint = if errno == Errno::NOMEM {
        "; the process may have reached vm.max_map_count or its address space limit, raise it"
    } else {
        ""
    };
    DeviceError::Driver {
        call,
        code: errno.raw_os_error(),
        text: format!("the host refused to {what}: {errno}{hint}"),
    }
}

/// Host addresses owned by this value and unmapped with it (invariant 1).
#[derive(Debug)]
struct HostRange {
    start: u64,
    bytes: u64,
}

impl HostRange {
    /// Takes `bytes` bytes of address space at a multiple of `align`, itself a power of two.
    fn new(bytes: u64, align: u64, prot: ProtFlags) -> Result<Self, Errno> {
        let padded = bytes.checked_add(align).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a mapping at an address of the kernel's choice touches no memory in use.
        let raw =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), host(padded), prot, flags) }?;
        let raw = raw.expose_provenance() as u64;
        let start = raw.next_multiple_of(align);
        // What lies before and after the aligned part goes back at once.
        let (head, tail) = (start - raw, raw + padded - (start + bytes));
        for (from, len) in [(raw, head), (start + bytes, tail)] {
            if len > 0 {
                drop(Self {
                    start: from,
                    bytes: len,
                });
            }
        }
        Ok(Self { start, bytes })
    }

    fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// Puts slot `slot` of `file` at `ptr`, not accessible yet.
    fn map_slot(&self, ptr: u64, file: &OwnedFd, slot: u64) -> Result<(), Errno> {
        assert!(self.start <= ptr && ptr + PAGE_BYTES <= self.end());
        // SAFETY: the addresses are this range's own (invariant 1), checked above.
        unsafe {
            rustix::mm::mmap(
                at(ptr).cast::<c_void>(),
                host(PAGE_BYTES),
                ProtFlags::empty(),
                MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
                file,
                slot * PAGE_BYTES,
            )
        }?;
        Ok(())
    }

    /// Puts the inaccessible reservation back where a page was.
    fn unmap_slot(&self, ptr: u64) -> Result<(), Errno> {
        assert!(self.start <= ptr && ptr + PAGE_BYTES <= self.end());
        // SAFETY: the addresses are this range's own (invariant 1), checked above.
        unsafe {
            rustix::mm::mmap_anonymous(
                at(ptr).cast::<c_void>(),
                host(PAGE_BYTES),
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )
        }?;
        Ok(())
    }

    /// Makes `bytes` bytes from `ptr` readable and writable.
    fn open(&self, ptr: u64, bytes: u64) -> Result<(), Errno> {
        assert!(self.start <= ptr && ptr + bytes <= self.end());
        let flags = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the addresses are this range's own (invariant 1), checked above.
        unsafe { rustix::mm::mprotect(at(ptr).cast::<c_void>(), host(bytes), flags) }
    }

    /// Asks for small host pages, so that touching one word costs 4 KiB and not 2 MiB.
    fn keep_sparse(&self) -> Result<(), Errno> {
        let ptr = at(self.start).cast::<c_void>();
        // SAFETY: the addresses are this range's own (invariant 1); the advice changes no content.
        unsafe { rustix::mm::madvise(ptr, host(self.bytes), Advice::LinuxNoHugepage) }
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        // SAFETY: the addresses are this range's own (invariant 1), and no reference to them is
        // left (invariant 4).
        let result =
            unsafe { rustix::mm::munmap(at(self.start).cast::<c_void>(), host(self.bytes)) };
        // It fails only where it would have to split a mapping and may not. The addresses stay
        // taken then, which harms nobody.
        let _ = result;
    }
}

/// Host memory lent to a device for a copy that runs later, as pinned memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemory {
    start: u64,
    bytes: u64,
}

impl HostMemory {
    /// Lends `bytes` bytes from `start`.
    ///
    /// # Safety
    ///
    /// They are readable, and writable where they are copied to, until the work they are given to has run; and
    /// no Rust reference to them is in use while it runs.
    #[must_use]
    pub unsafe fn new(start: *mut u8, bytes: u64) -> Self {
        let start = start.expose_provenance() as u64;
        Self { start, bytes }
    }

    /// How much it is, in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.bytes
    }
}

#[derive(Debug)]
struct Page {
    slot: u64,
    mapped_at: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    page: PageId,
    slot: u64,
    access: bool,
    /// When it was mapped, on the clock that also stamps submitted work.
    born: u64,
}

#[derive(Debug)]
struct Segment {
    range: HostRange,
    /// What was asked for; the range is longer.
    bytes: u64,
    born: u64,
}

/// Physical bytes: of the memory file, or of a segment, which are two spaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) segment: bool,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// How many host mappings a device may use: seven eighths of what Linux allows the process.
fn max_host_mappings() -> u64 {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count");
    // Without /proc, what Linux allows by default.
    let limit = limit.ok().and_then(|text| text.trim().parse().ok());
    let limit: u64 = limit.unwrap_or(65_530);
    limit - limit / 8
}

#[derive(Debug)]
pub(super) struct Memory {
    capacity_bytes: u64,
    other_process_bytes: u64,
    held_bytes: u64,
    virtual_memory: bool,
    keeps_contents: bool,
    /// What is behind pages: there if both are set.
    file: Option<OwnedFd>,
    pages: HashMap<PageId, Page>,
    next_page: u64,
    free_slots: BTreeSet<u64>,
    next_slot: u64,
    ranges: BTreeMap<u64, HostRange>,
    mapped: BTreeMap<u64, Mapping>,
    host_mappings: u64,
    max_host_mappings: u64,
    segments: BTreeMap<u64, Segment>,
}

impl Memory {
    pub(super) fn new(
        capacity_bytes: u64,
        virtual_memory: bool,
        keeps_contents: bool,
    ) -> DeviceResult<Self> {
        if i64::try_from(capacity_bytes).is_err() {
            let what = format!("address {capacity_bytes} bytes of a device");
            return Err(refused(NEW, &what, Errno::INVAL));
        }
        let file = if virtual_memory && keeps_contents {
            let file = rustix::fs::memfd_create("lastref-sim", MemfdFlags::CLOEXEC)
                .map_err(|e| refused(NEW, "create a memory file", e))?;
            // Only whole pages are ever used, so the file need not hold a last part of one.
            rustix::fs::ftruncate(&file, capacity_bytes / PAGE_BYTES * PAGE_BYTES)
                .map_err(|e| refused(NEW, "size the memory file", e))?;
            Some(file)
        } else {
            None
        };
        Ok(Self {
            capacity_bytes,
            other_process_bytes: 0,
            held_bytes: 0,
            virtual_memory,
            keeps_contents,
            file,
            pages: HashMap::new(),
            next_page: 1,
            free_slots: BTreeSet::new(),
            next_slot: 0,
            ranges: BTreeMap::new(),
            mapped: BTreeMap::new(),
            host_mappings: 0,
            max_host_mappings: max_host_mappings(),
            segments: BTreeMap::new(),
        })
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.capacity_bytes
            .saturating_sub(self.held_bytes)
            .saturating_sub(self.other_process_bytes)
    }

    pub(super) fn set_other_process_bytes(&mut self, bytes: u64) {
        self.other_process_bytes = bytes;
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    pub(super) fn segments(&self) -> u64 {
        self.segments.len() as u64
    }

    /// Host memory that the pages take, from the file's own count.
    pub(super) fn host_page_bytes(&self) -> u64 {
        let blocks = self
            .file
            .as_ref()
            .and_then(|file| rustix::fs::fstat(file).ok())
            .map_or(0, |stat| stat.st_blocks);
        u64::try_from(blocks).unwrap_or(0) * 512
    }

    pub(super) fn out_of_memory(&self, call: Call, requested: u64) -> DeviceError {
        DeviceError::OutOfMemory {
            call: call.name(),
            requested,
            free: self.free_bytes(),
            total: self.capacity_bytes,
        }
    }

    fn need_virtual_memory(&self, call: Call) -> DeviceResult<()> {
        if self.virtual_memory {
            return Ok(());
        }
        Err(DeviceError::NotSupported { call: call.name() })
    }

    // ---- segments -------------------------------------------------------------------------

    pub(super) fn alloc_segment(&mut self, bytes: u64, born: u64) -> DeviceResult<DevicePtr> {
        let call = Call::AllocSegment;
        if bytes == 0 {
            return Err(invalid(call, "0 bytes requested, ask for at least 1"));
        }
        let taken = bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .filter(|&taken| taken <= self.free_bytes())
            .ok_or_else(|| self.out_of_memory(call, bytes))?;
        let access = if self.keeps_contents {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::empty()
        };
        let range = HostRange::new(taken, PAGE_BYTES, access)
            .map_err(|e| refused(call.name(), &format!("map {taken} bytes"), e))?;
        range
            .keep_sparse()
            // A kernel without huge pages does not know the advice, and does not need it.
            .or_else(|e| if e == Errno::INVAL { Ok(()) } else { Err(e) })
            .map_err(|e| refused(call.name(), "advise on the mapping", e))?;
        let start = range.start;
        self.held_bytes += taken;
        self.segments.insert(start, Segment { range, bytes, born });
        Ok(DevicePtr(start))
    }

    pub(super) fn check_segment(&self, ptr: DevicePtr) -> DeviceResult<()> {
        if self.segments.contains_key(&ptr.0) {
            Ok(())
        } else {
            let reason = format!("{ptr} is not the start of a segment");
            Err(invalid(Call::FreeSegment, reason))
        }
    }

    pub(super) fn free_segment(&mut self, ptr: DevicePtr) -> DeviceResult<()> {
        self.check_segment(ptr)?;
        if let Some(segment) = self.segments.remove(&ptr.0) {
            self.held_bytes -= segment.range.bytes;
        }
        Ok(())
    }

    // ---- virtual memory -------------------------------------------------------------------

    pub(super) fn reserve_range(&mut self, bytes: u64) -> DeviceResult<DevicePtr> {
        let call = Call::ReserveRange;
        self.need_virtual_memory(call)?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            let reason = format!("{bytes} bytes is not a positive multiple of {PAGE_BYTES}");
            return Err(invalid(call, reason));
        }
        let range = HostRange::new(bytes, PAGE_BYTES, ProtFlags::empty()).map_err(|e| {
            refused(
                call.name(),
                &format!("reserve {bytes} bytes of addresses"),
                e,
            )
        })?;
        let start = range.start;
        self.ranges.insert(start, range);
        Ok(DevicePtr(start))
    }

    pub(super) fn release_range(&mut self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        let call = Call::ReleaseRange;
        self.need_virtual_memory(call)?;
        let range = self
            .ranges
            .get(&ptr.0)
            .filter(|range| range.bytes == bytes)
            .ok_or_else(|| {
                let reason = format!("{bytes} bytes from {ptr} are not a reserved range");
                invalid(call, reason)
            })?;
        if let Some((page_at, _)) = self.mapped.range(range.start..range.end()).next() {
            let reason = format!("a page is still mapped at {page_at:#x}, unmap it first");
            return Err(invalid(call, reason));
        }
        self.ranges.remove(&ptr.0);
        Ok(())
    }

    /// Takes a reserved range in which nothing is mapped from another memory of the group. An address range
    /// is no device's until something is mapped in it.
    pub(super) fn take_range(&mut self, from: &mut Self, ptr: DevicePtr) -> DeviceResult<()> {
        let range = from.range_of(Call::ReserveRange, ptr, 1)?;
        if let Some((page_at, _)) = from.mapped.range(range.start..range.end()).next() {
            let reason =
                format!("a page is mapped at {page_at:#x}, and a range has pages of one device");
            return Err(invalid(Call::ReserveRange, reason));
        }
        let start = range.start;
        if let Some(range) = from.ranges.remove(&start) {
            self.ranges.insert(start, range);
        }
        Ok(())
    }

    pub(super) fn create_page(&mut self) -> DeviceResult<PageId> {
        let call = Call::CreatePage;
        self.need_virtual_memory(call)?;
        if self.free_bytes() < PAGE_BYTES {
            return Err(self.out_of_memory(call, PAGE_BYTES));
        }
        // Lowest slot first: pages made one after the other lie side by side in the file, and the
        // host keeps one mapping for a run of them.
        let slot = self.free_slots.pop_first().unwrap_or_else(|| {
            self.next_slot += 1;
            self.next_slot - 1
        });
        let page = PageId(self.next_page);
        self.next_page += 1;
        self.held_bytes += PAGE_BYTES;
        let mapped_at = None;
        self.pages.insert(page, Page { slot, mapped_at });
        Ok(page)
    }

    pub(super) fn destroy_page(&mut self, page: PageId) -> DeviceResult<()> {
        let call = Call::DestroyPage;
        self.need_virtual_memory(call)?;
        let found = self.page(call, page)?;
        if let Some(ptr) = found.mapped_at {
            let reason = format!("page {} is mapped at {ptr:#x}, unmap it first", page.0);
            return Err(invalid(call, reason));
        }
        let slot = found.slot;
        if let Some(file) = &self.file {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, flags, slot * PAGE_BYTES, PAGE_BYTES)
                .map_err(|e| refused(call.name(), "give a page's memory back", e))?;
        }
        self.pages.remove(&page);
        self.free_slots.insert(slot);
        self.held_bytes -= PAGE_BYTES;
        Ok(())
    }

    fn page(&self, call: Call, page: PageId) -> DeviceResult<&Page> {
        self.pages
            .get(&page)
            .ok_or_else(|| invalid(call, format!("there is no page {}", page.0)))
    }

    /// The reserved range that holds `bytes` bytes from `ptr`.
    fn range_of(&self, call: Call, ptr: DevicePtr, bytes: u64) -> DeviceResult<&HostRange> {
        self.ranges
            .range(..=ptr.0)
            .next_back()
            .map(|(_, range)| range)
            .filter(|range| ptr.0 < range.end() && bytes <= range.end() - ptr.0)
            .ok_or_else(|| {
                let reason = format!("{bytes} bytes from {ptr} are not inside a reserved range");
                invalid(call, reason)
            })
    }

    pub(super) fn map_page(&mut self, ptr: DevicePtr, page: PageId, born: u64) -> DeviceResult<()> {
        let call = Call::MapPage;
        self.need_virtual_memory(call)?;
        let found = self.page(call, page)?;
        if let Some(other) = found.mapped_at {
            let reason = format!("page {} is already mapped at {other:#x}", page.0);
            return Err(invalid(call, reason));
        }
        if !ptr.0.is_multiple_of(PAGE_BYTES) {
            let reason = format!("{ptr} is not aligned to the page size, {PAGE_BYTES} bytes");
            return Err(invalid(call, reason));
        }
        let range = self.range_of(call, ptr, PAGE_BYTES)?;
        if let Some(other) = self.mapped.get(&ptr.0) {
            let reason = format!("page {} is already mapped at {ptr}", other.page.0);
            return Err(invalid(call, reason));
        }
        let slot = found.slot;
        if let Some(file) = &self.file {
            // A page in the middle of nothing adds two.
            let mapped = if self.host_mappings + 2 > self.max_host_mappings {
                Err(Errno::NOMEM)
            } else {
                range.map_slot(ptr.0, file, slot)
            };
            mapped.map_err(|e| refused(call.name(), &format!("map a page at {ptr}"), e))?;
        }
        let mapping = Mapping {
            page,
            slot,
            access: false,
            born,
        };
        self.host_mappings -= self.borders(ptr.0);
        self.mapped.insert(ptr.0, mapping);
        self.host_mappings += self.borders(ptr.0);
        if let Some(found) = self.pages.get_mut(&page) {
            found.mapped_at = Some(ptr.0);
        }
        Ok(())
    }

    /// How many of the two borders of the page at `ptr` are borders of a host mapping. Access does
    /// not matter: it is set soon after.
    fn borders(&self, ptr: u64) -> u64 {
        if self.file.is_none() {
            return 0;
        }
        let joined = |low: u64, high: u64| {
            let slot = |at: u64| self.mapped.get(&at).map(|mapping| mapping.slot);
            match (slot(low), slot(high)) {
                (None, None) => true,
                (Some(low), Some(high)) => low + 1 == high,
                _ => false,
            }
        };
        u64::from(!joined(ptr - PAGE_BYTES, ptr)) + u64::from(!joined(ptr, ptr + PAGE_BYTES))
    }

    pub(super) fn set_access(&mut self, ptr: DevicePtr, bytes: u64) -> DeviceResult<()> {
        let call = Call::SetAccess;
        self.need_virtual_memory(call)?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || !ptr.0.is_multiple_of(PAGE_BYTES) {
            let reason = format!("{bytes} bytes from {ptr} are not whole pages of {PAGE_BYTES}");
            return Err(invalid(call, reason));
        }
        let range = self.range_of(call, ptr, bytes)?;
        let end = ptr.0 + bytes;
        let mapped = self.mapped.range(ptr.0..end).count() as u64;
        if mapped != bytes / PAGE_BYTES {
            let reason = format!(
                "{mapped} of the {} pages from {ptr} are mapped",
                bytes / PAGE_BYTES
            );
            return Err(invalid(call, reason));
        }
        if self.file.is_some() {
            range
                .open(ptr.0, bytes)
                .map_err(|e| refused(call.name(), &format!("open {bytes} bytes from {ptr}"), e))?;
        }
        for (_, mapping) in self.mapped.range_mut(ptr.0..end) {
            mapping.access = true;
        }
        Ok(())
    }

    pub(super) fn unmap_page(&mut self, ptr: DevicePtr) -> DeviceResult<()> {
        let call = Call::UnmapPage;
        self.need_virtual_memory(call)?;
        let mapping = *self
            .mapped
            .get(&ptr.0)
            .ok_or_else(|| invalid(call, format!("no page is mapped at {ptr}")))?;
        let range = self.range_of(call, ptr, PAGE_BYTES)?;
        if self.file.is_some() {
            range
                .unmap_slot(ptr.0)
                .map_err(|e| refused(call.name(), &format!("unmap the page at {ptr}"), e))?;
        }
        self.host_mappings -= self.borders(ptr.0);
        self.mapped.remove(&ptr.0);
        self.host_mappings += self.borders(ptr.0);
        if let Some(page) = self.pages.get_mut(&mapping.page) {
            page.mapped_at = None;
        }
        Ok(())
    }

    /// Where a page's bytes are.
    pub(super) fn place_of_page(&self, page: PageId) -> Option<Place> {
        let start = self.pages.get(&page)?.slot * PAGE_BYTES;
        Some(Place {
            segment: false,
            start,
            end: start + PAGE_BYTES,
        })
    }

    /// Where a segment's bytes are.
    pub(super) fn place_of_segment(&self, ptr: DevicePtr) -> Option<Place> {
        let segment = self.segments.get(&ptr.0)?;
        Some(Place {
            segment: true,
            start: ptr.0,
            end: ptr.0 + segment.range.bytes,
        })
    }

    /// The physical bytes behind addresses, as few stretches as possible. What is not mapped is
    /// left out.
    pub(super) fn places(&self, ptr: DevicePtr, bytes: u64) -> SmallVec<[Place; 1]> {
        let mut places: SmallVec<[Place; 1]> = SmallVec::new();
        let end = ptr.0.saturating_add(bytes);
        if let Some((start, segment)) = self.segments.range(..=ptr.0).next_back()
            && ptr.0 < start + segment.bytes
        {
            places.push(Place {
                segment: true,
                start: ptr.0,
                end: end.min(start + segment.range.bytes),
            });
            return places;
        }
        let first = ptr.0 / PAGE_BYTES * PAGE_BYTES;
        for (&page_at, mapping) in self.mapped.range(first..end) {
            let slot = mapping.slot * PAGE_BYTES;
            let start = slot + ptr.0.max(page_at) - page_at;
            let stop = slot + end.min(page_at + PAGE_BYTES) - page_at;
            match places.last_mut() {
                Some(last) if last.end == start => last.end = stop,
                _ => places.push(Place {
                    segment: false,
                    start,
                    end: stop,
                }),
            }
        }
        places
    }

    // ---- the bytes ------------------------------------------------------------------------

    /// Whether `bytes` bytes from `ptr` may be read and written, and since before `submitted`.
    ///
    /// Memory mapped or allocated later than the work that touches it was submitted means that
    /// what the work was meant for is gone, even though something else is there now.
    pub(super) fn check(&self, ptr: DevicePtr, bytes: u64, submitted: u64) -> Result<(), String> {
        if bytes == 0 {
            return Ok(());
        }
        let Some(end) = ptr.0.checked_add(bytes) else {
            return Err(format!("{bytes} bytes from {ptr} pass the end of memory"));
        };
        let newer = |born: u64, what: &str| {
            if born > submitted {
                Err(format!("{what} after the work was submitted"))
            } else {
                Ok(())
            }
        };
        if let Some((start, segment)) = self.segments.range(..=ptr.0).next_back() {
            let segment_end = start + segment.bytes;
            if ptr.0 < segment_end {
                if end > segment_end {
                    return Err(format!(
                        "{bytes} bytes from {ptr} pass the end of the segment at {segment_end:#x}"
                    ));
                }
                return newer(
                    segment.born,
                    &format!("the segment at {start:#x} was allocated"),
                );
            }
        }
        let mut expected = ptr.0 / PAGE_BYTES * PAGE_BYTES;
        for (&page_at, mapping) in self.mapped.range(expected..end) {
            if page_at != expected {
                break;
            }
            if !mapping.access {
                return Err(format!("the page at {page_at:#x} has no access set"));
            }
            newer(
                mapping.born,
                &format!("the page at {page_at:#x} was mapped"),
            )?;
            expected += PAGE_BYTES;
        }
        if expected < end {
            let first = expected.max(ptr.0);
            return Err(format!("{first:#x} is not device memory of this device"));
        }
        Ok(())
    }

    /// Copies device memory at `src` into `dst`.
    pub(super) fn read(
        &self,
        dst: &mut [u8],
        src: DevicePtr,
        submitted: u64,
    ) -> Result<(), String> {
        self.check(src, dst.len() as u64, submitted)?;
        if !self.keeps_contents {
            dst.fill(0);
            return Ok(());
        }
        // SAFETY: `check` found the source readable (invariants 2 and 3); `copy` allows `dst` to
        // be an exported view of the same bytes (invariant 4).
        unsafe { std::ptr::copy(at(src.0), dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies `src` into device memory at `dst`.
    pub(super) fn write(&self, dst: DevicePtr, src: &[u8], submitted: u64) -> Result<(), String> {
        self.check(dst, src.len() as u64, submitted)?;
        if !self.keeps_contents {
            return Ok(());
        }
        // SAFETY: `check` found the destination writable (invariants 2 and 3).
        unsafe { std::ptr::copy(src.as_ptr(), at(dst.0), src.len()) };
        Ok(())
    }

    /// Copies device memory at `src` into lent host memory.
    pub(super) fn read_to(
        &self,
        dst: HostMemory,
        src: DevicePtr,
        submitted: u64,
    ) -> Result<(), String> {
        self.check(src, dst.bytes, submitted)?;
        if !self.keeps_contents {
            // SAFETY: the destination is lent (invariant 7).
            unsafe { std::ptr::write_bytes(at(dst.start), 0, host(dst.bytes)) };
            return Ok(());
        }
        // SAFETY: `check` found the source readable (invariants 2 and 3), and the destination is lent
        // (invariant 7); `copy` allows them to overlap.
        unsafe { std::ptr::copy(at(src.0), at(dst.start), host(dst.bytes)) };
        Ok(())
    }

    /// Copies lent host memory into device memory at `dst`.
    pub(super) fn write_from(
        &self,
        dst: DevicePtr,
        src: HostMemory,
        submitted: u64,
    ) -> Result<(), String> {
        self.check(dst, src.bytes, submitted)?;
        if !self.keeps_contents {
            return Ok(());
        }
        // SAFETY: `check` found the destination writable (invariants 2 and 3), and the source is lent
        // (invariant 7); `copy` allows them to overlap.
        unsafe { std::ptr::copy(at(src.start), at(dst.0), host(src.bytes)) };
        Ok(())
    }

    /// Copies rows from memory of `src_memory`, which may be this one, to this one.
    pub(super) fn copy(
        &self,
        dst: DevicePtr,
        src_memory: &Self,
        src: DevicePtr,
        extent: Extent2d,
        submitted: u64,
    ) -> Result<(), String> {
        self.check(dst, extent.span(extent.dst_pitch)?, submitted)?;
        src_memory.check(src, extent.span(extent.src_pitch)?, submitted)?;
        if !src_memory.keeps_contents {
            return self.fill(dst, FillValue::U8(0), extent, submitted);
        }
        if !self.keeps_contents {
            return Ok(());
        }
        for row in 0..extent.height {
            let from = at(src.0 + row * extent.src_pitch).cast_const();
            let to = at(dst.0 + row * extent.dst_pitch);
            // SAFETY: the row lies in the spans that `check` found accessible (invariants 2, 3).
            unsafe { std::ptr::copy(from, to, host(extent.width_bytes)) };
        }
        Ok(())
    }

    /// Fills rows with `value`. The caller has checked alignment to the value.
    pub(super) fn fill(
        &self,
        dst: DevicePtr,
        value: FillValue,
        extent: Extent2d,
        submitted: u64,
    ) -> Result<(), String> {
        self.check(dst, extent.span(extent.dst_pitch)?, submitted)?;
        if !self.keeps_contents {
            return Ok(());
        }
        for row in 0..extent.height {
            let to = at(dst.0 + row * extent.dst_pitch);
            // SAFETY: the row lies in the span that `check` found accessible (invariants 2, 3),
            // and no other reference to it exists (invariant 4). Any byte is a valid `u8`.
            let bytes = unsafe { std::slice::from_raw_parts_mut(to, host(extent.width_bytes)) };
            match value {
                FillValue::U8(value) => bytes.fill(value),
                FillValue::U16(value) => repeat(bytes, value.to_ne_bytes()),
                FillValue::U32(value) => repeat(bytes, value.to_ne_bytes()),
            }
        }
        Ok(())
    }
}

/// Fills `bytes`, a multiple of the pattern long, with the pattern.
fn repeat<const N: usize>(bytes: &mut [u8], pattern: [u8; N]) {
    for chunk in bytes.chunks_exact_mut(N) {
        chunk.copy_from_slice(&pattern);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A memory with a range of 64 pages and `pages` pages.
    fn memory(pages: usize) -> (Memory, DevicePtr, Vec<PageId>) {
        let mut memory = Memory::new(64 * PAGE_BYTES, true, true).unwrap();
        let range = memory.reserve_range(64 * PAGE_BYTES).unwrap();
        let pages = (0..pages).map(|_| memory.create_page().unwrap()).collect();
        (memory, range, pages)
    }

    #[test]
    fn host_mappings_are_counted_as_the_host_does() {
        let (mut memory, range, pages) = memory(6);
        let at = |slot: u64| range.offset(slot * PAGE_BYTES);
        // Slot of the range, page, borders after it is mapped.
        let steps = [
            (1, 0, 2),
            (3, 2, 4),
            (2, 1, 2),
            (4, 5, 3),
            (5, 4, 4),
            (0, 3, 5),
        ];
        for (slot, page, wanted) in steps {
            memory.map_page(at(slot), pages[page], 1).unwrap();
            assert_eq!(memory.host_mappings, wanted, "after slot {slot}");
        }
        memory.set_access(range, 6 * PAGE_BYTES).unwrap();
        // Five borders: the reservation begins at the last of them.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let starts = maps.lines().filter_map(|line| {
            let start = u64::from_str_radix(line.split('-').next()?, 16).ok()?;
            (range.0..range.0 + 64 * PAGE_BYTES)
                .contains(&start)
                .then_some(start)
        });
        assert_eq!(starts.count(), 5);
        for slot in [2, 1, 3, 5, 4, 0] {
            memory.unmap_page(at(slot)).unwrap();
        }
        assert_eq!(memory.host_mappings, 0);
    }

    #[test]
    fn too_many_host_mappings_are_refused_and_nothing_is_lost() {
        let (mut memory, range, pages) = memory(5);
        memory.max_host_mappings = 8;
        // Every second slot of the range, so that nothing can be merged.
        let at = |slot: u64| range.offset(2 * slot * PAGE_BYTES);
        for (slot, &page) in (0..4).zip(&pages) {
            memory.map_page(at(slot), page, 1).unwrap();
        }
        let error = memory.map_page(at(4), pages[4], 1).unwrap_err();
        assert!(error.to_string().contains("vm.max_map_count"), "{error}");
        assert!(!error.is_out_of_memory());
        memory.unmap_page(at(0)).unwrap();
        memory.map_page(at(4), pages[4], 1).unwrap();
        memory.set_access(at(4), PAGE_BYTES).unwrap();
        memory.write(at(4), &[1; 64], 1).unwrap();
    }
}
