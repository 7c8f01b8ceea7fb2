//! Bad input: a clear error that names the thing, nothing leaked, no panic.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use common::{allocated, bytes_on_gpu, turn};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, Managed};
use lastref::dlpack::{self, dlpark};
use lastref::{DType, Device, Element, Error, Result, Tensor, cuda, sim};

const GPU: Device = Device::Cuda(0);

/// Runs `bad`, which must fail, and gives the text of its error. Nothing may stay allocated.
#[track_caller]
fn refused<T: std::fmt::Debug>(bad: impl FnOnce() -> Result<T>) -> String {
    let before = allocated();
    let error = bad().unwrap_err();
    assert_eq!(allocated(), before, "leaked by {error}");
    let text = error.to_string();
    let first = text.chars().next().unwrap();
    assert!(
        !first.is_uppercase() && !text.ends_with('.'),
        "style: {text}"
    );
    text
}

macro_rules! assert_text {
    ($text:expr, $($part:expr),+) => {{
        let text = $text;
        $(assert!(text.contains($part), "{text:?} does not say {:?}", $part);)+
    }};
}

#[test]
fn negative_and_overflowing_shapes() {
    let _turn = turn("8GiB");
    for device in [Device::Cpu, GPU] {
        assert_text!(
            refused(|| Tensor::empty_with([2, -3], device)),
            "empty: negative size -3 in shape [2, -3]"
        );
        assert_text!(
            refused(|| Tensor::zeros_with([i64::MAX, 2], device)),
            "zeros: shape [9223372036854775807, 2] has more bytes than 2^63 - 1"
        );
        // 2^61 elements of 4 bytes are 2^63.
        assert_text!(refused(|| Tensor::ones_with([1 << 61], device)), "2^63 - 1");
        assert_text!(
            refused(|| Tensor::full_with([i64::MIN], 1, device)),
            "negative size"
        );
        // Zero elements, but strides that cannot be counted.
        assert_text!(
            refused(|| Tensor::empty_with([0, i64::MAX, 4], device)),
            "2^63 - 1"
        );
    }
    assert_text!(
        refused(|| Tensor::from_slice(&[1, 2, 3], [2, 2])),
        "from_slice: 3 elements do not fill shape [2, 2] of 4"
    );
    assert_text!(
        refused(|| Tensor::from_bytes(&[0; 6], DType::F32, [2])),
        "from_bytes: 6 bytes do not fill shape [2] of float32, which has 8"
    );
}

#[test]
fn more_memory_than_there_is() {
    let _turn = turn("8GiB");
    let text = refused(|| bytes_on_gpu(9 << 30));
    assert_text!(text, "9.00 GiB", "8.00 GiB");
    let held = bytes_on_gpu(6 << 30).unwrap();
    let error = bytes_on_gpu(3 << 30).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    assert_text!(error.to_string(), "out of memory", "3.00 GiB", "6.00 GiB");
    drop(held);
    assert_text!(
        refused(|| Tensor::empty([1 << 60])),
        "host memory: the system refused 4611686018427387904 bytes"
    );
    let endless = Tensor::zeros([1]).unwrap().expand([1 << 59]).unwrap();
    assert_text!(
        refused(|| endless.to_vec::<f32>()),
        "host memory: the system refused"
    );
    assert_text!(refused(|| endless.copy()), "the system refused");
    assert_text!(refused(|| endless.to_device(GPU)), "GiB");
}

#[test]
fn views_that_do_not_fit() {
    let _turn = turn("8GiB");
    let t = Tensor::zeros_with([2, 3], GPU).unwrap();
    assert_text!(
        refused(|| t.view([4, 2])),
        "view: shape [4, 2] does not fit 6 elements of shape [2, 3]"
    );
    assert_text!(
        refused(|| t.view([-1, -1])),
        "only one size of shape [-1, -1]"
    );
    assert_text!(refused(|| t.view([-2, 3])), "negative size -2");
    assert_text!(refused(|| t.view([i64::MAX, 3])), "more than 2^63 - 1");
    assert_text!(refused(|| t.view([-1, 0])), "can be anything");
    assert_text!(
        refused(|| t.transpose(0, 1).unwrap().view([6])),
        "cannot be seen as [6] without a copy; use reshape"
    );
    assert_text!(refused(|| t.reshape([7])), "reshape: shape [7]");
    assert_text!(refused(|| t.permute([0])), "permute: 1 dimensions given");
    assert_text!(
        refused(|| t.permute([0, 0])),
        "dimension 0 is given twice in [0, 0]"
    );
    assert_text!(
        refused(|| t.permute([0, 2])),
        "dimension 2 is out of range for a tensor of 2 dimensions, expected -2 to 1"
    );
    assert_text!(refused(|| t.transpose(0, -3)), "dimension -3");
    assert_text!(refused(|| t.unsqueeze(4)), "unsqueeze: dimension 4");
    assert_text!(refused(|| t.squeeze(2)), "squeeze: dimension 2");
    assert_text!(
        refused(|| t.expand([2, 4])),
        "cannot expand shape [2, 3] to [2, 4]"
    );
    assert_text!(refused(|| t.expand([3])), "fewer dimensions");
    assert_text!(
        refused(|| t.expand([-1, 2, 3])),
        "size -1 of the new dimension 0"
    );
    let one = Tensor::zeros_with([1], GPU).unwrap();
    assert_text!(
        refused(|| one.expand([i64::MAX, i64::MAX, 1])),
        "more bytes than 2^63 - 1"
    );
    assert_text!(refused(|| one.expand([-5])), "expand");
}

#[test]
fn slices_out_of_range() {
    let _turn = turn("8GiB");
    let t = Tensor::zeros_with([2, 3], GPU).unwrap();
    assert_text!(
        refused(|| t.narrow(1, 2, 2)),
        "narrow: length 2 from start 2 is out of range for dimension 1 of size 3"
    );
    assert_text!(
        refused(|| t.narrow(0, 3, 0)),
        "start 3 is out of range for dimension 0 of size 2"
    );
    assert_text!(refused(|| t.narrow(0, 0, -1)), "length -1");
    assert_text!(refused(|| t.narrow(0, i64::MIN, 1)), "start");
    assert_text!(refused(|| t.narrow(0, 1, i64::MAX)), "length");
    assert_text!(
        refused(|| t.select(0, 2)),
        "select: index 2 is out of range for dimension 0 of size 2"
    );
    assert_text!(refused(|| t.select(0, -3)), "index -3");
    assert_text!(refused(|| t.select(0, i64::MIN)), "out of range");
    assert_text!(refused(|| t.select(2, 0)), "dimension 2 is out of range");
    assert_text!(
        refused(|| t.slice(0, None, None, 0)),
        "slice: step 0 is not positive"
    );
    assert_text!(refused(|| t.slice(0, None, None, -1)), "step -1");
    assert_text!(refused(|| t.slice(5, 0, 1, 1)), "dimension 5");
    let scalar = t.select(0, 0).unwrap().select(0, 0).unwrap();
    assert_text!(refused(|| scalar.select(0, 0)), "has none to index");
    // As in Python, a slice beyond the size is cut, not refused.
    assert_eq!(t.slice(1, 2, 99, 1).unwrap().shape(), [2, 1]);
}

#[test]
fn dtypes_and_values_that_do_not_match() {
    let _turn = turn("8GiB");
    let t = Tensor::zeros_with([2, 3], GPU).unwrap();
    assert_text!(
        refused(|| t.to_vec::<i64>()),
        "to_vec: the tensor holds float32, not int64"
    );
    let one = t.select(0, 0).unwrap().select(0, 0).unwrap();
    assert_text!(
        refused(|| one.item::<f64>()),
        "item: the tensor holds float32"
    );
    assert_text!(
        refused(|| t.item::<f32>()),
        "item: a tensor of 6 elements, shape [2, 3], is not one value"
    );
    assert_text!(refused(|| "float33".parse::<DType>()), "\"float33\"");
    assert_text!(
        refused(|| Tensor::arange(0, 10, 0)),
        "arange: start 0, end 10, step 0: the step is zero"
    );
    assert_text!(refused(|| Tensor::arange(0, 10, -1)), "away from the end");
    assert_text!(refused(|| Tensor::arange(0, f64::NAN, 1)), "not finite");
    assert_text!(
        refused(|| Tensor::arange(0.0, 1e300, 1.0)),
        "too many values"
    );
    assert_text!(
        refused(|| Tensor::arange(i64::MIN, i64::MAX, 1)),
        "too many values"
    );
}

#[test]
fn writes_that_have_no_meaning() {
    let _turn = turn("8GiB");
    let t = Tensor::zeros_with([2, 3], GPU).unwrap();
    let wide = Tensor::zeros_with([1], GPU).unwrap().expand([3]).unwrap();
    assert_text!(
        refused(|| wide.fill_(1)),
        "fill_: several indices",
        "shape [3] with strides [0]"
    );
    assert_text!(refused(|| wide.copy_(&t.select(0, 0)?)), "copy_: several");
    assert_text!(
        refused(|| t.copy_(&Tensor::zeros([4])?)),
        "copy_: cannot expand shape [4] to [2, 3]"
    );
}

#[test]
fn devices_that_are_not_there() {
    let _turn = turn("8GiB");
    let t = Tensor::zeros([2]).unwrap();
    assert_text!(
        refused(|| t.to_device(Device::Cuda(7))),
        "to: there is no cuda:7, this process has 1 CUDA device(s)"
    );
    assert_text!(
        refused(|| Tensor::empty_with([2], Device::Cuda(1))),
        "empty: there is no cuda:1"
    );
    assert_text!(refused(|| cuda::set_device(u32::MAX)), "no cuda:4294967295");
    assert_text!(refused(|| cuda::memory_allocated(3)), "no cuda:3");
    assert_text!(refused(|| cuda::Stream::with(2, 0)), "no cuda:2");
    assert_eq!(cuda::current_device(), 0);
    for bad in [
        "gpu",
        "cuda:",
        "cuda:-1",
        "cuda:+1",
        "cuda:x",
        "cuda:99999999999",
    ] {
        assert_text!(refused(|| bad.parse::<Device>()), bad);
    }
    assert_text!(
        refused(|| t.record_stream(&cuda::current_stream(0)?)),
        "record_stream: the tensor is on cpu, the stream on cuda:0"
    );
    for bad in [f64::NAN, -0.1, 1.5] {
        assert_text!(
            refused(|| cuda::set_per_process_memory_fraction(bad, None)),
            "from 0 to 1"
        );
    }
    assert_text!(
        refused(|| sim::enable("2x8GiB")),
        "sim::enable=\"2x8GiB\"",
        "in use already, 8GiB"
    );
}

#[test]
fn events_that_cannot_be_timed() {
    let _turn = turn("8GiB");
    let (a, b) = (cuda::Event::new(), cuda::Event::new());
    assert_text!(refused(|| a.elapsed_time(&b)), "must be recorded first");
    a.record_current().unwrap();
    common::simulated(0).delay_events(1000);
    b.record_current().unwrap();
    assert_text!(refused(|| a.elapsed_time(&b)), "elapsed_microseconds");
    common::simulated(0).clear_faults();
    b.synchronize().unwrap();
    assert!(a.elapsed_time(&b).unwrap() >= 0.0);
}

#[test]
fn simulated_gpus_that_cannot_be_read() {
    let _turn = turn("8GiB");
    for (bad, why) in [
        ("", "does not begin with a number"),
        ("GiB", "does not begin with a number"),
        ("8G", "can mean two things, write GiB (1024) or GB (1000)"),
        ("8PiB", "unknown unit \"pib\""),
        ("-8GiB", "does not begin with a number"),
        ("1.5GiB", "unknown unit"),
        ("0x8GiB", "0 devices"),
        ("65x8GiB", "65 devices"),
        ("x8GiB", "not a number of devices"),
        ("2x", "does not begin with a number"),
        ("2x3x4GiB", "unknown unit"),
        ("0GiB", "expected 2MiB to 16TiB"),
        ("17TiB", "expected 2MiB to 16TiB"),
        ("99999999999999999999GiB", "more than 16TiB"),
        ("99999999999TiB", "more than 16TiB"),
        ("8GiB,races", "valid are races=true and races=false"),
        ("8GiB,races=yes", "\"races=yes\" is no switch"),
        ("8GiB,races=true,races=true", "is no switch"),
        (",races=true", "does not begin with a number"),
    ] {
        let text = refused(|| bad.parse::<sim::Spec>());
        assert_text!(text, why, &format!("simulated GPU={bad:?}"));
    }
    for (good, shown, bytes) in [
        ("8GiB", "8GiB", 8_u64 << 30),
        (" 8 gib ", "8GiB", 8 << 30),
        ("11GB", "11GB", 11_000_000_000),
        ("11000MiB", "11000MiB", 11_000 << 20),
        ("8192MiB", "8GiB", 8 << 30),
        ("3000001", "3000001B", 3_000_001),
        ("4000 kb", "4MB", 4_000_000),
        ("8GiB , races=TRUE", "8GiB,races=true", 8 << 30),
        ("8GiB,races=false", "8GiB", 8 << 30),
    ] {
        let spec: sim::Spec = good.parse().unwrap();
        assert_eq!((spec.count(), spec.capacity_bytes()), (1, bytes));
        assert_eq!(spec.to_string(), shown);
        assert_eq!(spec.to_string().parse::<sim::Spec>().unwrap(), spec);
    }
}

// ---- dlpack -------------------------------------------------------------------------------

/// Counts its drops: what a foreign library would free.
struct Owner(Box<[u64; 8]>, std::sync::mpsc::Sender<()>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.send(()).unwrap();
    }
}

struct Foreign {
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: DLDataType,
    device: DLDevice,
    shift: usize,
    null: bool,
    flags: DlpackFlags,
}

impl Default for Foreign {
    fn default() -> Self {
        Self {
            shape: vec![2, 4],
            strides: vec![4, 1],
            dtype: DLDataType::scalar(DLDataTypeCode::INT, 64),
            device: DLDevice::CPU,
            shift: 0,
            null: false,
            flags: DlpackFlags::empty(),
        }
    }
}

impl Foreign {
    /// Imports it. The owner must be dropped exactly once, by the failure or with the tensor.
    fn import(self) -> Result<Tensor> {
        let (send, dropped) = std::sync::mpsc::channel();
        let mut owner = Box::new(Owner(Box::new([7; 8]), send));
        let data = owner.0.as_mut_ptr();
        let mut made = Dynamic::new(&self.shape[..], &self.strides[..])
            .prepare_as::<DLManagedTensorVersioned>()
            .unwrap()
            .initialize(owner);
        let data = data.cast::<std::ffi::c_void>();
        made.set_data(if self.null {
            std::ptr::null_mut()
        } else {
            data.wrapping_byte_add(self.shift)
        })
        .set_dtype(self.dtype)
        .set_device(self.device)
        .set_flags(self.flags)
        .unwrap();
        // SAFETY: the descriptors that do not fit their memory are never followed: import refuses.
        let managed: Managed<DLManagedTensorVersioned> = unsafe { made.finish() };
        // SAFETY: as above; those that are accepted describe the owner's 8 integers.
        let tensor = unsafe { dlpack::import(managed) };
        match tensor {
            Ok(tensor) => {
                assert!(dropped.try_recv().is_err(), "dropped too early");
                let last = tensor.clone();
                drop(tensor);
                assert!(dropped.try_recv().is_err(), "dropped too early");
                let copy = last.copy().unwrap();
                drop(last);
                assert!(dropped.try_recv().is_ok(), "not dropped");
                Ok(copy)
            }
            Err(error) => {
                assert!(dropped.try_recv().is_ok(), "not dropped by a refusal");
                Err(error)
            }
        }
    }
}

#[test]
fn foreign_tensors_that_cannot_be_taken() {
    let _turn = turn("8GiB");
    let good = Foreign::default().import().unwrap();
    assert_eq!(good.to_vec::<i64>().unwrap(), [7; 8]);
    let empty = Foreign {
        shape: vec![0, 4],
        null: true,
        ..Foreign::default()
    };
    assert_eq!(empty.import().unwrap().numel(), 0);

    macro_rules! bad {
        ($($field:ident: $value:expr),+ => $($part:expr),+) => {
            assert_text!(
                refused(|| Foreign { $($field: $value,)+ ..Foreign::default() }.import()),
                "dlpack: ", $($part),+
            )
        };
    }
    bad!(dtype: DLDataType::scalar(DLDataTypeCode::COMPLEX, 64)
        => "no dtype for type code 5, 64 bits, 1 lanes");
    bad!(dtype: DLDataType::new(DLDataTypeCode::INT, 64, 2) => "2 lanes");
    bad!(dtype: DLDataType::scalar(DLDataTypeCode::INT, 7) => "7 bits");
    bad!(device: DLDevice::cuda(0) => "device type 2, index 0");
    bad!(null: true => "data pointer is null for shape [2, 4]");
    bad!(shift: 4, shape: vec![1, 4] => "is not aligned to the 8 bytes of int64");
    bad!(shape: vec![2, -4] => "negative", "-4");
    bad!(strides: vec![4, -1] => "negative stride -1 in strides [4, -1]");
    bad!(shape: vec![i64::MAX, 4] => "overflow");
    bad!(shape: vec![1 << 61, 1] => "overflow");
    bad!(strides: vec![i64::MAX, 1] => "reaches beyond 2^63 - 1 bytes");
    bad!(flags: DlpackFlags::READ_ONLY => "read-only");
}

#[test]
fn a_failed_copy_leaves_no_temporary() {
    use lastref::alloc::sim::{Call, Fault};
    let _turn = turn("8GiB");
    let from = Tensor::arange_with(0, 1000, 1, (DType::I32, GPU)).unwrap();
    let from = from.view([10, 100]).unwrap();
    let device = common::simulated(0);
    for call in [
        Call::CopyToHost,
        Call::CopyFromHost,
        Call::Copy2d,
        Call::Fill,
    ] {
        let mut failed = 0;
        for work in [
            (|t: &Tensor| t.to_dtype(DType::F64)) as fn(&Tensor) -> Result<Tensor>,
            |t| t.slice(1, 1, None, 3)?.copy(),
            |t| t.transpose(0, 1)?.cpu(),
            |t| Tensor::ones_with([5], t.device()),
            |t| t.cpu()?.to_device(GPU),
        ] {
            device.inject(Fault::nth(call, 1));
            let before = allocated();
            let outcome = work(&from);
            device.clear_faults();
            if let Err(error) = &outcome {
                assert_text!(error.to_string(), call.name());
                assert_eq!(allocated(), before);
                failed += 1;
            }
        }
        assert!(failed > 0, "{call:?} is part of some of these");
    }
    assert_eq!(
        from.to_vec::<i32>().unwrap(),
        (0..1000).collect::<Vec<i32>>(),
        "the source is unchanged"
    );
    assert_eq!(i32::DTYPE, from.dtype());
}
