//! The commands that read memory snapshots, as their users meet them.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

mod common;

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use common::{run, snapshot, text};

/// Compares with the file of this name; LASTREF_BLESS=1 writes it.
#[track_caller]
fn golden(name: &str, found: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/explain");
    let path: PathBuf = folder.join(name);
    if std::env::var_os("LASTREF_BLESS").is_some() {
        fs::create_dir_all(folder).unwrap();
        fs::write(&path, found).unwrap();
    }
    let wanted = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        found,
        wanted,
        "{}: LASTREF_BLESS=1 writes it anew",
        path.display()
    );
}

/// Failures made with the real PyTorch, and a word of the cause that its makers know.
const FAILURES: [(&str, &str); 6] = [
    ("dead-cycles", "dead reference cycles"),
    ("fragmentation", "fragmentation"),
    ("memory-fraction", "memory limit"),
    ("private-pool", "private pool"),
    ("other-stream", "another stream"),
    ("too-large", "too large"),
];

#[test]
fn the_true_cause_of_a_failure_is_in_the_first_three_lines() {
    for (name, cause) in FAILURES {
        let file = snapshot(&format!("oom/{name}.pickle.gz"));
        let found = text(&["explain", &file]);
        let start: Vec<_> = found.lines().take(3).collect();
        assert!(
            start[1].starts_with("cause: ") && start[1].contains(cause),
            "{found}"
        );
        for (_, other) in FAILURES.iter().filter(|(other, _)| *other != name) {
            assert!(
                !start.join("\n").contains(other),
                "{name} is not {other}: {found}"
            );
        }
        assert!(start[2].starts_with("helps: "), "{found}");
        golden(&format!("{name}.txt"), &found);
    }
}

#[test]
fn what_is_said_of_real_snapshots_is_what_it_was() {
    for name in [
        "no-frames",
        "three-pools",
        "federated",
        "kv-cache",
        "attention",
        "old-format-oom",
        "old-format-1.3b",
        "small-inference",
        "mixed-precision-forward",
        "transformer-training",
    ] {
        let file = snapshot(&format!("{name}.pickle.gz"));
        golden(&format!("{name}.txt"), &text(&["explain", &file]));
    }
}

#[test]
fn explain_says_the_same_as_json() {
    let found = text(&[
        "explain",
        "--json",
        &snapshot("oom/fragmentation.pickle.gz"),
        "--capacity",
        "1GiB",
    ]);
    let found: Value = serde_json::from_str(&found).unwrap();
    let device = &found["devices"][0];
    let mib = |bytes: &Value| bytes.as_u64().unwrap() >> 20;
    assert_eq!(device["moment"], "out_of_memory");
    assert_eq!(device["failure"]["verdict"]["cause"], "fragmentation");
    assert_eq!(mib(&device["failure"]["verdict"]["largest_hole_bytes"]), 16);
    assert_eq!(mib(&device["failure"]["requested_bytes"]), 120);
    let memory = &device["memory"];
    let parts = [
        "live_bytes",
        "pending_bytes",
        "cached_bytes",
        "fragmented_bytes",
        "reserved_bytes",
        "device_free_bytes",
        "outside_bytes",
    ];
    assert_eq!(
        parts.map(|part| mib(&memory[part])),
        [688, 0, 0, 272, 960, 64, 0]
    );
    assert_eq!(mib(&device["pins"][0]["free_bytes"]), 272);
    assert_eq!(device["contradictions"], 0);
    assert_eq!(
        found["summary"][0][1]
            .as_str()
            .unwrap()
            .split(':')
            .nth(1)
            .unwrap(),
        " fragmentation"
    );
}

#[test]
fn stats_has_these_keys_and_no_others() {
    let found = text(&["stats", "--json", &snapshot("three-pools.pickle.gz")]);
    let found: Value = serde_json::from_str(&found).unwrap();
    let keys = |value: &Value| -> Vec<String> {
        let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(
        keys(&found),
        [
            "devices", "history", "pools", "problems", "settings", "streams"
        ]
    );
    assert_eq!(
        keys(&found["devices"]["0"]),
        [
            "blocks_by_state",
            "bytes_by_state",
            "largest_inactive_bytes",
            "reserved_bytes",
            "segments",
            "wholly_free_bytes",
            "wholly_free_segments"
        ]
    );
    assert_eq!(found["pools"], json!([[0, 0], [0, 1], [0, 2]]));
    assert_eq!(found["settings"]["max_split_size"], -1);

    let found = text(&["stats", "--json", &snapshot("oom/too-large.pickle.gz")]);
    let found: Value = serde_json::from_str(&found).unwrap();
    let history = &found["history"][0];
    assert_eq!(
        keys(history),
        [
            "active_at_end_bytes",
            "active_at_start_bytes",
            "device",
            "entries",
            "out_of_memory",
            "peak_active_bytes",
            "peak_entry"
        ]
    );
    assert_eq!(history["out_of_memory"][0]["requested_bytes"], 1800 << 20);
}

#[test]
fn a_trace_is_read_as_a_history() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/resnet50_train.csv.gz");
    let trace = trace.to_str().unwrap();
    let found: Value = serde_json::from_str(&text(&["stats", "--json", trace])).unwrap();
    let history = &found["history"][0];
    assert_eq!(
        (&history["entries"], &history["active_at_start_bytes"]),
        (&json!(9846), &json!(0))
    );
    let replay: Value = serde_json::from_str(&text(&["replay", "--json", trace])).unwrap();
    assert_eq!(history["peak_active_bytes"], replay["peak_live_bytes"]);
    let found: Value = serde_json::from_str(&text(&["explain", "--json", trace])).unwrap();
    assert_eq!(found["devices"][0]["memory"]["pending_bytes"], 0);
}

#[test]
fn diff_says_what_grew() {
    let (before, after) = (
        snapshot("oom/memory-fraction.pickle.gz"),
        snapshot("oom/fragmentation.pickle.gz"),
    );
    let found: Value = serde_json::from_str(&text(&["diff", "--json", &before, &after])).unwrap();
    assert_eq!(found["growth_bytes"], 288 << 20);
    let most = &found["changes"][0];
    assert!(most["bytes_after"].as_u64() > most["bytes_before"].as_u64());
    let found = text(&["diff", &after, &before]);
    assert!(found.starts_with("-288.00 MiB in all"), "{found}");
    assert_eq!(text(&["diff", &before, &before]).lines().count(), 1);
}

#[test]
fn the_odd_rank_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..12 {
        let from = if rank == 10 {
            "fragmentation"
        } else {
            "memory-fraction"
        };
        let to = folder.path().join(format!("rank{rank}.pickle.gz"));
        fs::copy(snapshot(&format!("oom/{from}.pickle.gz")), to).unwrap();
    }
    let path = folder.path().to_str().unwrap();
    let found = text(&["explain", path]);
    let first = found.lines().next().unwrap();
    assert!(
        first.starts_with("1 of 12 ranks differs: rank 10 (cause fragmentation where most have memory limit; live 688.00 MiB"),
        "{found}"
    );
    assert!(first.contains("400.00 MiB at full (train.py:7)"), "{found}");
    assert!(first.ends_with("where the median rank has 0 B)"), "{found}");
    let lines = text(&["explain", "--json", path]);
    let ranks: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(ranks.len(), 12);
    assert_eq!(ranks[10]["odd"], true);
    assert_eq!(ranks[9]["odd"], false);
    let table = text(&["explain", "--csv", path]);
    assert_eq!(table.lines().count(), 13);
    assert!(
        table.starts_with("file,kind,host,rank,device,moment,time,out_of_memory,verdict,cause,"),
        "{table}"
    );
}

#[test]
fn export_writes_what_other_tools_read() {
    let file = snapshot("oom/fragmentation.pickle.gz");
    let export = |format: &str| text(&["export", &file, "--format", format]);

    let trace: Value = serde_json::from_str(&export("chrome")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let failures = events.iter().filter(|event| event["ph"] == "i");
    let names: Vec<_> = failures
        .map(|event| event["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["out of memory: 120.00 MiB"]);
    let last = events.iter().rfind(|event| event["ph"] == "C").unwrap();
    assert_eq!(last["args"]["active"], 688 << 20);
    assert_eq!(last["args"]["reserved"], 960 << 20);

    let table = export("csv");
    let entries = lastref_snapshot::Dump::read(fs::File::open(&file).unwrap()).unwrap();
    assert_eq!(table.lines().count(), entries.entries().len() + 1);
    let failed = table.lines().find(|line| line.contains(",oom,")).unwrap();
    assert!(
        failed.contains(&format!(",{},{},", 64 << 20, 120 << 20)),
        "{failed}"
    );

    let folded = export("folded");
    let bytes = folded
        .lines()
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap());
    assert_eq!(bytes.sum::<u64>(), 688 << 20);
    assert!(
        folded.contains(";<module> (train.py:27);activations (train.py:23);"),
        "{folded}"
    );

    let drawn = export("flamegraph");
    assert!(drawn.starts_with("<svg ") && drawn.trim_end().ends_with("</svg>"));
    assert!(
        drawn.contains("<title>activations (train.py:23): 288.00 MiB, 41.9 %</title>"),
        "{drawn}"
    );
    assert!(!drawn.contains("<listcomp>"), "escaped");

    let timeline = export("timeline");
    assert!(timeline.starts_with("<svg ") && timeline.trim_end().ends_with("</svg>"));
    assert!(
        timeline.contains("device 0: 960.00 MiB in use at the peak"),
        "{timeline}"
    );
    assert!(
        timeline.contains("960.00 MiB reserved at most"),
        "{timeline}"
    );
    assert!(
        timeline.contains("class=\"failed\""),
        "the failure is marked"
    );
    assert!(timeline.contains("warm_up (train.py:20)"), "{timeline}");
    assert!(!timeline.contains("<listcomp>"), "escaped");

    let folder = tempfile::tempdir().unwrap();
    let again = folder.path().join("again.pickle");
    let again = again.to_str().unwrap();
    assert_eq!(
        text(&["export", &file, "--format", "pickle", "-o", again]),
        ""
    );
    assert_eq!(
        text(&["stats", "--json", again]),
        text(&["stats", "--json", &file])
    );
}

#[test]
fn bad_input_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cut.pickle");
    let whole = fs::read(snapshot("forms/protocol-4.pickle")).unwrap();
    fs::write(&file, &whole[..500]).unwrap();
    let file = file.to_str().unwrap();
    for command in ["stats", "explain"] {
        let done = run(&[command, file]);
        assert_eq!(done.status.code(), Some(2));
        assert_eq!(done.stdout, b"");
        let message = String::from_utf8(done.stderr).unwrap();
        assert!(message.contains("byte 500: the file is cut"), "{message}");
    }
    let empty = folder.path().join("ranks");
    fs::create_dir(&empty).unwrap();
    for (arguments, message) in [
        (vec!["diff", file, file], "is cut"),
        (vec!["explain", empty.to_str().unwrap()], "has no .pickle"),
        (vec!["stats", "no-such-file"], "No such file"),
    ] {
        let done = run(&arguments);
        assert_eq!(done.status.code(), Some(2), "{arguments:?}");
        let found = String::from_utf8(done.stderr).unwrap();
        assert!(found.contains(message), "{found}");
    }
}

/// A file of one byte after the other that each open a container would take hundreds of times its
/// size; the limits keep it below.
#[test]
fn hostile_files_take_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hostile.pickle");
    for bytes in [
        vec![b']'; 8 << 20],
        vec![b'N'; 8 << 20],
        [b"N".to_vec(), vec![0x94; 8 << 20]].concat(),
    ] {
        fs::write(&file, bytes).unwrap();
        let limit_kib = (lastref_snapshot::read::BYTES_AT_LEAST
            + (8 << 20) * lastref_snapshot::read::BYTES_PER_BYTE)
            >> 10;
        let done = Command::new("sh")
            .args([
                "-c",
                &format!("ulimit -v {limit_kib}; exec \"$0\" stats \"$1\""),
            ])
            .args([env!("CARGO_BIN_EXE_lastref"), file.to_str().unwrap()])
            .output()
            .unwrap();
        assert_eq!(done.status.code(), Some(2), "{done:?}");
    }
}

#[test]
fn a_reader_that_goes_is_no_failure() {
    let file = snapshot("transformer-training.pickle.gz");
    for format in ["csv", "chrome", "pickle"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lastref"));
        let command = command.args(["export", &file, "--format", format]);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut start = [0; 6];
        child.stdout.take().unwrap().read_exact(&mut start).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(
            done.status.success() && done.stderr.is_empty(),
            "{format}: {done:?}"
        );
    }
}

#[test]
fn files_of_other_kinds_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| -> String {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let table = write("table.csv", "name,loss,step\na,1,2\n");
    let huge = write(
        "huge.csv",
        &format!("op,id,bytes,stream,phase,label\nalloc,1,{},0,,\n", u64::MAX),
    );
    let folder = folder.path().to_str().unwrap();
    for (arguments, reason) in [
        (
            ["stats", &table],
            "it is a table, but not with the header op,id,bytes",
        ),
        (
            ["replay", &table],
            "it is a table, but not with the header op,id,bytes",
        ),
        (["stats", folder], "Is a directory"),
        (
            ["advise", &huge],
            "16.00 EiB are in use at its peak, no device has more than 16.00 TiB",
        ),
    ] {
        let done = run(&arguments);
        assert_eq!(done.status.code(), Some(2), "{done:?}");
        let error = String::from_utf8(done.stderr).unwrap();
        assert!(
            error.starts_with("error: ") && error.contains(reason),
            "{error}"
        );
    }
}
