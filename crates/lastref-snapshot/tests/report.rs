//! Reports of lastref.torch: what is said of real ones, and that bad ones are refused with the reason.
#![expect(clippy::unwrap_used, reason = "a test that cannot read has failed")]

use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::path::Path;

use lastref_snapshot::explain::{Moment, Verdict};
use lastref_snapshot::report::{MOST_BYTES, Report, ReportError};

const FAILED: &str = "oom-node_b-2-23102.json";

fn file(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/reports");
    folder.join(name).to_str().unwrap().to_owned()
}

fn read(text: &str) -> Result<Report, ReportError> {
    Report::read(text.as_bytes())
}

/// A report with these keys beside the schema.
fn with(keys: &str) -> String {
    format!(r#"{{"schema": "lastref.report/1", {keys}}}"#)
}

fn storage(bytes: u64, paths: &[&str]) -> String {
    let path = |words| {
        format!(r#"{{"words": "{words}", "kind": "variable", "steps": [], "cure": "let go"}}"#)
    };
    let paths: Vec<_> = paths.iter().map(path).collect();
    format!(
        r#"{{"bytes": {bytes}, "device": "cuda:0", "paths": [{}], "cycle": null, "cure": "let go"}}"#,
        paths.join(",")
    )
}

fn device(free: u64, live: u64, cached: u64, fragmented: u64) -> String {
    format!(
        r#"{{"index": 0, "total": 1000000000, "free": {free}, "live": {live}, "cached": {cached},
        "pending": 0, "fragmented": {fragmented}, "largest_hole": 7}}"#
    )
}

#[test]
fn a_real_report_says_who_holds_most() {
    let report = Report::read(File::open(file(FAILED)).unwrap()).unwrap();
    assert_eq!((report.host(), report.rank()), (Some("node-b"), Some(2)));
    assert!(report.time().unwrap() > 1.7e9);
    let devices = report.explain();
    let [device] = &devices[..] else {
        panic!("{devices:?}");
    };
    assert_eq!(device.moment, Moment::OutOfMemory);
    let failure = device.failure.as_ref().unwrap();
    assert_eq!(failure.requested_bytes, 64 << 20);
    assert_eq!(failure.verdict, Verdict::LiveMemory);
    assert_eq!(device.memory.live_bytes, 1_409_418_240);
    assert_eq!(device.memory.reserved_bytes, 1_409_418_240 + 1_965_056);
    assert_eq!(device.memory.outside_bytes, Some(0));
    // Eight of the storages are in the graph of `total_loss`, four of them in that of `loss` too.
    let most = &device.holders[0];
    assert_eq!(
        most.place,
        [
            "variable `total_loss` in `validate` (job.py:21) → the autograd graph of `total_loss` (30 nodes), \
             saved by its nodes"
        ]
    );
    assert_eq!((most.bytes >> 20, most.blocks), (512, 8));
    assert_eq!(most.kind.as_deref(), Some("autograd"));
    assert!(most.cure.as_deref().unwrap().contains("`x.item()`"));

    let report = Report::read(File::open(file("report-node_a-1-23084-1.json")).unwrap()).unwrap();
    let device = &report.explain()[0];
    assert_eq!(device.moment, Moment::Snapshot);
    assert!(device.failure.is_none());
}

#[test]
fn a_compressed_report_is_the_same() {
    let plain = fs::read(file(FAILED)).unwrap();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&plain).unwrap();
    let compressed = encoder.finish().unwrap();
    let report = Report::read(&compressed[..]).unwrap();
    assert_eq!(report.explain()[0].holders[0].blocks, 8);
    let cut = Report::read(&compressed[..compressed.len() / 2]);
    assert!(matches!(cut, Err(ReportError::Truncated { .. })), "{cut:?}");
}

#[test]
fn a_cut_report_says_where() {
    let text = fs::read_to_string(file(FAILED)).unwrap();
    for length in [40, 500, 5_000, text.len() - 3] {
        let cut = read(&text[..length]);
        let Err(ReportError::Truncated { line, .. }) = cut else {
            panic!("{length}: {cut:?}");
        };
        assert_eq!(line, text[..length].lines().count());
    }
}

#[test]
fn other_files_are_no_reports() {
    for text in [
        "",
        " ",
        "[]",
        "{}",
        "{",
        r#"{"schema": "x"}"#,
        r#"{"segments": []}"#,
        "\u{80}]",
        "null",
    ] {
        let error = read(text);
        assert!(
            matches!(error, Err(ReportError::NotAReport)),
            "{text}: {error:?}"
        );
    }
}

#[test]
fn another_version_is_named() {
    let error = read(r#"{"devices": 7, "schema": "lastref.report/2"}"#).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"a report of the schema "lastref.report/2"; this version reads "lastref.report/1""#
    );
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    for (keys, wanted) in [
        (r#""storages": []"#, "missing field `devices`"),
        (r#""devices": [], "storages": {}"#, "expected a sequence"),
        (
            r#""devices": [{"index": -1}], "storages": []"#,
            "invalid value: integer `-1`",
        ),
        (
            r#""devices": [], "storages": [], "rank": 1.5"#,
            "expected u64",
        ),
        (
            r#""devices": [], "storages": [], "devices": []"#,
            "duplicate field",
        ),
        (r#""devices": [}"#, "expected value at line 1"),
    ] {
        let error = read(&with(keys)).unwrap_err();
        assert!(
            error.to_string().starts_with("malformed report: "),
            "{error}"
        );
        assert!(error.to_string().contains(wanted), "{keys}: {error}");
    }
}

#[test]
fn nesting_is_an_error_or_passed_over() {
    let deep = 1 << 20;
    let nested = |close: bool| {
        let mut text = "[".repeat(deep);
        if close {
            text.push_str(&"]".repeat(deep));
        }
        text
    };
    let unknown = with(&format!(
        r#""later": {}, "devices": [], "storages": []"#,
        nested(true)
    ));
    assert!(read(&unknown).unwrap().explain().is_empty());
    let error = read(&with(&format!(r#""devices": {}"#, nested(true)))).unwrap_err();
    assert!(matches!(error, ReportError::Malformed(_)), "{error}");
    let error = read(&with(&format!(r#""later": {}"#, nested(false)))).unwrap_err();
    assert!(
        matches!(
            error,
            ReportError::Malformed(_) | ReportError::Truncated { .. }
        ),
        "{error}"
    );
}

/// Only as much as may be is asked of an input without an end.
#[test]
fn a_report_without_an_end_is_refused() {
    struct Endless(u64);
    impl Read for Endless {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            into.fill(b' ');
            self.0 += into.len() as u64;
            assert!(self.0 <= MOST_BYTES + (1 << 20), "read on");
            Ok(into.len())
        }
    }
    let error = Report::read(with("").as_bytes().chain(Endless(0))).unwrap_err();
    // What is before it is not whole either, but it has not come to that.
    assert!(matches!(error, ReportError::TooLarge), "{error}");
    let error = Report::read(Endless(0)).unwrap_err();
    assert!(matches!(error, ReportError::NotAReport), "{error}");
}

#[test]
fn text_that_is_not_unicode_is_read() {
    let text = with(r#""devices": [], "storages": [], "host": "a\udcffb""#);
    assert_eq!(
        read(&text).unwrap().host(),
        Some("a\u{fffd}\u{fffd}\u{fffd}b")
    );
}

#[test]
fn numbers_at_their_ends_do_not_overflow() {
    let most = u64::MAX;
    let text = with(&format!(
        r#""rank": {most}, "out_of_memory": {{"device": null, "requested": {most}}},
        "devices": [{}], "storages": [{}, {}]"#,
        device(most, most, most, most),
        storage(most, &["a"]),
        storage(most, &["a"]),
    ));
    let device = &read(&text).unwrap().explain()[0];
    assert_eq!(device.memory.reserved_bytes, most);
    assert_eq!(device.holders[0].bytes, most);
}

#[test]
fn a_failure_is_judged_as_that_of_a_snapshot() {
    let requested = 100 << 20;
    for (memory, wanted) in [
        (device(200 << 20, 1, 0, 0), Verdict::MemoryLimit),
        (
            device(0, 1 << 20, 0, 0),
            Verdict::TooLarge {
                most_bytes: 1 << 20,
            },
        ),
        (
            device(0, 200 << 20, 0, 150 << 20),
            Verdict::Fragmentation {
                free_bytes: 150 << 20,
                largest_hole_bytes: 7,
            },
        ),
        (device(1 << 20, 800 << 20, 0, 0), Verdict::LiveMemory),
    ] {
        let text = with(&format!(
            r#""out_of_memory": {{"device": 0, "requested": {requested}}}, "devices": [{memory}], "storages": []"#
        ));
        let device = &read(&text).unwrap().explain()[0];
        assert_eq!(device.failure.as_ref().unwrap().verdict, wanted);
    }
}

#[test]
fn a_storage_counts_for_each_way_once() {
    let text = with(&format!(
        r#""devices": [{}], "storages": [{}, {}]"#,
        device(0, 30, 0, 0),
        storage(10, &["global `a[0]`", "global `a[1]`", "global `b`"]),
        storage(20, &["global `a[7]`"]),
    ));
    let holders = &read(&text).unwrap().explain()[0].holders;
    let found: Vec<_> = holders
        .iter()
        .map(|holder| (&*holder.place[0], holder.bytes, holder.blocks))
        .collect();
    assert_eq!(found, [("global `a[…]`", 30, 2), ("global `b`", 10, 1)]);
}

/// Many ways and long words: time and what is kept are bounded.
#[test]
fn a_hostile_report_is_told_in_few_words() {
    let long = "x".repeat(1 << 20);
    let many: Vec<String> = (0..50_000).map(|number| format!("way {number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let text = with(&format!(
        r#""devices": [{}], "storages": [{}, {}]"#,
        device(0, 30, 0, 0),
        storage(10, &[&long]),
        storage(10, &many),
    ));
    let devices = read(&text).unwrap().explain();
    assert_eq!(devices[0].holders.len(), 10);
    for holder in &devices[0].holders {
        assert!(holder.place[0].len() < 3000);
    }
}

#[test]
fn a_failure_is_on_a_device() {
    let devices = [
        device(0, 30, 0, 0),
        device(0, 40, 0, 0).replace("\"index\": 0", "\"index\": 1"),
    ];
    let failed = |at: &str, devices: &[String]| {
        let text = with(&format!(
            r#""out_of_memory": {{"device": {at}, "requested": 5}}, "devices": [{}], "storages": []"#,
            devices.join(",")
        ));
        let devices = read(&text).unwrap().explain();
        let failed = devices.iter().filter(|device| device.failure.is_some());
        failed.map(|device| device.device).collect::<Vec<_>>()
    };
    assert_eq!(failed("0", &devices), [0]);
    assert_eq!(failed("null", &devices), [1], "the one with most in use");
    assert_eq!(failed("7", &devices), [7], "not listed");
    assert_eq!(failed("null", &[]), [0]);
}
