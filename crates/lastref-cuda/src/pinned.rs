//! Pinned host memory, which a device reads and writes without a copy in between.
//!
//! Pinning is slow (it takes the kernel a while to lock pages, and the driver to map them), so what
//! is freed is cached by size class. There are eight classes to each doubling: a buffer is at most
//! an eighth larger than what was asked for, where powers of two waste up to half.
//!
//! # Invariants
//!
//! 1. A block of host memory is either in one [`PinnedBuffer`] or in the cache, and goes from one to
//!    the other as a whole.
//! 2. A block in the cache carries the events of the work that may still use it, and is given out
//!    again only when all of them are done. A block whose use cannot be known (an event could not be
//!    recorded, and the stream not waited for) is left to the system, for good.
//!
//! Lock order: the cache's lock is last; no call to the driver is made under it.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use lastref_alloc::{DeviceResult, StreamId};

use crate::device::CudaDevice;
use crate::raw::{Event, HostBlock};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// What a page of the host holds; pinning less is no cheaper.
const MIN_BYTES: usize = 4096;
/// Classes to a doubling, as a power of two.
const CLASS_BITS: u32 = 3;
/// What the cache keeps at most; what would pass it is given back.
const MAX_CACHED_BYTES: u64 = 256 << 20;

/// The size that a request of `bytes` bytes is given.
fn class_of(bytes: usize) -> usize {
    let bytes = bytes.max(MIN_BYTES);
    let step = 1_usize << (usize::BITS - 1 - bytes.leading_zeros()).saturating_sub(CLASS_BITS);
    bytes.next_multiple_of(step.max(MIN_BYTES))
}

#[derive(Debug)]
struct Idle {
    block: HostBlock,
    pending: Vec<Arc<Event>>,
}

#[derive(Debug, Default)]
struct Cache {
    /// By size.
    idle: BTreeMap<usize, Vec<Idle>>,
    bytes: u64,
}

fn cache() -> &'static Mutex<Cache> {
    static CACHE: OnceLock<Mutex<Cache>> = OnceLock::new();
    CACHE.get_or_init(Mutex::default)
}

static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

pub(crate) fn held_and_cached() -> (u64, u64) {
    (HELD_BYTES.load(Ordering::Relaxed), lock(cache()).bytes)
}

/// Pinned host memory for this process. It may be used with every device.
///
/// Dropping it puts it into a cache; [`CudaDevice::trim_pinned`] gives the cache back. Bytes are
/// zero at first, and what an earlier owner left afterwards.
#[derive(Debug)]
pub struct PinnedBuffer {
    /// Empty once it was given up.
    block: HostBlock,
    len: usize,
    pending: Vec<Arc<Event>>,
}

impl PinnedBuffer {
    pub(crate) fn new(device: &CudaDevice, bytes: usize) -> DeviceResult<Self> {
        let class = class_of(bytes);
        let _entered = device.enter("cuMemHostAlloc")?;
        let _uncaptured = device.uncaptured()?;
        let block = match take_idle(class) {
            Some(block) => block,
            None => {
                let block = HostBlock::new(class).or_else(|failure| {
                    // What is cached may be what is missing.
                    if trim_entered() == 0 {
                        return Err(failure);
                    }
                    HostBlock::new(class)
                })?;
                HELD_BYTES.fetch_add(class as u64, Ordering::Relaxed);
                block
            }
        };
        Ok(Self {
            block,
            len: bytes,
            pending: Vec::new(),
        })
    }

    /// Its size as asked for, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What was pinned for it, in bytes.
    #[must_use]
    pub fn pinned_bytes(&self) -> usize {
        self.block.len()
    }

    /// Says that work submitted to `stream` so far uses the memory: once dropped, it is given to
    /// nobody before that work is done. The bytes must not be touched either before then.
    ///
    /// # Errors
    ///
    /// The driver's; then the stream has been waited for, if it could be.
    pub fn record_stream(&mut self, device: &CudaDevice, stream: StreamId) -> DeviceResult<()> {
        let event = device.record_untimed(stream)?;
        self.pending.push(event);
        Ok(())
    }

    pub(crate) fn block(&self) -> &HostBlock {
        &self.block
    }

    pub(crate) fn block_mut(&mut self) -> &mut HostBlock {
        &mut self.block
    }

    pub(crate) fn pending_on(&mut self, event: Arc<Event>) {
        self.pending.push(event);
    }

    /// Waits until no work uses it any more.
    pub(crate) fn wait(&mut self) -> DeviceResult<()> {
        while let Some(event) = self.pending.last() {
            event.synchronize()?;
            self.pending.pop();
        }
        Ok(())
    }

    /// Leaves the memory to the system: nobody knows what still uses it.
    pub(crate) fn abandon(mut self) {
        let bytes = std::mem::take(&mut self.block).leak() as u64;
        HELD_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        log::error!(
            "lastref-cuda: {bytes} bytes of pinned memory are lost: what uses them is not known"
        );
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.block.bytes()[..self.len]
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.block.bytes_mut()[..self.len]
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let block = std::mem::take(&mut self.block);
        let pending = std::mem::take(&mut self.pending);
        let bytes = block.len();
        if bytes == 0 {
            return;
        }
        let mut cache = lock(cache());
        cache.bytes += bytes as u64;
        cache
            .idle
            .entry(bytes)
            .or_default()
            .push(Idle { block, pending });
    }
}

/// A block of this size that no work uses any more. A context must be current.
fn take_idle(class: usize) -> Option<HostBlock> {
    // Asked outside the lock; the events of a few at most.
    let candidates = {
        let mut cache = lock(cache());
        let idle = cache.idle.get_mut(&class)?;
        std::mem::take(idle)
    };
    let mut found = None;
    let mut others = Vec::new();
    for mut candidate in candidates {
        if found.is_none() {
            candidate
                .pending
                .retain(|event| !event.query().unwrap_or(false));
            if candidate.pending.is_empty() {
                found = Some(candidate.block);
                continue;
            }
        }
        others.push(candidate);
    }
    let mut cache = lock(cache());
    if found.is_some() {
        cache.bytes -= class as u64;
    }
    cache.idle.entry(class).or_default().append(&mut others);
    found
}

/// Gives back what no work uses. A context must be current.
pub(crate) fn trim_entered() -> u64 {
    let all = std::mem::take(&mut *lock(cache()));
    let mut given_back = 0;
    let mut kept = Vec::new();
    for idle in all.idle.into_values().flatten() {
        if idle
            .pending
            .iter()
            .all(|event| event.query().unwrap_or(false))
        {
            given_back += idle.block.len() as u64;
            drop(idle);
        } else {
            kept.push(idle);
        }
    }
    HELD_BYTES.fetch_sub(given_back, Ordering::Relaxed);
    let mut cache = lock(cache());
    for idle in kept {
        let bytes = idle.block.len();
        cache.bytes += bytes as u64;
        cache.idle.entry(bytes).or_default().push(idle);
    }
    given_back
}

/// Whether the cache holds more than it should.
pub(crate) fn is_overfull() -> bool {
    lock(cache()).bytes > MAX_CACHED_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_at_most_an_eighth_larger_than_what_was_asked_for() {
        let mut bytes = 1;
        while bytes < 1 << 34 {
            for bytes in [bytes, bytes + 1, bytes * 4 / 3, bytes * 15 / 8] {
                let class = class_of(bytes);
                assert!(class >= bytes && class.is_multiple_of(MIN_BYTES));
                assert_eq!(class_of(class), class, "a class is its own");
                let most = (bytes + bytes / 8).next_multiple_of(MIN_BYTES);
                assert!(class <= most.max(MIN_BYTES), "{bytes} gets {class}");
            }
            bytes *= 2;
        }
    }

    #[test]
    fn there_are_eight_classes_to_a_doubling() {
        let (from, to) = (1 << 20, 2 << 20);
        let classes: std::collections::BTreeSet<_> =
            (from..to).step_by(4096).map(class_of).collect();
        assert_eq!(classes.len(), 9, "the eight, and the next one's first");
    }
}
