//! Made-up traces: programs that are hard on allocators, each in another way.
//!
//! ```
//! use lastref_snapshot::generate::Kind;
//! use lastref_snapshot::trace::Trace;
//!
//! let kind = Kind::ALL.iter().find(|kind| kind.name == "pins").expect("one of them");
//! let trace = Trace::read(kind.csv(1).as_bytes())?;
//! assert_eq!(trace.live_blocks_at_end(), 0);
//! # Ok::<(), lastref_snapshot::trace::TraceError>(())
//! ```
//!
//! A trace depends on its kind and the seed alone. Sizes and lifetimes are such as a program could have that
//! knows nothing of the allocator but its rounding: no kind looks at an address.

use std::fmt::Write as _;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// What is live at the peak, roughly.
const LIVE_BYTES: u64 = 4 << 30;

/// A kind of made-up trace.
#[derive(Debug)]
pub struct Kind {
    /// What it is called.
    pub name: &'static str,
    /// What the program does.
    pub about: &'static str,
    run: fn(&mut Program),
}

impl Kind {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self {
            name: "lifetimes",
            about: "sizes from 512 B to 64 MiB, lifetimes from moments to nearly for ever",
            run: lifetimes,
        },
        Self {
            name: "sawtooth",
            about: "tensors that grow from step to step, then start small again; each needs the one before",
            run: sawtooth,
        },
        Self {
            name: "kv_cache",
            about: "sequences of text whose caches grow by copying, beginning and ending at their own times",
            run: kv_cache,
        },
        Self {
            name: "phases",
            about: "training and evaluation in turn, with other sizes each time; some results stay",
            run: phases,
        },
        Self {
            name: "streams",
            about: "eight streams that take turns at using much memory",
            run: streams,
        },
        Self {
            name: "bin_borders",
            about: "sizes just under and just over a border of size bins, and prime numbers of bytes",
            run: bin_borders,
        },
        Self {
            name: "doubling",
            about: "blocks of one size, of which every other one goes; then of twice the size, and so on",
            run: doubling,
        },
        Self {
            name: "pins",
            about: "small blocks by the million bytes, of which one in each 2 MiB stays; then large ones",
            run: pins,
        },
        Self {
            name: "large_pins",
            about: "as pins, with blocks of a quarter and of whole megabytes",
            run: large_pins,
        },
    ];

    /// The trace as CSV, as [`Trace::read`](crate::trace::Trace::read) reads it. Everything is freed at the
    /// end.
    #[must_use]
    pub fn csv(&self, seed: u64) -> String {
        let mut program = Program {
            label: self.name,
            phase: "start",
            random: seed,
            next_id: 1,
            live: Vec::new(),
            live_bytes: 0,
            text: "op,id,bytes,stream,phase,label\n".to_owned(),
        };
        (self.run)(&mut program);
        program.phase = "end";
        program.free_all();
        program.text
    }
}

/// What is written, and what is live.
struct Program {
    label: &'static str,
    phase: &'static str,
    random: u64,
    next_id: u64,
    live: Vec<Block>,
    live_bytes: u64,
    text: String,
}

#[derive(Clone, Copy)]
struct Block {
    id: u64,
    bytes: u64,
}

impl Program {
    fn alloc_on(&mut self, bytes: u64, stream: u64) -> Block {
        let block = Block {
            id: self.next_id,
            bytes,
        };
        self.next_id += 1;
        let (phase, label) = (self.phase, self.label);
        // Writing to a string does not fail.
        let _ = writeln!(
            self.text,
            "alloc,{},{bytes},{stream},{phase},{label}",
            block.id
        );
        self.live_bytes += bytes;
        block
    }

    fn alloc(&mut self, bytes: u64) -> Block {
        self.alloc_on(bytes, 0)
    }

    fn free(&mut self, block: Block) {
        let phase = self.phase;
        // As above.
        let _ = writeln!(self.text, "free,{},0,0,{phase},", block.id);
        self.live_bytes -= block.bytes;
    }

    /// Allocates a block that stays until it is picked.
    fn keep(&mut self, bytes: u64) {
        let block = self.alloc(bytes);
        self.live.push(block);
    }

    /// Frees one of those that are kept.
    fn free_any(&mut self) {
        let at = self.below(self.live.len() as u64);
        let block = self.live.swap_remove(usize::try_from(at).unwrap_or(0));
        self.free(block);
    }

    /// Frees those for which `goes` says so, given their numbers.
    fn free_if(&mut self, goes: impl Fn(usize) -> bool) {
        for (number, block) in std::mem::take(&mut self.live).into_iter().enumerate() {
            if goes(number) {
                self.free(block);
            } else {
                self.live.push(block);
            }
        }
    }

    fn free_all(&mut self) {
        self.free_if(|_| true);
    }

    /// `splitmix64`.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    /// A size of which every power of two from `first` is equally likely, for `octaves` of them.
    fn size(&mut self, first: u64, octaves: u64) -> u64 {
        let octave = first << self.below(octaves);
        octave + self.below(octave)
    }
}

fn lifetimes(program: &mut Program) {
    program.phase = "steady";
    for _ in 0..30_000 {
        let bytes = program.size(512, 17);
        program.keep(bytes);
        while program.live_bytes > LIVE_BYTES {
            program.free_any();
        }
        // Most die young.
        for _ in 0..program.below(3) {
            if let Some(block) = program.live.pop() {
                program.free(block);
            }
        }
    }
}

fn sawtooth(program: &mut Program) {
    for _ in 0..40 {
        let mut last: Option<Block> = None;
        let step = program.between(3, 97) * 37 * KIB;
        let mut bytes = 300 * KIB + program.below(MIB);
        while program.live_bytes + bytes < LIVE_BYTES / 2 {
            program.phase = "tooth";
            let grown = program.alloc(bytes);
            let scratch = program.alloc(bytes / 3);
            if let Some(last) = last.replace(grown) {
                program.free(last);
            }
            program.free(scratch);
            bytes += step + bytes / 16;
            // A result of each step stays until the tooth ends.
            program.keep(bytes / 50);
        }
        if let Some(last) = last {
            program.free(last);
        }
        program.free_all();
    }
}

fn kv_cache(program: &mut Program) {
    const LAYERS: u64 = 16;
    let mut sequences: Vec<(u64, u64, Vec<Block>)> = Vec::new();
    program.phase = "generate";
    for _ in 0..1_500 {
        if sequences.len() < 12 && program.below(4) == 0 {
            let (tokens, last) = (program.between(10, 2_000), program.between(50, 600));
            let blocks = (0..LAYERS).map(|_| program.alloc(tokens * 16 * KIB));
            let blocks = blocks.collect();
            sequences.push((tokens, tokens + last, blocks));
        }
        for (tokens, _, blocks) in &mut sequences {
            *tokens += 1;
            for block in blocks {
                let hidden = program.alloc(64 * KIB + *tokens * 40);
                let grown = program.alloc(*tokens * 16 * KIB);
                program.free(std::mem::replace(block, grown));
                program.free(hidden);
            }
        }
        let (going, ended): (Vec<_>, Vec<_>) = sequences
            .into_iter()
            .partition(|(tokens, last, _)| tokens < last);
        sequences = going;
        for block in ended.into_iter().flat_map(|(.., blocks)| blocks) {
            program.free(block);
        }
    }
    for block in sequences.into_iter().flat_map(|(.., blocks)| blocks) {
        program.free(block);
    }
}

fn phases(program: &mut Program) {
    for turn in 0..60 {
        let is_training = turn % 2 == 0;
        program.phase = if is_training { "train" } else { "evaluate" };
        let unit = program.between(700, 9_000) * 1_021;
        let mut held = Vec::new();
        while program.live_bytes < LIVE_BYTES - 64 * MIB {
            let bytes = unit / program.between(1, 16) + program.below(4 * KIB);
            held.push(program.alloc(bytes));
            // Evaluation keeps no activations.
            if !is_training && held.len() > 3 {
                let block = held.remove(0);
                program.free(block);
                if program.below(400) == 0 {
                    break;
                }
            }
        }
        // Backward: the last first.
        while let Some(block) = held.pop() {
            program.free(block);
            if held.len() % 29 == 7 {
                let result = program.between(130 * KIB, 900 * KIB);
                program.keep(result);
            }
        }
        program.free_if(|number| number % 3 == 0);
    }
}

fn streams(program: &mut Program) {
    const STREAMS: u64 = 8;
    let mut held: Vec<Vec<Block>> = vec![Vec::new(); 8];
    for turn in 0..160 {
        let stream = turn % STREAMS;
        program.phase = "burst";
        for own in &mut held {
            // The last one's memory goes when the next one needs it; a little of it stays in use.
            let keep = own.len() / 20;
            for block in own.drain(keep..) {
                program.free(block);
            }
        }
        let mut own = std::mem::take(&mut held[usize::try_from(stream).unwrap_or(0)]);
        for block in own.drain(..) {
            program.free(block);
        }
        while program.live_bytes < LIVE_BYTES {
            let bytes = program.size(64 * KIB, 10);
            own.push(program.alloc_on(bytes, stream));
            if program.below(5) == 0 && !own.is_empty() {
                let at = program.below(own.len() as u64);
                let block = own.swap_remove(usize::try_from(at).unwrap_or(0));
                program.free(block);
            }
        }
        held[usize::try_from(stream).unwrap_or(0)] = own;
    }
    for block in held.into_iter().flatten() {
        program.free(block);
    }
}

fn bin_borders(program: &mut Program) {
    const PRIMES: [u64; 8] = [
        131_101, 262_147, 524_309, 1_048_583, 2_097_169, 4_194_319, 8_388_617, 16_777_259,
    ];
    for _ in 0..24 {
        program.phase = "under";
        // Bins are a thirty-second of a power of two wide.
        let octave = (256 * KIB) << program.below(5);
        let border = octave + octave / 32 * program.between(1, 31);
        while program.live_bytes < LIVE_BYTES {
            program.keep(border - 512);
            if program.below(16) == 0 {
                let prime = PRIMES[usize::try_from(program.below(8)).unwrap_or(0)];
                program.keep(prime);
            }
        }
        program.phase = "over";
        program.free_if(|number| number % 2 == 0);
        while program.live_bytes < LIVE_BYTES {
            program.keep(border + 512);
        }
        program.free_if(|number| number % 4 != 1);
    }
}

fn doubling(program: &mut Program) {
    for _ in 0..4 {
        let mut bytes = 16 * KIB + program.below(4 * KIB);
        while bytes < 512 * MIB {
            program.phase = "fill";
            while program.live_bytes + bytes <= LIVE_BYTES / 4 {
                program.keep(bytes);
            }
            program.phase = "thin";
            program.free_if(|number| number % 2 == 0);
            bytes *= 2;
        }
        program.free_all();
    }
}

/// Fills memory with blocks of `small` bytes and keeps one in `one_in` of them; then fills it with blocks of
/// `large` bytes.
fn pin(program: &mut Program, small: u64, one_in: u64, large: u64) {
    program.phase = "many";
    while program.live_bytes < LIVE_BYTES {
        program.keep(small);
    }
    program.free_if(|number| number as u64 % one_in != one_in / 2);
    program.phase = "large";
    let mut held = Vec::new();
    while program.live_bytes + large <= LIVE_BYTES {
        held.push(program.alloc(large));
    }
    for block in held {
        program.free(block);
    }
    program.free_all();
}

fn pins(program: &mut Program) {
    for _ in 0..2 {
        let large = program.between(30, 300) * MIB;
        pin(program, 128 * KIB, 16, large);
    }
}

fn large_pins(program: &mut Program) {
    for _ in 0..12 {
        let small = program.between(256, 900) * KIB;
        let large = program.between(30, 300) * MIB;
        pin(program, small, (2 * MIB).div_ceil(small), large);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    #[test]
    fn every_kind_is_a_sound_trace_that_ends_with_everything_freed() {
        for kind in Kind::ALL {
            let trace = Trace::read(kind.csv(1).as_bytes()).unwrap();
            assert_eq!(trace.live_blocks_at_end(), 0, "{}", kind.name);
            let operations = trace.operations().len();
            assert!(
                (2_000..2_000_000).contains(&operations),
                "{}: {operations}",
                kind.name
            );
            let peak = trace.peak_live_bytes();
            assert!(
                peak > 200 * MIB && peak < 2 * LIVE_BYTES,
                "{}: {peak}",
                kind.name
            );
        }
    }

    #[test]
    fn the_seed_decides() {
        for kind in Kind::ALL {
            assert_eq!(kind.csv(5), kind.csv(5), "{}", kind.name);
            assert_ne!(kind.csv(5), kind.csv(6), "{}", kind.name);
        }
    }

    #[test]
    fn names_differ() {
        let mut names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Kind::ALL.len());
    }
}
