//! Random changes to real files: whatever comes in, the reader answers, and what it accepts can be
//! worked with.
//!
//! Two seconds by default; LASTREF_FUZZ_SECONDS says how long, LASTREF_FUZZ_SEED where to begin. A
//! failure names its seed; the file that failed is kept in `testdata/fuzz`, and is then tried each
//! time. Panics, overflows (checked in this profile) and endless work are failures.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its data has failed"
)]

use std::fs;
use std::io::Read as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lastref_snapshot::Dump;
use lastref_snapshot::explain::explain;
use lastref_snapshot::report::Report;
use lastref_snapshot::stats::Stats;

/// No input of these sizes may take longer.
const PATIENCE: Duration = Duration::from_secs(20);

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata")
}

fn load(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    if path.extension().is_some_and(|end| end == "gz") {
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(bytes.as_slice())
            .read_to_end(&mut plain)
            .unwrap();
        return plain;
    }
    bytes
}

/// What the mutations begin with.
fn seeds() -> Vec<Vec<u8>> {
    let mut paths: Vec<_> = ["forms", "fuzz", "oom"]
        .iter()
        .filter_map(|folder| fs::read_dir(testdata().join(folder)).ok())
        .flatten()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.push(testdata().join("small-inference.pickle.gz"));
    paths.push(testdata().join("reports/oom-node_b-2-23102.json"));
    paths.push(testdata().join("reports/report-node_a-0-23063-1.json"));
    paths.sort();
    let mut seeds: Vec<_> = paths.iter().map(|path| load(path)).collect();
    seeds.push(
        b"op,id,bytes,stream,phase,label\nalloc,1,512,0,init,a|b\nfree,1,0,0,step,\n".to_vec(),
    );
    seeds.push(br#"{"segments": [{"device": 0, "address": 4096, "total_size": 512, "blocks": [{"size": 512, "state": "inactive"}]}], "device_traces": [[]]}"#.to_vec());
    seeds
}

/// A generator of random numbers: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % (bound as u64).max(1)).unwrap()
    }
}

/// Bytes that mean something to a pickle.
const OPCODES: &[u8] =
    b"()]}etuaslhjqr.0 12NKMJGXVSIFdgp\x80\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x94\x95";

fn mutate(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(8) {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        match random.below(7) {
            0 => bytes[at] = random.next().to_le_bytes()[0],
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes[at] = OPCODES[random.below(OPCODES.len())],
            3 => bytes.insert(at, OPCODES[random.below(OPCODES.len())]),
            4 => bytes.truncate(at),
            5 => {
                // A piece of another file, or of this one.
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                let piece = &other[from..(from + random.below(64)).min(other.len())];
                let end = (at + piece.len()).min(bytes.len());
                bytes.splice(at..end, piece.iter().copied());
            }
            _ => {
                let end = (at + random.below(32)).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
    bytes
}

/// Reads it, and does all that can be done with what was read.
fn try_all(bytes: &[u8]) {
    match Report::read(bytes) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(report) => assert!(serde_json::to_string(&report.explain()).is_ok()),
    }
    match Dump::read(bytes) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(dump) => {
            let stats = Stats::of(&dump);
            let explained = explain(&dump, Some(1 << 30));
            assert!(serde_json::to_string(&(&stats, &explained)).is_ok());
            let mut written = Vec::new();
            dump.write(&mut written).unwrap();
            let again = Dump::read(written.as_slice()).unwrap();
            assert_eq!(Stats::of(&again).devices, stats.devices);
        }
    }
}

#[test]
fn whatever_comes_in_the_reader_answers() {
    let number = |name: &str| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
    let length = Duration::from_secs(number("LASTREF_FUZZ_SECONDS").unwrap_or(2));
    let first = number("LASTREF_FUZZ_SEED").unwrap_or(1);
    let seeds = seeds();
    for seed in &seeds {
        try_all(seed);
    }
    let start = Instant::now();
    let mut accepted = 0u64;
    for seed in first.. {
        if start.elapsed() >= length {
            println!("{} inputs, {accepted} accepted", seed - first);
            // Else nothing but the first bytes would be tested.
            assert!(seed - first < 1000 || accepted > 0);
            break;
        }
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let bytes = mutate(&mut random, &seeds);
        let began = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| try_all(&bytes)));
        let took = began.elapsed();
        if result.is_err() || took > PATIENCE {
            let folder = testdata().join("fuzz");
            fs::create_dir_all(&folder).unwrap();
            let path = folder.join(format!("seed-{seed}.pickle"));
            fs::write(&path, &bytes).unwrap();
            panic!(
                "seed {seed} fails after {took:?}; it is kept as {}",
                path.display()
            );
        }
        accepted += u64::from(Dump::read(bytes.as_slice()).is_ok());
    }
}
