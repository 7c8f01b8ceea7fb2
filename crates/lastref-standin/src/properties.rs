//! Structures of the runtime that are long, or differ between its versions: written field by field, as C lays them out.

use lastref_alloc::Device as _;

use crate::abi::Out;
use crate::device::{self, attribute};
use crate::error::Outcome;
use crate::state::{DEVICE_NAME, Gpu, uuid};

/// Bytes of a structure as far as they have been written. Each field is aligned to its size.
#[derive(Debug, Default)]
struct Structure(Vec<u8>);

impl Structure {
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.0.resize(self.0.len().next_multiple_of(N), 0);
        self.0.extend_from_slice(&bytes);
    }

    fn ints(&mut self, values: &[i32]) {
        for value in values {
            self.put(value.to_ne_bytes());
        }
    }

    fn size(&mut self, value: u64) {
        self.put(value.to_ne_bytes());
    }

    fn bytes(&mut self, bytes: &[u8], room: usize) {
        let end = self.0.len() + room;
        self.0.extend_from_slice(bytes);
        self.0.resize(end, 0);
    }

    fn write(mut self, out: Out<u8>, bytes: usize) -> Outcome {
        self.0.resize(bytes, 0);
        self.0
            .iter()
            .enumerate()
            .try_for_each(|(index, &byte)| out.set_nth(index, byte))
    }
}

/// `cudaDeviceProp` of CUDA 12 or 13. 13 left some fields out.
pub(crate) fn device_properties(gpu: &Gpu, major: i32, out: Out<u8>) -> Outcome {
    const BYTES_12: usize = 1032;
    const BYTES_13: usize = 1008;
    let twelve = major < 13;
    let is = |number: i32| attribute(gpu, number).unwrap_or(0);
    let unsigned = |value: i32| u64::from(value.unsigned_abs());
    let mut all = Structure::default();
    all.bytes(DEVICE_NAME.as_bytes(), 256);
    all.bytes(&uuid(gpu.physical), 16);
    all.bytes(&[], 8);
    all.ints(&[0]);
    all.size(gpu.sim.properties().total_bytes);
    all.size(unsigned(device::SHARED_PER_BLOCK));
    all.ints(&[device::REGISTERS, device::WARP]);
    all.size(unsigned(is(11)));
    all.ints(&[device::MAX_THREADS_PER_BLOCK]);
    all.ints(&device::MAX_BLOCK);
    all.ints(&device::MAX_GRID);
    if twelve {
        all.ints(&[device::CLOCK_KHZ]);
    }
    all.size(unsigned(device::CONSTANT));
    all.ints(&[device::MAJOR, device::MINOR]);
    all.size(unsigned(is(14)));
    all.size(unsigned(is(51)));
    if twelve {
        all.ints(&[is(15)]);
    }
    all.ints(&[device::MULTIPROCESSORS]);
    if twelve {
        all.ints(&[is(17)]);
    }
    all.ints(&[is(18), is(19)]);
    if twelve {
        all.ints(&[is(20)]);
    }
    // The largest textures: one-dimensional, with a third number in 12, then the others; and surfaces. None.
    all.ints(&[0; 2]);
    if twelve {
        all.ints(&[0]);
    }
    all.ints(&[0; 2 + 2 + 3 + 2 + 3 + 3 + 1 + 2 + 3 + 2]);
    all.ints(&[0; 1 + 2 + 3 + 2 + 3 + 1 + 2]);
    all.size(unsigned(is(30)));
    all.ints(&[
        is(31),
        is(32),
        is(33),
        is(34),
        is(50),
        is(35),
        is(40),
        is(41),
    ]);
    if twelve {
        all.ints(&[is(36)]);
    }
    all.ints(&[is(37), is(38), is(108), is(39), is(78), is(79), is(80)]);
    all.size(unsigned(is(81)));
    all.ints(&[is(82), is(83), is(84), is(85), is(86)]);
    if twelve {
        all.ints(&[is(87)]);
    }
    all.ints(&[is(88), is(89), is(90), is(91), is(95)]);
    if twelve {
        all.ints(&[is(96)]);
    }
    all.size(unsigned(is(97)));
    all.ints(&[is(100), is(101), is(106), is(109)]);
    all.size(unsigned(is(111)));
    all.ints(&[
        is(99),
        is(112),
        is(113),
        is(114),
        is(115),
        is(116),
        is(117),
        is(118),
        is(119),
    ]);
    // Arrays mapped later; events for other processes; clusters; unified function pointers.
    all.ints(&[is(121), is(125), is(120), is(129)]);
    all.write(out, if twelve { BYTES_12 } else { BYTES_13 })
}

/// `cudaFuncAttributes`, the same for every kernel.
pub(crate) fn function_attributes(out: Out<u8>) -> Outcome {
    const BYTES: usize = 144;
    const REGISTERS: i32 = 32;
    let version = device::MAJOR * 10 + device::MINOR;
    let mut all = Structure::default();
    for _ in 0..3 {
        all.size(0);
    }
    all.ints(&[device::MAX_THREADS_PER_BLOCK, REGISTERS, version, version]);
    all.ints(&[0, device::SHARED_PER_BLOCK]);
    all.write(out, BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state;

    fn read(major: i32, bytes: usize) -> Vec<u8> {
        let mut out = vec![0xaa_u8; bytes + 1];
        state::initialise().unwrap();
        state::driver(|state| {
            let place = Out::to(&mut out);
            device_properties(&state.gpus[0], major, place)
        })
        .unwrap();
        assert_eq!(out.pop(), Some(0xaa), "no byte beyond the end");
        out
    }

    fn int(bytes: &[u8], at: usize) -> i32 {
        i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Offsets as a C compiler gives them for the headers of CUDA 13.2 and 12.8.
    #[test]
    fn fields_lie_where_the_headers_have_them() {
        let thirteen = read(13, 1008);
        assert_eq!(int(&thirteen, 384), device::MULTIPROCESSORS);
        assert_eq!(int(&thirteen, 568), 1, "the bus");
        assert_eq!(int(&thirteen, 672), device::SHARED_PER_BLOCK_OPTIN);
        assert_eq!(int(&thirteen, 720), 1, "memory pools");
        let twelve = read(12, 1032);
        assert_eq!(int(&twelve, 388), device::MULTIPROCESSORS);
        assert_eq!(int(&twelve, 584), 1, "the bus");
        assert_eq!(int(&twelve, 696), device::SHARED_PER_BLOCK_OPTIN);
        assert_eq!(int(&twelve, 744), 1, "memory pools");
    }
}
