//! The device contract on GPUs that the stand-in plays, with virtual memory and without, and on a real
//! one where there is one.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::sync::Arc;

use lastref_alloc::Device;
use lastref_alloc::contract::{self, Report};

fn report() -> Report {
    contract::run_all(&|| {
        let devices = lastref_cuda::devices().unwrap().iter();
        devices
            .map(|device| Arc::new(device.clone()) as Arc<dyn Device>)
            .collect()
    })
}

#[test]
fn two_devices_with_virtual_memory_pass() {
    let said = common::run("inner", &[("DEVICES", "2"), ("MEMORY", "1GiB")]);
    assert!(
        said.contains("skipped: [\"virtual_memory_is_refused_where_there_is_none\"]"),
        "{said}"
    );
}

#[test]
fn a_device_without_virtual_memory_passes() {
    let said = common::run("inner", &[("VIRTUAL_MEMORY", "0"), ("MEMORY", "1GiB")]);
    assert!(said.contains("\"ranges_take_no_memory\""), "{said}");
    assert!(!said.contains("virtual_memory_is_refused"), "{said}");
}

#[test]
#[ignore = "run by the others, or by hand where there is a GPU"]
fn inner() {
    let report = report();
    let skipped: Vec<_> = report.skipped.iter().map(|(name, _)| name).collect();
    println!("skipped: {skipped:?}");
    report.assert_passed();
    assert_eq!(
        report.passed.len() + report.skipped.len(),
        contract::CASES.len()
    );
    assert_eq!(lastref_cuda::stats().failed_releases, 0);
}
