use std::fs::File;
use std::path::Path;
use anyhow::Context;
use lastref_snapshot::Dump;
use crate::Failure;
pub(crate) fn read(path: &Path) -> Result<Dump, Failure> {
    let read = || -> anyhow::Result<Dump> { Ok(Dump::read(File::open(path)?)?) };
    read().with_context(|| format!("cannot read {}", path.display())).map_err(Failure::BadInput)
}
