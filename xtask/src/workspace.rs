//! Where things are: the root, the target folder, the members and their manifests.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand, Package};

/// This workspace, as `cargo metadata` describes it.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// The folder of the root manifest.
    pub(crate) root: PathBuf,
    /// Where cargo builds to.
    pub(crate) target: PathBuf,
    metadata: Metadata,
}

impl Workspace {
    /// Asks cargo. Reads the manifests only: needs no lock file and no network.
    pub(crate) fn load() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask lies in the workspace's root")?
            .to_path_buf();
        let metadata = MetadataCommand::new()
            .manifest_path(root.join("Cargo.toml"))
            .no_deps()
            .exec()?;
        let target = metadata.target_directory.clone().into_std_path_buf();
        Ok(Self {
            root,
            target,
            metadata,
        })
    }

    /// The members, in the order of the root manifest.
    pub(crate) fn members(&self) -> Vec<&Package> {
        self.metadata.workspace_packages()
    }

    /// The members that are published to crates.io.
    pub(crate) fn published(&self) -> impl Iterator<Item = &Package> {
        self.members()
            .into_iter()
            .filter(|package| package.publish.as_ref().is_none_or(|to| !to.is_empty()))
    }
}
