//! What crosses the C interface: pointers from callers, and the structures of CUDA's and NVML's headers.
//!
//! # Invariants
//!
//! 1. A value of [`Out`], [`In`] or [`Text`] came from a C caller as the argument of an exported function. By the
//!    contract of that function it is null, or points to as many values as the function's other arguments say, which
//!    stay valid and unaliased until the function returns.
//! 2. A host range given to [`host_slice`], [`host_slice_mut`] or [`host_move`] is one that a C caller named in a copy:
//!    by the copy's contract it is readable, or writable, until the copy is done. A copy that is done later is done
//!    before the memory is given back: only memory that this library allocated or registered is copied later.
//! 3. A function pointer given to [`Callback`] came from a C caller that asked for it to be called once.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::error::{Code, Outcome};

/// Where a result goes.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// A place of our own.
    #[cfg(test)]
    pub(crate) fn to(place: &mut [T]) -> Self {
        Self(place.as_mut_ptr())
    }

    /// A result that nobody wants.
    pub(crate) const fn null() -> Self {
        Self(std::ptr::null_mut())
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Another kind of result at the same place, as the caller's other arguments ask for.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes the result that must have a place.
    pub(crate) fn set(self, value: T) -> Outcome {
        self.set_nth(0, value)
    }

    /// Writes a result that the caller may not want.
    pub(crate) fn set_if_wanted(self, value: T) {
        if !self.is_null() {
            // There is a place, so that this cannot fail.
            let _ = self.set(value);
        }
    }

    /// Writes one of several results.
    pub(crate) fn set_nth(self, index: usize, value: T) -> Outcome {
        if self.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let place = self.0.wrapping_add(index);
        // SAFETY: by invariant 1 there is room for the value, perhaps at an odd address.
        unsafe { place.write_unaligned(value) };
        Ok(())
    }

    /// What is there before the call.
    pub(crate) fn get(self) -> Result<T, Code>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

impl Out<c_char> {
    /// Writes text and a final zero into `room` bytes, as much as fits.
    pub(crate) fn set_text(self, text: &str, room: usize) -> Outcome {
        if self.is_null() || room == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let kept = text.as_bytes().iter().take(room - 1);
        for (index, &byte) in kept.chain([&0]).enumerate() {
            self.set_nth(index, byte.cast_signed())?;
        }
        Ok(())
    }
}

/// Where an argument is.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn get(self) -> Result<T, Code> {
        self.get_nth(0)
    }

    pub(crate) fn get_nth(self, index: usize) -> Result<T, Code> {
        if self.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let place = self.0.wrapping_add(index);
        // SAFETY: by invariant 1 there is a value, perhaps at an odd address.
        Ok(unsafe { place.read_unaligned() })
    }
}

/// Text that ends with a zero.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: by invariant 1 there is text that ends with a zero.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Something the caller wants back later and that is not looked into: a handle, user data, a kernel.
pub(crate) type Opaque = u64;

/// A function of the caller's, to be called with data of the caller's.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Callback(Option<unsafe extern "C" fn(*mut c_void)>);

impl Callback {
    pub(crate) fn is_none(self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn call(self, data: Opaque) {
        if let Some(function) = self.0 {
            // SAFETY: by invariant 3.
            unsafe { function(pointer(data)) };
        }
    }
}

/// The function of `cudaStreamAddCallback` and `cuStreamAddCallback`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct StreamCallback(Option<unsafe extern "C" fn(Opaque, c_int, *mut c_void)>);

impl StreamCallback {
    pub(crate) fn is_none(self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn call(self, stream: Opaque, data: Opaque) {
        if let Some(function) = self.0 {
            // SAFETY: by invariant 3.
            unsafe { function(stream, 0, pointer(data)) };
        }
    }
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(size(address))
}

/// A byte count or an address as the host counts. The crate is for 64-bit hosts.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the library exists only where usize has 64 bits"
)]
pub(crate) const fn size(bytes: u64) -> usize {
    bytes as usize
}

/// Host memory that a caller wants read. It may be gone when the call returns.
pub(crate) fn host_slice<'a>(address: u64, bytes: u64) -> Result<&'a [u8], Code> {
    if bytes == 0 {
        return Ok(&[]);
    }
    if address == 0 || bytes > isize::MAX.cast_unsigned() as u64 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: by invariant 2; not null, and not larger than a slice may be.
    Ok(unsafe { std::slice::from_raw_parts(pointer(address).cast(), size(bytes)) })
}

/// Host memory that a caller wants written. It may be gone when the call returns.
pub(crate) fn host_slice_mut<'a>(address: u64, bytes: u64) -> Result<&'a mut [u8], Code> {
    if bytes == 0 {
        return Ok(&mut []);
    }
    if address == 0 || bytes > isize::MAX.cast_unsigned() as u64 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: by invariant 2; not null, and not larger than a slice may be.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer(address).cast(), size(bytes)) })
}

/// Copies host memory to host memory, which may overlap.
pub(crate) fn host_move(to: u64, from: u64, bytes: u64) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    if to == 0 || from == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let (to, from) = (pointer(to).cast::<u8>(), pointer(from).cast::<u8>());
    // SAFETY: by invariant 2.
    unsafe { std::ptr::copy(from, to, size(bytes)) };
    Ok(())
}

/// The address of a function, to be found by name.
pub(crate) fn address_of(function: *const c_void) -> u64 {
    function.expose_provenance() as u64
}

// ---- structures, by the names of the headers ----------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_handle_meta_data: Opaque,
    pub(crate) flags: [u8; 8],
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_int,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemPoolProps {
    pub(crate) alloc_type: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_security_attributes: Opaque,
    pub(crate) max_size: u64,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

/// One side of a two-dimensional copy.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Memcpy2dSide {
    pub(crate) x_bytes: u64,
    pub(crate) y: u64,
    pub(crate) memory_type: c_int,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: Opaque,
    pub(crate) pitch: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CudaMemcpy2d {
    pub(crate) src: Memcpy2dSide,
    pub(crate) dst: Memcpy2dSide,
    pub(crate) width_bytes: u64,
    pub(crate) height: u64,
}

/// Three sizes; passed by value it takes two registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Dim3 {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) z: u32,
}

/// `cudaLaunchConfig_t` and `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared_bytes: u64,
    pub(crate) stream: Opaque,
    pub(crate) attributes: Opaque,
    pub(crate) num_attributes: u32,
}

/// `CUlaunchConfig` has a smaller number for the shared memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUlaunchConfig {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared_bytes: u32,
    pub(crate) stream: Opaque,
    pub(crate) attributes: Opaque,
    pub(crate) num_attributes: u32,
}

/// The beginning of `cudaPointerAttributes`, which is all that is used of it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CudaPointerAttributes {
    pub(crate) kind: c_int,
    pub(crate) device: c_int,
    pub(crate) device_pointer: u64,
    pub(crate) host_pointer: u64,
}

/// `cudaChannelFormatDesc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct ChannelDesc {
    pub(crate) bits: Dim3,
    pub(crate) w: u32,
    pub(crate) kind: c_int,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUuuid(pub(crate) [u8; 16]);

const _: () = {
    assert!(size_of::<CUmemAllocationProp>() == 32);
    assert!(size_of::<CUmemAccessDesc>() == 12);
    assert!(size_of::<CUmemPoolProps>() == 88);
    assert!(size_of::<CudaMemcpy2d>() == 128);
    assert!(size_of::<LaunchConfig>() == 56);
    assert!(size_of::<CUlaunchConfig>() == 56);
};

/// Host memory that copies may reach later, because it was pinned here.
pub(crate) fn lent(address: u64, bytes: u64) -> lastref_alloc::sim::HostMemory {
    // SAFETY: by invariant 2: it is pinned memory, and giving that back waits for all work first.
    unsafe { lastref_alloc::sim::HostMemory::new(pointer(address).cast(), bytes) }
}
