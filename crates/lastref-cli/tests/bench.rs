//! `lastref bench` and `lastref generate` as their users meet them.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lastref"));
    command.env_remove("LASTREF_ALLOC_CONF");
    command.args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn every_number_is_measured_even_in_no_time() {
    let done = run(&["bench", "--json", "--seconds", "0"]);
    assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
    let out = text(&done.stdout);
    assert_eq!(out.lines().count(), 1, "one line of JSON");
    let json: Value = serde_json::from_str(&out).unwrap();
    let positive = |value: &Value| value.as_f64().is_some_and(|ns| ns > 0.0 && ns < 1e9);
    let keyed = |name: &str| {
        let map = json[name].as_object().unwrap();
        assert!(map.values().all(positive), "{name}: {map:?}");
        let mut keys: Vec<u64> = map.keys().map(|key| key.parse().unwrap()).collect();
        keys.sort_unstable();
        keys
    };
    for sizes in [keyed("hot_pair_ns"), keyed("mimalloc_hot_ns")] {
        assert_eq!((sizes[0], sizes[sizes.len() - 1]), (512, 64 << 20));
    }
    assert_eq!(keyed("threads_ns"), [1, 2, 4]);
    assert_eq!(keyed("mimalloc_threads_ns"), [1, 2, 4]);
    assert!(positive(&json["churn_1000_ns"]) && positive(&json["mimalloc_churn_1000_ns"]));
    assert_eq!(json["rounds"], 1);
}

#[test]
fn people_get_a_table_with_ratios() {
    let out = text(&run(&["bench", "--seconds", "0"]).stdout);
    let row = out.lines().find(|line| line.starts_with("hot pair, 4 KiB"));
    let numbers: Vec<f64> = row
        .unwrap()
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [_, ours, theirs, ratio] = numbers[..] else {
        panic!("{out}")
    };
    assert!((ours / theirs - ratio).abs() < 0.1, "{out}");
    assert!(
        out.contains("1000 live") && out.contains("2 threads at once"),
        "{out}"
    );
    assert!(
        out.contains("medians of 1 rounds") && !out.contains('\x1b'),
        "{out}"
    );
}

#[test]
fn a_made_up_trace_is_replayed_from_a_pipe() {
    let listed = text(&run(&["generate"]).stdout);
    let names: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(names.len() > 5 && names.contains(&"sawtooth"), "{listed}");
    let made = run(&["generate", "sawtooth", "--seed", "7"]).stdout;
    assert_eq!(made, run(&["generate", "sawtooth", "--seed", "7"]).stdout);
    let mut replay = Command::new(env!("CARGO_BIN_EXE_lastref"))
        .args(["replay", "-", "--verify", "--json"])
        .env_remove("LASTREF_ALLOC_CONF")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    replay.stdin.take().unwrap().write_all(&made).unwrap();
    let done = replay.wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    let operations = made.iter().filter(|byte| **byte == b'\n').count() - 1;
    assert_eq!(report["operations"], operations);
}

#[test]
fn an_unknown_kind_is_refused_with_the_known_ones() {
    let done = run(&["generate", "nonsense"]);
    assert_eq!(done.status.code(), Some(2));
    assert!(done.stdout.is_empty());
    let said = text(&done.stderr);
    assert!(
        said.contains("\"nonsense\", there are lifetimes, sawtooth"),
        "{said}"
    );
}
