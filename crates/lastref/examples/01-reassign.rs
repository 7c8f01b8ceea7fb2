//! A variable that held a GPU tensor gets a new value.
//!
//! `LASTREF_SIM=8GiB cargo run -p lastref --example 01-reassign` prints `true`, then `false`; the
//! comments between say what the statistics show, and the test below reads them.

#![expect(clippy::print_stdout, reason = "what the program prints is its point")]

use lastref::{Result, Tensor, cuda};

/// The program. `step` is called after each of its lines.
fn reassign(mut step: impl FnMut(&'static str)) -> Result<[bool; 2]> {
    let mut t1 = Tensor::empty([4, 5])?;
    step("made on the CPU");
    if cuda::is_available() {
        t1 = t1.cuda()?; // the CPU tensor's last handle goes here
    }
    step("moved");
    let first = t1.is_cuda();
    t1 = Tensor::empty([4, 5])?; // the GPU tensor's last handle goes here
    step("rebound");
    let second = t1.is_cuda();
    cuda::empty_cache()?;
    step("cache given back");
    Ok([first, second])
}

fn main() -> Result<()> {
    for is_cuda in reassign(|_| ())? {
        println!("{is_cuda}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocated and reserved bytes, as the allocator counts them, and what the device says is in
    /// use.
    fn bytes() -> (u64, u64, u64) {
        let info = cuda::mem_get_info(None).unwrap();
        (
            cuda::memory_allocated(None).unwrap(),
            cuda::memory_reserved(None).unwrap(),
            info.total_bytes - info.free_bytes,
        )
    }

    #[test]
    fn freed_at_the_rebinding_cached_then_given_back() {
        lastref::sim::enable("8GiB").unwrap();
        let mut seen = Vec::new();
        let printed = reassign(|line| seen.push((line, bytes()))).unwrap();
        assert_eq!(printed, [true, false]);
        let page = 2 << 20;
        assert_eq!(
            seen,
            [
                ("made on the CPU", (0, 0, 0)),
                ("moved", (512, page, page)),
                ("rebound", (0, page, page)),
                ("cache given back", (0, 0, 0)),
            ]
        );
    }
}
