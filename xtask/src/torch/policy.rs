//! The model of PyTorch's allocator beside the allocator itself: `python/tests/torch/policy.py`.

use std::path::Path;

use anyhow::Result;

use super::over;
use crate::traces;
use crate::workspace::Workspace;

/// Replays every trace through both and prints a table. On the newest version with all that is compared, on
/// the others with a few settings.
pub(super) fn compare(
    workspace: &Workspace,
    version: &str,
    base: &Path,
    newest: bool,
) -> Result<()> {
    traces::build(workspace)?;
    over(workspace, version, base)?
        .python(workspace)
        .args(["python/tests/torch/policy.py"])
        .args([workspace.target.join("release/lastref")])
        .args([workspace.target.join("torch-policy").join(version)])
        .args((!newest).then_some("--few"))
        .args(traces::all(workspace)?)
        .run()
}
