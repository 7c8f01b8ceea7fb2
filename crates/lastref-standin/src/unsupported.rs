//! What is not supported: each of these functions fails as NVIDIA's fail for what a device cannot do, and says so once.
//!
//! They are here by name since a program that does not find a function of the runtime here would find NVIDIA's, which
//! knows nothing of this state. The lists have every function that CUDA 12.8 and 13.2 export and this library does not
//! implement.
#![expect(non_snake_case, reason = "the names of the C interface")]

/// Of the driver.
pub(crate) mod driver {
    crate::entry::unsupported_exports! {
        Driver;
        cuArray3DCreate cuArray3DCreate_v2 cuArray3DGetDescriptor cuArray3DGetDescriptor_v2 cuArrayCreate
        cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor cuArrayGetDescriptor_v2 cuArrayGetMemoryRequirements
        cuArrayGetPlane cuArrayGetSparseProperties cuCheckpointProcessCheckpoint cuCheckpointProcessGetRestoreThreadId
        cuCheckpointProcessGetState cuCheckpointProcessLock cuCheckpointProcessRestore cuCheckpointProcessUnlock
        cuCoredumpDeregisterCompleteCallback cuCoredumpDeregisterStartCallback cuCoredumpGetAttribute
        cuCoredumpGetAttributeGlobal cuCoredumpRegisterCompleteCallback cuCoredumpRegisterStartCallback
        cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal cuCtxAttach cuCtxCreate cuCtxDestroy cuCtxDetach
        cuCtxFromGreenCtx cuCtxGetDevResource cuCtxGetExecAffinity cuCtxGetSharedMemConfig cuCtxPopCurrent
        cuCtxPushCurrent cuCtxRecordEvent cuCtxResetPersistingL2Cache cuCtxSetSharedMemConfig cuCtxWaitEvent
        cuDestroyExternalMemory cuDestroyExternalSemaphore cuDevResourceGenerateDesc cuDevSmResourceSplit
        cuDevSmResourceSplitByCount cuDeviceGetDevResource cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute
        cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid cuDeviceGetNvSciSyncAttributes
        cuDeviceGetP2PAtomicCapabilities cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth cuDeviceGraphMemTrim
        cuDevicePrimaryCtxRelease cuDevicePrimaryCtxReset cuDevicePrimaryCtxSetFlags cuDeviceRegisterAsyncNotification
        cuDeviceSetGraphMemAttribute cuDeviceTotalMem cuDeviceUnregisterAsyncNotification cuEventDestroy
        cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites
        cuFuncGetModule cuFuncGetParamCount cuFuncGetParamInfo cuFuncIsLoaded cuFuncLoad cuFuncSetBlockShape
        cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGraphAddBatchMemOpNode cuGraphAddChildGraphNode
        cuGraphAddDependencies cuGraphAddDependencies_v2 cuGraphAddEmptyNode cuGraphAddEventRecordNode
        cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
        cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddKernelNode_v2 cuGraphAddMemAllocNode cuGraphAddMemFreeNode
        cuGraphAddMemcpyNode cuGraphAddMemsetNode cuGraphAddNode cuGraphAddNode_v2 cuGraphBatchMemOpNodeGetParams
        cuGraphBatchMemOpNodeSetParams cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphConditionalHandleCreate
        cuGraphCreate cuGraphDebugDotPrint cuGraphDestroyNode cuGraphEventRecordNodeGetEvent
        cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent
        cuGraphExecBatchMemOpNodeSetParams cuGraphExecChildGraphNodeSetParams cuGraphExecEventRecordNodeSetEvent
        cuGraphExecEventWaitNodeSetEvent cuGraphExecExternalSemaphoresSignalNodeSetParams
        cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExecGetFlags cuGraphExecGetId
        cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams cuGraphExecKernelNodeSetParams_v2
        cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecNodeSetParams cuGraphExecUpdate
        cuGraphExecUpdate_v2 cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
        cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges
        cuGraphGetEdges_v2 cuGraphGetId cuGraphGetRootNodes cuGraphHostNodeGetParams cuGraphHostNodeSetParams
        cuGraphInstantiate cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz cuGraphInstantiate_v2
        cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
        cuGraphKernelNodeGetParams_v2 cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams
        cuGraphKernelNodeSetParams_v2 cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams
        cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams
        cuGraphNodeFindInClone cuGraphNodeGetContainingGraph cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2
        cuGraphNodeGetDependentNodes cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled cuGraphNodeGetLocalId
        cuGraphNodeGetParams cuGraphNodeGetToolsId cuGraphNodeGetType cuGraphNodeSetEnabled cuGraphNodeSetParams
        cuGraphReleaseUserObject cuGraphRemoveDependencies cuGraphRemoveDependencies_v2 cuGraphicsMapResources
        cuGraphicsMapResources_ptsz cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer
        cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags cuGraphicsResourceSetMapFlags_v2
        cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources cuGraphicsUnmapResources_ptsz
        cuGraphicsUnregisterResource cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource cuGreenCtxGetId
        cuGreenCtxRecordEvent cuGreenCtxStreamCreate cuGreenCtxWaitEvent cuImportExternalMemory
        cuImportExternalSemaphore cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle
        cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuKernelGetLibrary cuKernelGetName cuKernelGetParamCount
        cuKernelGetParamInfo cuKernelSetCacheConfig cuLaunch cuLaunchCooperativeKernelMultiDevice cuLaunchGrid
        cuLaunchGridAsync cuLaunchHostFunc_v2 cuLaunchHostFunc_v2_ptsz cuLibraryEnumerateKernels cuLibraryGetGlobal
        cuLibraryGetKernelCount cuLibraryGetManaged cuLibraryGetUnifiedFunction cuLibraryLoadFromFile cuLinkAddData
        cuLinkAddData_v2 cuLinkAddFile cuLinkAddFile_v2 cuLinkComplete cuLinkCreate cuLinkCreate_v2 cuLinkDestroy
        cuLogsCurrent cuLogsDumpToFile cuLogsDumpToMemory cuLogsRegisterCallback cuLogsUnregisterCallback cuMemAlloc
        cuMemAllocHost cuMemAllocPitch cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz
        cuMemDiscardAndPrefetchBatchAsync cuMemDiscardAndPrefetchBatchAsync_ptsz cuMemDiscardBatchAsync
        cuMemDiscardBatchAsync_ptsz cuMemExportToShareableHandle cuMemFree cuMemGetAddressRange cuMemGetDefaultMemPool
        cuMemGetHandleForAddressRange cuMemGetInfo cuMemGetMemPool cuMemHostGetDevicePointer cuMemHostRegister
        cuMemImportFromShareableHandle cuMemMapArrayAsync cuMemMapArrayAsync_ptsz cuMemPoolExportPointer
        cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
        cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz cuMemRangeGetAttribute cuMemRangeGetAttributes
        cuMemSetMemPool cuMemcpy2D cuMemcpy2DAsync cuMemcpy2DUnaligned cuMemcpy3D cuMemcpy3DAsync cuMemcpy3DAsync_v2
        cuMemcpy3DAsync_v2_ptsz cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz cuMemcpy3DBatchAsync_v2
        cuMemcpy3DBatchAsync_v2_ptsz cuMemcpy3DPeer cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz cuMemcpy3DPeer_ptds
        cuMemcpy3DWithAttributesAsync cuMemcpy3DWithAttributesAsync_ptsz cuMemcpy3D_v2 cuMemcpy3D_v2_ptds cuMemcpyAtoA
        cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds cuMemcpyAtoD cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds cuMemcpyAtoH
        cuMemcpyAtoHAsync cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds
        cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz cuMemcpyBatchAsync_v2 cuMemcpyBatchAsync_v2_ptsz cuMemcpyDtoA
        cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyDtoH cuMemcpyDtoHAsync
        cuMemcpyHtoA cuMemcpyHtoAAsync cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz cuMemcpyHtoA_v2
        cuMemcpyHtoA_v2_ptds cuMemcpyHtoD cuMemcpyHtoDAsync cuMemcpyWithAttributesAsync
        cuMemcpyWithAttributesAsync_ptsz cuMemsetD16 cuMemsetD2D16 cuMemsetD2D32 cuMemsetD2D8 cuMemsetD32 cuMemsetD8
        cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements
        cuMipmappedArrayGetSparseProperties cuModuleEnumerateFunctions cuModuleGetFunctionCount cuModuleGetGlobal
        cuModuleGetGlobal_v2 cuModuleGetSurfRef cuModuleGetTexRef cuMulticastAddDevice cuMulticastBindAddr
        cuMulticastBindAddr_v2 cuMulticastBindMem cuMulticastBindMem_v2 cuMulticastCreate cuMulticastGetGranularity
        cuMulticastUnbind cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveClusters
        cuOccupancyMaxPotentialBlockSizeWithFlags cuOccupancyMaxPotentialClusterSize cuParamSetSize cuParamSetTexRef
        cuParamSetf cuParamSeti cuParamSetv cuSignalExternalSemaphoresAsync cuSignalExternalSemaphoresAsync_ptsz
        cuStreamBatchMemOp cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
        cuStreamBeginCapture cuStreamBeginCaptureToCig cuStreamBeginCaptureToCig_ptsz cuStreamBeginCaptureToGraph
        cuStreamBeginCaptureToGraph_ptsz cuStreamBeginCapture_ptsz cuStreamCopyAttributes cuStreamCopyAttributes_ptsz
        cuStreamDestroy cuStreamEndCaptureToCig cuStreamEndCaptureToCig_ptsz cuStreamGetAttribute
        cuStreamGetAttribute_ptsz cuStreamGetCtx_v2 cuStreamGetCtx_v2_ptsz cuStreamGetDevResource
        cuStreamGetDevResource_ptsz cuStreamGetGreenCtx cuStreamSetAttribute cuStreamSetAttribute_ptsz
        cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_ptsz cuStreamUpdateCaptureDependencies_v2
        cuStreamUpdateCaptureDependencies_v2_ptsz cuStreamWaitValue32 cuStreamWaitValue32_ptsz cuStreamWaitValue32_v2
        cuStreamWaitValue32_v2_ptsz cuStreamWaitValue64 cuStreamWaitValue64_ptsz cuStreamWaitValue64_v2
        cuStreamWaitValue64_v2_ptsz cuStreamWriteValue32 cuStreamWriteValue32_ptsz cuStreamWriteValue32_v2
        cuStreamWriteValue32_v2_ptsz cuStreamWriteValue64 cuStreamWriteValue64_ptsz cuStreamWriteValue64_v2
        cuStreamWriteValue64_v2_ptsz cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc
        cuSurfRefGetArray cuSurfRefSetArray cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide cuTensorMapEncodeTiled
        cuTensorMapReplaceAddress cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc
        cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate cuTexRefDestroy cuTexRefGetAddress
        cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray cuTexRefGetBorderColor cuTexRefGetFilterMode
        cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode
        cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray cuTexRefSetAddress
        cuTexRefSetAddress2D cuTexRefSetAddress2D_v2 cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode
        cuTexRefSetAddress_v2 cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags
        cuTexRefSetFormat cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
        cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuWaitExternalSemaphoresAsync
        cuWaitExternalSemaphoresAsync_ptsz
    }
}

/// Of the runtime.
pub(crate) mod runtime {
    crate::entry::unsupported_exports! {
        Runtime;
        __cudaGetProcAddress cudaArrayGetInfo cudaArrayGetMemoryRequirements cudaArrayGetPlane
        cudaArrayGetSparseProperties cudaCreateSurfaceObject cudaCreateTextureObject cudaDestroyExternalMemory
        cudaDestroyExternalSemaphore cudaDestroySurfaceObject cudaDestroyTextureObject cudaDevResourceGenerateDesc
        cudaDevSmResourceSplit cudaDevSmResourceSplitByCount cudaDeviceFlushGPUDirectRDMAWrites
        cudaDeviceGetDevResource cudaDeviceGetExecutionCtx cudaDeviceGetHostAtomicCapabilities
        cudaDeviceGetNvSciSyncAttributes cudaDeviceGetP2PAtomicCapabilities cudaDeviceGetTexture1DLinearMaxWidth
        cudaDeviceRegisterAsyncNotification cudaDeviceUnregisterAsyncNotification cudaEGLStreamConsumerAcquireFrame
        cudaEGLStreamConsumerConnect cudaEGLStreamConsumerConnectWithFlags cudaEGLStreamConsumerDisconnect
        cudaEGLStreamConsumerReleaseFrame cudaEGLStreamProducerConnect cudaEGLStreamProducerDisconnect
        cudaEGLStreamProducerPresentFrame cudaEGLStreamProducerReturnFrame cudaEventCreateFromEGLSync
        cudaExecutionCtxDestroy cudaExecutionCtxGetDevResource cudaExecutionCtxGetDevice cudaExecutionCtxGetId
        cudaExecutionCtxRecordEvent cudaExecutionCtxStreamCreate cudaExecutionCtxSynchronize cudaExecutionCtxWaitEvent
        cudaExternalMemoryGetMappedBuffer cudaExternalMemoryGetMappedMipmappedArray cudaFreeArray
        cudaFreeMipmappedArray cudaFuncGetName cudaFuncGetParamCount cudaFuncGetParamInfo cudaGLGetDevices
        cudaGLMapBufferObject cudaGLMapBufferObjectAsync cudaGLRegisterBufferObject cudaGLSetBufferObjectMapFlags
        cudaGLSetGLDevice cudaGLUnmapBufferObject cudaGLUnmapBufferObjectAsync cudaGLUnregisterBufferObject
        cudaGetChannelDesc cudaGetExportTable cudaGetMipmappedArrayLevel cudaGetSurfaceObjectResourceDesc
        cudaGetTextureObjectResourceDesc cudaGetTextureObjectResourceViewDesc cudaGetTextureObjectTextureDesc
        cudaGraphAddChildGraphNode cudaGraphAddDependencies cudaGraphAddDependencies_v2 cudaGraphAddEmptyNode
        cudaGraphAddEventRecordNode cudaGraphAddEventWaitNode cudaGraphAddExternalSemaphoresSignalNode
        cudaGraphAddExternalSemaphoresWaitNode cudaGraphAddHostNode cudaGraphAddKernelNode cudaGraphAddMemAllocNode
        cudaGraphAddMemFreeNode cudaGraphAddMemcpyNode cudaGraphAddMemcpyNode1D cudaGraphAddMemcpyNodeFromSymbol
        cudaGraphAddMemcpyNodeToSymbol cudaGraphAddMemsetNode cudaGraphAddNode cudaGraphAddNode_v2
        cudaGraphChildGraphNodeGetGraph cudaGraphClone cudaGraphConditionalHandleCreate
        cudaGraphConditionalHandleCreate_v2 cudaGraphCreate cudaGraphDebugDotPrint cudaGraphDestroyNode
        cudaGraphEventRecordNodeGetEvent cudaGraphEventRecordNodeSetEvent cudaGraphEventWaitNodeGetEvent
        cudaGraphEventWaitNodeSetEvent cudaGraphExecChildGraphNodeSetParams cudaGraphExecEventRecordNodeSetEvent
        cudaGraphExecEventWaitNodeSetEvent cudaGraphExecExternalSemaphoresSignalNodeSetParams
        cudaGraphExecExternalSemaphoresWaitNodeSetParams cudaGraphExecGetFlags cudaGraphExecGetId
        cudaGraphExecHostNodeSetParams cudaGraphExecKernelNodeSetParams cudaGraphExecMemcpyNodeSetParams
        cudaGraphExecMemcpyNodeSetParams1D cudaGraphExecMemcpyNodeSetParamsFromSymbol
        cudaGraphExecMemcpyNodeSetParamsToSymbol cudaGraphExecMemsetNodeSetParams cudaGraphExecNodeSetParams
        cudaGraphExecUpdate cudaGraphExternalSemaphoresSignalNodeGetParams
        cudaGraphExternalSemaphoresSignalNodeSetParams cudaGraphExternalSemaphoresWaitNodeGetParams
        cudaGraphExternalSemaphoresWaitNodeSetParams cudaGraphGetEdges cudaGraphGetEdges_v2 cudaGraphGetId
        cudaGraphGetRootNodes cudaGraphHostNodeGetParams cudaGraphHostNodeSetParams cudaGraphInstantiateWithParams
        cudaGraphInstantiateWithParams_ptsz cudaGraphKernelNodeCopyAttributes cudaGraphKernelNodeGetAttribute
        cudaGraphKernelNodeGetParams cudaGraphKernelNodeSetAttribute cudaGraphKernelNodeSetParams
        cudaGraphMemAllocNodeGetParams cudaGraphMemFreeNodeGetParams cudaGraphMemcpyNodeGetParams
        cudaGraphMemcpyNodeSetParams cudaGraphMemcpyNodeSetParams1D cudaGraphMemcpyNodeSetParamsFromSymbol
        cudaGraphMemcpyNodeSetParamsToSymbol cudaGraphMemsetNodeGetParams cudaGraphMemsetNodeSetParams
        cudaGraphNodeFindInClone cudaGraphNodeGetContainingGraph cudaGraphNodeGetDependencies
        cudaGraphNodeGetDependencies_v2 cudaGraphNodeGetDependentNodes cudaGraphNodeGetDependentNodes_v2
        cudaGraphNodeGetEnabled cudaGraphNodeGetLocalId cudaGraphNodeGetParams cudaGraphNodeGetToolsId
        cudaGraphNodeGetType cudaGraphNodeSetEnabled cudaGraphNodeSetParams cudaGraphReleaseUserObject
        cudaGraphRemoveDependencies cudaGraphRemoveDependencies_v2 cudaGraphicsEGLRegisterImage
        cudaGraphicsGLRegisterBuffer cudaGraphicsGLRegisterImage cudaGraphicsMapResources
        cudaGraphicsResourceGetMappedEglFrame cudaGraphicsResourceGetMappedMipmappedArray
        cudaGraphicsResourceGetMappedPointer cudaGraphicsResourceSetMapFlags cudaGraphicsSubResourceGetMappedArray
        cudaGraphicsUnmapResources cudaGraphicsUnregisterResource cudaGraphicsVDPAURegisterOutputSurface
        cudaGraphicsVDPAURegisterVideoSurface cudaGreenCtxCreate cudaImportExternalMemory cudaImportExternalSemaphore
        cudaIpcCloseMemHandle cudaIpcGetEventHandle cudaIpcGetMemHandle cudaIpcOpenEventHandle cudaIpcOpenMemHandle
        cudaLaunchCooperativeKernelMultiDevice cudaLaunchHostFunc_v2 cudaLaunchHostFunc_v2_ptsz
        cudaLibraryEnumerateKernels cudaLibraryGetGlobal cudaLibraryGetKernelCount cudaLibraryGetManaged
        cudaLibraryGetUnifiedFunction cudaLibraryLoadFromFile cudaLogsCurrent cudaLogsDumpToFile cudaLogsDumpToMemory
        cudaLogsRegisterCallback cudaLogsUnregisterCallback cudaMalloc3D cudaMalloc3DArray cudaMallocArray
        cudaMallocMipmappedArray cudaMemDiscardAndPrefetchBatchAsync cudaMemDiscardAndPrefetchBatchAsync_ptsz
        cudaMemDiscardBatchAsync cudaMemDiscardBatchAsync_ptsz cudaMemGetDefaultMemPool cudaMemGetMemPool
        cudaMemPoolExportPointer cudaMemPoolExportToShareableHandle cudaMemPoolImportFromShareableHandle
        cudaMemPoolImportPointer cudaMemPrefetchBatchAsync cudaMemPrefetchBatchAsync_ptsz cudaMemRangeGetAttribute
        cudaMemRangeGetAttributes cudaMemSetMemPool cudaMemcpy2DArrayToArray cudaMemcpy2DArrayToArray_ptds
        cudaMemcpy2DFromArray cudaMemcpy2DFromArrayAsync cudaMemcpy2DFromArrayAsync_ptsz cudaMemcpy2DFromArray_ptds
        cudaMemcpy2DToArray cudaMemcpy2DToArrayAsync cudaMemcpy2DToArrayAsync_ptsz cudaMemcpy2DToArray_ptds
        cudaMemcpy3D cudaMemcpy3DAsync cudaMemcpy3DAsync_ptsz cudaMemcpy3DBatchAsync cudaMemcpy3DBatchAsync_ptsz
        cudaMemcpy3DPeer cudaMemcpy3DPeerAsync cudaMemcpy3DPeerAsync_ptsz cudaMemcpy3DPeer_ptds
        cudaMemcpy3DWithAttributesAsync cudaMemcpy3DWithAttributesAsync_ptsz cudaMemcpy3D_ptds cudaMemcpyArrayToArray
        cudaMemcpyArrayToArray_ptds cudaMemcpyBatchAsync cudaMemcpyBatchAsync_ptsz cudaMemcpyFromArray
        cudaMemcpyFromArrayAsync cudaMemcpyFromArrayAsync_ptsz cudaMemcpyFromArray_ptds cudaMemcpyToArray
        cudaMemcpyToArrayAsync cudaMemcpyToArrayAsync_ptsz cudaMemcpyToArray_ptds cudaMemcpyWithAttributesAsync
        cudaMemcpyWithAttributesAsync_ptsz cudaMemset3D cudaMemset3DAsync cudaMemset3DAsync_ptsz cudaMemset3D_ptds
        cudaMipmappedArrayGetMemoryRequirements cudaMipmappedArrayGetSparseProperties cudaOccupancyMaxActiveClusters
        cudaOccupancyMaxPotentialClusterSize cudaSetDoubleForDevice cudaSetDoubleForHost
        cudaSignalExternalSemaphoresAsync cudaSignalExternalSemaphoresAsync_ptsz cudaSignalExternalSemaphoresAsync_v2
        cudaSignalExternalSemaphoresAsync_v2_ptsz cudaStreamBeginCaptureToGraph cudaStreamBeginCaptureToGraph_ptsz
        cudaStreamGetAttribute cudaStreamGetAttribute_ptsz cudaStreamGetDevResource cudaStreamGetDevResource_ptsz
        cudaStreamUpdateCaptureDependencies cudaStreamUpdateCaptureDependencies_ptsz
        cudaStreamUpdateCaptureDependencies_v2 cudaStreamUpdateCaptureDependencies_v2_ptsz cudaThreadExit
        cudaThreadGetCacheConfig cudaThreadGetLimit cudaThreadSetCacheConfig cudaThreadSetLimit cudaThreadSynchronize
        cudaVDPAUGetDevice cudaVDPAUSetVDPAUDevice cudaWaitExternalSemaphoresAsync
        cudaWaitExternalSemaphoresAsync_ptsz cudaWaitExternalSemaphoresAsync_v2
        cudaWaitExternalSemaphoresAsync_v2_ptsz
    }
}

/// Of the management library.
pub(crate) mod nvml {
    crate::entry::unsupported_exports! {
        Nvml;
        nvmlDeviceGetAccountingMode nvmlDeviceGetAttributes_v2 nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetBrand
        nvmlDeviceGetClockInfo nvmlDeviceGetComputeMode nvmlDeviceGetCpuAffinity nvmlDeviceGetCurrPcieLinkGeneration
        nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetEccMode nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetFanSpeed
        nvmlDeviceGetFieldValues nvmlDeviceGetMaxClockInfo nvmlDeviceGetMigMode nvmlDeviceGetNumaNodeId
        nvmlDeviceGetNvLinkCapability nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo
        nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkState nvmlDeviceGetP2PStatus nvmlDeviceGetPciInfoExt
        nvmlDeviceGetPcieLinkMaxSpeed nvmlDeviceGetPerformanceState nvmlDeviceGetPersistenceMode
        nvmlDeviceGetPlatformInfo nvmlDeviceGetPowerManagementLimit nvmlDeviceGetPowerUsage nvmlDeviceGetSerial
        nvmlDeviceGetTemperature nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetTotalEnergyConsumption
        nvmlDeviceGetVbiosVersion nvmlDeviceGetVirtualizationMode nvmlSystemGetConfComputeSettings
        nvmlSystemGetConfComputeState nvmlSystemGetProcessName
    }
}
