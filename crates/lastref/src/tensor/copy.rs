//! Moving bytes: copies, fills, conversions, and between devices.
//!
//! Which way a copy takes:
//!
//! | to | from | how |
//! | --- | --- | --- |
//! | host | host | element by element, in the longest runs both layouts allow |
//! | host | device | one copy if both are contiguous; else the fewest reads that cover the source |
//! | device | host | made contiguous on the host; one copy, or one and rows on the device |
//! | device | same | one copy, or rows; **staged** if that takes over 64 calls or the dtypes differ |
//! | device | another | peer copy, ordered by events both ways; dtypes converted first, staged |
//!
//! *Staged* means read to the host, done there and written back; [`cuda::copy_counts`] counts it.
//! All device work goes to the current stream of its device. Reading to the host waits for it.

use crate::alloc::{self, Extent2d, FillValue};
use crate::cuda::{self, Event};
use crate::dtype::with_element;
use crate::shape::{Dims, Layout, Shape, index, length, unsigned};
use crate::storage::{HostMemory, read_write};
use crate::tensor::strided::{self, Rows, Step, split_run, walk};
use crate::tensor::{Tensor, create};
use crate::{DType, Device, Element, Error, Result, Scalar};

/// Device calls that a copy may take before staging it through the host is thought cheaper: about
/// as long as one round trip of a few megabytes at a few microseconds a call.
const MAX_CALLS: u64 = 64;

/// How many times the bytes of a strided source may be read, at most, to read them all at once.
const MAX_READ_FOR_NOTHING: u64 = 64;

/// Bytes that may be read for nothing when the covering range of a strided source is read whole.
const SMALL_BYTES: u64 = 64 << 10;

impl Tensor {
    /// A copy of the elements in new memory, contiguous, on the same device. torch calls this
    /// `clone`; in Rust a clone is a handle.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] or [`Error::HostOutOfMemory`]; the device's.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn copy(&self) -> Result<Self> {
        let to = self.empty_like("copy", self.device(), self.dtype)?;
        to.copy_(self)?;
        Ok(to)
    }

    /// The tensor itself if it is contiguous, else a [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As `copy`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() {
            Ok(self.clone())
        } else {
            self.copy()
        }
    }

    /// Copies the elements of `from` into this tensor, converting their dtype, moving them between
    /// devices, and repeating dimensions of size 1 as [`expand`](Self::expand) does.
    ///
    /// If both share memory, `from` is read before anything is written.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidShape`] if `from` does not expand to this shape; [`Error::InvalidArgument`]
    /// if this tensor is expanded itself; without memory for a temporary, as
    /// [`empty`](Self::empty); the device's.
    pub fn copy_(&self, from: &Self) -> Result<()> {
        let call = "copy_";
        let layout = from.layout.expand(call, self.shape())?;
        self.check_distinct(call)?;
        if self.numel() == 0 {
            return Ok(());
        }
        let same_dtype = self.dtype == from.dtype;
        if self.same_storage(from) && same_dtype && self.layout == layout {
            return Ok(());
        }
        let shared = self.overlaps(from);
        let from = if shared {
            from.copy()?.expand(self.shape())?
        } else {
            from.with_layout(layout)
        };
        match (self.storage.host(), from.storage.host()) {
            (Some(to), Some(source)) => {
                self.copy_on_host(to, &from, source);
                Ok(())
            }
            (Some(to), None) => self.download(to, &from),
            (None, Some(_)) => self.upload(&from),
            (None, None) if self.device() != from.device() => self.copy_from_peer(&from),
            (None, None) if !same_dtype => self.upload(&from.staged()?),
            (None, None) => self.copy_on_device(&from),
        }
    }

    /// Sets every element to `value`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if this tensor is expanded; the device's.
    pub fn fill_(&self, value: impl Into<Scalar>) -> Result<()> {
        self.check_distinct("fill_")?;
        if self.numel() == 0 {
            return Ok(());
        }
        let value = self.dtype.encode(value.into());
        match self.storage.host() {
            Some(host) => {
                let size = length(self.dtype.size());
                let still = Dims::from_elem(0, self.dim());
                let walk = walk(self.shape(), self.strides(), &still);
                strided::copy(
                    self.dtype.size(),
                    &mut host.write(self.host_range()),
                    &value[..size],
                    &walk,
                );
                Ok(())
            }
            None => self.fill_on_device(value),
        }
    }

    /// Sets every element to zero.
    ///
    /// # Errors
    ///
    /// As [`fill_`](Self::fill_).
    pub fn zero_(&self) -> Result<()> {
        self.fill_(0)
    }

    /// This tensor on `device` with `dtype`, `None` meaning as it is: the same handle if nothing
    /// changes, else a contiguous copy.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`]; else as [`copy`](Self::copy).
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn to(
        &self,
        device: impl Into<Option<Device>>,
        dtype: impl Into<Option<DType>>,
    ) -> Result<Self> {
        let device = device.into().unwrap_or(self.device());
        let dtype = dtype.into().unwrap_or(self.dtype);
        if device == self.device() && dtype == self.dtype {
            return Ok(self.clone());
        }
        let to = self.empty_like("to", device, dtype)?;
        to.copy_(self)?;
        Ok(to)
    }

    /// [`to`](Self::to) another device.
    ///
    /// # Errors
    ///
    /// As `to`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn to_device(&self, device: Device) -> Result<Self> {
        self.to(device, None)
    }

    /// [`to`](Self::to) another dtype.
    ///
    /// # Errors
    ///
    /// As `to`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        self.to(None, dtype)
    }

    /// [`to`](Self::to) the current CUDA device of this thread.
    ///
    /// # Errors
    ///
    /// As `to`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn cuda(&self) -> Result<Self> {
        self.to_device(Device::Cuda(cuda::current_device()))
    }

    /// [`to`](Self::to) the host. Waits for the current stream.
    ///
    /// # Errors
    ///
    /// As `to`.
    #[cfg_attr(feature = "holders", track_caller)]
    pub fn cpu(&self) -> Result<Self> {
        self.to_device(Device::Cpu)
    }

    /// The bytes of all elements in row-major order. Waits for the current stream.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = host_bytes(self.nbytes())?;
        match self.storage.host() {
            _ if bytes.is_empty() => {}
            Some(host) => self.gather(&mut bytes, &host.read(self.host_range())),
            None => self.read_from_device(&mut bytes)?,
        }
        Ok(bytes)
    }

    #[cfg_attr(feature = "holders", track_caller)]
    fn empty_like(&self, call: &'static str, device: Device, dtype: DType) -> Result<Self> {
        create::new(call, Shape::from(self.shape()), dtype, device)
    }

    /// That no element of this tensor is reached twice, so that writing it has one meaning.
    fn check_distinct(&self, call: &'static str) -> Result<()> {
        if !self.layout.repeats_elements() {
            return Ok(());
        }
        Err(Error::argument(
            call,
            format!(
                "several indices of the tensor to write, shape {:?} with strides {:?}, reach one \
                 element; use copy() of it",
                self.shape(),
                self.strides()
            ),
        ))
    }

    /// Whether the memory of both, from the first element to the last, overlaps. By address, since
    /// an export that was imported again is another storage on the same memory; addresses are
    /// distinct between the host and all devices, but for simulated ones, whose memory is the host's.
    fn overlaps(&self, other: &Self) -> bool {
        let range = |tensor: &Self| {
            let first = tensor.data_ptr();
            first..first + unsigned(tensor.layout.extent()) * tensor.dtype.size()
        };
        let (a, b) = (range(self), range(other));
        a.start < b.end && b.start < a.end
    }

    // ---- host -----------------------------------------------------------------------------

    fn copy_on_host(&self, memory: &HostMemory, from: &Self, source: &HostMemory) {
        let walk = walk(self.shape(), self.strides(), from.strides());
        let (mut to, bytes) = read_write((memory, self.host_range()), (source, from.host_range()));
        convert(self.dtype, &mut to, from.dtype, &bytes, &walk);
    }

    /// Writes the elements in row-major order to `to`; `bytes` begins with the first of them.
    fn gather(&self, to: &mut [u8], bytes: &[u8]) {
        let contiguous = self.layout.to_contiguous();
        let walk = walk(self.shape(), &contiguous.strides, self.strides());
        strided::copy(self.dtype.size(), to, bytes, &walk);
    }

    // ---- between host and device ----------------------------------------------------------

    /// Copies a device tensor of this shape into this host tensor.
    fn download(&self, memory: &HostMemory, from: &Self) -> Result<()> {
        if self.is_contiguous() && self.dtype == from.dtype {
            return from.read_from_device(&mut memory.write(self.host_range()));
        }
        let bytes = from.to_bytes()?;
        let layout = from.layout.to_contiguous();
        let walk = walk(self.shape(), self.strides(), &layout.strides);
        let mut to = memory.write(self.host_range());
        convert(self.dtype, &mut to, from.dtype, &bytes, &walk);
        Ok(())
    }

    /// Copies a host tensor of this shape into this device tensor.
    fn upload(&self, from: &Self) -> Result<()> {
        if from.layout.extent() == 1 {
            // One value, repeated: nothing to send but the value.
            let one = from.with_layout(Layout {
                shape: [1].into_iter().collect(),
                strides: [1].into_iter().collect(),
                offset: from.layout.offset,
            });
            return self.fill_on_device(self.dtype.encode(one.item_scalar()?));
        }
        let (device, stream) = self.on_stream()?;
        let to = if self.is_contiguous() {
            self.clone()
        } else {
            self.empty_like("copy_", self.device(), self.dtype)?
        };
        let from = from.to_dtype(self.dtype)?.contiguous()?;
        if let Some(host) = from.storage.host() {
            let bytes = &host.read(from.host_range());
            device.copy_from_host(alloc::DevicePtr(to.data_ptr()), bytes, stream)?;
        }
        if self.is_contiguous() {
            return Ok(());
        }
        let walk = walk(self.shape(), self.strides(), to.strides());
        self.copy_rows(&to, &Rows::new(&walk, self.dtype.size(), None))
    }

    /// Reads the elements of this device tensor in row-major order.
    fn read_from_device(&self, to: &mut [u8]) -> Result<()> {
        let (device, stream) = self.on_stream()?;
        let first = alloc::DevicePtr(self.data_ptr());
        if self.is_contiguous() {
            return Ok(device.copy_to_host(to, first, stream)?);
        }
        let size = self.dtype.size();
        let contiguous = self.layout.to_contiguous();
        let walk = walk(self.shape(), &contiguous.strides, self.strides());
        let covered = unsigned(self.layout.extent()) * size;
        if covered > SMALL_BYTES.max(2 * self.nbytes()) {
            // Mostly gaps. A few pieces are read one by one; more are brought together first.
            let pieces = Rows::pieces(&walk, size);
            if pieces.calls() <= MAX_CALLS {
                return self.read_pieces(to, &pieces);
            }
            let rows = Rows::new(&walk, size, None);
            if rows.calls() <= MAX_CALLS {
                match self.empty_like("copy", self.device(), self.dtype) {
                    Ok(together) => {
                        together.copy_rows(self, &rows)?;
                        return together.read_from_device(to);
                    }
                    // Reading must work on a full device too.
                    Err(error) if error.is_out_of_memory() => {}
                    Err(error) => return Err(error),
                }
            }
            if covered / MAX_READ_FOR_NOTHING > self.nbytes() {
                return self.read_pieces(to, &pieces);
            }
        }
        let mut bytes = host_bytes(covered)?;
        device.copy_to_host(&mut bytes, first, stream)?;
        self.gather(to, &bytes);
        Ok(())
    }

    /// Reads the elements of this device tensor piece by piece.
    fn read_pieces(&self, to: &mut [u8], pieces: &Rows) -> Result<()> {
        let (device, stream) = self.on_stream()?;
        let first = alloc::DevicePtr(self.data_ptr());
        let size = self.dtype.size();
        let width = length(pieces.width_bytes);
        strided::for_each(&pieces.rest, 0, 0, &mut |to_at, from_at| {
            let start = index(to_at) * length(size);
            let piece = &mut to[start..start + width];
            let from = first.offset(unsigned(from_at) * size);
            Ok(device.copy_to_host(piece, from, stream)?)
        })
    }

    /// This device tensor on the host, for an operation that the device cannot do.
    #[cfg_attr(feature = "holders", track_caller)]
    fn staged(&self) -> Result<Self> {
        cuda::count_staged(self.nbytes());
        self.cpu()
    }

    // ---- on devices -----------------------------------------------------------------------

    /// The device of a device tensor, and its current stream.
    fn on_stream(&self) -> Result<(&'static dyn alloc::Device, alloc::StreamId)> {
        let Device::Cuda(index) = self.device() else {
            unreachable!("callers have seen that the tensor is on a device")
        };
        cuda::on_stream("copy_", index)
    }

    /// Copies a tensor of this shape and dtype on the same device.
    fn copy_on_device(&self, from: &Self) -> Result<()> {
        let walk = walk(self.shape(), self.strides(), from.strides());
        let rows = Rows::new(&walk, self.dtype.size(), None);
        // Scattering on the host would write back what lies between the elements, so a destination
        // with gaps is always written row by row.
        if rows.calls() <= MAX_CALLS || !self.is_contiguous() {
            self.copy_rows(from, &rows)
        } else {
            self.upload(&from.staged()?)
        }
    }

    /// Copies a tensor of the same device row by row.
    fn copy_rows(&self, from: &Self, rows: &Rows) -> Result<()> {
        let (device, stream) = self.on_stream()?;
        let size = self.dtype.size();
        let to_base = alloc::DevicePtr(self.data_ptr());
        let from_base = alloc::DevicePtr(from.data_ptr());
        strided::for_each(&rows.rest, 0, 0, &mut |to_at, from_at| {
            let to = to_base.offset(unsigned(to_at) * size);
            let from = from_base.offset(unsigned(from_at) * size);
            match rows.row {
                None => device.copy(to, from, rows.width_bytes, stream)?,
                Some(row) => {
                    device.copy_2d(to, from, extent(rows.width_bytes, row, size), stream)?
                }
            }
            Ok(())
        })
    }

    fn fill_on_device(&self, value: [u8; 8]) -> Result<()> {
        let (device, stream) = self.on_stream()?;
        let size = self.dtype.size();
        let base = alloc::DevicePtr(self.data_ptr());
        let [a, b, c, d, e, f, g, h] = value;
        let low = FillValue::U32(u32::from_ne_bytes([a, b, c, d]));
        let high = FillValue::U32(u32::from_ne_bytes([e, f, g, h]));
        // Fills repeat at most four bytes: eight that are not twice the same go in two halves.
        let parts: &[(u64, FillValue)] = match size {
            1 => &[(0, FillValue::U8(a))],
            2 => &[(0, FillValue::U16(u16::from_ne_bytes([a, b])))],
            8 if low != high => &[(0, low), (4, high)],
            _ => &[(0, low)],
        };
        let unit = (parts.len() > 1).then_some(4);
        let walk = walk(self.shape(), self.strides(), self.strides());
        let rows = Rows::new(&walk, size, unit);
        for &(shift, value) in parts {
            strided::for_each(&rows.rest, 0, 0, &mut |at, _| {
                let to = base.offset(unsigned(at) * size + shift);
                match rows.row {
                    None => device.fill(to, value, rows.width_bytes / value.bytes(), stream)?,
                    Some(row) => {
                        device.fill_2d(to, value, extent(rows.width_bytes, row, size), stream)?;
                    }
                }
                Ok::<(), Error>(())
            })?;
        }
        Ok(())
    }

    /// Copies a tensor of this shape from another device.
    fn copy_from_peer(&self, from: &Self) -> Result<()> {
        let from = if from.dtype == self.dtype {
            from.contiguous()?
        } else {
            // Converted on the host, which is on the way.
            return self.upload(&from.staged()?);
        };
        let to = if self.is_contiguous() {
            self.clone()
        } else {
            self.empty_like("copy_", self.device(), self.dtype)?
        };
        let (device, _) = to.on_stream()?;
        let (peer, _) = from.on_stream()?;
        let to_stream = cuda::current_stream(self.device().index())?;
        let from_stream = cuda::current_stream(from.device().index())?;
        // The copy comes after what wrote the source, and before what writes or frees it next.
        to_stream.wait_stream(&from_stream)?;
        device.copy_from_peer(
            alloc::DevicePtr(to.data_ptr()),
            peer.properties().index,
            alloc::DevicePtr(from.data_ptr()),
            self.nbytes(),
            to_stream.id(),
        )?;
        let done = Event::new();
        done.record(&to_stream)?;
        done.wait(&from_stream)?;
        if self.is_contiguous() {
            return Ok(());
        }
        let walk = walk(self.shape(), self.strides(), to.strides());
        self.copy_rows(&to, &Rows::new(&walk, self.dtype.size(), None))
    }
}

/// Zeroed host memory, or an error where `vec!` would end the process.
fn host_bytes(bytes: u64) -> Result<Vec<u8>> {
    let mut memory = host_vec(bytes, bytes)?;
    memory.resize(length(bytes), 0);
    Ok(memory)
}

/// A vector with room for `len` elements of `bytes` bytes in all.
pub(super) fn host_vec<T>(len: u64, bytes: u64) -> Result<Vec<T>> {
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(length(len))
        .map_err(|_| Error::HostOutOfMemory { bytes })?;
    Ok(memory)
}

/// Rows of `width_bytes`, a step of elements of `size` bytes apart.
fn extent(width_bytes: u64, row: Step, size: u64) -> Extent2d {
    Extent2d {
        width_bytes,
        height: unsigned(row.size),
        dst_pitch: unsigned(row.to) * size,
        src_pitch: unsigned(row.from) * size,
    }
}

/// Copies elements between host bytes that begin with the first of them, converting them where the
/// dtypes differ.
fn convert(to_dtype: DType, to: &mut [u8], from_dtype: DType, from: &[u8], walk: &[Step]) {
    if to_dtype == from_dtype {
        strided::copy(to_dtype.size(), to, from, walk);
        return;
    }
    with_element!(to_dtype, To => with_element!(from_dtype, From => {
        let (outer, run) = split_run(walk);
        let Ok(()) = strided::for_each::<std::convert::Infallible>(
            outer,
            0,
            0,
            &mut |mut to_at, mut from_at| {
                for _ in 0..run.size {
                    let value = From::load(&from[index(from_at) * size_of::<From>()..]);
                    To::from_scalar(value.to_scalar())
                        .store(&mut to[index(to_at) * size_of::<To>()..]);
                    to_at += run.to;
                    from_at += run.from;
                }
                Ok(())
            },
        );
    }));
}
