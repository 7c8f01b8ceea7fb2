//! The command as its users meet it: the binary, its arguments, its exit status and its output.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const HEADER: &str = "op,id,bytes,stream,phase,label\n";

fn lastref(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lastref"));
    command
        .args(arguments)
        .env_remove("LASTREF_SIM")
        .env_remove("LASTREF_ALLOC_CONF")
        .env_remove("NO_COLOR");
    command.env_remove("CLICOLOR_FORCE").stdin(Stdio::null());
    command
}

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("testdata")
        .join(name)
}

fn run(arguments: &[&str]) -> Done {
    Done::from(lastref(arguments).output().unwrap())
}

/// Runs with `input` on standard input.
fn run_with(arguments: &[&str], input: &[u8]) -> Done {
    let mut child: Child = lastref(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may have stopped reading: that is not what is tested.
    let _ = child.stdin.take().unwrap().write_all(input);
    Done::from(child.wait_with_output().unwrap())
}

/// Replays these lines after the header, from standard input.
fn replay(lines: &str, options: &[&str]) -> Done {
    let arguments = [&["replay", "-"], options].concat();
    run_with(&arguments, format!("{HEADER}{lines}").as_bytes())
}

#[derive(Debug)]
struct Done {
    status: i32,
    out: String,
    err: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code().expect("no signal ends it"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Done {
    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!(self.out.lines().count(), 1, "one line of JSON: {self:?}");
        serde_json::from_str(&self.out).unwrap()
    }

    /// Refused as bad usage or bad input, with this in the message and nothing on standard output.
    #[track_caller]
    fn refused(&self, message: &str) {
        assert_eq!(self.status, 2, "{self:?}");
        assert_eq!(self.out, "", "standard output is for data");
        assert!(self.err.contains("error"), "{self:?}");
        assert!(self.err.contains(message), "{message:?} is not in {self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
    }
}

#[track_caller]
fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn a_replay_reports_these_keys_and_no_others() {
    let trace = testdata("resnet50_train.csv.gz");
    let done = run(&["replay", "--json", trace.to_str().unwrap()]);
    assert_eq!((done.status, &*done.err), (0, ""));
    let json = done.json();
    let mut expected = [
        "operations",
        "peak_live_bytes",
        "peak_reserved_bytes",
        "reserved_over_live",
        "device_allocations",
        "device_microseconds",
        "nanoseconds_per_operation",
        "out_of_memory",
        "thread_cache_hit_rate",
        "pages_created",
        "pages_moved",
        "segments_allocated",
        "host_waits",
        "device_waits",
        "rungs",
    ];
    expected.sort_unstable();
    let mut found = keys(&json);
    found.sort_unstable();
    assert_eq!(found, expected);
    // What the trace itself says, counted by zcat and awk.
    assert_eq!(json["operations"], 9846);
    assert_eq!(json["peak_live_bytes"], 5_762_142_352_u64);
    assert_eq!(json["out_of_memory"], Value::Null);
    let reserved = json["peak_reserved_bytes"].as_u64().unwrap();
    let ratio = json["reserved_over_live"].as_f64().unwrap();
    assert!((ratio - reserved as f64 / 5_762_142_352.0).abs() < 1e-9);
    assert!((1.0..1.30).contains(&ratio), "{ratio}");
    assert!(json["device_allocations"].as_u64().unwrap() >= reserved / (2 << 20));
    assert!(json["device_microseconds"].as_f64().unwrap() > 0.0);
    assert!(json["nanoseconds_per_operation"].as_f64().unwrap() > 0.0);
}

#[test]
fn traces_of_both_kinds_verify_whole_and_in_words() {
    for name in [
        "resnet50_train.csv.gz",
        "resnet50_prefetch_multiscale.csv.gz",
    ] {
        let trace = testdata(name);
        let full = run(&["replay", "--json", "--verify", trace.to_str().unwrap()]);
        assert_eq!(full.status, 0, "{full:?}");
        let scaled = run(&[
            "replay",
            "--json",
            "--verify",
            "--scale",
            "64",
            trace.to_str().unwrap(),
        ]);
        assert_eq!(scaled.status, 0, "{scaled:?}");
        let [full, scaled] = [full.json(), scaled.json()];
        assert_eq!(full["operations"], scaled["operations"]);
        let ratio =
            full["peak_live_bytes"].as_f64().unwrap() / scaled["peak_live_bytes"].as_f64().unwrap();
        assert!((60.0..=64.0).contains(&ratio), "{ratio}");
    }
}

#[test]
fn segments_and_virtual_memory_are_different_devices() {
    let trace = testdata("resnet50_train.csv.gz");
    let of = |options: &[&str]| {
        let done = run(&[&["replay", "--json", trace.to_str().unwrap()], options].concat());
        assert_eq!(done.status, 0, "{done:?}");
        done.json()["device_allocations"].as_u64().unwrap()
    };
    assert!(
        of(&["--segments"]) * 10 < of(&[]),
        "pages are small, segments large"
    );
}

#[test]
fn a_replay_tells_people_the_same() {
    let trace = testdata("resnet50_train.csv.gz");
    let done = run(&[
        "replay",
        trace.to_str().unwrap(),
        "--capacity",
        "11GB",
        "--verify",
    ]);
    assert_eq!((done.status, &*done.err), (0, ""));
    for text in [
        "9,846",
        "5.37 GiB",
        "10.24 GiB  simulated, with virtual memory",
        "verified",
        "as an A100",
    ] {
        assert!(done.out.contains(text), "{text:?} is not in {done:?}");
    }
    assert!(
        done.out.lines().all(|line| !line.contains('\u{1b}')),
        "no colour in a pipe"
    );
}

#[test]
fn the_smallest_device_is_found_and_is_the_smallest() {
    let lines = "alloc,1,5000000,0,p,a\nalloc,2,7000000,0,p,b\nfree,1,0,0,p,\n";
    let done = replay(lines, &["--smallest", "--json", "--verify"]);
    assert_eq!(done.status, 0, "{done:?}");
    let json = done.json();
    let smallest = json["smallest_bytes"].as_u64().unwrap();
    assert!(
        smallest >= 12_000_000 && smallest.is_multiple_of(2 << 20),
        "{smallest}"
    );
    let ratio = json["smallest_over_live"].as_f64().unwrap();
    assert!((ratio - smallest as f64 / 12e6).abs() < 1e-9);
    assert_eq!(json["out_of_memory"], Value::Null);
    let with = |bytes: u64| replay(lines, &["--capacity", &bytes.to_string()]).status;
    assert_eq!(with(smallest), 0);
    assert_eq!(with(smallest - (2 << 20)), 1);
}

#[test]
fn out_of_memory_ends_with_1_and_says_which_allocation() {
    let lines = "alloc,1,5000000,0,p,weights\nalloc,9,6000000,2,p,too much\n";
    let done = replay(lines, &["--json", "--capacity", "8MiB"]);
    assert_eq!(done.status, 1, "{done:?}");
    let failed = &done.json()["out_of_memory"];
    assert_eq!(failed["operation"], 1);
    assert_eq!(failed["line"], 3);
    assert_eq!(failed["id"], 9);
    assert_eq!(failed["stream"], 2);
    assert_eq!(failed["label"], "too much");
    assert_eq!(failed["requested_bytes"], 6_000_000);
    let place = "operation 1 (line 3, id 9, stream 2, label \"too much\"): out of memory";
    assert!(done.err.contains(place), "{done:?}");
    assert!(
        failed["message"]
            .as_str()
            .unwrap()
            .contains("out of memory"),
        "{failed}"
    );
    // More than the device has at all.
    let done = replay("alloc,1,5000000,0,p,x\n", &["--capacity", "2MiB"]);
    assert_eq!(done.status, 1, "{done:?}");
    assert!(
        done.err.contains("that is more than the device has"),
        "{done:?}"
    );
}

#[test]
fn every_kind_of_bad_trace_is_refused_by_name() {
    let refused = |lines: &str, message: &str| {
        let done = replay(lines, &[]);
        done.refused(message);
        assert!(
            done.err
                .contains("cannot read the trace from standard input: "),
            "{done:?}"
        );
    };
    refused("realloc,1,8,0,p,l\n", "line 2: unknown op \"realloc\"");
    refused(
        "alloc,1,-8,0,p,lbl\n",
        "line 2: bytes \"-8\" of id \"1\", label \"lbl\"",
    );
    refused(
        "alloc,1,99999999999999999999,0,p,l\n",
        "bytes \"99999999999999999999\" of id \"1\"",
    );
    refused(
        "alloc,1,18446744073709551615,0,p,l\nalloc,2,1,0,p,l\n",
        "the live bytes pass 2^64",
    );
    refused(
        "alloc,1,8,0,p,a\nalloc,1,8,0,p,lbl\n",
        "line 3: id 1 (label \"lbl\") is allocated again, it was allocated on line 2",
    );
    refused(
        "alloc,1,8,0,p,lbl\nfree,1,0,0,p,\nfree,1,0,0,p,\n",
        "line 4: id 1 (label \"lbl\") is freed twice, it was freed on line 3",
    );
    refused(
        "free,1,0,0,p,lbl\n",
        "line 2: id 1 (label \"lbl\") is freed but was never allocated",
    );
    refused(
        "alloc,1,8,0,p,l\nfree,1,0",
        "line 3: the trace is cut in the middle",
    );
    refused("alloc,1,8\n", "line 2: 3 fields where 6 are expected");

    run_with(&["replay", "-"], b"").refused("the trace is empty");
    run_with(&["replay", "-"], b"alloc,1,8,0,p,l\n").refused("line 1: expected the header");
    let whole = fs::read(testdata("resnet50_train.csv.gz")).unwrap();
    run_with(&["replay", "-"], &whole[..whole.len() / 2])
        .refused("the trace is cut in the middle, the compressed data ends early");
}

#[test]
fn a_replay_leaves_a_snapshot_that_says_what_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("replay.pickle");
    let file = file.to_str().unwrap();
    let trace = testdata("resnet50_train.csv.gz");
    let trace = trace.to_str().unwrap();
    for backing in [&[][..], &["--segments"]] {
        let arguments = [&["replay", trace, "--json", "--snapshot", file], backing].concat();
        let replayed = run(&arguments).json();
        let stats = run(&["stats", file, "--json"]).json();
        assert_eq!(stats["problems"], Value::Array(Vec::new()));
        let history = &stats["history"][0];
        assert_eq!(history["peak_active_bytes"], replayed["peak_live_bytes"]);
        assert_eq!(history["active_at_start_bytes"], 0);
        assert_eq!(history["out_of_memory"], Value::Array(Vec::new()));
        // It is a program like any other: the same one.
        let again = run(&["replay", file, "--json"]).json();
        for key in ["operations", "peak_live_bytes"] {
            assert_eq!(again[key], replayed[key], "{key}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Of which a drawing is in the documentation: `LASTREF_RENEW=1` writes it anew.
#[test]
fn the_timeline_of_a_replay_is_drawn_by_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("replay.pickle");
    let file = file.to_str().unwrap();
    let trace = testdata("resnet50_train.csv.gz");
    let trace = trace.to_str().unwrap();
    assert_eq!(run(&["replay", trace, "--snapshot", file]).status, 0);
    let drawn = run(&["export", file, "--format", "timeline"]);
    assert_eq!(drawn.status, 0, "{drawn:?}");
    // As many columns as fit, however many entries there are.
    assert!(drawn.out.len() < 120_000, "{} bytes", drawn.out.len());
    let shown = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/charts/timeline.svg");
    if std::env::var_os("LASTREF_RENEW").is_some() {
        fs::write(&shown, &drawn.out).unwrap();
    }
    // Outside the repository there is no documentation.
    if let Ok(shown) = fs::read_to_string(shown) {
        assert!(
            shown == drawn.out,
            "docs/charts/timeline.svg is not what is drawn now"
        );
    }
}

#[test]
fn a_timeline_of_more_bytes_than_there_are_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("huge.csv");
    let mut lines = HEADER.to_owned();
    for id in 0..4 {
        // A trace promises that its sum can be counted; a snapshot does not.
        writeln!(lines, "alloc,{id},{},0,p,l{id}", i64::MAX / 4).unwrap();
    }
    fs::write(&file, lines).unwrap();
    let drawn = run(&["export", file.to_str().unwrap(), "--format", "timeline"]);
    assert_eq!(drawn.status, 0, "{drawn:?}");
    let huge = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/huge.pickle");
    let drawn = run(&["export", huge.to_str().unwrap(), "--format", "timeline"]);
    assert_eq!(drawn.status, 0, "{drawn:?}");
    assert!(drawn.out.trim_end().ends_with("</svg>"));
}

#[test]
fn a_timeline_without_a_history_is_refused() {
    let file = snapshot("attention.pickle.gz");
    let file = file.to_str().unwrap();
    run(&["export", file, "--format", "timeline"]).refused("has no history to draw");
}

#[test]
fn a_snapshot_of_a_replay_that_ran_out_of_memory_explains_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("replay.pickle");
    let file = file.to_str().unwrap();
    let lines = "alloc,1,41943040,0,init,weights|Model\nalloc,2,20971520,0,fwd,conv|Model\n\
                 alloc,3,20971520,0,fwd,batch|Loader\n";
    let done = replay(lines, &["--capacity", "64MiB", "--snapshot", file]);
    assert_eq!(done.status, 1, "{done:?}");
    let stats = run(&["stats", file, "--json"]).json();
    let failures = stats["history"][0]["out_of_memory"].as_array().unwrap();
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0]["requested_bytes"], 20 << 20);
    assert_eq!(stats["history"][0]["active_at_end_bytes"], 60 << 20);
    let explained = run(&["explain", file]);
    assert_eq!(explained.status, 0, "{explained:?}");
    let first = explained.out.lines().next().unwrap();
    assert!(first.contains("20.00 MiB asked for at batch"), "{first}");
    assert!(explained.out.contains("weights"), "{}", explained.out);
}

#[test]
fn a_snapshot_that_cannot_be_written_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing").join("replay.pickle");
    let path = path.to_str().unwrap();
    let done = replay("alloc,1,8,0,p,l\n", &["--json", "--snapshot", path]);
    assert_eq!(done.status, 2);
    assert!(
        done.err.contains("cannot write the snapshot to"),
        "{done:?}"
    );
    // What was measured is not lost.
    assert_eq!(done.json()["operations"], 1);
    // What is no file is not replaced by one.
    let done = replay("alloc,1,8,0,p,l\n", &["--json", "--snapshot", "/dev/null"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert!(!Path::new("/dev/null").is_file());
    replay("alloc,1,8,0,p,l\n", &["--snapshot", path, "--smallest"]).refused("cannot be used with");
}

#[test]
fn a_trace_beyond_any_device_is_refused() {
    replay("alloc,1,9223372036854775807,0,p,l\n", &[])
        .refused("cannot simulate a device for 8.00 EiB");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    run(&["replay", "no-such-file.csv"])
        .refused("cannot read the trace from no-such-file.csv: No such file");
    let folder = testdata("");
    run(&["replay", folder.to_str().unwrap()]).refused("Is a directory");
}

#[test]
fn bad_usage_is_refused() {
    run(&["replay", "-", "--capacity", "8G"]).refused("write GiB (1024) or GB (1000)");
    run(&["replay", "-", "--capacity", "2x8GiB"]).refused("2 devices, a replay has one");
    run(&["replay", "-", "--capacity", "-1GiB"]).refused("unexpected argument '-1'");
    run(&["replay", "-", "--scale", "0"]).refused("--scale");
    run(&["replay", "-", "--smallest", "--capacity", "8GiB"]).refused("cannot be used with");
    run(&["replay"]).refused("TRACE");
    run(&["reply"]).refused("unrecognized subcommand 'reply'");
    let nothing = run(&[]);
    assert_eq!(nothing.status, 2);
    assert!(nothing.err.contains("Usage: lastref"), "{nothing:?}");
}

#[test]
fn help_and_version_are_data() {
    for (argument, text) in [
        ("--help", "Usage: lastref"),
        ("--version", env!("CARGO_PKG_VERSION")),
    ] {
        let done = run(&[argument]);
        assert_eq!((done.status, &*done.err), (0, ""));
        assert!(done.out.contains(text), "{done:?}");
    }
}

#[test]
fn details_go_to_standard_error() {
    let done = replay("alloc,1,5000000,0,p,a\n", &["--verbose", "--json"]);
    assert_eq!(done.status, 0);
    done.json();
    for text in [
        "thread cache             0.0 %",
        "pages created                3",
        "host waits                   0",
        "device waits                 0",
        "move_pages",
        "rung.thread_caches.num_tried",
        "allocated_bytes.all.peak",
        "create_page",
    ] {
        assert!(done.err.contains(text), "{text} is not in {done:?}");
    }
}

#[test]
fn the_report_says_how_the_memory_was_come_by() {
    let mut lines = String::new();
    for id in 0..10 {
        lines += &format!("alloc,{id},1000,0,p,a\nfree,{id},0,0,p,a\n");
    }
    lines += "alloc,20,20000000,0,p,a\nalloc,21,1000000,0,p,a\nfree,20,0,0,p,a\nalloc,22,30000000,0,p,a\n";
    let json = replay(&lines, &["--json", "--capacity", "40MiB"]).json();
    let rate = json["thread_cache_hit_rate"].as_f64().unwrap();
    assert!((0.4..0.8).contains(&rate), "{json}");
    assert!(json["pages_created"].as_u64().unwrap() <= 20);
    assert!(json["pages_moved"].as_u64().unwrap() >= 5, "{json}");
    // Nothing is submitted in a replay, so that pages are known to be idle as soon as it is asked.
    assert_eq!(
        (&json["host_waits"], &json["device_waits"]),
        (&0.into(), &0.into())
    );
    let rungs = json["rungs"].as_array().unwrap();
    let names: Vec<_> = rungs.iter().map(|r| r["rung"].as_str().unwrap()).collect();
    let wanted = [
        "thread_caches",
        "finished_events",
        "stream_waits",
        "move_pages",
        "release_cached",
        "wait_for_streams",
    ];
    assert_eq!(names, wanted);
    assert_eq!(rungs[0]["times"], 1);
    assert_eq!(rungs[0]["bytes"], 1024);
    let moved = rungs[3]["bytes"].as_u64().unwrap();
    assert_eq!(moved, json["pages_moved"].as_u64().unwrap() * (2 << 20));

    let segments = replay(&lines, &["--json", "--segments"]).json();
    assert!(segments["segments_allocated"].as_u64().unwrap() >= 2);
    assert_eq!(segments["pages_created"], 0);
}

#[test]
fn a_seed_gives_the_same_replay_again() {
    let trace = testdata("resnet50_prefetch_multiscale.csv.gz");
    let of = |seed: &str| {
        let arguments = [
            "replay",
            "--json",
            "--verify",
            "--seed",
            seed,
            trace.to_str().unwrap(),
        ];
        let mut json = run(&arguments).json();
        json.as_object_mut()
            .unwrap()
            .remove("nanoseconds_per_operation");
        for rung in json["rungs"].as_array_mut().unwrap() {
            rung.as_object_mut().unwrap().remove("microseconds");
        }
        json
    };
    assert_eq!(of("7"), of("7"));
}

#[test]
fn devices_are_listed_only_if_there_are_any() {
    let done = run(&["devices"]);
    assert_eq!((done.status, &*done.out), (0, "no device\n"));
    assert!(done.err.contains("hint: LASTREF_SIM=8GiB"), "{done:?}");
    assert_eq!(
        run(&["devices", "--json"]).json(),
        serde_json::json!({"devices": []})
    );

    let simulated = |arguments: &[&str], setting: &str| {
        Done::from(
            lastref(arguments)
                .env("LASTREF_SIM", setting)
                .output()
                .unwrap(),
        )
    };
    let done = simulated(&["devices", "--json"], "2x8GiB");
    assert_eq!(done.status, 0);
    assert!(
        done.err.contains("simulated"),
        "it must be plain which device is used: {done:?}"
    );
    let json = done.json();
    let devices = json["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for (index, device) in devices.iter().enumerate() {
        assert_eq!(device["device"], format!("cuda:{index}"));
        assert_eq!(device["simulated"], true);
        assert_eq!(device["total_bytes"], 8_u64 << 30);
        assert_eq!(device["free_bytes"], 8_u64 << 30);
        assert_eq!(device["page_bytes"], 2 << 20);
    }
    let done = simulated(&["devices"], "11GB");
    assert!(
        done.out.contains("cuda:0  lastref simulated GPU"),
        "{done:?}"
    );
    for command in ["devices", "demo"] {
        simulated(&[command], "8").refused("LASTREF_SIM=\"8\"");
        simulated(&[command], "lots").refused("LASTREF_SIM=\"lots\"");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = lastref(&["demo"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Reads one byte and closes the pipe, as `head` does.
    child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let done = Done::from(child.wait_with_output().unwrap());
    assert_eq!(done.status, 0, "{done:?}");
    assert!(
        !done.err.contains("error") && !done.err.contains("panicked"),
        "{done:?}"
    );
}

#[test]
fn a_full_disk_is_an_error() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = lastref(&["devices"])
        .env("LASTREF_SIM", "8GiB")
        .stdout(full)
        .output()
        .unwrap();
    let done = Done::from(output);
    assert_eq!(done.status, 2, "{done:?}");
    assert!(
        done.err
            .contains("cannot write to standard output: No space left"),
        "{done:?}"
    );
}

#[test]
fn files_and_pipes_read_the_same() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plain.csv");
    let mut text = HEADER.to_owned();
    for id in 0..100 {
        writeln!(text, "alloc,{id},{},0,p,l", id * 1000).unwrap();
    }
    File::create(&path)
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let mut json = run(&["replay", "--json", path.to_str().unwrap()]).json();
    let mut piped = run_with(&["replay", "--json", "-"], text.as_bytes()).json();
    for json in [&mut json, &mut piped] {
        assert!(
            json.as_object_mut()
                .unwrap()
                .remove("nanoseconds_per_operation")
                .is_some()
        );
    }
    assert_eq!(json, piped);
    assert_eq!(json["operations"], 100);
}

mod demo {
    use super::*;

    fn demo(setting: Option<&str>) -> Done {
        let mut command = lastref(&["demo"]);
        if let Some(setting) = setting {
            command.env("LASTREF_SIM", setting);
        }
        let done = Done::from(command.output().unwrap());
        assert_eq!(done.status, 0, "{done:?}");
        done
    }

    /// What is shown after `source`, up to the next source.
    #[track_caller]
    fn after<'a>(out: &'a str, source: &str) -> &'a str {
        let start = format!("> {source}\n");
        let rest = out
            .split_once(&start)
            .unwrap_or_else(|| panic!("no {source:?} in {out}"))
            .1;
        rest.split_once("\n\n").map_or(rest, |(step, _)| step)
    }

    #[test]
    fn the_reassigned_tensor_is_freed_then_cached_then_given_back() {
        let out = demo(None).out;
        let moved = after(&out, "if cuda::is_available() { t1 = t1.cuda()?; }");
        assert!(moved.contains("on cuda:0"), "{moved}");
        assert!(
            moved.contains("allocated 512 B  cached 2.00 MiB"),
            "{moved}"
        );
        let reassigned = after(&out, "t1 = Tensor::empty([4, 5])?;");
        assert!(reassigned.contains("t1 → 80 B on cpu"), "{reassigned}");
        assert!(reassigned.contains("freed: 80 B on cuda:0"), "{reassigned}");
        let memory = "allocated 0 B  cached 2.00 MiB  free 8.00 GiB  driver calls 0";
        assert!(reassigned.contains(memory), "{reassigned}");
        let emptied = after(&out, "cuda::empty_cache()?;");
        let memory = "allocated 0 B  cached 0 B  free 8.00 GiB  driver calls 1";
        assert!(emptied.contains(memory), "{emptied}");
        let printed: Vec<_> = out
            .lines()
            .map(str::trim)
            .filter(|line| ["true", "false"].contains(line))
            .collect();
        assert_eq!(printed, ["true", "false"]);
    }

    #[test]
    fn a_view_keeps_its_storage_and_the_next_allocation_is_a_hit() {
        let out = demo(None).out;
        let viewed = after(&out, "let b = a.narrow(0, 0, 10)?;");
        assert_eq!(viewed.matches("2 references").count(), 2, "{viewed}");
        let kept = after(&out, "a = Tensor::empty([4, 5])?;");
        assert!(
            kept.contains("allocated 2.00 GiB") && !kept.contains("\n    freed:"),
            "{kept}"
        );
        let freed = after(&out, "drop(b);");
        assert!(freed.contains("freed: 2.00 GiB"), "{freed}");
        assert!(freed.contains("allocated 0 B  cached 2.00 GiB"), "{freed}");
        let hit = after(&out, "a = Tensor::empty_with([2 * eighth], gpu)?;");
        assert!(
            hit.contains("allocated 2.00 GiB") && hit.contains("driver calls 0"),
            "{hit}"
        );
    }

    #[test]
    fn the_ladder_puts_the_cache_to_use_and_then_the_error_adds_up() {
        let out = demo(None).out;
        let full = after(&out, "let d = Tensor::empty_with([5 * eighth], gpu)?;");
        assert!(full.contains("d → 5.00 GiB on cuda:0"), "{full}");
        assert!(
            full.contains("ladder: move idle pages to where they are needed, once"),
            "{full}"
        );
        let error = after(&out, "Tensor::empty_with([4 * eighth], gpu)");
        assert!(error.contains("out of memory on device 0"), "{error}");
        let amount = |name: &str| {
            let line = error
                .lines()
                .find(|line| line.trim().starts_with(name))
                .unwrap();
            let mut words = line.split_whitespace().skip(1);
            let number: f64 = words.next().unwrap().parse().unwrap();
            number
                * match words.next() {
                    Some("GiB") => 1.0,
                    Some("MiB") => 1.0 / 1024.0,
                    _ => 0.0,
                }
        };
        let parts = ["allocated", "pending", "cached", "other", "free"];
        let sum: f64 = parts.into_iter().map(amount).sum();
        assert!((sum - amount("capacity")).abs() < 0.03, "{error}");
    }

    #[test]
    fn a_dead_cycle_stays_until_the_collector_runs_and_then_nothing_is_left() {
        let out = demo(None).out;
        let dead = after(&out, "drop(trainer);");
        assert!(dead.contains("allocated 2.00 GiB"), "{dead}");
        assert!(!dead.contains("freed:"), "{dead}");
        let collected = after(&out, "let report = gc::collect(2)?;");
        assert!(
            collected.contains("Dead objects found: 1. They held 2.00 GiB."),
            "{collected}"
        );
        assert!(
            collected.contains("freed: 2.00 GiB on cuda:0"),
            "{collected}"
        );
        let (_, rest) = out.split_once("let report = gc::collect(2)?;").unwrap();
        let emptied = after(rest, "cuda::empty_cache()?;");
        assert!(emptied.contains("allocated 0 B  cached 0 B"), "{emptied}");
    }

    #[test]
    fn it_says_which_device_it_is_and_replays_a_real_program() {
        let done = demo(None);
        assert!(done.err.contains("simulated"), "{done:?}");
        assert!(
            done.out
                .contains("Device: lastref simulated GPU (8.00 GiB)")
        );
        assert!(done.out.contains("There is no GPU here"));
        assert!(
            done.out.contains("verified                   yes"),
            "{}",
            done.out
        );
        let asked = demo(Some("64MiB")).out;
        assert!(asked.contains("as LASTREF_SIM asks"), "{asked}");
    }

    #[test]
    fn it_fits_80_columns_and_has_no_colour_in_a_pipe() {
        for setting in [None, Some("80GiB"), Some("16MiB")] {
            for line in demo(setting).out.lines() {
                assert!(
                    line.chars().count() <= 80,
                    "{} columns: {line}",
                    line.chars().count()
                );
                assert!(!line.contains('\u{1b}'), "{line}");
                assert_eq!(line, line.trim_end());
            }
        }
    }

    #[test]
    fn a_device_too_small_for_it_is_an_error() {
        let output = lastref(&["demo"])
            .env("LASTREF_SIM", "10MiB")
            .output()
            .unwrap();
        let done = Done::from(output);
        assert_eq!(done.status, 1, "{done:?}");
        let text = "needs 16.00 MiB free on the device, 10.00 MiB is";
        assert!(done.err.contains(text), "{done:?}");
    }

    #[test]
    fn colour_can_be_asked_for_and_refused() {
        let with = |name: &str| {
            let output = lastref(&["demo"]).env(name, "1").output().unwrap();
            Done::from(output).out.contains('\u{1b}')
        };
        assert!(with("CLICOLOR_FORCE"));
        assert!(!with("NO_COLOR"));
    }
}

#[test]
fn a_replay_runs_under_the_allocators_settings() {
    let with = |settings: &str| {
        let trace = testdata("resnet50_train.csv.gz");
        let mut command = lastref(&["replay", trace.to_str().unwrap()]);
        command.env("LASTREF_ALLOC_CONF", settings);
        Done::from(command.output().unwrap())
    };
    assert_eq!(with("").status, 0);
    let refused =
        "LASTREF_ALLOC_CONF: there is no setting \"nonsense\"; valid are expandable_segments,";
    with("nonsense:1").refused(refused);
    let limited = with("memory_limit_mb:0");
    assert_eq!(limited.status, 1, "{limited:?}");
    assert!(limited.err.contains("limit"), "{limited:?}");
}

fn snapshot(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../lastref-snapshot/testdata")
        .join(name)
}

/// The figures of PyTorch 2.15 itself, which `cargo xtask test --torch` compares with on all traces.
#[test]
fn pytorchs_policy_replays_as_pytorch_does() {
    for (trace, settings, reserved, allocations) in [
        ("resnet50_train", "", 7_537_164_288_u64, 141),
        (
            "resnet50_train",
            ":expandable_segments:True",
            5_819_596_800,
            127,
        ),
        (
            "resnet50_train",
            ":roundup_power2_divisions:8",
            7_879_000_064,
            141,
        ),
        ("resnet50_prefetch_multiscale", "", 13_056_868_352, 185),
        (
            "resnet50_prefetch_multiscale",
            ":max_split_size_mb:128",
            15_044_968_448,
            203,
        ),
    ] {
        let trace = testdata(&format!("{trace}.csv.gz"));
        let policy = format!("pytorch{settings}");
        let done = run(&[
            "replay",
            "--json",
            "--policy",
            &policy,
            trace.to_str().unwrap(),
        ]);
        assert_eq!((done.status, &*done.err), (0, ""));
        let json = done.json();
        assert_eq!(json["peak_reserved_bytes"], reserved, "{policy}");
        assert_eq!(json["device_allocations"], allocations, "{policy}");
        let own = run(&["replay", "--json", trace.to_str().unwrap()]).json();
        // What only lastref has, such as pages, is not there.
        let own = keys(&own);
        assert!(keys(&json).iter().all(|key| own.contains(key)), "{json}");
    }
}

#[test]
fn pytorchs_policy_runs_out_of_memory_one_page_below_its_smallest_device() {
    let trace = testdata("resnet50_train.csv.gz");
    let trace = trace.to_str().unwrap();
    let policy = "pytorch:expandable_segments:True";
    let done = run(&["replay", trace, "--json", "--smallest", "--policy", policy]);
    assert_eq!(done.status, 0, "{done:?}");
    let smallest = done.json()["smallest_bytes"].as_u64().unwrap();
    let with = |bytes: u64| {
        let capacity = bytes.to_string();
        run(&["replay", trace, "--capacity", &capacity, "--policy", policy])
    };
    let enough = with(smallest);
    assert_eq!(enough.status, 0, "{enough:?}");
    assert!(
        enough
            .out
            .contains("PyTorch's policy, expandable_segments:True"),
        "{enough:?}"
    );
    let less = with(smallest - (2 << 20));
    assert_eq!(less.status, 1, "{less:?}");
    assert!(
        less.err
            .contains("out of memory on device 0 (PyTorch's policy)"),
        "{less:?}"
    );
    assert!(
        less.err.contains("give cached memory back to the device"),
        "{less:?}"
    );
}

#[test]
fn policies_that_do_not_exist_are_refused() {
    let trace = testdata("resnet50_train.csv.gz");
    let trace = trace.to_str().unwrap();
    for (arguments, message) in [
        (
            &["--policy", "jax"][..],
            "expected lastref, pytorch or pytorch:SETTINGS",
        ),
        (&["--policy", "pytorch:max_split_size_mb:1"], "too small"),
        (
            &["--policy", "pytorch:expandable"],
            "expected a key and a colon",
        ),
        (&["--policy", "pytorch", "--verify"], "cannot be used with"),
        (
            &["--policy", "pytorch", "--segments"],
            "cannot be used with",
        ),
    ] {
        run(&[&["replay", trace], arguments].concat()).refused(message);
    }
}

#[test]
fn advice_names_a_setting_and_the_line_to_paste() {
    let trace = testdata("resnet50_train.csv.gz");
    let done = run(&["advise", "--json", trace.to_str().unwrap()]);
    assert_eq!((done.status, &*done.err), (0, ""));
    let json = done.json();
    assert_eq!(keys(&json), ["files", "recommended"]);
    let file = &json["files"][0];
    let tried = file["tried"].as_array().unwrap();
    let of = |settings: &str| {
        let found = tried.iter().find(|one| one["settings"] == settings);
        found.unwrap_or_else(|| panic!("{settings} was not tried"))
    };
    assert_eq!(of("")["peak_reserved_bytes"], 7_537_164_288_u64);
    assert_eq!(of("expandable_segments:True")["device_allocations"], 127);
    let own = tried.last().unwrap();
    assert_eq!(
        (&own["policy"], &own["completes"]),
        (&"lastref".into(), &true.into())
    );
    for one in tried {
        let bytes = |key: &str| one[key].as_u64().unwrap();
        assert!(bytes("smallest_bytes") >= 5_762_142_352, "{one}");
        assert!(
            bytes("smallest_bytes") <= bytes("peak_reserved_bytes").next_multiple_of(2 << 20),
            "{one}"
        );
    }
    let line = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
    assert_eq!(json["recommended"]["line"], line);
    assert_eq!(file["recommended"], json["recommended"]);

    let done = run(&[
        "advise",
        trace.to_str().unwrap(),
        "--with",
        "max_split_size_mb:48",
    ]);
    assert_eq!((done.status, &*done.err), (0, ""));
    for text in [
        line,
        "> expandable_segments:True",
        "max_split_size_mb:48",
        "lastref's own allocator",
        "5.42 GiB reserved at the peak instead of 7.02 GiB",
        "record_stream",
    ] {
        assert!(done.out.contains(text), "{text:?} is not in {done:?}");
    }
}

/// What the snapshot of a real GPU shows: 61 segments of 1,897,922,560 bytes in all, and its history
/// begins with the program.
#[test]
fn advice_on_a_snapshot_starts_from_what_the_gpu_did() {
    let federated = snapshot("federated.pickle.gz");
    let done = run(&["advise", "--json", federated.to_str().unwrap()]);
    assert_eq!((done.status, &*done.err), (0, ""));
    let default = done.json()["files"][0]["tried"][0].clone();
    assert_eq!(default["settings"], "");
    assert_eq!(default["peak_reserved_bytes"], 1_897_922_560_u64);
    assert_eq!(default["device_allocations"], 61);

    let done = run(&[
        "advise",
        snapshot("transformer-training.pickle.gz").to_str().unwrap(),
    ]);
    assert_eq!(done.status, 0, "{done:?}");
    assert!(
        done.out
            .contains("664 blocks of 4.75 GiB were there already"),
        "{done:?}"
    );

    let replayed = run(&[
        "replay",
        "--json",
        "--policy",
        "pytorch",
        federated.to_str().unwrap(),
    ]);
    assert_eq!(replayed.json()["peak_reserved_bytes"], 1_897_922_560_u64);
}

#[test]
fn advice_for_many_files_is_one_setting_and_for_a_device_one_that_completes() {
    let [one, other] = ["resnet50_train", "resnet50_prefetch_multiscale"]
        .map(|name| testdata(&format!("{name}.csv.gz")));
    let done = run(&["advise", one.to_str().unwrap(), other.to_str().unwrap()]);
    assert_eq!(done.status, 0, "{done:?}");
    assert!(
        done.out
            .contains("for all 2 files\n  PYTORCH_CUDA_ALLOC_CONF=expandable"),
        "{done:?}"
    );

    // Between the smallest devices of expandable segments and of the defaults.
    let done = run(&["advise", one.to_str().unwrap(), "--capacity", "5570MiB"]);
    assert_eq!(done.status, 0, "{done:?}");
    assert!(
        done.out.contains("it completes, and by default does not"),
        "{done:?}"
    );
    assert!(done.out.contains("out of memory"), "{done:?}");

    let done = run(&["advise", one.to_str().unwrap(), "--capacity", "5GiB"]);
    assert_eq!(done.status, 1, "{done:?}");
    assert!(
        done.err
            .contains("no setting of PyTorch's allocator completes on a device of 5.00 GiB"),
        "{done:?}"
    );
}

#[test]
fn advice_on_what_has_no_history_is_refused() {
    run(&["advise", snapshot("attention.pickle.gz").to_str().unwrap()])
        .refused("the snapshot has no history");
    run(&["advise", "no-such-file"]).refused("cannot read no-such-file");
    run(&["advise", "Cargo.toml"]).refused("neither an allocation trace nor a memory snapshot");
    run(&["advise", "x.csv", "--with", "max_split_size:1"]).refused("unknown key");
    run(&["advise"]).refused("FILE");
    run_with(&["advise", "-"], HEADER.replace("op", "up").as_bytes())
        .refused("expected the header");
}

#[test]
fn the_guide_quotes_what_advice_prints() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/advise.md");
    let guide = fs::read_to_string(guide).unwrap();
    let (_, quoted) = guide.split_once("<!-- advise -->\n```text\n").unwrap();
    let (quoted, _) = quoted.split_once("```").unwrap();
    let trace = testdata("resnet50_prefetch_multiscale.csv.gz");
    let done = run(&["advise", trace.to_str().unwrap()]);
    let mut printed = done.out.lines();
    for line in quoted.lines() {
        assert!(
            printed.any(|other| other == line),
            "{line:?} is not, or not there, in {done:?}"
        );
    }
}
