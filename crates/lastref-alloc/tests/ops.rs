//! Runs the scripts of `tests/ops`: programs from public reports (`r`) and others (`s`), with what must
//! come of them.
//!
//! Every condition is checked on every kind of memory that the script allows. A step or a condition
//! that is not known fails the test. Conditions on the message of a failed allocation need one: a
//! script that has them must fail its allocation on some kind of memory.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]
#![cfg(target_os = "linux")]

use std::collections::HashMap;

use lastref_alloc::ladder::Rung;
use lastref_alloc::sim::{Call, Fault, KernelUse, Race, SimDevice, SimOptions};
use lastref_alloc::{
    AllocError, AllocatorOptions, Block, Bytes, CachingAllocator, CheckLevel, Device, DevicePtr,
    MemPool, OutOfMemoryError, PoolScope, StreamId,
};
use lastref_snapshot::BlockState;

const MIB: u64 = 1 << 20;

/// A size in MiB, or with a suffix.
fn size(text: &str) -> u64 {
    let units = [("KiB", 1 << 10), ("GiB", 1 << 30), ("B", 1)];
    let unit = units.iter().find(|(unit, _)| text.ends_with(unit));
    let (unit, bytes) = unit.copied().unwrap_or(("", MIB));
    text.strip_suffix(unit).unwrap().parse::<u64>().unwrap() * bytes
}

/// A device, its allocator, and the device's streams by the script's numbers.
struct Gpu {
    device: SimDevice,
    allocator: CachingAllocator<SimDevice>,
    streams: HashMap<u64, StreamId>,
    /// Steps in which memory was obtained from the device, or given back.
    obtained: u64,
    given_back: u64,
}

impl Gpu {
    fn stream(&mut self, number: &str) -> StreamId {
        let number = number.parse().unwrap();
        *self.streams.entry(number).or_insert_with(|| match number {
            0 => StreamId::DEFAULT,
            _ => self.device.create_stream(0).unwrap(),
        })
    }

    /// Calls that obtain memory, and calls that give it back.
    fn memory_calls(&self) -> [u64; 2] {
        let counters = self.device.counters();
        [
            counters.calls(Call::AllocSegment) + counters.calls(Call::CreatePage),
            counters.calls(Call::FreeSegment) + counters.calls(Call::DestroyPage),
        ]
    }
}

/// What became of an allocation.
enum Outcome {
    Held {
        block: Block<SimDevice>,
        moved: bool,
    },
    Freed,
    Failed,
}

struct Script {
    expandable: bool,
    options: String,
    gpus: HashMap<String, Gpu>,
    /// Addresses and sizes stay known after a block was freed.
    places: HashMap<String, (DevicePtr, u64)>,
    outcomes: HashMap<String, Outcome>,
    /// The scopes that are open, the innermost last.
    scopes: Vec<(String, PoolScope<SimDevice>)>,
    pools: HashMap<String, MemPool<SimDevice>>,
    captured: Option<StreamId>,
    last_error: Option<Box<OutOfMemoryError>>,
    fault: Option<Fault>,
    /// How many of the calls that fail were to work before.
    before_fault: u64,
    /// Whether some condition on a message was checked against one.
    messages: bool,
}

/// The words of a step; a text in quotes is one word, with its quotes.
fn words(line: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = line.trim();
    while !rest.is_empty() {
        let quoted = rest
            .strip_prefix('"')
            .map(|text| text.find('"').unwrap() + 2);
        let end = quoted.or_else(|| rest.find(' ')).unwrap_or(rest.len());
        words.push(&rest[..end]);
        rest = rest[end..].trim_start();
    }
    words
}

impl Script {
    fn new(expandable: bool) -> Self {
        Self {
            expandable,
            options: String::new(),
            gpus: HashMap::new(),
            places: HashMap::new(),
            outcomes: HashMap::new(),
            scopes: Vec::new(),
            pools: HashMap::new(),
            captured: None,
            last_error: None,
            fault: None,
            before_fault: 0,
            messages: false,
        }
    }

    fn gpu(&mut self, name: &str) -> &mut Gpu {
        self.gpus.get_mut(name).unwrap()
    }

    /// One step. False if the script is not for this kind of memory.
    fn step(&mut self, line: &str) -> bool {
        let words = words(line);
        match words[..] {
            [] => {}
            ["device", name, "capacity", capacity] => self.add_device(name, size(capacity)),
            ["config", setting] => {
                let (key, value) = setting.split_once('=').unwrap();
                if key == "expandable" {
                    return (value == "true") == self.expandable;
                }
                self.options = format!("{key}:{value}");
                for gpu in self.gpus.values() {
                    let options: AllocatorOptions = self.options.parse().unwrap();
                    gpu.allocator.change_options(&options).unwrap();
                }
            }
            ["alloc", name, bytes] => self.alloc(name, size(bytes), "0", "0"),
            ["alloc", name, bytes, "stream", stream] => self.alloc(name, size(bytes), stream, "0"),
            ["alloc", name, bytes, "dev", device] => self.alloc(name, size(bytes), "0", device),
            ["alloc", name, bytes, "stream", stream, "dev", device] => {
                self.alloc(name, size(bytes), stream, device);
            }
            ["use", name, "stream", stream] => {
                let (ptr, bytes) = self.places[name];
                let gpu = self.gpu_of(name);
                let stream = gpu.stream(stream);
                let uses = [KernelUse::read(ptr, bytes)];
                gpu.device.launch("use", &uses, 1.0, stream).unwrap();
            }
            ["record", name, "stream", stream] => {
                let stream = self.gpu_of(name).stream(stream);
                self.block(name).record_stream(stream).unwrap();
            }
            ["free", name] => {
                let outcome = self.outcomes.insert(name.to_owned(), Outcome::Freed);
                assert!(
                    matches!(outcome, Some(Outcome::Held { .. })),
                    "{name} is not live"
                );
            }
            ["pool", name] => self.add_pool(name, "0"),
            ["pool", name, "on", device] => self.add_pool(name, device),
            ["enter", name] => {
                let scope = self.pools[name].enter();
                self.scopes.push((name.to_owned(), scope));
            }
            ["leave", name] => {
                let (innermost, _) = self.scopes.pop().unwrap();
                assert_eq!(innermost, name, "not the innermost");
            }
            ["capture", "begin", stream] => {
                let gpu = self.gpu("0");
                let stream = gpu.stream(stream);
                gpu.device.begin_capture(stream).unwrap();
                self.captured = Some(stream);
            }
            ["capture", "end"] => {
                let stream = self.captured.take().unwrap();
                self.gpu("0").device.end_capture(stream).unwrap();
            }
            ["done", stream] => {
                let gpu = self.gpu("0");
                let stream = gpu.stream(stream);
                gpu.device.synchronize_stream(stream).unwrap();
            }
            ["flush"] => self.flush("0"),
            ["flush", "dev", device] => self.flush(device),
            ["fail", call, "at_page", n, "oom"] => {
                let call = match call {
                    "map" => Call::MapPage,
                    "create" => Call::CreatePage,
                    "unmap" => Call::UnmapPage,
                    other => panic!("fail {other}: not a call that a script can fail"),
                };
                let n: u64 = n.parse().unwrap();
                self.before_fault = n - 1;
                let fault = Fault::nth(call, n);
                self.fault = Some(fault.from_then_on().out_of_memory());
            }
            ["expect", ref conditions @ ..] => self.conditions(conditions, true),
            ["forbid", ref conditions @ ..] => self.conditions(conditions, false),
            _ => panic!("not a step: {line}"),
        }
        true
    }

    fn add_pool(&mut self, name: &str, device: &str) {
        let pool = self.gpu(device).allocator.create_pool();
        self.pools.insert(name.to_owned(), pool);
    }

    fn add_device(&mut self, name: &str, capacity: u64) {
        // Work runs only when something waits for it, so that "not finished" is certain.
        let options = SimOptions::new(capacity)
            .with_races(true)
            .with_max_ops_per_step(0);
        let device = SimDevice::new(options).unwrap();
        let expandable = if self.expandable { "True" } else { "False" };
        let options = format!("expandable_segments:{expandable}").parse().unwrap();
        let allocator = CachingAllocator::with_options(device.clone(), &options);
        let gpu = Gpu {
            device,
            allocator,
            streams: HashMap::new(),
            obtained: 0,
            given_back: 0,
        };
        self.gpus.insert(name.to_owned(), gpu);
    }

    fn block(&self, name: &str) -> &Block<SimDevice> {
        match self.outcomes.get(name) {
            Some(Outcome::Held { block, .. }) => block,
            _ => panic!("{name} is not live"),
        }
    }

    fn gpu_of(&mut self, name: &str) -> &mut Gpu {
        let index = self.block(name).allocator().device().properties().index;
        self.gpu(&index.to_string())
    }

    /// Runs a step on a device, and counts it if it obtained memory or gave it back.
    fn on<R>(&mut self, device: &str, run: impl FnOnce(&mut Gpu) -> R) -> R {
        let fault = self.fault.take();
        let gpu = self.gpu(device);
        let [before_alloc, before_free] = gpu.memory_calls();
        if let Some(fault) = fault {
            gpu.device.inject(fault);
        }
        let result = run(gpu);
        gpu.device.clear_faults();
        let [after_alloc, after_free] = gpu.memory_calls();
        gpu.obtained += u64::from(after_alloc > before_alloc);
        gpu.given_back += u64::from(after_free > before_free);
        gpu.allocator.check_invariants(CheckLevel::Device).unwrap();
        result
    }

    fn alloc(&mut self, name: &str, bytes: u64, stream: &str, device: &str) {
        let (result, moved) = self.on(device, |gpu| {
            let stream = gpu.stream(stream);
            let before = gpu.allocator.stats().reserved_bytes.all.current;
            let result = gpu.allocator.alloc(bytes, stream);
            // Fewer new bytes than asked for, though no free block was large enough.
            let after = gpu.allocator.stats().reserved_bytes.all.current;
            (result, after < before + bytes)
        });
        let outcome = match result {
            Ok(block) => {
                self.places.insert(name.to_owned(), (block.ptr(), bytes));
                Outcome::Held { block, moved }
            }
            Err(AllocError::OutOfMemory(error)) => {
                self.last_error = Some(error);
                Outcome::Failed
            }
            Err(error) => panic!("alloc {name}: {error}"),
        };
        self.outcomes.insert(name.to_owned(), outcome);
    }

    fn flush(&mut self, device: &str) {
        self.on(device, |gpu| gpu.allocator.empty_cache().unwrap());
    }

    // ---- conditions ---------------------------------------------------------------------------

    fn conditions(&mut self, words: &[&str], wanted: bool) {
        let mut subject: &[&str] = &[];
        for condition in words.split(|word| *word == "and") {
            // "message says x and y" goes on about the message.
            let says = condition.starts_with(&["message", "says"]);
            let (says, condition) = match condition {
                [_, _, rest @ ..] if says => (true, rest),
                rest => (subject == ["message"], rest),
            };
            if says {
                subject = &["message"];
                self.message(condition[0], wanted);
            } else {
                assert_eq!(self.holds(condition), wanted, "{condition:?}");
            }
        }
    }

    fn holds(&self, condition: &[&str]) -> bool {
        let gpu = &self.gpus["0"];
        let stats = gpu.allocator.stats();
        let reserved = stats.reserved_bytes.all.current;
        let flushes = stats.rungs.get(&Rung::ReleaseCached);
        let flushes = flushes.map_or(0, |rung| rung.num_tried);
        match *condition {
            ["ok", name] => matches!(self.outcomes[name], Outcome::Held { .. }),
            ["oom", name] => matches!(self.outcomes[name], Outcome::Failed),
            ["oom", name, "clean"] => {
                // Nothing is left of it, and what was mapped was unmapped, and no more.
                let counters = gpu.device.counters();
                let unmapped = counters.calls(Call::UnmapPage);
                matches!(self.outcomes[name], Outcome::Failed)
                    && counters.held_bytes == 0
                    && unmapped == self.before_fault
                    && reserved == 0
            }
            ["oom_or_remap", name] => match &self.outcomes[name] {
                Outcome::Failed => true,
                Outcome::Held { moved, .. } => *moved,
                Outcome::Freed => false,
            },
            ["pool_reserved", name, relation, bytes] => {
                let reserved = self.pools[name].stats().reserved_bytes.current;
                match relation {
                    "==" => reserved == size(bytes),
                    "<=" => reserved <= size(bytes),
                    _ => panic!("not a relation: {relation}"),
                }
            }
            ["mapped", "==", bytes] => {
                let counters = gpu.device.counters();
                assert_eq!(counters.held_bytes, reserved);
                reserved == size(bytes)
            }
            ["reserved", "<=", bytes] => reserved <= size(bytes),
            ["driver_mallocs", "==", n] => gpu.obtained == n.parse::<u64>().unwrap(),
            ["driver_frees", "==", n] => gpu.given_back == n.parse::<u64>().unwrap(),
            ["same_address", one, other] => self.places[one].0 == self.places[other].0,
            ["stats", "flushes_before_oom", ">=", n] => {
                flushes >= n.parse().unwrap() && stats.num_ooms == 0
            }
            ["retries", "counted"] => {
                let keys = stats.torch_keys();
                let counted = keys.iter().find(|(key, _)| key == "num_alloc_retries");
                counted.unwrap().1 == flushes
            }
            ["detector", "warns", text] => self.detected(text.trim_matches('"')),
            ["lint", text] => {
                let text = text.trim_matches('"');
                stats.advice().iter().any(|advice| advice.contains(text))
            }
            _ => panic!("not a condition: {condition:?}"),
        }
    }

    /// Whether a report has all parts of the text, blocks by their names in the script, and streams
    /// by their numbers there.
    fn detected(&self, text: &str) -> bool {
        let gpu = &self.gpus["0"];
        let races = gpu.device.races();
        let freed = races.iter().filter_map(|race| match race {
            Race::FreedInUse { block, used, .. } => Some((race, block, used)),
            _ => None,
        });
        freed
            .map(|(race, block, used)| {
                let named = self.places.iter().find(|(_, place)| place.0 == block.ptr);
                let (number, _) = gpu
                    .streams
                    .iter()
                    .find(|(_, id)| **id == used.stream)
                    .unwrap();
                race.to_string()
                    .replace(&format!("block {}", block.ptr), named.unwrap().0)
                    .replace(
                        &format!("stream {}", used.stream),
                        &format!("stream {number}"),
                    )
            })
            .any(|report| text.split(", ").all(|part| report.contains(part)))
    }

    /// A condition on the message of the last failed allocation. Where there was none, there is
    /// nothing to say; some kind of memory must have one.
    fn message(&mut self, condition: &str, wanted: bool) {
        let Some(error) = &self.last_error else {
            return;
        };
        self.messages = true;
        let text = error.to_string();
        let free: Vec<u64> = self.gpus["0"]
            .allocator
            .snapshot()
            .segments
            .iter()
            .flat_map(|segment| segment.blocks.clone())
            .filter(|block| block.state == BlockState::Inactive)
            .map(|block| block.bytes)
            .collect();
        let holds = if let Some(names) = condition.strip_prefix("blocks_pinning=") {
            let mut wanted: Vec<DevicePtr> =
                names.split(',').map(|name| self.places[name].0).collect();
            wanted.sort_unstable();
            let blocks = &error.pinned.as_ref().unwrap().blocks;
            let mut found: Vec<DevicePtr> = blocks.iter().map(|block| block.ptr).collect();
            found.sort_unstable();
            found == wanted
                && wanted
                    .iter()
                    .all(|ptr| text.contains(&format!("at {ptr} ")))
        } else if condition == "largest_free_block" {
            let largest = Bytes(*free.iter().max().unwrap());
            text.contains(&format!("largest free block {largest}"))
        } else if condition == "total_cached_free" {
            let total = Bytes(free.iter().sum());
            let mut lines = text.lines();
            lines.any(|line| line.contains(&format!("{total}  total cached free")))
        } else {
            let said = condition
                .strip_prefix('"')
                .and_then(|text| text.strip_suffix('"'));
            text.contains(said.unwrap())
        };
        assert_eq!(holds, wanted, "{condition}: {text}");
    }
}

fn run(script: &str) {
    let mut kinds = 0;
    let mut messages = false;
    for expandable in [true, false] {
        let mut state = Script::new(expandable);
        let mut lines = script.lines().map(|line| line.split('#').next().unwrap());
        // The device is made with the kind of memory that is being tried.
        if lines.all(|line| state.step(line)) {
            kinds += 1;
            messages |= state.messages;
        }
    }
    assert!(kinds > 0, "the script is for no kind of memory");
    assert_eq!(
        script.contains("message says"),
        messages,
        "no allocation failed, or nobody looks at the message"
    );
}

macro_rules! scripts {
    ($($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                run(include_str!(concat!("ops/", stringify!($name), ".ops")));
            }
        )+

        #[test]
        fn every_script_is_run() {
            let mut files: Vec<String> = std::fs::read_dir("tests/ops")
                .unwrap()
                .filter_map(|file| {
                    let name = file.unwrap().file_name().into_string().unwrap();
                    name.strip_suffix(".ops").map(str::to_owned)
                })
                .collect();
            files.sort_unstable();
            assert_eq!(files, [$(stringify!($name)),+]);
        }
    };
}

scripts! {
    r34_split_segment,
    r35_variable_length,
    r38_missing_record_stream,
    r40_three_streams,
    r43_flush_each_step,
    r55_partial_map,
    s01_live_pool_under_pressure,
    s02_captured_pool,
}

/// A condition that does not hold fails, as does a step that is not one.
#[test]
fn a_script_that_is_wrong_fails() {
    let start = "device 0 capacity 100\nalloc a 8\n";
    for line in [
        "expect oom a",
        "expect oom_or_remap a\nfree a\nexpect oom_or_remap a",
        "forbid ok a",
        "expect reserved <= 7",
        "expect mapped == 0",
        "expect driver_mallocs == 2",
        "expect driver_frees == 1",
        "expect ok a and oom a",
        "expect detector warns \"a used\"",
        "expect lint \"empty_cache\"",
        "expect nothing",
        "alloc b 200\nexpect message says \"gc would help\"",
        "alloc b 96\nexpect message says \"gc would help\"",
        "alloc b 96\nforbid message says largest_free_block",
        "expect message says largest_free_block",
        "free b",
        "shrug",
        "fail shrug at_page 1 oom",
        "pool P\nexpect pool_reserved P == 1",
        "pool P\nexpect pool_reserved P > 0",
        "pool P\npool Q\nenter P\nenter Q\nleave P",
    ] {
        let script = format!("{start}{line}");
        let result = std::panic::catch_unwind(|| run(&script));
        assert!(result.is_err(), "{line}");
    }
    run(&format!(
        "{start}config expandable=true\nexpect ok a and mapped == 8\n"
    ));
}
