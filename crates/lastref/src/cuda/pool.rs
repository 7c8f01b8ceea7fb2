//! Private pools, as `torch.cuda.MemPool` and `torch.cuda.use_mem_pool`.

use std::sync::Arc;

use super::{entry, runtime};
use crate::alloc::{self, Device};
use crate::{Result, cuda};

/// A private pool of one device's memory: tensors made in it lie apart from all others, and what it
/// has free serves its own tensors only. See [`alloc::MemPool`] for what is promised.
///
/// Cloning makes another handle. Tensors may outlive the pool.
///
/// # Examples
///
/// ```
/// use lastref::{Device, Tensor, cuda, sim};
///
/// sim::enable("8GiB")?;
/// let pool = cuda::MemPool::new(None)?;
/// let inside = {
///     let _scope = cuda::use_mem_pool(&pool);
///     Tensor::zeros([1 << 20])?.cuda()?
/// };
/// assert_eq!(pool.memory_allocated(), inside.nbytes() as u64);
/// # Ok::<(), lastref::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemPool {
    device: u32,
    pool: alloc::MemPool<Arc<dyn Device>>,
}

impl MemPool {
    /// A pool of `device`, by default of the current device. It takes no memory yet.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice).
    pub fn new(device: impl Into<Option<u32>>) -> Result<Self> {
        let device = device.into().unwrap_or_else(cuda::current_device);
        let pool = entry("MemPool", device)?.allocator.create_pool();
        Ok(Self { device, pool })
    }

    /// Its number on its device, from 1.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.pool.id()
    }

    /// The device it belongs to.
    #[must_use]
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Bytes in its tensors, rounding included.
    #[must_use]
    pub fn memory_allocated(&self) -> u64 {
        self.pool.stats().allocated_bytes.current
    }

    /// Bytes it has obtained from the device.
    #[must_use]
    pub fn memory_reserved(&self) -> u64 {
        self.pool.stats().reserved_bytes.current
    }

    /// All its numbers.
    #[must_use]
    pub fn stats(&self) -> alloc::PoolStats {
        self.pool.stats()
    }
}

/// Sends the tensors that this thread makes on the pool's device to the pool, until what it returns
/// is dropped. The innermost of several counts; other threads are not concerned.
#[must_use = "tensors go to the pool only while this lives"]
pub fn use_mem_pool(pool: &MemPool) -> MemPoolContext {
    // A runtime exists, since the pool does.
    debug_assert!(runtime::device("use_mem_pool", pool.device).is_ok());
    MemPoolContext {
        _scope: pool.pool.enter(),
    }
}

/// While it lives, tensors go to a pool. See [`use_mem_pool`].
#[derive(Debug)]
pub struct MemPoolContext {
    _scope: alloc::PoolScope<Arc<dyn Device>>,
}
