//! Streams as values, and the current stream of each thread.
//!
//! Every device operation of a tensor runs on the current stream of its device, and memory is
//! allocated on it. The current stream is a thread's own setting; at first it is the default
//! stream. Work on one stream happens in order; between streams only events order it.
//!
//! A stream comes from a pool of 32 for each device and priority, handed out in turn and never
//! destroyed: the 33rd `Stream::new` names the same stream as the first. torch does the same.
//!
//! **A tensor used on another stream than the one it was made on** is the caller's duty: let the
//! other stream wait ([`Stream::wait_stream`]), and call
//! [`Tensor::record_stream`](crate::Tensor::record_stream), or the tensor's memory may be used
//! again, after its last handle goes, before the other stream has finished with it.

use std::cell::RefCell;
use std::marker::PhantomData;

use crate::alloc::StreamId;
use crate::cuda::event::Event;
use crate::cuda::runtime;
use crate::sync::{Mutex, lock};
use crate::{Error, Result};

/// Streams in a pool, as in torch.
const POOL_SIZE: usize = 32;

/// A stream of one device. A plain value: a copy names the same stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream {
    device: u32,
    id: StreamId,
    priority: i32,
}

/// The streams of one device that `Stream::new` hands out, by priority: normal, high.
#[derive(Debug, Default)]
pub(crate) struct StreamPool([Mutex<PoolState>; 2]);

#[derive(Debug, Default)]
struct PoolState {
    streams: Vec<StreamId>,
    next: usize,
}

impl Stream {
    /// The next stream of the pool of the current device, with normal priority.
    ///
    /// ```
    /// use lastref::{Tensor, cuda};
    /// # lastref::sim::enable("8GiB")?;
    /// let side = cuda::Stream::new()?;
    /// let tensor = side.scope(|| Tensor::ones_with([1024], lastref::Device::Cuda(0)))??;
    /// side.synchronize()?;
    /// assert!(side.query()?);
    /// # Ok::<(), lastref::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`]; the device's.
    pub fn new() -> Result<Self> {
        Self::with(None, 0)
    }

    /// The next stream of the pool of `device`, by default the current one. A `priority` below 0
    /// is served first.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with(device: impl Into<Option<u32>>, priority: i32) -> Result<Self> {
        let index = device.into().unwrap_or_else(current_device);
        let entry = runtime::device("stream", index)?;
        let priority = priority.clamp(-1, 0);
        let mut pool = lock(&entry.pool.0[usize::from(priority < 0)]);
        let at = pool.next % POOL_SIZE;
        if at == pool.streams.len() {
            let id = entry.allocator.device().create_stream(priority)?;
            pool.streams.push(id);
        }
        pool.next = at + 1;
        Ok(Self {
            device: index,
            id: pool.streams[at],
            priority,
        })
    }

    /// The default stream of `device`, by default the current one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`].
    pub fn default_of(device: impl Into<Option<u32>>) -> Result<Self> {
        let index = device.into().unwrap_or_else(current_device);
        runtime::device("default_stream", index)?;
        Ok(Self {
            device: index,
            id: StreamId::DEFAULT,
            priority: 0,
        })
    }

    /// The device it belongs to.
    #[must_use]
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Its identifier on its device; 0 is the default stream.
    #[must_use]
    pub const fn id(&self) -> StreamId {
        self.id
    }

    /// 0, or -1 where it is served first.
    #[must_use]
    pub const fn priority(&self) -> i32 {
        self.priority
    }

    /// Waits on the host until all its work so far is done.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn synchronize(&self) -> Result<()> {
        let entry = runtime::device("stream.synchronize", self.device)?;
        Ok(entry.allocator.synchronize_stream(self.id)?)
    }

    /// Whether all its work so far is done. Does not wait.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn query(&self) -> Result<bool> {
        let entry = runtime::device("stream.query", self.device)?;
        Ok(entry.allocator.query_stream(self.id)?)
    }

    /// Makes work submitted to this stream from now on wait for what `other` has now. Does not
    /// wait on the host. The streams may belong to different devices.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        if self != other {
            self.wait_event(&other.record_event()?)?;
        }
        Ok(())
    }

    /// Makes work submitted to this stream from now on wait for `event`. Does not wait on the
    /// host; does nothing if the event was never recorded.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        event.wait(self)
    }

    /// A new event that stands for the work this stream has now.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn record_event(&self) -> Result<Event> {
        let event = Event::new();
        event.record(self)?;
        Ok(event)
    }

    /// Makes this the current stream of this thread, and its device the current device, until the
    /// guard is dropped.
    #[must_use = "the stream is current only while the guard lives"]
    pub fn enter(&self) -> StreamGuard {
        let (device, stream) = with_current(|current| {
            let before = (current.device, current.stream(self.device));
            current.device = self.device;
            current.set_stream(self.device, self.id, self.priority);
            before
        })
        .unwrap_or((self.device, (self.id, self.priority)));
        StreamGuard {
            before_device: device,
            device: self.device,
            before_stream: stream,
            here_only: PhantomData,
        }
    }

    /// Runs `work` with this as the current stream. What was current before is restored also when
    /// `work` panics.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`], if this stream's device is not there.
    pub fn scope<R>(&self, work: impl FnOnce() -> R) -> Result<R> {
        runtime::device("stream.scope", self.device)?;
        let _guard = self.enter();
        Ok(work())
    }
}

/// Restores the current stream and device when dropped. See [`Stream::enter`].
#[derive(Debug)]
pub struct StreamGuard {
    before_device: u32,
    device: u32,
    before_stream: (StreamId, i32),
    /// The setting belongs to one thread.
    here_only: PhantomData<*const ()>,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let (id, priority) = self.before_stream;
        with_current(|current| {
            current.set_stream(self.device, id, priority);
            current.device = self.before_device;
        });
    }
}

/// Makes a device current until dropped, then the one before it again.
#[derive(Debug)]
pub struct DeviceGuard {
    before: u32,
    here_only: PhantomData<*const ()>,
}

impl DeviceGuard {
    /// Makes `device` the current device of this thread.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`].
    pub fn new(device: u32) -> Result<Self> {
        runtime::device("device", device)?;
        Ok(Self {
            before: with_current(|current| std::mem::replace(&mut current.device, device))
                .unwrap_or(device),
            here_only: PhantomData,
        })
    }
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        with_current(|current| current.device = self.before);
    }
}

/// The current stream of `device`, by default of the current device.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn current_stream(device: impl Into<Option<u32>>) -> Result<Stream> {
    let index = device.into().unwrap_or_else(current_device);
    runtime::device("current_stream", index)?;
    let (id, priority) =
        with_current(|current| current.stream(index)).unwrap_or((StreamId::DEFAULT, 0));
    Ok(Stream {
        device: index,
        id,
        priority,
    })
}

/// Makes `stream` the current one of this thread, for good, and its device the current device.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn set_stream(stream: &Stream) -> Result<()> {
    runtime::device("set_stream", stream.device)?;
    with_current(|current| {
        current.device = stream.device;
        current.set_stream(stream.device, stream.id, stream.priority);
    });
    Ok(())
}

/// The index of this thread's current device; 0 at first.
#[must_use]
pub fn current_device() -> u32 {
    with_current(|current| current.device).unwrap_or(0)
}

/// Makes `device` the current device of this thread, for good.
///
/// # Errors
///
/// [`Error::NoSuchDevice`].
pub fn set_device(device: u32) -> Result<()> {
    runtime::device("set_device", device)?;
    with_current(|current| current.device = device);
    Ok(())
}

/// The stream that work on `device` goes to now.
pub(crate) fn current_id(device: u32) -> StreamId {
    with_current(|current| current.stream(device).0).unwrap_or(StreamId::DEFAULT)
}

/// What is current in one thread.
struct Current {
    device: u32,
    /// By device; the default stream where the vector ends.
    streams: Vec<(StreamId, i32)>,
}

impl Current {
    fn stream(&self, device: u32) -> (StreamId, i32) {
        self.streams
            .get(device as usize)
            .copied()
            .unwrap_or((StreamId::DEFAULT, 0))
    }

    fn set_stream(&mut self, device: u32, id: StreamId, priority: i32) {
        let at = device as usize;
        if self.streams.len() <= at {
            self.streams.resize(at + 1, (StreamId::DEFAULT, 0));
        }
        self.streams[at] = (id, priority);
    }
}

thread_local! {
    static CURRENT: RefCell<Current> = const {
        RefCell::new(Current { device: 0, streams: Vec::new() })
    };
}

/// Runs `f` on this thread's setting; `None` when the thread is ending and has lost it.
fn with_current<R>(f: impl FnOnce(&mut Current) -> R) -> Option<R> {
    CURRENT
        .try_with(|current| f(&mut current.borrow_mut()))
        .ok()
}

/// That two streams, or a tensor and a stream, are on the same device.
pub(crate) fn same_device(
    call: &'static str,
    tensor: crate::Device,
    stream: &Stream,
) -> Result<()> {
    if tensor == crate::Device::Cuda(stream.device) {
        return Ok(());
    }
    Err(Error::argument(
        call,
        format!(
            "the tensor is on {tensor}, the stream on cuda:{}",
            stream.device
        ),
    ))
}
