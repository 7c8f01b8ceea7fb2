//! The parts that lastref alone is in.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use lastref::cudarc::driver::{LaunchConfig, PushKernelArg};
use lastref::cudarc::nvrtc::Ptx;
use lastref::gc::{self, Gc, Slot};
use lastref::{DType, Device, Tensor, cuda};
use lastref_alloc::{AllocatorOptions, Block, CachingAllocator, Device as _, StreamId, contract};
use lastref_cuda::CudaDevice;
use lastref_derive::Trace;
use lastref_snapshot::trace::{OperationKind, Trace};
use serde_json::{Map, Value, json};

use crate::{Setting, median, rounded};

const GPU: Device = Device::Cuda(0);

/// What every device must do. Counts of memory are compared exactly: nobody else may use the GPU.
pub(crate) fn contract(_: &Setting) -> Result<Value> {
    let report = contract::run_all(&|| {
        let devices = lastref_cuda::devices().unwrap_or_default().iter();
        devices
            .map(|device| Arc::new(device.clone()) as Arc<dyn lastref_alloc::Device>)
            .collect()
    });
    let failed: Vec<String> = report
        .failed
        .iter()
        .map(|(name, how)| format!("{name}: {how}"))
        .collect();
    if !failed.is_empty() {
        bail!(
            "{} passed, failed: {}",
            report.passed.len(),
            failed.join("; ")
        );
    }
    Ok(json!({
        "passed": report.passed.len(),
        "skipped": report.skipped.iter().map(|(name, _)| name).collect::<Vec<_>>(),
    }))
}

/// Allocated, reserved, and what the driver says more is in use than at the start, in bytes.
fn numbers(at_start: u64) -> Result<[u64; 3]> {
    Ok([
        cuda::memory_allocated(0)?,
        cuda::memory_reserved(0)?,
        at_start.saturating_sub(cuda::mem_get_info(0)?.free_bytes),
    ])
}

/// A variable is given a new value, with the driver's word for where the memory is.
pub(crate) fn reassign(_: &Setting) -> Result<Value> {
    cuda::empty_cache()?;
    let at_start = cuda::mem_get_info(0)?.free_bytes;
    let mib = 1_i64 << 20;
    let mut steps = Map::new();
    let mut tensor = Tensor::empty_with([512 * mib], (DType::U8, GPU))?;
    let with_tensor = numbers(at_start)?;
    steps.insert("a_tensor_of_512MiB".to_owned(), json!(with_tensor));
    tensor = {
        drop(tensor);
        Tensor::empty([4, 5])?
    };
    ensure!(!tensor.is_cuda());
    let reassigned = numbers(at_start)?;
    steps.insert("after_a_new_value".to_owned(), json!(reassigned));
    cuda::empty_cache()?;
    let emptied = numbers(at_start)?;
    steps.insert("after_empty_cache".to_owned(), json!(emptied));
    let bytes = 512 << 20;
    ensure!(with_tensor == [bytes; 3], "{steps:?}");
    ensure!(reassigned == [0, bytes, bytes], "{steps:?}");
    ensure!(emptied == [0; 3], "{steps:?}");
    Ok(Value::Object(steps))
}

#[derive(Trace)]
struct Model {
    weights: Tensor,
    itself: Slot<Option<Gc<Model>>>,
}

/// Models that refer to themselves, of three times the device's memory together.
pub(crate) fn dead_cycles(setting: &Setting) -> Result<Value> {
    cuda::empty_cache()?;
    cuda::reset_peak_memory_stats(0)?;
    let total = setting.device.properties().total_bytes;
    let each = i64::try_from(total / 28)?;
    let started = Instant::now();
    for made in 0..84 {
        let weights = Tensor::empty_with([each], (DType::U8, GPU))
            .with_context(|| format!("model {made} of 84"))?;
        let model = Gc::new(Model {
            weights,
            itself: Slot::default(),
        });
        model.itself.set(Some(model.clone()));
        ensure!(model.weights.is_cuda());
    }
    let seconds = started.elapsed().as_secs_f64();
    let peak = cuda::max_memory_allocated(0)?;
    gc::collect(2)?;
    cuda::empty_cache()?;
    ensure!(cuda::memory_allocated(0)? == 0 && cuda::memory_reserved(0)? == 0);
    let sums = gc::stats();
    Ok(json!({
        "made": 84,
        "bytes_each": each,
        "peak_allocated": peak,
        "collections": sums.iter().map(|sums| sums.collections).sum::<u64>(),
        "loop_seconds": rounded(seconds),
    }))
}

/// One block allocated and freed again, in nanoseconds a pair.
pub(crate) fn hot_pair(setting: &Setting) -> Result<Value> {
    let allocator = CachingAllocator::new(setting.device.clone());
    let mut table = Map::new();
    for kib in [1_u64, 64, 1024, 16 << 10] {
        let mut rounds = Vec::new();
        for _ in 0..7 {
            const PAIRS: u32 = 50_000;
            let start = Instant::now();
            for _ in 0..PAIRS {
                drop(allocator.alloc(kib << 10, StreamId::DEFAULT)?);
            }
            rounds.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS));
        }
        table.insert(format!("{kib}KiB_ns"), json!(rounded(median(rounds))));
    }
    Ok(Value::Object(table))
}

/// Each trace, by the allocator on the GPU: time with the driver's share, and what was reserved.
pub(crate) fn replay(setting: &Setting) -> Result<Value> {
    let mut table = Map::new();
    for path in &setting.traces {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = name.strip_suffix(".csv").unwrap_or(&name).to_owned();
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let trace = Trace::read(file).with_context(|| format!("cannot read {}", path.display()))?;
        let free = setting.device.memory_info()?.free_bytes;
        let row = if trace.peak_live_bytes() > free - free / 16 {
            json!({ "skipped": format!("{} bytes are live at its peak", trace.peak_live_bytes()) })
        } else {
            one_trace(setting.device, &trace)?
        };
        table.insert(name, row);
    }
    Ok(Value::Object(table))
}

fn one_trace(device: &CudaDevice, trace: &Trace) -> Result<Value> {
    let allocator = CachingAllocator::with_options(device.clone(), &AllocatorOptions::new());
    let mut streams = std::collections::HashMap::from([(0, StreamId::DEFAULT)]);
    for operation in trace.operations() {
        if let std::collections::hash_map::Entry::Vacant(place) = streams.entry(operation.stream) {
            place.insert(device.create_stream(0)?);
        }
    }
    let mut live: std::collections::HashMap<u64, Block<CudaDevice>> =
        std::collections::HashMap::new();
    let started = Instant::now();
    for operation in trace.operations() {
        match operation.kind {
            OperationKind::Alloc => {
                let block = allocator.alloc(operation.bytes, streams[&operation.stream])?;
                live.insert(operation.id, block);
            }
            OperationKind::Free => {
                live.remove(&operation.id);
            }
        }
    }
    let nanoseconds = started.elapsed().as_secs_f64() * 1e9;
    let stats = allocator.stats();
    let reserved = stats.reserved_bytes.all.peak;
    live.clear();
    allocator.empty_cache()?;
    for (_, stream) in streams {
        if stream != StreamId::DEFAULT {
            device.destroy_stream(stream)?;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "printed with three decimals")]
    Ok(json!({
        "operations": trace.operations().len(),
        "ns_per_operation": rounded(nanoseconds / trace.operations().len() as f64),
        "reserved_over_live": rounded(reserved as f64 / trace.peak_live_bytes() as f64),
    }))
}

/// Adds one to each of `n` values.
const PTX: &str = "
.version 7.0
.target sm_52
.address_size 64
.visible .entry add_one(.param .u64 values, .param .u32 n) {
  .reg .pred %p<1>; .reg .b32 %r<5>; .reg .b64 %rd<4>; .reg .f32 %f<1>;
  ld.param.u64 %rd0, [values];
  ld.param.u32 %r0, [n];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %p0, %r4, %r0;
  @%p0 bra done;
  cvta.to.global.u64 %rd1, %rd0;
  mul.wide.u32 %rd2, %r4, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.f32 %f0, [%rd3];
  add.f32 %f0, %f0, 0f3F800000;
  st.global.f32 [%rd3], %f0;
done:
  ret;
}
";

/// A kernel of cudarc's on a tensor, on a stream of lastref's.
pub(crate) fn kernel(setting: &Setting) -> Result<Value> {
    const VALUES: u32 = 1_000_003;
    let tensor = Tensor::full_with([i64::from(VALUES)], 41, (DType::F32, GPU))?;
    let module = cuda::cudarc_context(0)?.load_module(Ptx::from_src(PTX))?;
    let function = module.load_function("add_one")?;
    let side = cuda::Stream::new()?;
    side.wait_stream(&cuda::current_stream(0)?)?;
    side.scope(|| {
        let mut slice = tensor.cudarc_slice::<f32>()?;
        let stream = Arc::clone(slice.stream());
        let mut view = slice.view_mut();
        let mut launch = stream.launch_builder(&function);
        launch.arg(&mut view).arg(&VALUES);
        // SAFETY: the kernel stays within the values.
        unsafe { launch.launch(LaunchConfig::for_num_elems(VALUES)) }?;
        anyhow::Ok(())
    })??;
    let values = side.scope(|| tensor.to_vec::<f32>())??;
    let expected = if setting.is_rehearsal { 41.0 } else { 42.0 };
    let wrong = values.iter().filter(|value| **value != expected).count();
    ensure!(wrong == 0, "{wrong} of {VALUES} values are not {expected}");
    Ok(json!({ "values": VALUES, "each": expected }))
}
