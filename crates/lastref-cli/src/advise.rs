//! `lastref advise`: a program's allocations under other settings of PyTorch's allocator, and the line
//! that would have served it best.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anstyle::Style;
use anyhow::{Context, anyhow};
use clap::Args;
use lastref::alloc::pytorch::{self, SETTINGS_VARIABLE, Settings, UNLIMITED};
use lastref::alloc::replay::{ReplayError, ReplayOptions, replay, smallest};
use lastref::alloc::sim::{SimDevice, SimOptions};
use lastref::alloc::{Bytes, CachingAllocator, DeviceError};
use lastref_snapshot::trace::Trace;
use rayon::ThreadPoolBuilder;
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};
use serde::Serialize;

use crate::Failure;
use crate::escape::escaped;
use crate::numbers::grouped;
use crate::program::{self, From, Named};
use crate::progress::{Audience, Progress};
use crate::replay::capacity;

/// The settings that are tried, in the order in which they are preferred where all else is equal: the
/// simpler first.
const SWEEP: [&str; 15] = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,large_segment_size_mb:12",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "max_split_size_mb:1024",
    "large_segment_size_mb:32",
    "large_segment_size_mb:64",
    "large_segment_size_mb:128",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "roundup_power2_divisions:32",
];
/// Tried beside those where the device is given: a threshold is a part of it.
const SWEEP_ON_A_DEVICE: [&str; 1] =
    ["garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"];

/// More than any device has, and more than is worth trying: as for `--capacity`.
const LARGEST_DEVICE: u64 = 1 << 44;

/// How often the caller is asked whether to go on.
const PATIENCE: Duration = Duration::from_millis(100);

/// Settings whose peaks differ by less than this are alike; so are devices.
const ALIKE: f64 = 1.005;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// What programs allocated: PyTorch memory snapshots with a history, or traces as `lastref replay`
    /// reads them
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// The device's memory, such as 80GiB: only settings that complete on it are named [default: as
    /// much as they take]
    #[arg(long, value_name = "SIZE", value_parser = capacity)]
    capacity: Option<u64>,

    /// Try these settings too, as in PYTORCH_CUDA_ALLOC_CONF; may be given more than once
    #[arg(long, value_name = "SETTINGS")]
    with: Vec<Settings>,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Advice {
    files: Vec<FileAdvice>,
    /// For all files together; null if no setting completes.
    recommended: Option<Recommended>,
}

#[derive(Serialize)]
struct FileAdvice {
    file: String,
    operations: usize,
    peak_live_bytes: u64,
    streams: usize,
    /// The settings that a snapshot was recorded under, if it says.
    recorded_settings: Option<String>,
    /// PyTorch's under each of the settings, in the order of the sweep, then lastref's.
    tried: Vec<Tried>,
    recommended: Option<Recommended>,
    /// What this cannot know, in words.
    unknown: Vec<String>,
}

/// One allocator under one setting.
#[derive(Clone, Serialize)]
struct Tried {
    policy: &'static str,
    settings: String,
    peak_reserved_bytes: u64,
    reserved_over_live: f64,
    smallest_bytes: u64,
    device_allocations: u64,
    completes: bool,
}

#[derive(Clone, PartialEq, Serialize)]
struct Recommended {
    /// Empty for the defaults.
    settings: String,
    /// The line to paste; null for the defaults.
    line: Option<String>,
}

impl Recommended {
    fn new(settings: &str) -> Self {
        let line = !settings.is_empty();
        Self {
            settings: settings.to_owned(),
            line: line.then(|| format!("{SETTINGS_VARIABLE}={settings}")),
        }
    }
}

/// What is tried.
enum Candidate {
    PyTorch(Settings),
    Lastref,
}

/// What [`advise`] is asked.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct AdviseOptions {
    /// The device's memory: only settings that complete on it are named. `None`: as much as they take.
    pub capacity_bytes: Option<u64>,
    /// Settings to be tried too, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: Vec<String>,
}

/// Why there is no advice.
#[derive(Debug)]
#[non_exhaustive]
pub enum AdviseError {
    /// A file cannot be read.
    Read(io::Error),
    /// A file is something else, or an option is wrong: the text says which and why.
    BadInput(String),
    /// A replay failed.
    Failed(String),
    /// The caller wanted to stop.
    Stopped,
}

/// What `lastref advise --json` prints, without its line feed: the files' programs under settings of
/// PyTorch's allocator. Where no setting completes, its `recommended` is null.
///
/// It takes all processors. `go_on` is called on this thread ten times a second while settings are tried; once it
/// says no, none is begun any more.
///
/// # Errors
///
/// See [`AdviseError`].
///
/// ```no_run
/// use lastref_cli::{AdviseOptions, advise};
///
/// let json = advise(&["snapshot.pickle".into()], &AdviseOptions::default(), &mut || true);
/// ```
pub fn advise(
    files: &[PathBuf],
    options: &AdviseOptions,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<String, AdviseError> {
    if files.is_empty() {
        return Err(AdviseError::BadInput("no file to look at".to_owned()));
    }
    let with = options.settings.iter().map(|text| {
        let parsed = text.parse::<Settings>();
        parsed.map_err(|error| AdviseError::BadInput(format!("{text:?}: {error}")))
    });
    let with = with.collect::<Result<Vec<_>, _>>()?;
    if let Some(bytes) = options.capacity_bytes {
        // As of the command's option.
        capacity(&format!("{bytes}B")).map_err(|reason| {
            AdviseError::BadInput(format!("a device of {bytes} bytes: {reason}"))
        })?;
    }
    let advice = look(
        files,
        options.capacity_bytes,
        &with,
        Audience::Program,
        go_on,
    );
    let advice = advice.map_err(|failure| match failure {
        Failure::BadInput(error) => {
            let read = error
                .chain()
                .find_map(|cause| cause.downcast_ref::<io::Error>());
            match read.and_then(io::Error::raw_os_error) {
                Some(code) => AdviseError::Read(io::Error::from_raw_os_error(code)),
                None => AdviseError::BadInput(format!("{error:#}")),
            }
        }
        Failure::No(error) => AdviseError::Failed(format!("{error:#}")),
        Failure::Output(error) => AdviseError::Failed(error.to_string()),
    })?;
    let advice = advice.ok_or(AdviseError::Stopped)?;
    serde_json::to_string(&advice).map_err(|error| AdviseError::Failed(error.to_string()))
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let Arguments {
        files,
        capacity,
        with,
        ..
    } = arguments;
    let advice = look(files, *capacity, with, Audience::Person, &mut || true)?;
    let advice = advice.expect("nobody asks to stop");
    if arguments.json {
        serde_json::to_writer(&mut *out, &advice).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        write_advice(out, &advice, arguments.capacity)?;
    }
    if advice.recommended.is_some() {
        return Ok(());
    }
    let device = Bytes(arguments.capacity.unwrap_or(UNLIMITED));
    Err(Failure::No(anyhow!(
        "no setting of PyTorch's allocator completes on a device of {device}"
    )))
}

/// The advice; `None` if `go_on` said no.
fn look(
    files: &[PathBuf],
    capacity: Option<u64>,
    with: &[Settings],
    audience: Audience,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<Advice>, Failure> {
    let mut programs = Vec::new();
    for file in files {
        let read = program::programs(file, audience)
            .with_context(|| format!("cannot read {}", program::name(file)))
            .map_err(Failure::BadInput)?;
        for program in &read {
            let most = program.trace.peak_live_bytes();
            if most > LARGEST_DEVICE {
                return Err(Failure::BadInput(anyhow!(
                    "{}: {} are in use at its peak, no device has more than {}",
                    program.name,
                    Bytes(most),
                    Bytes(LARGEST_DEVICE),
                )));
            }
        }
        programs.extend(read);
    }
    let candidates = candidates(capacity, with, &programs);
    let Some(all) = try_all(&programs, &candidates, capacity, audience, go_on)? else {
        return Ok(None);
    };
    let mut all = all.into_iter();
    let mut files = Vec::new();
    for program in &programs {
        let tried: Vec<Tried> = all.by_ref().take(candidates.len()).collect();
        files.push(FileAdvice {
            file: program.name.clone(),
            operations: program.trace.operations().len(),
            peak_live_bytes: program.trace.peak_live_bytes(),
            streams: program.trace.streams().len(),
            recorded_settings: program.settings().map(str::to_owned),
            recommended: recommended(&[&tried]),
            tried,
            unknown: unknown(program),
        });
    }
    let tried: Vec<&[Tried]> = files.iter().map(|file| &*file.tried).collect();
    Ok(Some(Advice {
        recommended: recommended(&tried),
        files,
    }))
}

/// The sweep, what the user asks for, and what the programs ran under.
fn candidates(capacity: Option<u64>, with: &[Settings], programs: &[Named]) -> Vec<Candidate> {
    let device: &[&str] = match capacity {
        Some(_) => &SWEEP_ON_A_DEVICE,
        None => &[],
    };
    let known = SWEEP.iter().chain(device);
    let known = known.map(|text| text.parse().expect("the sweep's settings are valid"));
    let mut settings: Vec<Settings> = known.collect();
    let recorded = programs.iter().filter_map(Named::settings);
    // What another version of PyTorch read may be nothing that this one can.
    let recorded = recorded.filter_map(|text| text.parse().ok());
    for more in with.iter().cloned().chain(recorded) {
        if !settings.contains(&more) {
            settings.push(more);
        }
    }
    let pytorch = settings.into_iter().map(Candidate::PyTorch);
    pytorch.chain([Candidate::Lastref]).collect()
}

/// Every candidate on every program, on all processors; `None` if `go_on` said no. The order is that of
/// the programs, and in each that of the candidates.
fn try_all(
    programs: &[Named],
    candidates: &[Candidate],
    capacity: Option<u64>,
    audience: Audience,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<Vec<Tried>>, Failure> {
    let jobs: Vec<(&Named, &Candidate)> = programs
        .iter()
        .flat_map(|program| candidates.iter().map(move |candidate| (program, candidate)))
        .collect();
    let mut bar = Progress::replays("trying settings", jobs.len() as u64).shown_to(audience);
    // Not the pool for all: its threads are gone after a fork, and Python programs fork.
    let pool = ThreadPoolBuilder::new().build();
    let pool = pool.map_err(|error| Failure::No(anyhow!(error).context("starting threads")))?;
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        let work = scope.spawn(|| {
            let replays = jobs
                .into_par_iter()
                .map_with(sender, |sender, (program, candidate)| {
                    // Whoever does not listen any more wants no more.
                    if sender.send(0).is_err() {
                        return Ok(None);
                    }
                    let tried = try_one(&program.trace, candidate, capacity);
                    // As above, and this one is done.
                    let _ = sender.send(1);
                    tried.map(Some).map_err(|error| {
                        Failure::No(anyhow!(error).context(format!("replaying {}", program.name)))
                    })
                });
            pool.install(|| replays.collect::<Result<Option<Vec<Tried>>, Failure>>())
        });
        let (mut done, mut asked) = (0, Instant::now());
        loop {
            match receiver.recv_timeout(PATIENCE) {
                Ok(more) => {
                    done += more;
                    bar.set(done);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if asked.elapsed() >= PATIENCE {
                asked = Instant::now();
                if !go_on() {
                    break;
                }
            }
        }
        drop(receiver);
        work.join().expect("a replay does not panic")
    })
}

fn try_one(
    trace: &Trace,
    candidate: &Candidate,
    capacity: Option<u64>,
) -> Result<Tried, ReplayError> {
    let live = trace.peak_live_bytes();
    let (policy, settings, report, smallest) = match candidate {
        Candidate::PyTorch(settings) => {
            let capacity = capacity.unwrap_or(UNLIMITED);
            let report = pytorch::replay(trace, settings, capacity, ReplayOptions::default());
            let smallest = pytorch::smallest(trace, settings, ReplayOptions::default());
            ("pytorch", settings.to_string(), report, smallest)
        }
        Candidate::Lastref => {
            let on = |capacity| {
                let device = SimDevice::new(SimOptions::new(capacity).with_contents(false))?;
                Ok::<_, DeviceError>(CachingAllocator::new(device))
            };
            let capacity = capacity.unwrap_or_else(|| live.saturating_mul(2).max(1 << 30));
            let report = replay(&on(capacity)?, trace, ReplayOptions::default())?;
            let smallest = smallest(trace, ReplayOptions::default(), on)?;
            ("lastref", String::new(), report, smallest)
        }
    };
    Ok(Tried {
        policy,
        settings,
        peak_reserved_bytes: report.peak_reserved_bytes,
        reserved_over_live: report.reserved_over_live(),
        smallest_bytes: smallest.bytes,
        device_allocations: report.device_allocations,
        completes: report.out_of_memory.is_none(),
    })
}

/// The setting under which PyTorch reserves least, in the file where it reserves most. Of those that
/// are alike, the one that completes on the smallest device; then the defaults, then the one with the
/// fewest device allocations.
fn recommended(files: &[&[Tried]]) -> Option<Recommended> {
    struct Candidate<'a> {
        settings: &'a str,
        peak: u64,
        smallest: u64,
        device_allocations: u64,
    }
    let most = |index: usize, of: fn(&Tried) -> u64| {
        let in_files = files.iter().map(|tried| of(&tried[index]));
        in_files.max().unwrap_or(0)
    };
    let mut candidates: Vec<Candidate<'_>> = (0..files[0].len())
        .filter(|index| {
            let pytorch = files[0][*index].policy == "pytorch";
            pytorch && files.iter().all(|tried| tried[*index].completes)
        })
        .map(|index| Candidate {
            settings: &files[0][index].settings,
            peak: most(index, |tried| tried.peak_reserved_bytes),
            smallest: most(index, |tried| tried.smallest_bytes),
            device_allocations: files
                .iter()
                .map(|tried| tried[index].device_allocations)
                .sum(),
        })
        .collect();
    for of in [
        |candidate: &Candidate<'_>| candidate.peak,
        |candidate: &Candidate<'_>| candidate.smallest,
    ] {
        let least = candidates.iter().map(of).min()?;
        candidates.retain(|candidate| of(candidate) as f64 <= least as f64 * ALIKE);
    }
    // The first of those that are equal.
    let chosen = candidates
        .iter()
        .min_by_key(|candidate| (!candidate.settings.is_empty(), candidate.device_allocations))?;
    Some(Recommended::new(chosen.settings))
}

fn unknown(program: &Named) -> Vec<String> {
    let mut unknown = Vec::new();
    match &program.from {
        From::Trace => unknown.push(
            "memory that libraries take beside the allocator, and blocks that wait for another \
             stream (record_stream): a trace does not say"
                .to_owned(),
        ),
        From::Snapshot { gaps, .. } => {
            unknown.push(
                "memory that libraries take beside the allocator: a snapshot does not say"
                    .to_owned(),
            );
            if gaps.blocks_before > 0 {
                unknown.push(format!(
                    "what came before the history: {} blocks of {} were there already, and are taken \
                     to be allocated in the order of their addresses; a cache that was there is not \
                     counted",
                    grouped(gaps.blocks_before),
                    Bytes(gaps.bytes_before)
                ));
            }
            if gaps.missing_frees > 0 {
                unknown.push(format!(
                    "when {} blocks were freed: the history allocates at their addresses again, and \
                     they are taken to be freed just before",
                    grouped(gaps.missing_frees)
                ));
            }
            if gaps.in_private_pools > 0 {
                unknown.push(format!(
                    "private pools: {} allocations were in pools of CUDA graphs or MemPool, and are \
                     taken to be in the default one",
                    grouped(gaps.in_private_pools)
                ));
            }
            if gaps.out_of_memory > 0 {
                unknown.push(format!(
                    "how it would have gone on: {} allocations failed",
                    grouped(gaps.out_of_memory)
                ));
            }
        }
    }
    if program.trace.streams().len() == 1 {
        unknown.push(
            "how more streams would do: there is one here, and PyTorch keeps a cache for each"
                .to_owned(),
        );
    }
    unknown
}

fn write_advice(out: &mut impl Write, advice: &Advice, capacity: Option<u64>) -> io::Result<()> {
    let bold = Style::new().bold();
    let dim = Style::new().dimmed();
    for file in &advice.files {
        writeln!(
            out,
            "{bold}{}{bold:#}  {} operations, {} stream{}, {} live at the peak{}",
            escaped(&file.file),
            grouped(file.operations as u64),
            file.streams,
            if file.streams == 1 { "" } else { "s" },
            Bytes(file.peak_live_bytes),
            capacity.map_or_else(String::new, |bytes| format!(
                ", on a device of {}",
                Bytes(bytes)
            ))
        )?;
        if let Some(settings) = file
            .recorded_settings
            .as_ref()
            .filter(|text| !text.is_empty())
        {
            let settings = escaped(settings);
            writeln!(out, "  {dim}recorded under {settings}{dim:#}")?;
        }
        let width = file.tried.iter().map(|tried| name(tried).len()).max();
        let width = width.unwrap_or(0);
        writeln!(
            out,
            "  {:<width$}  {:>13}  {:>9}  {:>15}  {:>18}",
            "", "peak reserved", "over live", "smallest device", "device allocations"
        )?;
        for tried in &file.tried {
            let chosen = file.recommended.as_ref().is_some_and(|recommended| {
                tried.policy == "pytorch" && recommended.settings == tried.settings
            });
            let style = if chosen { bold } else { Style::new() };
            writeln!(
                out,
                "{style}{} {:<width$}  {:>13}  {:>9.4}  {:>15}  {:>18}{style:#}{}",
                if chosen { ">" } else { " " },
                name(tried),
                Bytes(tried.peak_reserved_bytes).to_string(),
                tried.reserved_over_live,
                Bytes(tried.smallest_bytes).to_string(),
                grouped(tried.device_allocations),
                if tried.completes {
                    ""
                } else {
                    "  out of memory"
                }
            )?;
        }
        write_recommended(out, file)?;
        writeln!(out, "  {dim}not known:{dim:#}")?;
        for unknown in &file.unknown {
            writeln!(out, "  {dim}- {unknown}{dim:#}")?;
        }
        writeln!(out)?;
    }
    if advice.files.len() > 1
        && let Some(recommended) = &advice.recommended
    {
        writeln!(out, "for all {} files", advice.files.len())?;
        match &recommended.line {
            None => writeln!(out, "  keep the default settings")?,
            Some(line) => writeln!(out, "  {bold}{line}{bold:#}")?,
        }
    }
    Ok(())
}

/// The recommendation, and what it gains.
fn write_recommended(out: &mut impl Write, file: &FileAdvice) -> io::Result<()> {
    let bold = Style::new().bold();
    let Some(recommended) = &file.recommended else {
        return writeln!(
            out,
            "  no setting of PyTorch's allocator completes on this device"
        );
    };
    let of = |settings: &str| {
        let found = |tried: &&Tried| tried.policy == "pytorch" && tried.settings == settings;
        file.tried.iter().find(found)
    };
    match (&recommended.line, of(""), of(&recommended.settings)) {
        (Some(line), Some(default), Some(chosen)) => {
            writeln!(out, "  {bold}{line}{bold:#}")?;
            if !default.completes {
                return writeln!(
                    out,
                    "  in the program's environment: it completes, and by default does not"
                );
            }
            let change = |what: &str, from: u64, to: u64| {
                format!("{} {what} instead of {}", Bytes(to), Bytes(from))
            };
            writeln!(
                out,
                "  in the program's environment: {}, {}",
                change(
                    "reserved at the peak",
                    default.peak_reserved_bytes,
                    chosen.peak_reserved_bytes
                ),
                change(
                    "for the smallest device",
                    default.smallest_bytes,
                    chosen.smallest_bytes
                )
            )
        }
        _ => writeln!(
            out,
            "  keep the default settings: no other is {:.1} % better",
            (ALIKE - 1.0) * 100.0
        ),
    }
}

fn name(tried: &Tried) -> &str {
    match tried.policy {
        "lastref" => "lastref's own allocator",
        _ if tried.settings.is_empty() => "PyTorch's default settings",
        _ => &tried.settings,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(settings: &str, peak_reserved_bytes: u64, device_allocations: u64) -> Tried {
        Tried {
            policy: "pytorch",
            settings: settings.to_owned(),
            peak_reserved_bytes,
            reserved_over_live: 1.0,
            smallest_bytes: 0,
            device_allocations,
            completes: true,
        }
    }

    #[test]
    fn of_those_alike_the_one_for_the_smallest_device_is_chosen() {
        let mut file = [tried("", 1000, 1), tried("a", 1001, 9), tried("b", 1002, 8)];
        file[0].smallest_bytes = 990;
        file[1].smallest_bytes = 900;
        file[2].smallest_bytes = 904;
        assert_eq!(chosen(&[&file]).as_deref(), Some("b"));
    }

    fn chosen(files: &[&[Tried]]) -> Option<String> {
        recommended(files).map(|recommended| recommended.settings)
    }

    #[test]
    fn the_least_is_chosen_and_of_those_alike_the_one_with_fewest_calls() {
        let file = [
            tried("", 2000, 1),
            tried("a", 1000, 9),
            tried("b", 1004, 5),
            tried("c", 1006, 1),
        ];
        assert_eq!(chosen(&[&file]).as_deref(), Some("b"));
        let file = [tried("", 1004, 90), tried("a", 1000, 9)];
        assert_eq!(
            chosen(&[&file]).as_deref(),
            Some(""),
            "the defaults, if they are alike"
        );
        assert_eq!(recommended(&[&file]).unwrap().line, None);
    }

    #[test]
    fn what_does_not_complete_is_not_chosen() {
        let mut file = [tried("", 2000, 1), tried("a", 1000, 9)];
        file[1].completes = false;
        assert_eq!(chosen(&[&file]).as_deref(), Some(""));
        file[0].completes = false;
        assert_eq!(chosen(&[&file]), None);
        let mut lastref = tried("", 1, 1);
        lastref.policy = "lastref";
        let file = [file[0].clone(), lastref];
        assert_eq!(
            chosen(&[&file]),
            None,
            "it is PyTorch's settings that are named"
        );
    }

    #[test]
    fn for_many_files_the_one_that_takes_most_counts() {
        let one = [tried("", 100, 1), tried("a", 3000, 1)];
        let other = [tried("", 4000, 1), tried("a", 2000, 1)];
        assert_eq!(chosen(&[&one, &other]).as_deref(), Some("a"));
        assert_eq!(chosen(&[&one]).as_deref(), Some(""));
    }

    #[test]
    fn the_sweep_is_valid_and_tries_nothing_twice() {
        let mut seen = Vec::new();
        for text in SWEEP.iter().chain(&SWEEP_ON_A_DEVICE) {
            let settings: Settings = text.parse().unwrap();
            assert_eq!(settings.to_string(), *text, "printed as it is written here");
            assert!(!seen.contains(&settings));
            seen.push(settings);
        }
    }
}
