//! `lastref-bench-mechanisms [--made-up] TRACE...`: replays each trace, on an ample device and on the smallest
//! on which it completes; prints the reports as JSON. The allocator's settings are those of
//! `LASTREF_ALLOC_CONF`.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lastref_alloc::replay::{ReplayOptions, replay, smallest};
use lastref_alloc::sim::{SimDevice, SimOptions};
use lastref_alloc::{AllocatorOptions, CachingAllocator, DeviceError};
use lastref_snapshot::generate::Kind;
use lastref_snapshot::trace::Trace;
use serde_json::{Value, json};

/// The ample device, or twice the peak of live bytes.
const CAPACITY: u64 = 80 << 30;

fn main() -> Result<()> {
    let options = AllocatorOptions::from_env()?;
    let (mut given, mut made_up) = (Vec::new(), Vec::new());
    for argument in std::env::args_os().skip(1) {
        if argument == "--made-up" {
            for kind in Kind::ALL {
                let trace = Trace::read(kind.csv(1).as_bytes()).context(kind.name)?;
                made_up.push(report(kind.name, &trace, &options)?);
            }
        } else {
            let path = PathBuf::from(argument);
            let context = || format!("cannot read the trace {}", path.display());
            let file = File::open(&path).with_context(context)?;
            given.push(report(
                &name(&path),
                &Trace::read(file).with_context(context)?,
                &options,
            )?);
        }
    }
    println!("{}", json!({"given": given, "made_up": made_up}));
    Ok(())
}

fn name(path: &Path) -> String {
    let name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy();
    name.split('.').next().unwrap_or(&name).to_owned()
}

fn report(name: &str, trace: &Trace, options: &AllocatorOptions) -> Result<Value> {
    let allocator = |capacity| -> Result<_, DeviceError> {
        let device = SimDevice::new(SimOptions::new(capacity).with_contents(false))?;
        Ok(CachingAllocator::with_options(device, options))
    };
    let capacity = CAPACITY.max(trace.peak_live_bytes().saturating_mul(2));
    let ample = replay(&allocator(capacity)?, trace, ReplayOptions::default())
        .with_context(|| name.to_owned())?;
    ensure!(
        ample.out_of_memory.is_none(),
        "{name} runs out of memory on {capacity} bytes"
    );
    let smallest =
        smallest(trace, ReplayOptions::default(), allocator).with_context(|| name.to_owned())?;
    let rounded = |value: f64, digits: f64| (value * digits).round() / digits;
    Ok(json!({
        "trace": name,
        "operations": ample.operations,
        "peak_live_bytes": ample.peak_live_bytes,
        "reserved_over_live": rounded(ample.reserved_over_live(), 1e5),
        "smallest_over_live": rounded(smallest.over_live(), 1e5),
        "device_microseconds": rounded(ample.device_microseconds, 1.0),
        "nanoseconds_per_operation": rounded(ample.nanoseconds_per_operation(), 10.0),
    }))
}
