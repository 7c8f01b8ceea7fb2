//! The device contract on the simulated device, under many interleavings, and on devices that break
//! it, to see that the suite notices.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::sync::Arc;

use lastref_alloc::Device;
use lastref_alloc::contract::{self, Report};
use lastref_alloc::sim::{SimDevice, SimOptions};

fn run(seed: u64, count: usize, change: fn(SimOptions) -> SimOptions) -> Report {
    contract::run_all(&|| {
        let options = change(SimOptions::new(1 << 30).with_seed(seed));
        let devices = SimDevice::group(vec![options; count]).expect("the host has memory files");
        let shared = devices.into_iter().map(|d| Arc::new(d) as Arc<dyn Device>);
        shared.collect()
    })
}

fn names(report: &Report) -> Vec<&str> {
    report.skipped.iter().map(|(name, _)| *name).collect()
}

#[test]
fn two_devices_pass_under_many_seeds() {
    for seed in 0..4 {
        let report = run(seed, 2, |options| options);
        report.assert_passed();
        let skipped = names(&report);
        assert_eq!(skipped, ["virtual_memory_is_refused_where_there_is_none"]);
        assert_eq!(report.passed.len() + skipped.len(), contract::CASES.len());
    }
}

#[test]
fn a_busy_device_passes() {
    run(1, 2, |options| options.with_max_ops_per_step(20)).assert_passed();
}

#[test]
fn a_device_without_virtual_memory_or_peer_says_what_it_skips() {
    let report = run(2, 1, |options| options.with_virtual_memory(false));
    report.assert_passed();
    let needs_pages = [
        "ranges_take_no_memory",
        "wrong_ranges_are_refused",
        "memory_info_follows_pages",
        "bytes_cross_page_borders",
        "a_moved_page_keeps_its_bytes",
        "pages_can_be_shuffled",
        "wrong_page_calls_change_nothing",
        "peers_copy_and_wait_for_each_other",
    ];
    assert_eq!(names(&report), needs_pages);
}
