//! What programs call without the process around it: the same as the command says.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot run its command has failed"
)]

mod common;

use std::io;
use std::path::{Path, PathBuf};

use lastref_cli::{AdviseError, AdviseOptions, advise};

use common::{run, snapshot, text};

fn trace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/resnet50_train.csv.gz")
}

#[test]
fn advise_is_what_the_command_prints() {
    let files = [trace(), snapshot("transformer-training.pickle.gz").into()];
    let [first, second] = files.each_ref().map(|file| file.to_str().unwrap());
    let mut options = AdviseOptions::default();
    options.capacity_bytes = Some(8 << 30);
    options.settings = vec!["max_split_size_mb:48".to_owned()];
    let found = advise(&files, &options, &mut || true).unwrap();
    let arguments = [
        "advise",
        "--json",
        "--capacity",
        "8GiB",
        "--with",
        "max_split_size_mb:48",
        first,
        second,
    ];
    assert_eq!(found, text(&arguments).trim_end());

    // That nothing completes is an answer.
    options.capacity_bytes = Some(1 << 30);
    let found = advise(&files[..1], &options, &mut || true).unwrap();
    assert!(found.ends_with(r#""recommended":null}"#), "{found}");
    let done = run(&[
        "advise",
        "--json",
        "--capacity",
        "1GiB",
        "--with",
        "max_split_size_mb:48",
        first,
    ]);
    assert_eq!(done.status.code(), Some(1));
    assert_eq!(found.as_bytes(), done.stdout.trim_ascii_end());
}

#[test]
fn whoever_wants_to_stop_is_not_kept() {
    let files = vec![trace(); 40];
    let mut asked = 0;
    let stopped = advise(&files, &AdviseOptions::default(), &mut || {
        asked += 1;
        asked < 2
    });
    assert!(matches!(stopped, Err(AdviseError::Stopped)), "{stopped:?}");
    assert_eq!(asked, 2);
}

#[test]
fn bad_input_is_told_by_kind() {
    let none = advise(&[], &AdviseOptions::default(), &mut || true);
    assert!(matches!(none, Err(AdviseError::BadInput(_))), "{none:?}");
    let missing = advise(
        &["no-such-file".into()],
        &AdviseOptions::default(),
        &mut || true,
    );
    let Err(AdviseError::Read(error)) = missing else {
        panic!("{missing:?}");
    };
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    let mut options = AdviseOptions::default();
    options.settings = vec!["no_such_setting:1".to_owned()];
    for (file, bytes, word) in [
        (trace(), None, "no_such_setting"),
        (
            snapshot("forms/protocol-4.pickle").into(),
            Some(0),
            "a device of 0 bytes",
        ),
        (
            snapshot("truth.json").into(),
            None,
            "neither an allocation trace nor a memory snapshot",
        ),
    ] {
        if word != "no_such_setting" {
            options.settings.clear();
        }
        options.capacity_bytes = bytes;
        let found = advise(&[file], &options, &mut || true);
        let Err(AdviseError::BadInput(text)) = &found else {
            panic!("{word}: {found:?}");
        };
        assert!(text.contains(word), "{text}");
    }
}
