//! `lastref view` as its users meet it: the page in one file, the terminal, and what is served.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::read::GzDecoder;
use serde_json::Value;

use common::{lastref, run, snapshot, text};

fn stats(file: &str) -> Value {
    serde_json::from_str(&text(&["stats", "--json", file])).unwrap()
}

const TRAINING: &str = "transformer-training.pickle.gz";
const WITHOUT_HISTORY: &str = "attention.pickle.gz";

/// The data in a page: its header, and what follows it.
fn data_of(page: &str) -> (Value, Vec<u8>) {
    let start = "id=\"lastref-data\">";
    let (_, rest) = page.split_once(start).unwrap();
    let (packed, _) = rest.split_once("</script>").unwrap();
    let packed = STANDARD.decode(packed).unwrap();
    let mut data = Vec::new();
    GzDecoder::new(packed.as_slice())
        .read_to_end(&mut data)
        .unwrap();
    let length = u32::from_le_bytes(data[..4].try_into().unwrap()) as usize;
    assert_eq!(
        (4 + length) % 8,
        0,
        "arrays of doubles begin at multiples of 8"
    );
    let header = serde_json::from_slice(&data[4..4 + length]).unwrap();
    (header, data.split_off(4 + length))
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

#[test]
fn a_page_holds_its_data_and_asks_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("a page.html");
    let to = to.to_str().unwrap();
    let (training, attention) = (snapshot(TRAINING), snapshot(WITHOUT_HISTORY));
    let said = text(&["view", &training, &attention, "--html", to]);
    let page = std::fs::read_to_string(to).unwrap();
    assert_eq!(said, format!("{to} ({} bytes)\n", page.len()));
    for loaded in ["<script src", "href=\"http", "url(http", "@import"] {
        assert!(!page.contains(loaded), "the page loads by {loaded}");
    }

    let (header, data) = data_of(&page);
    let about = &header["about"]["files"];
    assert_eq!(about[0]["name"], TRAINING);
    assert_eq!(about[1]["name"], WITHOUT_HISTORY);
    let (device, told) = (&about[0]["devices"][0], stats(&training));
    let history = &told["history"][0];
    assert_eq!(device["entries"], history["entries"]);
    assert_eq!(device["peakBytes"], history["peak_active_bytes"]);
    assert_eq!(
        device["peakEntry"].as_i64().unwrap() - 1,
        history["peak_entry"].as_i64().unwrap(),
        "a moment is after its entry"
    );
    assert_eq!(
        about[1]["devices"][0]["peakReservedBytes"],
        stats(&attention)["devices"]["0"]["reserved_bytes"]
    );

    // Every tile of every level lies where it is said, and the coarsest one shows the peak.
    let held = &header["files"][0]["devices"][0];
    let tiles = held["tiles"].as_array().unwrap();
    assert_eq!(device["finest"], 0, "all levels of a short history fit");
    for tile in tiles {
        let (at, bytes) = (number(&tile[2]), number(&tile[3]));
        assert_eq!(&data[at..at + 4], b"LRT1");
        let level = u32::from_le_bytes(data[at + 4..at + 8].try_into().unwrap());
        assert_eq!(u64::from(level), tile[0].as_u64().unwrap());
        assert!(at % 8 == 0 && at + bytes <= data.len());
    }
    let double = |at: usize| f64::from_le_bytes(data[at..at + 8].try_into().unwrap());
    let first = number(&tiles[0][2]);
    let columns = u32::from_le_bytes(data[first + 8..first + 12].try_into().unwrap());
    let live = (0..columns as usize).map(|column| double(first + 32 + column * 8));
    assert_eq!(
        live.fold(0.0, f64::max),
        device["peakBytes"].as_f64().unwrap()
    );

    // What is there at the end, by its spans, is what the snapshot says.
    let at_end = |column: &Value| -> f64 {
        let (at, count) = (number(&column["at"]), number(&column["count"]));
        let end = |id: usize| {
            let at = at + count * 24 + id * 4;
            u32::from_le_bytes(data[at..at + 4].try_into().unwrap())
        };
        let bytes = |id: usize| double(at + count * 8 + id * 8);
        (0..count)
            .filter(|id| end(*id) == u32::MAX)
            .map(bytes)
            .sum()
    };
    let active = history["active_at_end_bytes"].as_f64().unwrap();
    assert_eq!(at_end(&held["allocations"]), active);
    let reserved = told["devices"]["0"]["reserved_bytes"].as_f64().unwrap();
    assert_eq!(at_end(&held["segments"]), reserved);
    assert_eq!(
        header["files"][0]["stacks"].as_array().unwrap().len(),
        number(&about[0]["stacks"])
    );
}

#[test]
fn a_page_that_cannot_be_written_is_bad_usage() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().to_str().unwrap();
    let done = run(&["view", &snapshot(WITHOUT_HISTORY), "--html", to]);
    assert_eq!(done.status.code(), Some(2));
    let error = String::from_utf8(done.stderr).unwrap();
    assert!(
        error.starts_with(&format!("error: cannot write {to}: ")),
        "{error}"
    );
}

#[test]
fn the_terminal_shows_the_peak_that_explain_tells() {
    let file = snapshot(TRAINING);
    let found = text(&["view", "--tty", &file]);
    assert!(
        found.is_ascii() || !found.contains('\x1b'),
        "no colours in a pipe"
    );
    let first = found.lines().next().unwrap();
    assert_eq!(
        first,
        "transformer-training.pickle.gz, device 0: peak 6.53 GiB after 9,967 of 19,136 entries, \
         6.74 GiB reserved at most"
    );
    let explained = text(&["explain", &file]);
    assert!(
        explained.contains("at its peak, after 9,967 entries,"),
        "{explained}"
    );
    assert!(
        found.contains("\n  after 9,938 entries: Optimizer.step#AdamW.step START\n"),
        "{found}"
    );
    assert!(found.contains('⣿') && found.lines().all(|line| line.chars().count() <= 140));
    // Without a history there is nothing to draw; that is said.
    let found = text(&["view", "--tty", &snapshot(WITHOUT_HISTORY)]);
    assert!(found.contains("No history was recorded"), "{found}");
    assert!(!found.contains('⣿'), "{found}");
}

#[test]
fn a_long_history_is_drawn() {
    // 488 columns at the coarsest level: more than a terminal of 80 has dots for, and one must do.
    let mut trace = String::from("op,id,bytes,stream,phase,label\n");
    for id in 0..125_000 {
        trace.push_str(&format!("alloc,{id},1024,0,,\nfree,{id},1024,0,,\n"));
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("long.csv");
    std::fs::write(&file, trace).unwrap();
    let found = text(&["view", "--tty", file.to_str().unwrap()]);
    assert!(found.contains("peak 1.00 KiB"), "{found}");
    assert!(found.contains('⣿'), "{found}");
}

/// A command that serves until it is dropped.
struct Serving {
    child: Child,
    address: String,
    token: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(files: &[&str]) -> Serving {
    let mut command = lastref();
    command.arg("view").args(files).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut url = String::new();
    let out = child.stdout.take().unwrap();
    BufReader::new(out).read_line(&mut url).unwrap();
    let rest = url.trim_end().strip_prefix("http://").unwrap();
    let (address, token) = rest.split_once("/?token=").unwrap();
    Serving {
        child,
        address: address.to_owned(),
        token: token.to_owned(),
    }
}

impl Serving {
    /// Status, headers and body of a request for a path, with these lines in its header.
    fn get(&self, path: &str, lines: &str) -> (u16, String, Vec<u8>) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{lines}\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .unwrap();
        let body = answer.split_off(end + 4);
        let head = String::from_utf8(answer).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head, body)
    }

    fn api(&self, path: &str) -> (u16, Vec<u8>) {
        let lines = format!("Authorization: Bearer {}\r\n", self.token);
        let (status, _, body) = self.get(&format!("/api/{path}"), &lines);
        (status, body)
    }

    #[track_caller]
    fn json(&self, path: &str) -> Value {
        let (status, body) = self.api(path);
        assert_eq!(status, 200, "{path}");
        serde_json::from_slice(&body).unwrap()
    }
}

#[test]
fn nothing_is_served_without_the_token() {
    let serving = serve(&[&snapshot(WITHOUT_HISTORY)]);
    assert!(serving.address.starts_with("127.0.0.1:"), "loopback alone");
    assert_eq!(serving.token.len(), 32);
    let cut = &serving.token[1..];
    let wrong = format!(
        "{}{cut}",
        if serving.token.starts_with('0') {
            '1'
        } else {
            '0'
        }
    );
    for path in ["/", "/api/about", "/api/0/0/state/0", "/nothing"] {
        for token in [
            "",
            "?token=",
            &format!("?token={wrong}"),
            &format!("?token={cut}"),
        ] {
            let (status, _, body) = serving.get(&format!("{path}{token}"), "");
            assert_eq!(status, 403, "{path}{token}");
            let body = String::from_utf8(body).unwrap();
            assert!(
                body.contains("open the address that `lastref view` printed"),
                "{body}"
            );
        }
        let bearer = format!("Authorization: Bearer {wrong}\r\n");
        assert_eq!(serving.get(path, &bearer).0, 403, "{path}");
    }
    let (status, head, body) = serving.get(&format!("/?token={}", serving.token), "");
    assert_eq!(status, 200);
    assert!(body.starts_with(b"<!doctype html>"));
    for line in [
        "cache-control: no-store",
        "referrer-policy: no-referrer",
        "default-src 'none'",
    ] {
        assert!(head.contains(line), "{head}");
    }
}

#[test]
fn what_is_served_agrees_with_stats_and_what_is_not_there_is_said() {
    let (training, attention) = (snapshot(TRAINING), snapshot(WITHOUT_HISTORY));
    let serving = serve(&[&training, &attention]);
    let about = serving.json("about");
    assert_eq!(about["files"].as_array().unwrap().len(), 2);
    for (file, path) in [training, attention].iter().enumerate() {
        let told = stats(path);
        // A moment after the last is the last.
        let state = serving.json(&format!("{file}/0/state/{}", u32::MAX));
        let (entries, reserved) = (
            &about["files"][file]["devices"][0]["entries"],
            &told["devices"]["0"]["reserved_bytes"],
        );
        assert_eq!(&state["entry"], entries);
        assert_eq!(&state["reservedBytes"], reserved);
        let bytes = |rows: &Value| -> u64 {
            let rows = rows.as_array().unwrap().iter();
            rows.map(|row| row["bytes"].as_u64().unwrap()).sum()
        };
        assert_eq!(bytes(&state["segments"]), reserved.as_u64().unwrap());
        let stacks = serving.json(&format!("{file}/0/stacks/{}", u32::MAX));
        assert_eq!(bytes(&stacks), state["liveBytes"].as_u64().unwrap());
        if let Some(history) = told["history"].get(0) {
            assert_eq!(state["liveBytes"], history["active_at_end_bytes"]);
        }
    }
    let found = serving.json("0/search?text=OPTIMIZER.PY");
    let stack = found[0].as_u64().unwrap();
    let stack = serving.json(&format!("0/stack/{stack}"));
    assert!(stack.to_string().contains("optimizer.py"), "{stack}");
    assert_eq!(serving.json("0/0/allocation/0")["id"], 0);
    assert_eq!(&serving.api("0/0/tile/0/0").1[..4], b"LRT1");

    for (path, what) in [
        ("9/0/state/0", "device"),
        ("0/9/state/0", "device"),
        ("0/9/stacks/0", "device"),
        ("0/0/tile/4294967295/0", "tile"),
        ("0/0/tile/0/18446744073709551615", "tile"),
        ("0/0/allocation/4294967295", "allocation"),
        ("0/stack/18446744073709551615", "stack"),
        ("9/search?text=a", "file"),
    ] {
        let (status, body) = serving.api(path);
        assert_eq!(status, 404, "{path}");
        assert_eq!(
            body,
            format!("there is no such {what}\n").as_bytes(),
            "{path}"
        );
    }
    for path in [
        "0/0/tile/-1/0",
        "0/0/state/-5",
        "0/0/state/4294967296",
        "0/0/allocation/x",
        "0/search",
    ] {
        assert_eq!(serving.api(path).0, 400, "{path}");
    }
    // None of it has stopped the command.
    assert_eq!(serving.json("about"), about);
}

#[test]
fn a_port_that_is_taken_is_bad_usage() {
    let file = snapshot(WITHOUT_HISTORY);
    let serving = serve(&[&file]);
    let (_, port) = serving.address.split_once(':').unwrap();
    let done = run(&["view", &file, "--port", port]);
    assert_eq!(done.status.code(), Some(2));
    let error = String::from_utf8(done.stderr).unwrap();
    assert!(
        error.contains(&format!("cannot listen on 127.0.0.1:{port}")),
        "{error}"
    );
}
