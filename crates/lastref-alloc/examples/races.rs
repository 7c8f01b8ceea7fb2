//! A missing `record_stream`, and what the simulated device says about it.
//!
//! `cargo run -p lastref-alloc --example races`

use lastref_alloc::sim::{KernelUse, SimDevice, SimOptions};
use lastref_alloc::{CachingAllocator, Device, StreamId};

#[expect(clippy::print_stdout, reason = "an example shows what it finds")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = SimDevice::new(SimOptions::new(1 << 30).with_races(true))?;
    let allocator = CachingAllocator::new(device.clone());
    let side = device.create_stream(0)?;

    let gradients = allocator.alloc(64 << 20, StreamId::DEFAULT)?;
    let reads = [KernelUse::read(gradients.ptr(), 64 << 20)];
    device.launch("all_reduce", &reads, 500.0, side)?;
    drop(gradients); // the side stream still reads, and nobody said so

    for race in device.races() {
        println!("{race}");
    }
    Ok(())
}
