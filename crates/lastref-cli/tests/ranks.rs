//! `lastref explain FOLDER`: the ranks of a job, from reports and snapshots, as its users meet it.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use common::{run, snapshot, text};

const FAILED: &str = "oom-node_b-2-23102.json";

fn report(name: &str) -> Value {
    let path = snapshot(&format!("reports/{name}"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A folder with the four reports.
fn job() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(snapshot("reports")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "json") {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    folder
}

fn explain(folder: &Path, more: &[&str]) -> Output {
    let mut arguments = vec!["explain", folder.to_str().unwrap()];
    arguments.extend(more);
    run(&arguments)
}

fn json_lines(done: &Output) -> Vec<Value> {
    let lines = std::str::from_utf8(&done.stdout).unwrap().lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[track_caller]
fn rows(folder: &Path) -> Vec<Value> {
    let done = explain(folder, &["--json"]);
    assert!(done.status.success(), "{done:?}");
    json_lines(&done)
}

#[test]
fn the_rank_that_keeps_its_graphs_is_named_from_reports() {
    let folder = snapshot("reports");
    let found = text(&["explain", &folder]);
    let first = found.lines().next().unwrap();
    for words in [
        "1 of 4 ranks differs: rank 2 on node-b (out of memory; live 1.31 GiB where the median is 704.12 MiB; ",
        "512.00 MiB at variable `total_loss` in `validate` (job.py:21) → the autograd graph of `total_loss`",
        "where the median rank has 0 B)",
    ] {
        assert!(first.contains(words), "{found}");
    }
    let marked: Vec<_> = found.lines().filter(|line| line.starts_with('!')).collect();
    assert!(marked.len() == 1 && marked[0].contains("node-b"), "{found}");
    assert!(
        found.contains("  helps: keep `x.detach()` or `x.item()`"),
        "{found}"
    );

    let rows = rows(Path::new(&folder));
    let of = |key: &str| -> Vec<Value> { rows.iter().map(|row| row[key].clone()).collect() };
    assert_eq!(of("rank"), [0, 1, 2, 3]);
    assert_eq!(of("host"), ["node-a", "node-a", "node-b", "node-b"]);
    assert_eq!(of("out_of_memory"), [false, false, true, false]);
    assert_eq!(of("odd"), [false, false, true, false]);
    assert_eq!(of("device"), [0, 0, 0, 0]);
    assert_eq!(rows[2]["verdict"], "live_memory");
    assert_eq!(rows[2]["requested_bytes"], 64 << 20);
    assert_eq!(rows[2]["holder_bytes"], 512 << 20);
    assert_eq!(rows[2]["holder_kind"], "autograd");
    assert_eq!(rows[0]["cause"], Value::Null);
    for row in &rows {
        let sum: u64 = ["live", "pending", "cached", "fragmented"]
            .iter()
            .map(|part| row[format!("{part}_bytes")].as_u64().unwrap())
            .sum();
        assert_eq!(row["reserved_bytes"], sum);
    }
}

#[test]
fn one_report_is_explained_as_a_snapshot_is() {
    let file = snapshot(&format!("reports/{FAILED}"));
    let found = text(&["explain", &file]);
    let lines: Vec<_> = found.lines().collect();
    assert_eq!(
        lines[0],
        "out of memory on device 0: 64.00 MiB asked for, 54.00 MiB free on the device"
    );
    assert!(
        lines[1].starts_with("cause: ") && lines[1].contains("`total_loss`"),
        "{found}"
    );
    assert!(lines[2].starts_with("helps: keep `x.detach()`"), "{found}");
    assert!(!found.contains("what the stacks suggest"), "{found}");
    let found: Value = serde_json::from_str(&text(&["explain", "--json", &file])).unwrap();
    assert_eq!(found["devices"][0]["holders"][0]["blocks"], 8);
}

#[test]
fn reports_and_snapshots_are_one_table() {
    let folder = job();
    let put = |name: &str, from: &str| fs::copy(snapshot(from), folder.path().join(name)).unwrap();
    // Rank 2 has a report already; ranks 5 and 6 have none, and nothing tells of 4.
    put("rank2.pickle.gz", "oom/memory-fraction.pickle.gz");
    put("rank5.pickle.gz", "oom/memory-fraction.pickle.gz");
    put("rank6.pickle.gz", "oom/fragmentation.pickle.gz");
    let rows = rows(folder.path());
    let of = |key: &str| -> Vec<Value> { rows.iter().map(|row| row[key].clone()).collect() };
    assert_eq!(of("rank"), [0, 1, 2, 3, 4, 5, 6]);
    let kinds = json!([
        "report", "report", "report", "report", null, "snapshot", "snapshot"
    ]);
    assert_eq!(json!(of("kind")), kinds);
    assert_eq!(rows[2]["other_files"], 1);
    assert_eq!(rows[4]["moment"], "missing");
    assert_eq!(rows[4]["live_bytes"], Value::Null);
    let keys = |row: &Value| -> Vec<String> { row.as_object().unwrap().keys().cloned().collect() };
    for row in &rows {
        assert_eq!(keys(row), keys(&rows[0]), "one schema for every row");
    }
    let found = String::from_utf8(explain(folder.path(), &[]).stdout).unwrap();
    assert!(found.contains("\nrank 4: no file tells of it\n"), "{found}");
    assert!(
        found.contains("1 more files tell of these ranks"),
        "{found}"
    );
}

#[test]
fn the_first_to_die_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut failed = report(FAILED);
    for (rank, time) in [(0, 1000.5), (1, 996.25), (2, 1003.0)] {
        failed["rank"] = json!(rank);
        failed["time"] = json!(time);
        let path = folder.path().join(format!("oom-n-{rank}-1.json"));
        fs::write(path, failed.to_string()).unwrap();
    }
    let found = String::from_utf8(explain(folder.path(), &[]).stdout).unwrap();
    assert!(
        found.starts_with(
            "1 of 3 ranks differs: rank 1 on node-b (the first to run out of memory, by 4.2 s)"
        ),
        "{found}"
    );
}

#[test]
fn a_rank_without_a_launcher_is_told_by_its_files_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut failed = report(FAILED);
    failed["rank"] = Value::Null;
    fs::write(
        folder.path().join("oom-node_b-7-1.json"),
        failed.to_string(),
    )
    .unwrap();
    assert_eq!(rows(folder.path()).last().unwrap()["rank"], 7);
}

/// Bad files are told with name and cause, have a row, and lose no other.
#[test]
fn bad_files_are_named_and_lose_no_other() {
    let folder = job();
    let put = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    let whole = fs::read(snapshot(&format!("reports/{FAILED}"))).unwrap();
    put("cut.json", &whole[..3000]);
    put("cut-at-the-start.json", &whole[..30]);
    put("deep.json", "[".repeat(1 << 20).as_bytes());
    put(
        "deep-report.json",
        format!(
            "{{\"schema\": \"lastref.report/1\", \"devices\": {}",
            "[".repeat(1 << 20)
        )
        .as_bytes(),
    );
    put("empty.json", b"");
    put("later.json", br#"{"schema": "lastref.report/2"}"#);
    put(
        "negative.json",
        br#"{"schema": "lastref.report/1", "rank": -1, "devices": [], "storages": []}"#,
    );
    put("no-text.json", b"\xff\xfe\x00");
    put("other.json", br#"{"name": "x"}"#);
    put("rank4.pickle", b"\x80\x04no");
    put("script.pickle", b"cos\nsystem\n(S'true'\ntR.");
    symlink("loop.json", folder.path().join("loop.json")).unwrap();
    symlink("gone.pickle", folder.path().join("rank5.pickle")).unwrap();
    fs::create_dir(folder.path().join("folder.json")).unwrap();
    let pipe = folder.path().join("pipe.json");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    put(".lastref-writing.json", b"{");

    let done = explain(folder.path(), &["--json"]);
    assert_eq!(
        done.status.code(),
        Some(1),
        "the work was done, and not all of it: {done:?}"
    );
    let errors = String::from_utf8(done.stderr.clone()).unwrap();
    for (name, cause) in [
        ("cut.json", "the report is cut: it ends at line "),
        ("cut-at-the-start.json", "cut"),
        ("deep.json", ""),
        ("deep-report.json", "report"),
        ("empty.json", "the file is empty"),
        (
            "later.json",
            "a report of the schema \"lastref.report/2\"; this version reads \"lastref.report/1\"",
        ),
        ("negative.json", "invalid value: integer `-1`"),
        ("no-text.json", ""),
        ("other.json", ""),
        ("rank4.pickle", ""),
        ("script.pickle", "plain data"),
        ("loop.json", "symbolic link"),
        ("rank5.pickle", "No such file"),
        ("folder.json", "it is no file"),
        ("pipe.json", "it is no file"),
    ] {
        let line = errors
            .lines()
            .find(|line| line.starts_with("not read: ") && line.contains(&format!("/{name}: ")));
        assert!(
            line.is_some_and(|line| line.contains(cause)),
            "{name}: {errors}"
        );
    }
    assert!(
        errors.ends_with("cannot be read\n") && errors.contains("error: 15 of the 19 files in "),
        "{errors}"
    );
    let rows = json_lines(&done);
    let unreadable = rows.iter().filter(|row| row["moment"] == "unreadable");
    assert_eq!(unreadable.count(), 15);
    let read: Vec<_> = rows.iter().filter(|row| row["kind"] == "report").collect();
    assert_eq!(read.len(), 4);
    assert!(read[2]["odd"] == true && read[2]["why"].as_str().unwrap().contains("`total_loss`"));
    // A file that cannot be read tells of its rank nevertheless.
    assert!(
        rows.iter()
            .any(|row| row["rank"] == 5 && row["moment"] == "unreadable")
    );
    assert!(rows.iter().all(|row| row["moment"] != "missing"));
}

#[test]
fn a_folder_of_nothing_that_can_be_read_is_bad_input() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.json"), "{}").unwrap();
    for format in [&[][..], &["--json"], &["--csv"]] {
        let done = explain(folder.path(), format);
        assert_eq!(done.status.code(), Some(2), "{done:?}");
        assert_eq!(done.stdout, b"");
        let errors = String::from_utf8(done.stderr).unwrap();
        assert!(errors.contains("none of the 1 files in "), "{errors}");
    }
}

#[test]
fn csv_has_what_json_has_whatever_is_in_the_names() {
    let folder = tempfile::tempdir().unwrap();
    let mut failed = report(FAILED);
    let words = "variable `a,\"b\"\r\nc;'` in `é` (x.py:1)";
    for storage in failed["storages"].as_array_mut().unwrap() {
        storage["paths"] = json!([{"words": words, "kind": "variable", "steps": [], "cure": "say \"no\", then\nstop"}]);
    }
    failed["host"] = json!("a, \"host\"\nof two lines");
    fs::write(folder.path().join("oom-x-0-1.json"), failed.to_string()).unwrap();
    failed["rank"] = json!(0);
    fs::write(folder.path().join("a,\"b\"\n.json"), failed.to_string()).unwrap();

    let done = explain(folder.path(), &["--csv"]);
    assert!(done.status.success(), "{done:?}");
    let mut reader = csv::Reader::from_reader(&done.stdout[..]);
    let heads = reader.headers().unwrap().clone();
    let table: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let rows = rows(folder.path());
    assert_eq!(table.len(), rows.len());
    for (record, row) in table.iter().zip(&rows) {
        let object = row.as_object().unwrap();
        assert_eq!(object.len(), heads.len());
        for (head, cell) in heads.iter().zip(record) {
            let wanted = match &object[head] {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            assert_eq!(cell, wanted, "{head}");
        }
    }
    assert!(rows.iter().any(|row| row["holder"] == words));
}

/// They are read one after the other, with the others in the table.
#[test]
fn a_large_file_is_a_row_too() {
    let folder = job();
    let large = folder.path().join("rank9.json");
    let mut text = br#"{"segments": [], "device_traces": [[{"action": "oom", "size": 7, "device_free": 0}]], "#.to_vec();
    text.resize(65 << 20, b' ');
    text.extend(br#""x": 1}"#);
    fs::write(large, text).unwrap();
    let rows = rows(folder.path());
    let last = rows.last().unwrap();
    assert_eq!(
        (&last["rank"], &last["kind"], &last["requested_bytes"]),
        (&json!(9), &json!("snapshot"), &json!(7))
    );
    assert_eq!(rows.len(), 10);
}

/// Many reports are read in little memory: what is kept of each is a row.
#[test]
fn a_thousand_reports_take_the_memory_of_a_few() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = report("report-node_a-0-23063-1.json");
    report["rank"] = Value::Null;
    report["padding"] = json!("x".repeat(1 << 20));
    let first = folder.path().join("report-n-0-1-1.json");
    fs::write(&first, report.to_string()).unwrap();
    for rank in 1..1000 {
        fs::hard_link(
            &first,
            folder.path().join(format!("report-n-{rank}-1-1.json")),
        )
        .unwrap();
    }
    // All of them are 1 GiB. The program's own address space is in the limit.
    let command = format!("ulimit -v {}; exec \"$0\" explain --json \"$1\"", 400 << 10);
    let done = Command::new("sh")
        .args(["-c", &command])
        .args([
            env!("CARGO_BIN_EXE_lastref"),
            folder.path().to_str().unwrap(),
        ])
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let rows = json_lines(&done);
    assert_eq!(rows.len(), 1000);
    assert!(rows.iter().all(|row| row["odd"] == false));
}
