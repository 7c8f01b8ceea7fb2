//! Device bytes: what automatic runs are triggered by, and what runs report.
//!
//! Each device has a count of the bytes that storages hold, kept where storages are made and
//! dropped, and a mark at which the collector is woken. After a run the mark is set a threshold
//! above what is held then. To that is added what another allocator says that it holds there.

use std::cell::Cell;

use super::ForeignCollector;
use super::sync::Ordering;
use super::sync::plain::AtomicU64;
use super::trigger::{Reason, TRIGGER, wake};

/// Devices with marks of their own; further ones share the last.
const MAX_DEVICES: usize = 64;
/// The least growth that wakes the collector.
const MIN_GROWTH: u64 = 64 << 20;
/// And the part of the device's memory: an eighth.
const GROWTH_SHARE: u64 = 8;

struct Device {
    held: AtomicU64,
    /// What another allocator holds on it, as of its latest word; `u64::MAX` if it never spoke.
    foreign: AtomicU64,
    mark: AtomicU64,
    /// The growth set by the user; `u64::MAX` for the default.
    threshold: AtomicU64,
    capacity: AtomicU64,
}

static DEVICES: [Device; MAX_DEVICES] = [const {
    Device {
        held: AtomicU64::new(0),
        foreign: AtomicU64::new(u64::MAX),
        mark: AtomicU64::new(MIN_GROWTH),
        threshold: AtomicU64::new(u64::MAX),
        capacity: AtomicU64::new(0),
    }
}; MAX_DEVICES];

fn device(index: u32) -> &'static Device {
    let last = MAX_DEVICES - 1;
    &DEVICES[usize::try_from(index).map_or(last, |index| index.min(last))]
}

impl Device {
    fn growth(&self) -> Option<u64> {
        match self.threshold.load(Ordering::Relaxed) {
            0 => None,
            u64::MAX => Some(MIN_GROWTH.max(self.capacity.load(Ordering::Relaxed) / GROWTH_SHARE)),
            set => Some(set),
        }
    }

    /// What is in use, whoever holds it.
    fn in_use(&self) -> u64 {
        let foreign = match self.foreign.load(Ordering::Relaxed) {
            u64::MAX => 0,
            told => told,
        };
        self.held.load(Ordering::Relaxed).saturating_add(foreign)
    }

    fn rearm(&self) {
        let held = self.in_use();
        let mark = self
            .growth()
            .map_or(u64::MAX, |growth| held.saturating_add(growth));
        self.mark.store(mark, Ordering::Relaxed);
    }
}

/// A storage of `bytes` bytes was made.
pub(crate) fn added(index: u32, bytes: u64) {
    let device = device(index);
    device.held.fetch_add(bytes, Ordering::Relaxed);
    device.grown();
}

impl Device {
    /// Wakes the collector if the mark is reached.
    fn grown(&self) {
        if self.in_use() < self.mark.load(Ordering::Relaxed) {
            return;
        }
        self.mark.store(u64::MAX, Ordering::Relaxed);
        if TRIGGER.enabled.load(Ordering::Relaxed) && super::has_work() {
            wake(Reason::Bytes);
        } else {
            self.rearm();
        }
    }
}

/// Tells how many bytes another allocator has in use on a device, of which this crate knows nothing.
///
/// If the bytes in use there have grown by the [threshold](super::set_byte_threshold), the collector
/// is woken, for a [`ForeignCollector`] may find some of them. Returns how many bytes may be added
/// before this need be called again; it costs some loads, so call it now and then.
///
/// ```
/// use lastref::gc;
///
/// gc::set_byte_threshold(7, Some(1 << 20));
/// assert!(gc::foreign_bytes_in_use(7, 4096) <= 1 << 20);
/// # gc::foreign_bytes_in_use(7, 0);
/// # gc::set_byte_threshold(7, None);
/// ```
pub fn foreign_bytes_in_use(device_index: u32, bytes: u64) -> u64 {
    let device = device(device_index);
    let before = device
        .foreign
        .swap(bytes.min(u64::MAX - 1), Ordering::Relaxed);
    if before == u64::MAX {
        // What was there before anyone looked is no growth.
        device.rearm();
    }
    device.grown();
    let left = device
        .mark
        .load(Ordering::Relaxed)
        .saturating_sub(device.in_use());
    // There is no mark while a run is awaited, nor while the threshold is 0. Close to the mark, an
    // eighth more does no harm, and calls at every allocation would cost.
    device
        .growth()
        .map_or(left, |growth| left.clamp(growth / 8, growth))
}

/// Tells how much memory a device has that another allocator serves; see
/// [`set_byte_threshold`](super::set_byte_threshold).
pub fn set_foreign_capacity(device_index: u32, bytes: u64) {
    if device(device_index).capacity.load(Ordering::Relaxed) == 0 {
        set_capacity(device_index, bytes);
    }
}

/// Tells that a [`ForeignCollector`] has freed bytes of another allocator on this thread, during its
/// [`collect`](ForeignCollector::collect). They are part of what the run's report says.
pub fn foreign_bytes_freed(bytes: u64) {
    note_freed(bytes);
}

/// Asks for what another allocator holds on the devices it has spoken of.
pub(super) fn ask_for_foreign_bytes(collector: &dyn ForeignCollector) {
    for (device, index) in DEVICES.iter().zip(0..) {
        if device.foreign.load(Ordering::Relaxed) != u64::MAX {
            let bytes = collector.device_bytes(index);
            device
                .foreign
                .store(bytes.min(u64::MAX - 1), Ordering::Relaxed);
        }
    }
}

std::thread_local! {
    /// Device bytes freed by storages dropped on this thread, while somebody counts.
    static FREED: Cell<u64> = const { Cell::new(0) };
}

/// A storage of `bytes` bytes was dropped.
pub(crate) fn removed(index: u32, bytes: u64) {
    device(index).held.fetch_sub(bytes, Ordering::Relaxed);
    note_freed(bytes);
}

fn note_freed(bytes: u64) {
    // At the end of a thread nobody counts any more.
    let _ = FREED.try_with(|freed| freed.set(freed.get().wrapping_add(bytes)));
}

/// Device bytes freed by storages dropped on this thread during `work`.
pub fn device_bytes_freed_by<R>(work: impl FnOnce() -> R) -> (R, u64) {
    let now = || FREED.try_with(Cell::get).unwrap_or(0);
    let before = now();
    let result = work();
    (result, now().wrapping_sub(before))
}

/// Sets all marks anew, after a run.
pub(super) fn rearm() {
    for device in &DEVICES {
        device.rearm();
    }
}

/// Tells how much memory a device has, which the default threshold depends on.
pub(crate) fn set_capacity(index: u32, bytes: u64) {
    device(index).capacity.store(bytes, Ordering::Relaxed);
    device(index).rearm();
}

/// Sets the growth of a device's bytes that wakes the collector; 0 for never, `None` for the
/// default.
pub(super) fn set_threshold(index: u32, bytes: Option<u64>) {
    device(index)
        .threshold
        .store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    device(index).rearm();
}

pub(super) fn threshold(index: u32) -> u64 {
    device(index).growth().unwrap_or(0)
}
