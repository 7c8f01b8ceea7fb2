//! What is said where there is no driver, and where the driver is broken or too old: one clear message.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{command, folder, passed, run};

/// What `devices` says, and whether it is the usual lack of a GPU.
#[test]
#[ignore = "run by the others"]
fn inner() {
    match lastref_cuda::devices() {
        Ok(devices) => println!("found: {}", devices.len()),
        Err(unavailable) => {
            println!("usual: {}", unavailable.is_usual());
            println!("message: {unavailable}");
            let again = lastref_cuda::devices().unwrap_err();
            assert_eq!(unavailable, again, "the same at every call");
        }
    }
}

fn own_folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[track_caller]
fn says(folder: &Path, settings: &[(&str, &str)], usual: bool, message: &str) {
    let output = command("inner", folder, settings).output().unwrap();
    let said = passed(&output);
    assert!(said.contains(&format!("usual: {usual}\n")), "{said}");
    assert!(said.contains(message), "{message:?} is not in\n{said}");
    assert!(
        output.stderr.is_empty(),
        "printed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn without_a_driver_there_is_nothing_to_tell() {
    let message = "there is no CUDA driver: neither libcuda.so nor libcuda.so.1 was found";
    says(&own_folder("no-driver"), &[], true, message);
}

#[test]
fn a_driver_without_devices_is_usual_too() {
    let standin = folder("standin");
    says(&standin, &[("DEVICES", "0")], true, "sees no device");
    let hidden = "sees no device (CUDA_VISIBLE_DEVICES=\"\")";
    says(&standin, &[("CUDA_VISIBLE_DEVICES", "")], true, hidden);
}

#[test]
fn visible_devices_are_the_drivers_to_choose() {
    let three = ("DEVICES", "3");
    let said = run("inner", &[three, ("CUDA_VISIBLE_DEVICES", "2,0")]);
    assert!(said.contains("found: 2\n"), "{said}");
}

#[test]
fn a_file_that_is_no_library_is_named() {
    let folder = own_folder("garbage");
    fs::write(folder.join("libcuda.so.1"), "not a library").unwrap();
    let message = "the CUDA driver cannot be loaded: ";
    says(&folder, &[], false, message);
    says(&folder, &[], false, "libcuda.so.1");
}

#[test]
fn an_old_driver_is_told_by_its_age_and_not_by_what_it_lacks() {
    let message = "(libcuda.so) is too old: it is for CUDA 11.3, lastref needs one for 11.4 or newer (version 470); update it";
    says(&folder("standin"), &[("DRIVER", "11.3")], false, message);
    let said = run("inner", &[("DRIVER", "11.4")]);
    assert!(said.contains("found: 1\n"), "{said}");
}

#[test]
fn a_driver_that_does_not_start_says_why_and_what_to_do() {
    let standin = folder("standin");
    for (code, hint) in [
        ("34", "take its folder out of LD_LIBRARY_PATH"),
        ("803", "reboot"),
        ("999", "the kernel module may not be loaded"),
    ] {
        let fail = format!("cuInit:1+={code}");
        let begin = format!("does not start: cuInit: error {code}, ");
        says(&standin, &[("FAIL", &fail)], false, &begin);
        says(&standin, &[("FAIL", &fail)], false, hint);
    }
    says(&standin, &[("FAIL", "cuInit:1+=100")], true, "no device");
}

#[test]
fn calls_that_fail_while_devices_are_looked_for_are_named() {
    for call in [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceTotalMem",
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
    ] {
        let fail = format!("{call}:1+=999");
        let message = format!("does not start: {call}: error 999, ");
        says(&folder("standin"), &[("FAIL", &fail)], false, &message);
    }
}

/// Deletes a symbol from a library as `dlsym` sees it: by making it local, which it looks past.
fn without_symbol(library: &[u8], symbol: &str) -> Vec<u8> {
    let number = |at: u64, bytes: usize| {
        let mut number = [0; 8];
        let at = usize::try_from(at).unwrap();
        number[..bytes].copy_from_slice(&library[at..at + bytes]);
        u64::from_le_bytes(number)
    };
    let (sections, section_bytes, num_sections) = (number(40, 8), number(58, 2), number(60, 2));
    let section = |n: u64| sections + n * section_bytes;
    const DYNAMIC_SYMBOLS: u64 = 11;
    let table = (0..num_sections)
        .map(section)
        .find(|at| number(at + 4, 4) == DYNAMIC_SYMBOLS)
        .unwrap();
    let names = number(section(number(table + 40, 4)) + 24, 8);
    let (first, bytes) = (number(table + 24, 8), number(table + 32, 8));
    let wanted = [symbol.as_bytes(), b"\0"].concat();
    let entry = (first..first + bytes)
        .step_by(24)
        .find(|entry| {
            let name = usize::try_from(names + number(*entry, 4)).unwrap();
            library[name..].starts_with(&wanted)
        })
        .unwrap_or_else(|| panic!("the stand-in has no {symbol}"));
    let mut library = library.to_vec();
    // The upper half of this byte is the binding; 0 is local.
    library[usize::try_from(entry + 4).unwrap()] &= 0xf;
    library
}

#[test]
fn each_function_that_is_missing_is_named() {
    let library = fs::read(common::shared_object()).unwrap();
    let folder = own_folder("broken");
    for symbol in lastref_cuda::SYMBOLS {
        let path = folder.join("libcuda.so.1");
        fs::write(&path, without_symbol(&library, symbol)).unwrap();
        let message = format!(
            "message: the CUDA driver (libcuda.so.1) is broken: it has no function {symbol}; install it anew"
        );
        says(&folder, &[], false, &message);
    }
}
