//! Which device is used, and what a user is told. What is set is read once in a process, so each
//! case runs in a process of its own: this file again, with only [`child`] in it.
#![expect(clippy::unwrap_used, reason = "an error here is a failed test")]

#[path = "../../lastref-cuda/tests/common/mod.rs"]
mod standin;

use std::process::Command;

use lastref::{Result, Tensor, cuda, sim};

/// What the cases print.
#[test]
#[ignore = "run by the tests below, each in a process of its own"]
fn child() {
    fn show<T: std::fmt::Debug>(name: &str, result: Result<T>) {
        match result {
            Ok(value) => println!("{name} = {value:?}"),
            Err(error) => println!("{name}: {error}"),
        }
    }
    for step in std::env::var("STEPS").unwrap_or_default().split(' ') {
        match step.split_once('=').unwrap_or((step, "")) {
            ("enable", spec) => show("enable", sim::enable(spec)),
            ("look", _) => {
                println!("is_available = {}", cuda::is_available());
                println!("device_count = {}", cuda::device_count());
                println!("spec = {:?}", sim::spec().map(|spec| spec.to_string()));
            }
            ("quiet", _) => {
                show("empty_cache", cuda::empty_cache());
                show("memory_allocated", cuda::memory_allocated(None));
                show("max_memory_reserved", cuda::max_memory_reserved(None));
                show(
                    "memory_summary",
                    cuda::memory_summary(None).map(|t| t.len()),
                );
            }
            ("strict", _) => {
                show("get_device_name", cuda::get_device_name(None));
                show(
                    "mem_get_info",
                    cuda::mem_get_info(None).map(|i| i.free_bytes),
                );
                show("memory_allocated(0)", cuda::memory_allocated(0));
                show(
                    "cuda",
                    Tensor::zeros([1]).unwrap().cuda().map(|t| t.is_cuda()),
                );
                show("stream", cuda::Stream::new().map(|s| s.device()));
            }
            ("threads", _) => {
                let threads: Vec<_> = (0..8)
                    .map(|_| std::thread::spawn(cuda::is_available))
                    .collect();
                assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
            }
            ("limit", _) => show(
                "limit",
                cuda::allocator(None).map(|allocator| allocator.memory_limit()),
            ),
            ("change", settings) => show("change", cuda::set_allocator_settings(settings)),
            ("exit", _) => {
                // Tensors in thread-local variables of the main thread and in a static.
                static KEPT: std::sync::OnceLock<Tensor> = std::sync::OnceLock::new();
                let tensor = Tensor::ones([3]).unwrap().cuda().unwrap();
                KEPT.set(tensor.clone()).unwrap();
                println!("kept = {tensor}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs the steps under `LASTREF_SIM=setting` and gives what they print, and standard error.
#[track_caller]
fn run(setting: Option<&str>, steps: &str) -> (String, String) {
    run_with(setting, None, steps)
}

/// The same, also under `LASTREF_ALLOC_CONF=conf`.
#[track_caller]
fn run_with(setting: Option<&str>, conf: Option<&str>, steps: &str) -> (String, String) {
    let command = Command::new(std::env::current_exe().unwrap());
    finish(command, setting, conf, steps)
}

/// The same with the stand-in as the driver.
#[track_caller]
fn run_on_driver(
    settings: &[(&str, &str)],
    setting: Option<&str>,
    steps: &str,
) -> (String, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .env("LD_LIBRARY_PATH", standin::folder("standin"))
        .env("LASTREF_STANDIN_QUIET", "1");
    for (name, value) in settings {
        command.env(format!("LASTREF_STANDIN_{name}"), value);
    }
    finish(command, setting, None, steps)
}

#[track_caller]
fn finish(
    mut command: Command,
    setting: Option<&str>,
    conf: Option<&str>,
    steps: &str,
) -> (String, String) {
    command
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env("STEPS", steps)
        .env_remove("LASTREF_SIM")
        .env_remove("LASTREF_ALLOC_CONF");
    if let Some(conf) = conf {
        command.env("LASTREF_ALLOC_CONF", conf);
    }
    if let Some(setting) = setting {
        command.env("LASTREF_SIM", setting);
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (out, error) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{out}{error}");
    let lines = |text: &str, keep: fn(&&str) -> bool| -> String {
        text.lines()
            .filter(keep)
            .map(|line| format!("{line}\n"))
            .collect()
    };
    (
        lines(&out, |line| {
            !line.is_empty() && !line.starts_with("running") && !line.starts_with("test ")
        }),
        lines(&error, |line| line.starts_with("lastref")),
    )
}

#[test]
fn without_a_driver_nothing_is_available() {
    for setting in [None, Some("")] {
        let (out, error) = run(setting, "look quiet strict");
        let missing = "no CUDA device is available; set LASTREF_SIM=8GiB to use a simulated one";
        assert!(out.contains("is_available = false\ndevice_count = 0\nspec = None\n"));
        assert!(out.contains("empty_cache = 0\nmemory_allocated = 0\nmax_memory_reserved = 0\n"));
        for call in [
            "get_device_name: get_device_name",
            "mem_get_info: mem_get_info",
            "memory_allocated(0): memory_stats",
            "cuda: to",
            "stream: stream",
        ] {
            assert!(
                out.contains(&format!("{call}: {missing}\n")),
                "{call}: {out}"
            );
        }
        assert_eq!(error, "", "nothing to say");
    }
}

#[test]
fn the_variable_asks_for_simulated_gpus_and_one_line_says_so() {
    let (out, error) = run(Some("2x1GiB"), "threads look strict");
    assert!(out.contains("is_available = true\ndevice_count = 2\nspec = Some(\"2x1GiB\")\n"));
    assert!(out.contains("get_device_name = \"lastref simulated GPU (1.00 GiB)\"\n"));
    assert!(out.contains("mem_get_info = 1073741824\n"));
    assert!(out.contains("cuda = true\n"));
    assert_eq!(
        error,
        "lastref: using 2 simulated GPUs of 1.00 GiB, no real one (LASTREF_SIM=2x1GiB)\n"
    );
}

#[test]
fn a_variable_that_cannot_be_read_is_a_clear_error_of_every_call() {
    let (out, error) = run(Some("8G"), "look quiet strict");
    let why =
        "LASTREF_SIM=\"8G\": the unit \"g\" can mean two things, write GiB (1024) or GB (1000)";
    assert!(out.contains("is_available = false\ndevice_count = 0\n"));
    for call in [
        "empty_cache",
        "memory_allocated",
        "max_memory_reserved",
        "memory_summary",
        "get_device_name",
        "mem_get_info",
        "memory_allocated(0)",
        "cuda",
        "stream",
    ] {
        assert!(out.contains(&format!("{call}: {why}\n")), "{call}: {out}");
    }
    assert_eq!(error, format!("lastref: {why}\n"), "said once");
}

#[test]
fn the_program_may_ask_first_or_after_finding_nothing() {
    let (out, error) = run(None, "look enable=1GiB look enable=1024MiB enable=2GiB");
    assert!(out.contains("is_available = false\n"));
    assert!(out.contains("enable = ()\nis_available = true\ndevice_count = 1\n"));
    assert!(
        out.contains("spec = Some(\"1GiB\")\nenable = ()\n"),
        "the same again: {out}"
    );
    assert!(
        out.ends_with("enable: sim::enable=\"2GiB\": simulated GPUs are in use already, 1GiB\n")
    );
    assert_eq!(
        error,
        "lastref: using 1 simulated GPU of 1.00 GiB, no real one (asked for by sim::enable)\n"
    );

    let (out, _) = run(Some("8GiB"), "enable=1GiB look");
    assert!(out.contains("spec = Some(\"1GiB\")\n"), "the program wins");
    let (out, _) = run(Some("8GiB"), "look enable=1GiB");
    assert!(out.contains("in use already, 8GiB\n"), "unless it is late");
    let (out, _) = run(Some("nonsense"), "enable=1GiB look");
    assert!(out.contains("is_available = true\n"));
}

#[test]
fn tensors_may_live_to_the_end_of_the_process() {
    let (out, _) = run(Some("1GiB"), "exit");
    assert_eq!(out, "kept = tensor([1., 1., 1.], device='cuda:0')\n");
}

#[test]
fn the_allocator_takes_its_settings_from_the_environment_and_from_the_program() {
    let conf = Some("per_process_memory_fraction:0.5");
    let steps = "limit change=history_entries:5 limit change=memory_limit_mb:64 limit";
    let (out, _) = run_with(Some("1GiB"), conf, steps);
    assert_eq!(
        out,
        "limit = Some(536870912)\nchange = ()\nlimit = Some(536870912)\nchange = ()\n\
         limit = Some(67108864)\n"
    );
    let (out, _) = run(
        Some("1GiB"),
        "change=expandable_segments:False change=nonsense:1",
    );
    assert!(
        out.contains("cannot change while the allocator is in use"),
        "{out}"
    );
    assert!(
        out.contains("change: set_allocator_settings=\"nonsense:1\": there is no setting"),
        "{out}"
    );
}

#[test]
fn allocator_settings_that_cannot_be_read_are_a_clear_error_of_every_call() {
    let (out, error) = run_with(Some("1GiB"), Some("max_split_size_mb:1"), "look strict");
    let why = "LASTREF_ALLOC_CONF=\"max_split_size_mb:1\": there is no setting \"max_split_size_mb\" here";
    assert!(out.contains("is_available = false\n"), "{out}");
    for call in ["get_device_name", "mem_get_info", "cuda", "stream"] {
        assert!(out.contains(&format!("{call}: {why}")), "{call}: {out}");
    }
    assert!(error.starts_with(&format!("lastref: {why}")), "{error}");
    assert_eq!(error.lines().count(), 1, "said once: {error}");
    // Nobody asked for a device: nobody needs the settings.
    let (out, error) = run_with(None, Some("nonsense"), "look");
    assert!(out.contains("is_available = false\n") && error.is_empty());
}

// ---- the driver ---------------------------------------------------------------------------

#[test]
fn a_driver_that_cannot_be_used_is_named_once_and_in_every_error() {
    let (out, error) = run_on_driver(&[("DRIVER", "11.3")], None, "look look quiet strict");
    let why = "the CUDA driver (libcuda.so) is too old: it is for CUDA 11.3, lastref needs one for 11.4 or newer (version 470); update it";
    assert_eq!(error, format!("lastref: no GPU can be used: {why}\n"));
    assert!(
        out.starts_with("is_available = false\ndevice_count = 0\n"),
        "{out}"
    );
    assert!(
        out.contains("empty_cache = 0\nmemory_allocated = 0\n"),
        "{out}"
    );
    for call in ["get_device_name", "mem_get_info", "cuda", "stream"] {
        assert!(out.contains(&format!("{call}: ")), "{call}\n{out}");
    }
    assert_eq!(out.matches(why).count(), 5, "{out}");
}

#[test]
fn a_driver_without_devices_is_as_none() {
    let (out, error) = run_on_driver(&[("DEVICES", "0")], None, "look quiet strict");
    assert_eq!((out, error), run(None, "look quiet strict"));
}

#[test]
fn a_gpu_is_used_unless_simulated_ones_were_asked_for_first() {
    let settings = [("DEVICES", "2"), ("MEMORY", "3GiB")];
    let (out, error) = run_on_driver(&settings, None, "look strict enable=1GiB");
    assert!(error.is_empty(), "{error}");
    assert!(
        out.contains("is_available = true\ndevice_count = 2\nspec = None\n"),
        "{out}"
    );
    assert!(out.contains("cuda = true\n"), "{out}");
    let refused = "enable: sim::enable=\"1GiB\": a GPU is in use already\n";
    assert!(out.ends_with(refused), "{out}");

    for (setting, steps) in [(Some("1GiB"), "look"), (None, "enable=1GiB look")] {
        let (out, error) = run_on_driver(&settings, setting, steps);
        assert!(
            out.contains("device_count = 1\nspec = Some(\"1GiB\")\n"),
            "{out}"
        );
        assert!(
            error.contains("1 simulated GPU of 1.00 GiB, no real one"),
            "{error}"
        );
    }
}

#[test]
fn tensors_of_a_gpu_in_statics_are_left_at_exit() {
    let (out, error) = run_on_driver(&[("MEMORY", "1GiB")], None, "exit");
    assert!(
        out.contains("kept = tensor([1., 1., 1.], device='cuda:0')"),
        "{out}"
    );
    assert!(error.is_empty(), "{error}");
}
