//! Every real snapshot gives exactly the figures that an independent reader counted.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its data has failed"
)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lastref_snapshot::Dump;
use lastref_snapshot::stats::Stats;
use serde_json::{Value, json};

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata")
}

/// The figures of a truth, under the names that [`Stats`] serializes to.
fn wanted(truth: &Value) -> Value {
    let mut devices = BTreeMap::new();
    for (device, figures) in truth["devices"].as_object().unwrap() {
        let number = |key: &str| figures.get(key).cloned().unwrap_or(json!(0));
        let by_state = |what: &str| -> Value {
            let states = ["active_allocated", "active_pending_free", "inactive"];
            let found = states
                .into_iter()
                .filter_map(|state| Some((state, figures.get(format!("{what}_{state}"))?.clone())));
            found.collect::<BTreeMap<_, _>>().into_iter().collect()
        };
        devices.insert(
            device.clone(),
            json!({
                "segments": number("segments"),
                "reserved_bytes": number("reserved"),
                "blocks_by_state": by_state("blocks"),
                "bytes_by_state": by_state("bytes"),
                "wholly_free_segments": number("segments_wholly_free"),
                "wholly_free_bytes": number("releasable_by_empty_cache"),
                "largest_inactive_bytes": number("largest_inactive"),
            }),
        );
    }
    let histories = truth["traces"].as_array().unwrap().iter();
    let history = histories.map(|history| {
        json!({
            "device": history["device"],
            "entries": history["events"],
            "active_at_start_bytes": history["requested_active_at_start"],
            "active_at_end_bytes": history["requested_active_at_end"],
            "peak_active_bytes": history["requested_peak_active"],
            "peak_entry": history["peak_event"],
            "out_of_memory": history["ooms"],
        })
    });
    let pools = truth["pools"].as_array().unwrap().iter();
    let pools = pools.map(|pool| {
        let numbers = pool.as_str().unwrap().trim_matches(['(', ')']).split(", ");
        numbers
            .map(|number| number.parse::<u64>().unwrap())
            .collect::<Vec<_>>()
    });
    json!({
        "devices": devices,
        "history": history.collect::<Vec<_>>(),
        "pools": pools.collect::<Vec<_>>(),
        "streams": truth["streams"],
        "alloc_conf": truth["alloc_conf"],
        "problems": truth["inconsistencies"],
    })
}

#[test]
fn every_real_snapshot_gives_the_figures_of_its_truth() {
    let truths = fs::read_to_string(testdata().join("truth.json")).unwrap();
    let truths: BTreeMap<String, Value> = serde_json::from_str(&truths).unwrap();
    assert_eq!(truths.len(), 10);
    for (name, truth) in &truths {
        let file = File::open(testdata().join(format!("{name}.gz"))).unwrap();
        let dump = Dump::read(file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut found = serde_json::to_value(Stats::of(&dump)).unwrap();
        let settings = found.as_object_mut().unwrap().remove("settings").unwrap();
        found["alloc_conf"] = settings
            .get("PYTORCH_CUDA_ALLOC_CONF")
            .cloned()
            .unwrap_or(Value::Null);
        assert_eq!(found, wanted(truth), "{name}");

        assert_eq!(
            dump.segments().len(),
            truth["n_segments"].as_u64().unwrap() as usize,
            "{name}"
        );
        assert_eq!(
            dump.annotations().len(),
            truth["annotations"].as_u64().unwrap() as usize,
            "{name}"
        );
        for history in truth["traces"].as_array().unwrap() {
            let device = history["device"].as_u64().unwrap();
            let found = dump
                .histories()
                .iter()
                .find(|h| u64::from(h.device) == device);
            let entries = dump.entries_of(found.unwrap());
            let mut actions = BTreeMap::<&str, u64>::new();
            for entry in entries {
                *actions.entry(entry.action.as_str()).or_default() += 1;
            }
            assert_eq!(json!(actions), history["actions"], "{name}");
            let without = entries
                .iter()
                .filter(|entry| !entry.stack.is_some())
                .count();
            assert_eq!(json!(without), history["events_without_frames"], "{name}");
            let time = |us: u64| if us == 0 { Value::Null } else { json!(us) };
            assert_eq!(time(entries[0].time_us), history["first_us"], "{name}");
            assert_eq!(
                time(entries.last().unwrap().time_us),
                history["last_us"],
                "{name}"
            );
        }
    }
}
