//! Text in a file, and a file's name, give no orders to the terminal they are shown on.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

mod common;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use common::{lastref, snapshot, text};

/// Sets the title, rings, clears the screen, colours, goes back, reverses, hides, begins a line.
const HOSTILE: &str =
    "\x1b]0;pwned\x07\u{9b}2J\x1b[35mx\x08\r\u{202e}y\u{2066}\u{200b}\nerror: forged";

/// A snapshot in which every text is hostile.
fn hostile_snapshot(bytes: u64) -> Value {
    let frames = json!([{"name": HOSTILE, "filename": format!("{HOSTILE}.py"), "line": 1}]);
    let entry = |action: &str, addr: u64, size: u64| {
        json!({"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, "frames": frames,
            "user_metadata": HOSTILE, "category": HOSTILE})
    };
    json!({
        "segments": [{"device": 0, "address": 4096, "total_size": 8192, "allocated_size": bytes,
            "active_size": bytes, "stream": 0, "segment_type": "small", "frames": frames, "blocks": [
            {"address": 4096, "size": bytes, "requested_size": bytes, "state": "active_allocated", "frames": frames},
            {"address": 4096 + bytes, "size": 8192 - bytes, "requested_size": 0, "state": "inactive", "frames": []},
        ]}],
        "device_traces": [[
            entry("segment_alloc", 4096, 8192), entry("alloc", 4096, bytes), entry("annotate", 0, 0),
            entry("oom", 0, 1 << 20),
        ]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": HOSTILE, HOSTILE: HOSTILE},
        "external_annotations": [{"device": 0, "time_us": 1, "name": HOSTILE, "stage": HOSTILE}],
    })
}

/// Runs the command as on a terminal with colours, and looks at all that it writes.
#[track_caller]
fn look(arguments: &[&Path]) -> String {
    let mut command = lastref();
    let command = command.args(arguments).env("CLICOLOR_FORCE", "1");
    let done = command.output().unwrap();
    let mut text = String::from_utf8_lossy(&done.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&done.stderr));
    assert!(!text.is_empty(), "{done:?}");
    // Colours of ours are kept, and that one is none of them.
    assert!(!text.contains("\x1b[35m"), "{text:?}");
    let mut rest = &text[..];
    while let Some(at) = rest.find('\x1b') {
        let end = rest[at..].find('m').unwrap_or_else(|| panic!("{rest:?}"));
        let code = &rest[at + 1..at + end];
        assert!(
            code.starts_with('[') && code[1..].chars().all(|c| c.is_ascii_digit() || c == ';'),
            "{code:?} in {text:?}"
        );
        rest = &rest[at + end..];
    }
    for letter in text.chars() {
        let hidden = matches!(letter, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        let control = letter.is_control() && letter != '\n' && letter != '\x1b';
        assert!(!hidden && !control, "{letter:?} in {text:?}");
    }
    assert!(
        !text.lines().any(|line| line.starts_with("error: forged")),
        "{text}"
    );
    text
}

#[test]
fn text_from_files_is_shown_and_not_sent() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let before = put("before\x1b[35m.json", hostile_snapshot(512).to_string());
    let after = put(
        "after\u{202e}\x1b]0;x\x07.json",
        hostile_snapshot(1024).to_string(),
    );
    let label = HOSTILE.replace('\n', " ");
    let trace = format!("op,id,bytes,stream,phase,label\nalloc,1,9000000000,0,{label},{label}\n");
    let trace = put("trace\x1b[35m.csv", trace);
    let bad = put(
        "bad\x1b[35m.csv",
        format!("op,id,bytes,stream,phase,label\n{HOSTILE},1,1,0,,\n"),
    );
    let bad_number = format!("op,id,bytes,stream,phase,label\nalloc,{HOSTILE},1,0,,\n");
    let bad_number = put("number.csv", bad_number);
    let wrong = json!({"segments": [{HOSTILE: 1, "device": HOSTILE}]});
    let wrong = put("wrong.json", wrong.to_string());
    let missing = folder.path().join("missing\x1b[35m");
    let arg = Path::new;

    let fits = "op,id,bytes,stream,phase,label\nalloc,1,9000000,0,,\n";
    let fits = put("fits\x1b[35m.csv", fits.to_owned());
    for arguments in [
        &[arg("stats"), &after][..],
        &[arg("replay"), &fits],
        &[arg("explain"), &after],
        &[arg("diff"), &before, &after],
        &[arg("view"), arg("--tty"), &after],
        &[arg("advise"), &after],
        &[arg("replay"), &trace, arg("--capacity"), arg("1GiB")],
        &[
            arg("replay"),
            &trace,
            arg("--capacity"),
            arg("1GiB"),
            arg("--policy"),
            arg("pytorch"),
        ],
    ] {
        let text = look(arguments);
        let shown = text.contains("\\u{1b}");
        assert!(shown, "{arguments:?} shows something of the file: {text}");
    }
    for command in ["stats", "explain", "view", "advise", "replay"] {
        for file in [&bad, &bad_number, &wrong, &missing] {
            let more = (command == "view").then_some(arg("--tty"));
            let arguments: Vec<&Path> = [arg(command)]
                .into_iter()
                .chain(more)
                .chain([&**file])
                .collect();
            look(&arguments);
        }
    }
}

#[test]
fn data_for_programs_is_what_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hostile.json");
    fs::write(&file, hostile_snapshot(512).to_string()).unwrap();
    let found: Value =
        serde_json::from_str(&text(&["stats", "--json", file.to_str().unwrap()])).unwrap();
    assert_eq!(found["settings"]["PYTORCH_CUDA_ALLOC_CONF"], HOSTILE);
}

#[test]
fn text_from_reports_is_shown_and_not_sent() {
    let folder = tempfile::tempdir().unwrap();
    let real = fs::read(snapshot("reports/oom-node_b-2-23102.json")).unwrap();
    let mut report: Value = serde_json::from_slice(&real).unwrap();
    report["host"] = json!(HOSTILE);
    for storage in report["storages"].as_array_mut().unwrap() {
        storage["paths"] =
            json!([{"words": HOSTILE, "kind": HOSTILE, "steps": [], "cure": HOSTILE}]);
    }
    let file = folder.path().join("oom-\x1b[35m-1-1.json");
    fs::write(&file, report.to_string()).unwrap();
    fs::copy(
        snapshot("reports/report-node_a-0-23063-1.json"),
        folder.path().join("report-a-0-1-1.json"),
    )
    .unwrap();
    report["schema"] = json!(format!("lastref.report/{HOSTILE}"));
    fs::write(
        folder.path().join("later\u{202e}\x1b[35m.json"),
        report.to_string(),
    )
    .unwrap();
    let script = folder.path().join("script.pickle");
    fs::write(script, "c\x1b[35m\nsystem\n(S'true'\ntR.").unwrap();
    let one = look(&[Path::new("explain"), folder.path()]);
    assert!(one.contains("1 of 2 ranks differs"), "{one}");
    report["schema"] = json!("lastref.report/1");
    report["rank"] = json!(9);
    report["devices"][0]["live"] = json!(1);
    let third = folder.path().join("oom-\x1b[35m-9-1.json");
    fs::write(third, report.to_string()).unwrap();
    let several = look(&[Path::new("explain"), folder.path()]);
    assert!(several.contains(" ranks differ:"), "{several}");
    for text in [one, several, look(&[Path::new("explain"), &file])] {
        assert!(text.contains("\\u{1b}]0;pwned\\u{7}"), "{text}");
    }
}
