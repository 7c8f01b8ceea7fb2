//! `lastref demo`: the question "when a CUDA variable gets a new value, is the memory it held
//! freed?", answered by running it.
//!
//! Every line of source shown is the code that runs, and every number is read from the allocator's
//! statistics after it ran. The sentences between are those of `docs/answer.md`.

mod screen;

use std::io::Write;

use clap::Args;
use lastref::alloc::replay::{ReplayOptions, replay};
use lastref::alloc::sim::{SimDevice, SimOptions};
use lastref::alloc::{Bytes, CachingAllocator};
use lastref::gc::{self, Gc, Slot, Trace};
use lastref::{DType, Device, Tensor, cuda, sim};
use lastref_snapshot::trace;

use crate::Failure;
use crate::replay::write_report;
use screen::Screen;

/// What stands in where there is no GPU.
const SIMULATED: &str = "8GiB";
/// A trace of a real program; `testdata/README.md` says which.
const TRACE: &[u8] = include_bytes!("../testdata/resnet50_train.csv.gz");
const TRACE_IS: &str = "ResNet-50, training";
/// The device that the trace is replayed on.
const TRACE_CAPACITY: u64 = 8 << 30;

/// Where to read on, from the root of the repository.
const FILES: [(&str, &str); 5] = [
    (
        "docs/answer.md",
        "the answer, sentence by sentence, with the tests that prove each",
    ),
    (
        "crates/lastref/src/storage.rs",
        "what a tensor refers to, and what happens at the last drop",
    ),
    (
        "crates/lastref-alloc/src/state.rs",
        "the cache: how blocks are found, split and merged",
    ),
    (
        "crates/lastref-alloc/src/ladder.rs",
        "what is tried before an out-of-memory error",
    ),
    (
        "crates/lastref-alloc/src/sim/mod.rs",
        "the simulated device, and what it checks",
    ),
];

#[derive(Args, Debug)]
pub(crate) struct Arguments {}

/// Shows lines of source, one in each pair of braces, runs them, and shows what they did. The names
/// in brackets are the tensors that are in scope afterwards.
macro_rules! step {
    ($screen:ident, [$($variable:ident),*], $({ $($source:tt)* })+, $text:expr) => {
        $screen.source(&[$(stringify!($($source)*)),+])?;
        $($($source)*)+
        $screen.after($text, &[$((stringify!($variable), &$variable)),*])?;
    };
}

pub(crate) fn run(_: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let asked_for = sim::spec().is_some();
    // A setting that cannot be read must not pass for "no GPU".
    cuda::memory_stats(None)?;
    if !cuda::is_available() {
        sim::enable(SIMULATED)?;
    }
    let mut screen = Screen::new(out);
    screen.title("lastref demo: when a CUDA variable gets a new value, is its memory freed?")?;
    let name = cuda::get_device_name(None)?;
    let simulated = cuda::get_device_properties(None)?.simulated;
    screen.device(
        &name,
        match (simulated, asked_for) {
            (false, _) => "This is a real GPU.",
            (true, true) => {
                "Simulated, as LASTREF_SIM asks: real bytes in host memory, real streams, no GPU."
            }
            (true, false) => {
                "There is no GPU here, so one is simulated: real bytes in host memory, and the \
                 same allocator."
            }
        },
    )?;

    reassignment(&mut screen)?;
    references(&mut screen)?;
    full_device(&mut screen)?;
    cycles(&mut screen)?;
    real_program(&mut screen)?;

    screen.section("Five files to read")?;
    screen.table(&FILES)
}

/// The program in the README.
fn reassignment(screen: &mut Screen<impl Write>) -> Result<(), Failure> {
    // What the program prints belongs to the screen.
    macro_rules! println {
        ($($argument:tt)*) => { screen.prints(&format!($($argument)*))? };
    }
    screen.section("A variable that held a GPU tensor gets a new value")?;
    step!(
        screen,
        [t1],
        {
            let mut t1 = Tensor::empty([4, 5])?;
        },
        "Twenty floats in host memory. The device has no part in this."
    );
    step!(
        screen,
        [t1],
        {
            if cuda::is_available() {
                t1 = t1.cuda()?;
            }
        },
        "Now t1 refers to a copy on the device. The host tensor had no other reference: freed."
    );
    step!(
        screen,
        [t1],
        {
            println!("{}", t1.is_cuda());
        },
        ""
    );
    step!(
        screen,
        [t1],
        {
            t1 = Tensor::empty([4, 5])?;
        },
        "The old tensor is not moved: t1 refers to a new one. Nothing else refers to the old one, \
         so its memory is freed, at this moment. It stays cached, because asking the driver is slow."
    );
    step!(
        screen,
        [t1],
        {
            println!("{}", t1.is_cuda());
        },
        ""
    );
    step!(
        screen,
        [t1],
        {
            cuda::empty_cache()?;
        },
        "empty_cache gives the cached memory back to the driver, where other programs can see it."
    );
    Ok(())
}

/// The same with memory large enough to see, and two references.
fn references(screen: &mut Screen<impl Write>) -> Result<(), Failure> {
    screen.section("It is the last reference that counts")?;
    let gpu = (DType::U8, Device::Cuda(cuda::current_device()));
    let eighth = eighth()?;
    screen.note(&format!(
        "From here on in larger pieces: eighth = {}, an eighth of what is free on the device.",
        Bytes(eighth.unsigned_abs())
    ))?;
    step!(
        screen,
        [a],
        {
            let mut a = Tensor::empty_with([2 * eighth], gpu)?;
        },
        "A cache miss: the driver is asked."
    );
    step!(
        screen,
        [a, b],
        {
            let b = a.narrow(0, 0, 10)?;
        },
        "A view of ten bytes. It is a second reference to the whole storage."
    );
    step!(
        screen,
        [a, b],
        {
            a = Tensor::empty([4, 5])?;
        },
        "a has a new value, and nothing is freed: the view still refers to the old storage, which \
         is where it was."
    );
    step!(
        screen,
        [a],
        {
            drop(b);
        },
        "That was the last reference: freed, at once."
    );
    step!(
        screen,
        [a],
        {
            a = Tensor::empty_with([2 * eighth], gpu)?;
        },
        "A cache hit: the same memory again, and the driver is not asked."
    );
    Ok(())
}

/// What happens when memory runs short.
fn full_device(screen: &mut Screen<impl Write>) -> Result<(), Failure> {
    screen.section("When the device is full")?;
    cuda::empty_cache()?;
    let gpu = (DType::U8, Device::Cuda(cuda::current_device()));
    let eighth = eighth()?;
    step!(screen, [a, b, c],
        { let a = Tensor::empty_with([3 * eighth], gpu)?; }
        { let b = Tensor::empty_with([eighth], gpu)?; }
        { let c = Tensor::empty_with([3 * eighth], gpu)?; },
        "Seven eighths are held.");
    step!(
        screen,
        [b],
        {
            drop((a, c));
        },
        "Six of them are free now, but cached in two pieces, with b between them."
    );
    let before = cuda::memory_stats(None)?;
    step!(
        screen,
        [b, d],
        {
            let d = Tensor::empty_with([5 * eighth], gpu)?;
        },
        "No piece is large enough, and the driver has too little left. Before anyone sees an \
         error, the allocator puts its cache to use: it moves pages of it to where they are \
         needed, or gives memory back to the driver and asks again. So calling empty_cache first \
         does not enlarge what this process can allocate."
    );
    screen.rungs(&before, &cuda::memory_stats(None)?)?;
    macro_rules! shown {
        ($source:expr) => {{
            screen.source(&[stringify!($source)])?;
            $source
        }};
    }
    match shown!(Tensor::empty_with([4 * eighth], gpu)) {
        Err(error @ lastref::Error::OutOfMemory(_)) => screen.error(&error)?,
        Err(other) => return Err(other.into()),
        Ok(_) => {
            return Err(Failure::No(anyhow::anyhow!(
                "the device was full and gave {} more",
                Bytes(4 * eighth.unsigned_abs())
            )));
        }
    }
    screen.after(
        "More than is left, whatever is given back. The error says where every byte is and what \
         was tried, and its numbers add up. Nothing is lost: b and d are as they were.",
        &[("b", &b), ("d", &d)],
    )?;
    drop((b, d));
    cuda::empty_cache()?;
    Ok(())
}

/// What counting cannot free.
fn cycles(screen: &mut Screen<impl Write>) -> Result<(), Failure> {
    // As `step!`, for what is no tensor.
    macro_rules! shown {
        ($({ $($source:tt)* })+) => {
            screen.source(&[$(stringify!($($source)*)),+])?;
            $($($source)*)+
        };
    }
    macro_rules! shown_type {
        (#[$attribute:meta] $($item:tt)+) => {
            screen.source(&[stringify!(#[$attribute]), stringify!($($item)+)])?;
            #[$attribute] $($item)+
        };
    }
    screen.section("Objects that refer to each other")?;
    screen.note(
        "It runs by itself, at no predictable moment: the collector of dead cycles, when the bytes \
         in use have grown, when many objects may be in one, or after some seconds. Here it is to \
         wait, so that each step can be seen. It can be queried, configured and run by hand.",
    )?;
    shown!({
        gc::disable();
    });
    screen.prints(&format!("enabled: {}", gc::is_enabled()))?;
    let gpu = (DType::U8, Device::Cuda(cuda::current_device()));
    let eighth = eighth()?;
    shown_type! {
        #[derive(Trace)]
        struct Trainer { weights: Tensor, myself: Slot<Option<Gc<Trainer>>> }
    }
    shown!(
        { let weights = Tensor::empty_with([2 * eighth], gpu)?; }
        { let trainer = Gc::new(Trainer { weights, myself: Slot::default() }); }
        { trainer.myself.set(Some(trainer.clone())); }
    );
    let bytes = trainer.weights.storage().nbytes();
    screen.after(
        "An object that holds a tensor and refers to itself.",
        &[("trainer.weights", &trainer.weights)],
    )?;
    shown!({
        drop(trainer);
    });
    screen.after(
        "A dead cycle stays allocated until the collector runs. Nothing can reach the object, and \
         yet one reference to it remains: its own.",
        &[],
    )?;
    shown!({
        let report = gc::collect(2)?;
    });
    if report.device_bytes_freed != bytes {
        return Err(Failure::No(anyhow::anyhow!(
            "a dead cycle held {}, and the collector freed {}",
            Bytes(bytes),
            Bytes(report.device_bytes_freed)
        )));
    }
    screen.after(
        &format!(
            "Dead objects found: {}. They held {}. It took {} µs. The memory is cached, as that of \
             any other tensor.",
            report.objects,
            Bytes(report.device_bytes_freed),
            report.microseconds
        ),
        &[],
    )?;
    step!(
        screen,
        [],
        {
            cuda::empty_cache()?;
        },
        "collect() and empty_cache() leave nothing."
    );
    gc::enable();
    Ok(())
}

/// A recorded program on a device of its own.
fn real_program(screen: &mut Screen<impl Write>) -> Result<(), Failure> {
    let failed = |error: anyhow::Error| Failure::No(error.context("replaying the built-in trace"));
    screen.section(&format!("A real program: {TRACE_IS}"))?;
    let trace = trace::Trace::read(TRACE).map_err(|error| failed(error.into()))?;
    screen.chart(&trace)?;
    let device = SimDevice::new(SimOptions::new(TRACE_CAPACITY)).map_err(lastref::Error::from)?;
    let options = ReplayOptions {
        verify: true,
        ..ReplayOptions::default()
    };
    let report = replay(&CachingAllocator::new(device), &trace, options)
        .map_err(|error| failed(error.into()))?;
    screen.note(&format!(
        "Every allocation and free of it, recorded, and replayed on a simulated device of {}:",
        Bytes(TRACE_CAPACITY)
    ))?;
    write_report(screen.out(), &report, None, true)?;
    match report.out_of_memory {
        None => Ok(()),
        Some(out_of_memory) => Err(failed(out_of_memory.error.into())),
    }
}

/// An eighth of what the device has free, in whole pages.
fn eighth() -> Result<i64, Failure> {
    const PAGE: u64 = 2 << 20;
    let free = cuda::mem_get_info(None)?.free_bytes;
    if free < 8 * PAGE {
        let (needed, free) = (Bytes(8 * PAGE), Bytes(free));
        return Err(Failure::No(anyhow::anyhow!(
            "the demo needs {needed} free on the device, {free} is; try LASTREF_SIM=8GiB"
        )));
    }
    Ok(i64::try_from((free / 8) & !(PAGE - 1)).unwrap_or(i64::MAX / 8))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_files_to_read_are_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for (file, _) in FILES {
            assert!(root.join(file).is_file(), "{file} is not there");
        }
    }

    #[test]
    fn the_built_in_trace_fits_the_device_it_is_replayed_on() {
        let trace = trace::Trace::read(TRACE).unwrap();
        assert!(trace.operations().len() > 1000);
        assert!(trace.peak_live_bytes() < TRACE_CAPACITY);
        assert_eq!(trace.live_blocks_at_end(), 0);
    }
}
