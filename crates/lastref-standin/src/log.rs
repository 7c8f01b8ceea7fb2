//! What the stand-in has to say: one line at the start, and notes on what it cannot do.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::OnceLock;

use crate::settings::{Log, settings};
use crate::sync::{Mutex, lock};

/// A line on standard error, whatever the settings are.
pub(crate) fn say(line: &str) {
    // Nothing is left to be done if standard error is closed.
    let _ = writeln!(std::io::stderr(), "lastref stand-in: {line}");
}

/// A note, once for each text, where the settings want notes.
pub(crate) fn note(text: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    static FILE: OnceLock<Option<Mutex<std::fs::File>>> = OnceLock::new();
    let Ok(settings) = settings() else {
        return;
    };
    if settings.log == Log::Nowhere || !lock(&SAID).insert(text.to_owned()) {
        return;
    }
    let Log::File(path) = &settings.log else {
        return say(text);
    };
    let file = FILE.get_or_init(|| {
        let opened = std::fs::File::options()
            .append(true)
            .create(true)
            .open(path);
        match opened {
            Ok(file) => Some(Mutex::new(file)),
            Err(error) => {
                say(&format!("cannot write the log {}: {error}", path.display()));
                None
            }
        }
    });
    if let Some(file) = file {
        // The log is a help, no duty.
        let _ = writeln!(lock(file), "{text}");
    }
}
