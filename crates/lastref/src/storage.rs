//! [`Storage`]: reference-counted memory, on the host or on a device.
//!
//! Invariants:
//!
//! 1. A host storage's pointer is valid for `len` bytes, readable and writable, from the creation
//!    of the storage until its drop, and aligned to [`HOST_ALIGN`] if lastref allocated it.
//! 2. Lastref reads host bytes only while it holds the storage's lock, and writes them only while it
//!    holds it for writing. Slices are made of the bytes in use alone: two storages may be on the
//!    same memory, when a tensor is exported and imported again, and [`read_write`] refuses bytes
//!    that overlap. Whoever else was given the pointer (DLPack, `data_ptr`) follows the rules of the
//!    unsafe call that made use of it.
//! 3. A storage never changes its memory, size or device.
//!
//! Dropping uses no thread-local variable and calls no driver, so it is safe on any thread, in a
//! destructor of a thread-local variable, and at process exit.
//!
//! Lock order: of two host storages, the one at the lower address first (see [`read_write`]).
//! Under a storage's lock the device may be called, never the allocator.

use std::alloc::{Layout as HostLayout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use crate::alloc::{self, DevicePtr};
use crate::shape::length;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, read, write};
use crate::{Device, Error, Result, cuda, gc};

/// What host memory is aligned to: a cache line, and enough for any vector instruction.
pub(crate) const HOST_ALIGN: usize = 64;

/// Reference-counted memory. A clone is another handle on the same bytes.
///
/// Tensors and their views share one storage. When the last handle is dropped, on any thread, the
/// memory is freed at once: device memory goes to the cache of its device, without a device call;
/// host memory to the system; foreign memory to its owner.
pub struct Storage(Arc<Inner>, #[cfg(feature = "holders")] u64);

struct Inner {
    device: Device,
    bytes: u64,
    memory: Memory,
    #[cfg(feature = "holders")]
    holders: crate::holders::Holders,
}

impl Inner {
    fn new(device: Device, bytes: u64, memory: Memory) -> Arc<Self> {
        Arc::new(Self {
            device,
            bytes,
            memory,
            #[cfg(feature = "holders")]
            holders: crate::holders::Holders::default(),
        })
    }
}

impl Clone for Storage {
    #[cfg_attr(feature = "holders", track_caller)]
    fn clone(&self) -> Self {
        Self::handle(Arc::clone(&self.0))
    }
}

#[cfg(feature = "holders")]
impl Drop for Storage {
    fn drop(&mut self) {
        self.0.holders.remove(self.1);
    }
}

enum Memory {
    Host(HostMemory),
    Cuda(cuda::Block),
    /// On a GPU, somebody else's.
    CudaForeign(cuda::ForeignMemory),
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let (Device::Cuda(index), Memory::Cuda(block)) = (self.device, &self.memory) {
            gc::removed(index, block.allocated_bytes());
        }
    }
}

/// A storage that does not keep its memory.
#[derive(Clone)]
pub(crate) struct WeakStorage(Weak<Inner>);

impl Storage {
    #[cfg_attr(feature = "holders", track_caller)]
    fn handle(inner: Arc<Inner>) -> Self {
        #[cfg(feature = "holders")]
        let number = inner.holders.add();
        Self(
            inner,
            #[cfg(feature = "holders")]
            number,
        )
    }

    /// Where the handles on this storage were made; see [`Tensor::holders`](crate::Tensor::holders).
    #[cfg(feature = "holders")]
    #[must_use]
    pub fn holders(&self) -> Vec<&'static std::panic::Location<'static>> {
        self.0.holders.places()
    }

    /// Memory for `bytes` bytes. On the host it is zeroed; on a device it holds anything, and
    /// belongs to the current stream.
    #[cfg_attr(feature = "holders", track_caller)]
    pub(crate) fn new(call: &'static str, device: Device, bytes: u64) -> Result<Self> {
        let memory = match device {
            Device::Cpu => Memory::Host(HostMemory::new(bytes)?),
            Device::Cuda(index) => Memory::Cuda(cuda::alloc(call, index, bytes)?),
        };
        Ok(Self::handle(Inner::new(device, bytes, memory)))
    }

    /// Host memory that belongs to `owner`, which is dropped with the last handle.
    ///
    /// # Safety
    ///
    /// `ptr` must be valid for reads and writes of `bytes` bytes until `owner` is dropped, and
    /// nobody else may access them while lastref does.
    #[cfg_attr(feature = "holders", track_caller)]
    pub(crate) unsafe fn foreign(
        ptr: NonNull<u8>,
        bytes: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let memory = Memory::Host(HostMemory {
            ptr,
            len: length(bytes),
            lock: RwLock::new(()),
            owner: Owner::Foreign(owner),
        });
        Self::handle(Inner::new(Device::Cpu, bytes, memory))
    }

    /// Memory of GPU `index` that belongs to `owner`, which is dropped with the last handle, once the
    /// streams that used the memory are done.
    ///
    /// # Safety
    ///
    /// `bytes` bytes at `ptr` must be memory of that GPU until `owner` is dropped.
    #[cfg_attr(feature = "holders", track_caller)]
    pub(crate) unsafe fn foreign_on_device(
        call: &'static str,
        index: u32,
        ptr: u64,
        bytes: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: as the caller promises.
        let memory = unsafe { cuda::ForeignMemory::new(call, index, ptr, bytes, owner) }?;
        let device = Device::Cuda(index);
        let memory = Memory::CudaForeign(memory);
        Ok(Self::handle(Inner::new(device, bytes, memory)))
    }

    /// Where the memory is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Its size in bytes, as asked for.
    #[must_use]
    pub fn nbytes(&self) -> u64 {
        self.0.bytes
    }

    /// Its address, on the host or on its device; 0 for no bytes on a device.
    #[must_use]
    pub fn data_ptr(&self) -> u64 {
        match &self.0.memory {
            // Exposed, since whoever is given the number may make a pointer of it (invariant 2).
            Memory::Host(host) => host.ptr.as_ptr().expose_provenance() as u64,
            Memory::Cuda(block) => block.ptr().0,
            Memory::CudaForeign(memory) => memory.ptr().0,
        }
    }

    /// Handles on this storage: tensors, views, clones and exported DLPack tensors.
    #[must_use]
    pub fn ref_count(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Whether both are handles on the same memory.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the memory belongs to somebody else, as that of an imported DLPack tensor.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        matches!(
            &self.0.memory,
            Memory::Host(HostMemory {
                owner: Owner::Foreign(_),
                ..
            }) | Memory::CudaForeign(_)
        )
    }

    /// The block behind a device storage; `None` on the host, and for somebody else's memory.
    #[must_use]
    pub fn block(&self) -> Option<&cuda::Block> {
        match &self.0.memory {
            Memory::Cuda(block) => Some(block),
            Memory::Host(_) | Memory::CudaForeign(_) => None,
        }
    }

    /// Says that `stream` uses the memory.
    pub(crate) fn record_stream(&self, stream: alloc::StreamId) -> Result<()> {
        match &self.0.memory {
            Memory::Cuda(block) => Ok(block.record_stream(stream)?),
            Memory::CudaForeign(memory) => {
                memory.record_stream(stream);
                Ok(())
            }
            Memory::Host(_) => Ok(()),
        }
    }

    pub(crate) fn host(&self) -> Option<&HostMemory> {
        match &self.0.memory {
            Memory::Host(host) => Some(host),
            Memory::Cuda(_) | Memory::CudaForeign(_) => None,
        }
    }

    pub(crate) fn downgrade(&self) -> WeakStorage {
        WeakStorage(Arc::downgrade(&self.0))
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("device", &format_args!("{}", self.device()))
            .field("nbytes", &self.nbytes())
            .field("data_ptr", &DevicePtr(self.data_ptr()))
            .field("ref_count", &self.ref_count())
            .finish()
    }
}

impl WeakStorage {
    #[cfg_attr(feature = "holders", track_caller)]
    pub(crate) fn upgrade(&self) -> Option<Storage> {
        Some(Storage::handle(self.0.upgrade()?))
    }

    pub(crate) fn ref_count(&self) -> usize {
        self.0.strong_count()
    }
}

/// Host bytes behind a lock.
pub(crate) struct HostMemory {
    ptr: NonNull<u8>,
    len: usize,
    lock: RwLock<()>,
    owner: Owner,
}

enum Owner {
    /// Allocated here with this layout; nothing is allocated for zero bytes.
    Lastref(HostLayout),
    /// Freed by dropping this.
    #[expect(dead_code, reason = "held to be dropped with the storage")]
    Foreign(Box<dyn Any + Send + Sync>),
}

// SAFETY: the pointer is used only as invariant 2 says, and the memory is bound to no thread; a
// foreign owner is `Send` itself.
unsafe impl Send for HostMemory {}
// SAFETY: as above; the lock keeps readers and writers apart.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn new(bytes: u64) -> Result<Self> {
        let refused = || Error::HostOutOfMemory { bytes };
        let len = usize::try_from(bytes).map_err(|_| refused())?;
        let layout = HostLayout::from_size_align(len, HOST_ALIGN).map_err(|_| refused())?;
        let ptr = if len == 0 {
            NonNull::<Aligned>::dangling().cast()
        } else {
            // SAFETY: the layout's size is not zero.
            let ptr = unsafe { alloc_zeroed(layout) };
            NonNull::new(ptr).ok_or_else(refused)?
        };
        Ok(Self {
            ptr,
            len,
            lock: RwLock::new(()),
            owner: Owner::Lastref(layout),
        })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Locks the bytes of `range` for reading. While other bytes may be somebody else's to write,
    /// no slice is made of them.
    pub(crate) fn read(&self, range: Range<usize>) -> HostRead<'_> {
        let guard = Guard::Read(read(&self.lock));
        HostRead(self.bytes(range, guard))
    }

    /// Locks the bytes of `range` for writing.
    pub(crate) fn write(&self, range: Range<usize>) -> HostWrite<'_> {
        let guard = Guard::Write(write(&self.lock));
        HostWrite(self.bytes(range, guard))
    }

    fn bytes<'a>(&'a self, range: Range<usize>, guard: Guard<'a>) -> Locked<'a> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "bytes {range:?} of {}",
            self.len
        );
        Locked {
            // SAFETY: within the memory, by the check above (invariant 1).
            ptr: unsafe { self.ptr.add(range.start) },
            len: range.len(),
            _guard: guard,
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Owner::Lastref(layout) = self.owner
            && layout.size() > 0
        {
            // SAFETY: allocated in `new` with this layout, and dropped once (invariant 1).
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}

/// As aligned as [`HOST_ALIGN`]: the address of no bytes.
#[repr(align(64))]
struct Aligned;
const _: () = assert!(align_of::<Aligned>() == HOST_ALIGN);

/// Bytes of a host storage, and the lock on it.
struct Locked<'a> {
    ptr: NonNull<u8>,
    len: usize,
    _guard: Guard<'a>,
}

/// Held to be dropped, not to be read.
#[expect(dead_code, reason = "unlock when dropped")]
enum Guard<'a> {
    Read(RwLockReadGuard<'a, ()>),
    Write(RwLockWriteGuard<'a, ()>),
    /// The lock is held by the other half of a [`read_write`] within one storage.
    Other,
}

/// Host bytes locked for reading.
pub(crate) struct HostRead<'a>(Locked<'a>);

impl Deref for HostRead<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: valid by invariant 1; nobody writes while the lock is held (invariant 2).
        unsafe { std::slice::from_raw_parts(self.0.ptr.as_ptr(), self.0.len) }
    }
}

/// Host bytes locked for writing.
pub(crate) struct HostWrite<'a>(Locked<'a>);

impl Deref for HostWrite<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: valid by invariant 1; the lock keeps every other access out (invariant 2).
        unsafe { std::slice::from_raw_parts(self.0.ptr.as_ptr(), self.0.len) }
    }
}

impl DerefMut for HostWrite<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for reading; `&mut self` makes this the only slice of these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr.as_ptr(), self.0.len) }
    }
}

/// Locks two ranges of host bytes that do not overlap, one for writing and one for reading, of one
/// storage or of two.
pub(crate) fn read_write<'a>(
    (to, to_range): (&'a HostMemory, Range<usize>),
    (from, from_range): (&'a HostMemory, Range<usize>),
) -> (HostWrite<'a>, HostRead<'a>) {
    let (to, from) = if std::ptr::eq(to, from) {
        let write = to.write(to_range);
        (write, HostRead(from.bytes(from_range, Guard::Other)))
    } else if std::ptr::from_ref(to) < std::ptr::from_ref(from) {
        let write = to.write(to_range);
        (write, from.read(from_range))
    } else {
        let read = from.read(from_range);
        (to.write(to_range), read)
    };
    let starts = (to.0.ptr.addr().get(), from.0.ptr.addr().get());
    assert!(
        starts.0 + to.0.len <= starts.1 || starts.1 + from.0.len <= starts.0,
        "callers copy what overlaps first"
    );
    (to, from)
}
