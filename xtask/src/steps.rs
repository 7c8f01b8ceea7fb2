//! Named steps: announced, timed, counted, stopped at the first that fails.

use std::time::Instant;

use anyhow::{Context, Result};

/// What has been run so far.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    passed: u32,
    skipped: Vec<String>,
}

impl Steps {
    /// Runs `body` and prints how many of its steps passed, failed and were skipped.
    ///
    /// # Errors
    ///
    /// The error of the step that failed.
    pub(crate) fn run(body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let started = Instant::now();
        let mut steps = Self::default();
        let result = body(&mut steps);
        println!();
        for skipped in &steps.skipped {
            println!("skipped: {skipped}");
        }
        println!("in {:.1} s", started.elapsed().as_secs_f64());
        println!("{}", steps.summary(result.is_err()));
        result
    }

    /// Runs one step.
    ///
    /// # Errors
    ///
    /// The error of `body`, with the step's name.
    pub(crate) fn step(&mut self, name: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
        println!("\n==> {name}");
        let started = Instant::now();
        let result = body();
        let seconds = started.elapsed().as_secs_f64();
        match &result {
            Ok(()) => {
                self.passed += 1;
                println!("<== {name}: passed in {seconds:.1} s");
            }
            Err(_) => println!("<== {name}: FAILED after {seconds:.1} s"),
        }
        result.with_context(|| format!("step `{name}`"))
    }

    /// Says that a step cannot be run here, and what would make it run.
    pub(crate) fn skip(&mut self, name: &str, why: &str) {
        println!("\n==> {name}: skipped: {why}");
        self.skipped.push(format!("{name}: {why}"));
    }

    fn summary(&self, failed: bool) -> String {
        let mut line = format!("steps: {} passed, {} failed", self.passed, u8::from(failed));
        if !self.skipped.is_empty() {
            line += &format!(", {} skipped", self.skipped.len());
        }
        line
    }
}

/// Whether nothing may be skipped: `.ci/run` says so.
pub(crate) fn nothing_is_skipped() -> bool {
    std::env::var_os("LASTREF_CI").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_step_stops_the_run_and_is_named() {
        let mut later = false;
        let error = Steps::run(|steps| {
            steps.step("first", || Ok(()))?;
            steps.step("second", || anyhow::bail!("no such thing"))?;
            later = true;
            Ok(())
        })
        .unwrap_err();
        assert!(!later);
        assert_eq!(format!("{error:#}"), "step `second`: no such thing");
    }

    #[test]
    fn the_summary_counts_what_was_run() {
        let mut steps = Steps::default();
        steps.step("first", || Ok(())).unwrap();
        assert_eq!(steps.summary(false), "steps: 1 passed, 0 failed");
        steps.skip("second", "needs a thing");
        assert_eq!(steps.summary(true), "steps: 1 passed, 1 failed, 1 skipped");
    }
}
