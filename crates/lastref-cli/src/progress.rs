//! A progress bar on standard error that only shows itself when there is something to wait for.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shorter work shows no bar.
const PATIENCE: Duration = Duration::from_millis(300);

/// A bar for one piece of work. Gone when dropped; never shown where standard error is no
/// terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// When the work began; `None` once it is decided whether the bar is shown.
    hidden_since: Option<Instant>,
}

/// Whom work is done for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Audience {
    /// Who typed the command, and waits.
    Person,
    /// A program that calls the library: standard error is not ours.
    Program,
}

impl Progress {
    /// Never shows itself to a program.
    pub(crate) fn shown_to(mut self, audience: Audience) -> Self {
        if audience == Audience::Program {
            self.hidden_since = None;
        }
        self
    }

    /// A bar over `total` operations.
    pub(crate) fn operations(what: &'static str, total: u64) -> Self {
        let template = "{msg} {wide_bar} {human_pos}/{human_len} operations, {eta} left";
        Self::new(Some(total), template, what)
    }

    /// A bar over `total` measurements.
    pub(crate) fn measurements(total: u64) -> Self {
        let template = "{msg} {wide_bar} {eta} left";
        Self::new(Some(total), template, "measuring")
    }

    /// A bar over `total` replays.
    pub(crate) fn replays(what: &'static str, total: u64) -> Self {
        let template = "{msg} {wide_bar} {pos}/{len} replays, {eta} left";
        Self::new(Some(total), template, what)
    }

    /// A bar over `total` files.
    pub(crate) fn files(what: &'static str, total: u64) -> Self {
        let template = "{msg} {wide_bar} {pos}/{len} files, {eta} left";
        Self::new(Some(total), template, what)
    }

    /// A bar over `total` bytes, or a count of them where the total is not known.
    pub(crate) fn bytes(what: &'static str, total: Option<u64>) -> Self {
        let template = match total {
            Some(_) => "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes}",
            None => "{spinner} {msg} {binary_bytes}",
        };
        Self::new(total, template, what)
    }

    /// A line that says what is being done.
    pub(crate) fn spinner(what: &'static str) -> Self {
        Self::new(None, "{spinner} {msg}", what)
    }

    fn new(total: Option<u64>, template: &str, what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(template).expect("the templates above are valid");
        bar.set_style(style.progress_chars("━━ "));
        bar.set_message(what);
        Self {
            bar,
            hidden_since: Some(Instant::now()),
        }
    }

    /// Moves the bar to `position`.
    pub(crate) fn set(&mut self, position: u64) {
        self.show_when_due();
        self.bar.set_position(position);
    }

    /// Says something else is being done.
    pub(crate) fn say(&mut self, what: String) {
        self.show_when_due();
        self.bar.set_message(what);
        self.bar.tick();
    }

    fn show_when_due(&mut self) {
        if self
            .hidden_since
            .is_some_and(|since| since.elapsed() >= PATIENCE)
        {
            self.hidden_since = None;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
