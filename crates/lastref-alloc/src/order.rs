//! The program's own events and waits, so that the allocator learns from them: memory freed on a stream
//! is given at once to one that waits for it, on the device, and to any once the host has seen
//! the work done.
//!
//! Each of these calls does what the method of [`Device`] of its name does. A program that calls
//! the device instead is no less correct; the allocator knows less and asks for itself.
//!
//! # Invariants
//!
//! An event's recording and the note of what it stands for are made under one hold of the state's lock, and
//! so is a wait on the device. Waiting on the host holds no lock: what the event stood for before counts
//! only if it was not recorded again meanwhile.

use crate::allocator::CachingAllocator;
use crate::bias::lock;
use crate::device::{Device, DeviceResult, EventId, StreamId};

impl<D: Device> CachingAllocator<D> {
    /// Records an event, as [`Device::record_event`] does. An event that was recorded here once is
    /// always recorded here, and destroyed by [`destroy_event`](Self::destroy_event).
    ///
    /// # Errors
    ///
    /// The device's.
    ///
    /// # Examples
    ///
    /// ```
    /// use lastref_alloc::{CachingAllocator, Device, FillValue, StreamId};
    /// use lastref_alloc::sim::{Call, SimDevice, SimOptions};
    ///
    /// let allocator = CachingAllocator::new(SimDevice::new(SimOptions::new(1 << 30))?);
    /// let device = allocator.device();
    /// let (first, second) = (device.create_stream(0)?, device.create_stream(0)?);
    /// let event = device.create_event()?;
    ///
    /// let block = allocator.alloc(64 << 20, first)?;
    /// let ptr = block.ptr();
    /// device.fill(ptr, FillValue::U32(7), 1024, first)?;
    /// drop(block);
    /// allocator.record_event(event, first)?;
    /// allocator.wait_event(second, event)?;
    /// let block = allocator.alloc(64 << 20, second)?;
    /// assert_eq!(block.ptr(), ptr, "what `second` does comes after the fill");
    /// assert_eq!(device.counters().calls(Call::QueryEvent), 0, "and nobody had to ask");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn record_event(&self, event: EventId, stream: StreamId) -> DeviceResult<()> {
        let mut state = lock(&self.handle().state);
        state.clocks.note_record(self.device(), event, stream)
    }

    /// Makes work submitted to `stream` from now on wait for `event`, as [`Device::wait_event`] does.
    /// The event is one of this device. For one of another device, call the device.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn wait_event(&self, stream: StreamId, event: EventId) -> DeviceResult<()> {
        let mut state = lock(&self.handle().state);
        state.clocks.note_wait(self.device(), stream, event)
    }

    /// Whether the work that `event` stands for is done, as [`Device::query_event`] says.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn query_event(&self, event: EventId) -> DeviceResult<bool> {
        let mut state = lock(&self.handle().state);
        let is_done = self.device().query_event(event)?;
        if is_done {
            let recording = state.clocks.recording(event);
            state.clocks.note_finished(event, recording);
        }
        Ok(is_done)
    }

    /// Waits on the host for `event`, as [`Device::synchronize_event`] does.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn synchronize_event(&self, event: EventId) -> DeviceResult<()> {
        let recording = lock(&self.handle().state).clocks.recording(event);
        self.device().synchronize_event(event)?;
        let mut state = lock(&self.handle().state);
        state.clocks.note_finished(event, recording);
        Ok(())
    }

    /// Destroys an event, as [`Device::destroy_event`] does.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn destroy_event(&self, event: EventId) -> DeviceResult<()> {
        lock(&self.handle().state).clocks.forget_event(event);
        self.device().destroy_event(event)
    }

    /// Whether all work of `stream` is done, as [`Device::query_stream`] says.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn query_stream(&self, stream: StreamId) -> DeviceResult<bool> {
        let mut state = lock(&self.handle().state);
        let reach = state.clocks.reach_of(Some(stream));
        let is_done = self.device().query_stream(stream)?;
        if is_done {
            state.clocks.note_done(&reach);
        }
        Ok(is_done)
    }

    /// Waits on the host until all work submitted to `stream` so far is done, as
    /// [`Device::synchronize_stream`] does.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn synchronize_stream(&self, stream: StreamId) -> DeviceResult<()> {
        let reach = lock(&self.handle().state).clocks.reach_of(Some(stream));
        self.device().synchronize_stream(stream)?;
        lock(&self.handle().state).clocks.note_done(&reach);
        Ok(())
    }

    /// Waits on the host until all work submitted to the device so far is done, as
    /// [`Device::synchronize`] does.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn synchronize(&self) -> DeviceResult<()> {
        let reach = lock(&self.handle().state).clocks.reach_of(None);
        self.device().synchronize()?;
        lock(&self.handle().state).clocks.note_done(&reach);
        Ok(())
    }
}
