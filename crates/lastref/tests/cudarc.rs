//! Tensors and streams as cudarc has them, over the stand-in: kernels are counted and compute nothing.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::standin::{self, Standin};
use common::{MIB, allocated, in_use};
use lastref::alloc::Device as _;
use lastref::cudarc::driver::{LaunchConfig, PushKernelArg, result, sys};
use lastref::cudarc::nvrtc::Ptx;
use lastref::{DType, Device, Error, Tensor, cuda, sim};

const GPU: Device = Device::Cuda(0);
const MEMORY: (&str, &str) = ("MEMORY", "1GiB");

/// Adds one to each of `n` values.
const PTX: &str = "
.version 7.0
.target sm_52
.address_size 64
.visible .entry add_one(.param .u64 values, .param .u32 n) {
  .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .f32 %f;
  ld.param.u64 %rd0, [values];
  ld.param.u32 %r0, [n];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %p, %r4, %r0;
  @%p bra done;
  cvta.to.global.u64 %rd1, %rd0;
  mul.wide.u32 %rd2, %r4, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.f32 %f, [%rd3];
  add.f32 %f, %f, 0f3F800000;
  st.global.f32 [%rd3], %f;
done:
  ret;
}";

#[test]
fn a_kernel_runs_on_a_tensor_and_frees_nothing_of_it() {
    standin::run("kernel", &[MEMORY]);
}

#[test]
#[ignore = "run by the others"]
fn kernel() {
    let tensor = Tensor::zeros_with([1000], (DType::F32, GPU)).unwrap();
    let module = cuda::cudarc_context(0)
        .unwrap()
        .load_module(Ptx::from_src(PTX))
        .unwrap();
    let function = module.load_function("add_one").unwrap();
    let side = cuda::Stream::new().unwrap();
    side.wait_stream(&cuda::current_stream(0).unwrap()).unwrap();
    let standin = Standin::new();
    side.scope(|| {
        let mut slice = tensor.cudarc_slice::<f32>().unwrap();
        let stream = Arc::clone(slice.stream());
        assert_eq!(stream.cu_stream(), side.to_cudarc().unwrap().cu_stream());
        assert!(!stream.cu_stream().is_null());
        let mut view = slice.view_mut();
        let mut launch = stream.launch_builder(&function);
        launch.arg(&mut view).arg(&1000_u32);
        // SAFETY: the kernel writes within 1000 values.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }.unwrap();
    })
    .unwrap();
    assert_eq!(standin.calls("cuLaunchKernel"), 1);
    // cudarc's own copies work on the memory too.
    let slice = tensor.cudarc_slice::<f32>().unwrap();
    assert_eq!(slice.tensor().ref_count(), 2);
    let values = slice.stream().clone_dtoh(&slice.view()).unwrap();
    assert_eq!(values, vec![0.0; 1000]);

    // A slice keeps the memory as a handle does, and gives it to the allocator, not to the driver.
    let frees = ["cuMemFree", "cuMemFreeAsync"].map(|name| standin.calls(name));
    drop(tensor);
    assert_eq!(allocated(), 4096);
    drop(slice);
    assert_eq!(allocated(), 0);
    let after = ["cuMemFree", "cuMemFreeAsync"].map(|name| standin.calls(name));
    assert_eq!(frees, after, "freed through the driver");

    let wrong = Tensor::zeros_with([4, 4], (DType::F32, GPU)).unwrap();
    let error = wrong.cudarc_slice::<i64>().unwrap_err();
    assert!(matches!(error, Error::DTypeMismatch { .. }), "{error}");
    let error = wrong
        .transpose(0, 1)
        .unwrap()
        .cudarc_slice::<f32>()
        .unwrap_err();
    assert!(error.to_string().contains("not contiguous"), "{error}");
    let error = Tensor::zeros([4])
        .unwrap()
        .cudarc_slice::<f32>()
        .unwrap_err();
    assert!(error.to_string().contains("on the CPU"), "{error}");
}

#[test]
fn what_cudarc_allocated_goes_back_the_way_it_came() {
    standin::run("adopted", &[MEMORY]);
}

#[test]
#[ignore = "run by the others"]
fn adopted() {
    let stream = cuda::current_stream(0).unwrap().to_cudarc().unwrap();
    let standin = Standin::new();
    let values: Vec<f32> = (0..1_000_u16).map(f32::from).collect();
    let slice = stream.clone_htod(&values).unwrap();
    let error = Tensor::from_cudarc(stream.alloc_zeros::<f32>(7).unwrap(), [2, 4]).unwrap_err();
    assert!(
        error.to_string().contains("7 elements, shape [2, 4] has 8"),
        "{error}"
    );
    let tensor = Tensor::from_cudarc(slice, [10, 100]).unwrap();
    assert!(tensor.is_cuda() && tensor.storage().is_foreign());
    assert_eq!(tensor.to_vec::<f32>().unwrap(), values);
    tensor.select(0, 3).unwrap().fill_(-1).unwrap();
    let copy = tensor.copy().unwrap();
    assert_eq!(
        copy.select(0, 3).unwrap().to_vec::<f32>().unwrap(),
        [-1.0; 100]
    );
    drop(copy);
    assert_eq!(allocated(), 0, "the allocator has no part in it");
    let frees = standin.calls("cuMemFreeAsync");
    let view = tensor.narrow(0, 0, 1).unwrap();
    drop(tensor);
    assert_eq!(standin.calls("cuMemFreeAsync"), frees, "a view keeps it");
    drop(view);
    assert_eq!(standin.calls("cuMemFreeAsync"), frees + 1);
    cuda::empty_cache().unwrap();
    assert_eq!(in_use(), 0);
}

#[test]
fn an_owner_is_dropped_after_the_streams_that_use_its_memory() {
    standin::run("owned", &[MEMORY]);
}

#[test]
#[ignore = "run by the others"]
fn owned() {
    static DROPPED: AtomicBool = AtomicBool::new(false);
    struct Owner(cuda::Block);
    impl Drop for Owner {
        fn drop(&mut self) {
            let device = self.0.allocator().device().clone();
            let side = cuda::Stream::new().unwrap();
            assert!(device.query_stream(side.id()).unwrap());
            DROPPED.store(true, Ordering::Relaxed);
        }
    }
    let block = cuda::allocator(0)
        .unwrap()
        .alloc(2 << 20, cuda::current_stream(0).unwrap().id())
        .unwrap();
    let ptr = block.ptr().0;
    let standin = Standin::new();
    let owner = Box::new(Owner(block));
    // SAFETY: the block is memory of the device while its owner has it.
    let tensor = unsafe { Tensor::from_device_ptr(ptr, [MIB / 2], DType::F32, 0, owner) }.unwrap();
    assert_eq!(tensor.data_ptr(), ptr);
    let side = cuda::Stream::new().unwrap();
    side.wait_stream(&cuda::current_stream(0).unwrap()).unwrap();
    standin.delay_events(true);
    side.record_event().unwrap();
    standin.delay_events(false);
    side.scope(|| tensor.fill_(1).unwrap()).unwrap();
    tensor.record_stream(&side).unwrap();
    assert!(!side.query().unwrap(), "the fill is pending");
    assert!(!DROPPED.load(Ordering::Relaxed));
    drop(tensor);
    assert!(DROPPED.load(Ordering::Relaxed));
    assert!(side.query().unwrap(), "waited for");

    let nobody = Box::new(());
    // SAFETY: it is refused.
    let error = unsafe { Tensor::from_device_ptr(ptr + 2, [4], DType::F32, 0, nobody) };
    assert!(error.unwrap_err().to_string().contains("not aligned"));
}

#[test]
fn nothing_is_asked_of_streams_while_one_is_captured() {
    standin::run("captured", &[MEMORY]);
}

#[test]
#[ignore = "run by the others"]
fn captured() {
    let warm = Tensor::zeros_with([1000], (DType::F32, GPU)).unwrap();
    let device = cuda::allocator(0).unwrap().device().clone();
    let side = cuda::Stream::new().unwrap();
    let stream = side.to_cudarc().unwrap();
    assert!(!device.is_capturing());
    // Of cudarc's, the thin layer leaves it to its caller which context is current.
    stream.context().bind_to_thread().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a stream of ours.
    unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.unwrap();
    assert!(device.is_capturing());
    let standin = Standin::new();
    let asked = [
        "cuEventQuery",
        "cuStreamQuery",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ];
    let before = asked.map(|name| standin.calls(name));
    side.scope(|| {
        let inside = Tensor::empty_with([50 * MIB], (DType::U8, GPU)).unwrap();
        inside.fill_(3).unwrap();
        let error = inside.to_bytes().unwrap_err().to_string();
        assert!(error.contains("is being captured into a graph"), "{error}");
        let error = device
            .copy_from_host(
                lastref::alloc::DevicePtr(inside.data_ptr()),
                &[1],
                side.id(),
            )
            .unwrap_err()
            .to_string();
        assert!(error.contains("copy before"), "{error}");
    })
    .unwrap();
    assert_eq!(before, asked.map(|name| standin.calls(name)));
    // SAFETY: the stream is captured.
    let graph = unsafe { result::stream::end_capture(stream.cu_stream()) }.unwrap();
    // SAFETY: a graph of ours, which was not launched.
    unsafe { result::graph::destroy(graph) }.unwrap();
    assert!(!device.is_capturing());
    drop(warm);
    cuda::empty_cache().unwrap();
    assert_eq!(in_use(), 0);
}

#[test]
fn simulated_devices_are_not_for_cudarc() {
    if common::on_driver() {
        return;
    }
    sim::enable("1GiB").unwrap();
    let tensor = Tensor::zeros_with([4], (DType::F32, GPU)).unwrap();
    let error = tensor.cudarc_slice::<f32>().unwrap_err().to_string();
    assert_eq!(
        error,
        "cudarc_slice: cuda:0 is simulated, and cudarc cannot use it"
    );
    assert!(cuda::cudarc_context(0).is_err());
    // SAFETY: it is refused.
    let foreign = unsafe { Tensor::from_device_ptr(4096, [4], DType::F32, 0, Box::new(())) };
    let error = foreign.unwrap_err().to_string();
    assert!(error.contains("has no memory but its own"), "{error}");
}
