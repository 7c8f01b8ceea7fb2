//! 400 objects, each in a cycle with itself and each holding 400 MiB, on a GPU of 11,000 MiB.
//!
//! No count ever falls to zero here: what keeps the program going is the cycle collector, which
//! runs when the bytes in use have grown, and before any out-of-memory error.
//!
//! `cargo run -p lastref --example 02-dead-cycles` prints collections, milliseconds and the peak.
//! Without `LASTREF_SIM` and without a GPU it simulates one.

#![expect(clippy::print_stdout, reason = "what the program prints is its point")]

use lastref::gc::{self, Gc, Slot, Trace};
use lastref::{DType, Device, Result, Tensor, cuda, sim};

const OBJECTS: u32 = 400;
const MIB: i64 = 1 << 20;

#[derive(Trace)]
struct Trainer {
    weights: Tensor,
    itself: Slot<Option<Gc<Trainer>>>,
}

/// Makes the objects and lets go of each at once. Returns how many could be made.
fn dead_cycles() -> (u32, Result<()>) {
    for made in 0..OBJECTS {
        match Tensor::empty_with([400 * MIB], (DType::U8, Device::Cuda(0))) {
            Ok(weights) => {
                let trainer = Gc::new(Trainer {
                    weights,
                    itself: Slot::default(),
                });
                trainer.itself.set(Some(trainer.clone()));
                assert!(trainer.weights.is_cuda());
            } // The last handle from outside goes here, the one inside stays.
            Err(error) => return (made, Err(error)),
        }
    }
    (OBJECTS, Ok(()))
}

/// Collections that ran, objects they freed, and milliseconds they took.
fn collections() -> (u64, u64, f64) {
    let sums = gc::stats();
    let microseconds: u64 = sums.iter().map(|sums| sums.microseconds).sum();
    (
        sums.iter().map(|sums| sums.collections).sum(),
        sums.iter().map(|sums| sums.collected).sum(),
        microseconds as f64 / 1e3,
    )
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    if !cuda::is_available() {
        sim::enable("11000MiB")?;
    }
    let (made, result) = dead_cycles();
    result?;
    let (number, freed, milliseconds) = collections();
    let peak = cuda::max_memory_allocated(None)? >> 20;
    println!("{made} objects of 400 MiB made, {freed} of them freed in {number} collections");
    println!("{milliseconds:.1} ms in collections, destructors included");
    println!("{peak} MiB allocated at the peak");
    gc::collect(2)?;
    cuda::empty_cache()?;
    let (allocated, reserved) = (cuda::memory_allocated(None)?, cuda::memory_reserved(None)?);
    println!("then collect() and empty_cache(): {allocated} B allocated, {reserved} B reserved");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is left of the run before, and its peak is forgotten.
    fn clean() {
        gc::collect(2).unwrap();
        cuda::empty_cache().unwrap();
        assert_eq!(cuda::memory_allocated(None).unwrap(), 0);
        assert_eq!(cuda::memory_reserved(None).unwrap(), 0);
        cuda::reset_peak_memory_stats(None).unwrap();
    }

    /// One test, since the collector's settings are those of the process.
    #[test]
    fn completes_unless_every_trigger_is_off() {
        sim::enable("11000MiB").unwrap();
        let (made, result) = dead_cycles();
        result.unwrap();
        assert_eq!(made, OBJECTS);
        assert!(cuda::max_memory_allocated(None).unwrap() <= 11_000 << 20);
        clean();
        let (number, freed, milliseconds) = collections();
        assert_eq!(freed, u64::from(OBJECTS));
        assert!(number >= 400 / 27, "{number} collections");
        assert!(milliseconds > 0.0);

        gc::disable();
        dead_cycles()
            .1
            .expect("the run before an error is not automatic");
        let peak = cuda::max_memory_allocated(None).unwrap();
        assert_eq!(peak >> 20, 27 * 400, "only a full device makes it run");
        clean();

        // A limit set by the user counts as the end of the device does.
        cuda::set_per_process_memory_fraction(0.5, None).unwrap();
        dead_cycles().1.unwrap();
        assert_eq!(cuda::max_memory_allocated(None).unwrap() >> 20, 13 * 400);
        clean();
        cuda::set_per_process_memory_fraction(1.0, None).unwrap();

        gc::set_before_out_of_memory(false);
        let (made, result) = dead_cycles();
        assert_eq!(made, 27, "11,000 MiB hold 27 times 400 MiB");
        let error = result.unwrap_err();
        assert!(matches!(error, lastref::Error::OutOfMemory(_)), "{error}");
        clean();
    }
}
