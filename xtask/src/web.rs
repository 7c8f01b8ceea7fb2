//! The page of `lastref view`: its sources in `web/` checked, tested and built, and the page driven in a
//! real browser.
//!
//! What is built is kept in the sources, since the command embeds it: a build that differs from it is
//! an error here.

use std::fs;

use anyhow::{Result, ensure};

use crate::command::{cargo, command};
use crate::steps::{Steps, nothing_is_skipped};
use crate::workspace::Workspace;

/// Where the page is kept, in the crate that embeds it.
const PAGE: &str = "crates/lastref-cli/viewer/index.html";

/// Runs every test of the page.
pub(crate) fn test(workspace: &Workspace, steps: &mut Steps) -> Result<()> {
    let name = "the page of `lastref view`";
    if !command(workspace, "npm").args(["--version"]).works() && !nothing_is_skipped() {
        steps.skip(name, "needs npm (`apt-get install nodejs npm`)");
        return Ok(());
    }
    let npm = |arguments: &[&str]| {
        command(workspace, "npm")
            .args(["--prefix", "web"])
            .args(arguments)
            .run()
    };
    steps.step(name, || {
        npm(&["ci", "--no-audit", "--no-fund"])?;
        npm(&["run", "check"])?;
        npm(&["test"])?;
        let page = workspace.root.join(PAGE);
        let kept = fs::read(&page)?;
        npm(&["run", "build"])?;
        ensure!(
            fs::read(&page)? == kept,
            "{PAGE} is not what web/ builds; it is now: commit it"
        );
        Ok(())
    })?;
    let name = "the page in Chromium";
    let chromium = std::env::var_os("CHROMIUM").unwrap_or("/usr/bin/chromium".into());
    if !fs::exists(&chromium)? && !nothing_is_skipped() {
        steps.skip(name, "needs Chromium (`apt-get install chromium`)");
        return Ok(());
    }
    steps.step(name, || {
        cargo(workspace)
            .args(["build", "--release", "--package", "lastref-cli"])
            .run()?;
        command(workspace, "npm")
            .args(["--prefix", "web", "run", "browser"])
            .env("LASTREF", workspace.target.join("release/lastref"))
            .env("CHROMIUM", chromium)
            .run()
    })
}
