//! Functions by their names, as `cuGetProcAddress` and the settings know them.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::entry::{Export, Library};
use crate::settings::settings;

/// Names under which later versions of CUDA changed a function, with the version that brought the symbol. A name without
/// an entry is as old as can be, and a `_v2` without one came with CUDA 3.2.
const SINCE: &[(&str, i32)] = &[
    ("cuCtxCreate_v3", 11_040),
    ("cuCtxCreate_v4", 12_050),
    ("cuCtxDestroy_v2", 4_000),
    ("cuCtxGetDevice_v2", 13_000),
    ("cuCtxSynchronize_v2", 13_000),
    ("cuDeviceGetUuid_v2", 11_040),
    ("cuDevicePrimaryCtxRelease_v2", 11_000),
    ("cuDevicePrimaryCtxReset_v2", 11_000),
    ("cuDevicePrimaryCtxSetFlags_v2", 11_000),
    ("cuEventElapsedTime_v2", 12_080),
    ("cuGetProcAddress_v2", 12_000),
    ("cuGraphAddDependencies_v2", 12_030),
    ("cuGraphAddKernelNode_v2", 12_000),
    ("cuGraphAddNode_v2", 12_030),
    ("cuGraphExecKernelNodeSetParams_v2", 12_000),
    ("cuGraphExecUpdate_v2", 12_000),
    ("cuGraphGetEdges_v2", 12_030),
    ("cuGraphInstantiate_v2", 11_000),
    ("cuGraphKernelNodeGetParams_v2", 12_000),
    ("cuGraphKernelNodeSetParams_v2", 12_000),
    ("cuGraphNodeGetDependencies_v2", 12_030),
    ("cuGraphNodeGetDependentNodes_v2", 12_030),
    ("cuGraphRemoveDependencies_v2", 12_030),
    ("cuIpcOpenMemHandle_v2", 11_000),
    ("cuLaunchHostFunc_v2", 13_010),
    ("cuMemAdvise_v2", 12_020),
    ("cuMemPrefetchAsync_v2", 12_020),
    ("cuMemcpy3DBatchAsync_v2", 13_000),
    ("cuMemcpyBatchAsync_v2", 13_000),
    ("cuMulticastBindAddr_v2", 13_010),
    ("cuMulticastBindMem_v2", 13_010),
    ("cuStreamBatchMemOp_v2", 11_070),
    ("cuStreamBeginCapture_v2", 10_010),
    ("cuStreamGetCaptureInfo_v2", 11_030),
    ("cuStreamGetCaptureInfo_v3", 12_030),
    ("cuStreamGetCtx_v2", 12_050),
    ("cuStreamUpdateCaptureDependencies_v2", 12_030),
    ("cuStreamWaitValue32_v2", 11_070),
    ("cuStreamWaitValue64_v2", 11_070),
    ("cuStreamWriteValue32_v2", 11_070),
    ("cuStreamWriteValue64_v2", 11_070),
    ("cuMemAddressReserve", 10_020),
    ("cuMemAddressFree", 10_020),
    ("cuMemCreate", 10_020),
    ("cuMemRelease", 10_020),
    ("cuMemMap", 10_020),
    ("cuMemUnmap", 10_020),
    ("cuMemSetAccess", 10_020),
    ("cuMemGetAccess", 10_020),
    ("cuMemGetAllocationGranularity", 10_020),
    ("cuMemAllocAsync", 11_020),
    ("cuMemFreeAsync", 11_020),
    ("cuMemAllocFromPoolAsync", 11_020),
    ("cuMemPoolCreate", 11_020),
];

fn table() -> &'static BTreeMap<&'static str, Export> {
    static TABLE: OnceLock<BTreeMap<&'static str, Export>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let all = crate::EXPORTS.iter().flat_map(|exports| exports.iter());
        all.map(|export| (export.entry.name, *export)).collect()
    })
}

/// A name without what tells its versions apart.
pub(crate) fn base(name: &str) -> &str {
    let name = name
        .strip_suffix("_ptsz")
        .or_else(|| name.strip_suffix("_ptds"))
        .unwrap_or(name);
    let versions = ["_v2", "_v3", "_v4"];
    versions
        .iter()
        .find_map(|version| name.strip_suffix(version))
        .unwrap_or(name)
}

/// Whether a setting that names `wanted` means the function `name`.
pub(crate) fn same(wanted: &str, name: &str) -> bool {
    wanted == name || wanted == base(name)
}

pub(crate) fn is_known(name: &str) -> bool {
    table().keys().any(|known| same(name, known))
}

pub(crate) fn find(name: &str) -> Option<Export> {
    table().get(name).copied()
}

/// How often the functions that a name means were called; `*` means all but the stand-in's own.
pub(crate) fn calls(name: &str) -> u64 {
    let meant = table().values().filter(|export| match name {
        "*" => export.entry.library != Library::Control,
        _ => same(name, export.entry.name),
    });
    meant.map(|export| export.entry.calls()).sum()
}

/// What asking for a function came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    At(u64),
    Nowhere,
    /// It is there, and not in that version of CUDA.
    TooNew,
}

/// The function of the driver that `symbol` names in version `version` of CUDA.
pub(crate) fn driver_function(symbol: &str, version: i32, per_thread: bool) -> Found {
    let missing = settings().map(|settings| &settings.missing);
    if missing.is_ok_and(|names| names.iter().any(|name| same(name, symbol))) {
        return Found::Nowhere;
    }
    let oldest = [
        String::new(),
        "_v2".to_owned(),
        "_v3".to_owned(),
        "_v4".to_owned(),
    ];
    let mut found = Found::Nowhere;
    for suffix in oldest {
        let name = format!("{symbol}{suffix}");
        let Some(export) = find(&name).filter(|export| export.entry.library == Library::Driver)
        else {
            continue;
        };
        let since = SINCE
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, since)| *since);
        let since = since.unwrap_or(if suffix == "_v2" { 3_020 } else { 0 });
        if since > version {
            if found == Found::Nowhere {
                found = Found::TooNew;
            }
            continue;
        }
        let own = ["_ptsz", "_ptds"]
            .iter()
            .find_map(|kind| find(&format!("{name}{kind}")));
        let chosen = own.filter(|_| per_thread).unwrap_or(export);
        found = Found::At(chosen.function.address());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_without_versions() {
        assert_eq!(base("cuMemcpyHtoDAsync_v2_ptsz"), "cuMemcpyHtoDAsync");
        assert!(same("cuMemAlloc", "cuMemAlloc_v2"));
        assert!(same("cuMemAlloc_v2", "cuMemAlloc_v2"));
        assert!(!same("cuMemAlloc_v3", "cuMemAlloc_v2"));
    }

    #[test]
    fn a_version_of_cuda_gets_the_functions_it_knows() {
        let at = |name: &str| Found::At(find(name).unwrap().function.address());
        let ask = |version| driver_function("cuStreamGetCaptureInfo", version, false);
        assert_eq!(ask(10_010), at("cuStreamGetCaptureInfo"));
        assert_eq!(ask(11_030), at("cuStreamGetCaptureInfo_v2"));
        assert_eq!(ask(13_020), at("cuStreamGetCaptureInfo_v3"));
        assert_eq!(driver_function("cuMemCreate", 9_000, false), Found::TooNew);
        assert_eq!(driver_function("cuFancy", 13_000, false), Found::Nowhere);
        assert_eq!(
            driver_function("cuMemcpyHtoDAsync", 13_000, true),
            at("cuMemcpyHtoDAsync_v2_ptsz")
        );
        // Only the driver's.
        assert_eq!(driver_function("cudaMalloc", 13_000, false), Found::Nowhere);
    }
}
