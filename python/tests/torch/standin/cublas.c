// A stand-in for cuBLAS and cuBLASLt, so that a linear layer runs where there is no GPU: what they make and
// find is there, and products compute nothing. Preloaded, like cudart.c.
#include <stddef.h>

#define SUCCEEDS(name) \
  int name(void) { return 0; }

// Whoever asks for a handle or a descriptor gets one, and never looks inside.
static char thing;
#define MAKES(name)         \
  int name(void** out) {    \
    *out = &thing;          \
    return 0;               \
  }

MAKES(cublasCreate_v2)
MAKES(cublasLtCreate)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixLayoutCreate)

SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasLtDestroy)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatrixLayoutDestroy)

int cublasGetMathMode(void* handle, int* mode) {
  (void)handle;
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(void* handle, int* mode) {
  (void)handle;
  *mode = 0;
  return 0;
}

size_t cublasLtGetVersion(void) { return 130000; }

// One algorithm, which is as good as any.
int cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* description, void* a, void* b, void* c, void* d, void* preference, int wanted,
    void* results, int* found) {
  (void)handle, (void)description, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)results;
  *found = wanted > 0;
  return 0;
}

SUCCEEDS(cublasCaxpy_v2)
SUCCEEDS(cublasCcopy_v2)
SUCCEEDS(cublasCdotc_v2)
SUCCEEDS(cublasCdotu_v2)
SUCCEEDS(cublasCgemmBatched)
SUCCEEDS(cublasCgemmStridedBatched)
SUCCEEDS(cublasCgemm_v2)
SUCCEEDS(cublasCgemv_v2)
SUCCEEDS(cublasCgerc_v2)
SUCCEEDS(cublasCgeru_v2)
SUCCEEDS(cublasChemm_v2)
SUCCEEDS(cublasChemv_v2)
SUCCEEDS(cublasCher2_v2)
SUCCEEDS(cublasCher2k_v2)
SUCCEEDS(cublasCher_v2)
SUCCEEDS(cublasCherk_v2)
SUCCEEDS(cublasCrot_v2)
SUCCEEDS(cublasCrotg_v2)
SUCCEEDS(cublasCscal_v2)
SUCCEEDS(cublasCsrot_v2)
SUCCEEDS(cublasCsscal_v2)
SUCCEEDS(cublasCswap_v2)
SUCCEEDS(cublasCsymm_v2)
SUCCEEDS(cublasCsymv_v2)
SUCCEEDS(cublasCsyr2_v2)
SUCCEEDS(cublasCsyr2k_v2)
SUCCEEDS(cublasCsyr_v2)
SUCCEEDS(cublasCsyrk_v2)
SUCCEEDS(cublasCtrmm_v2)
SUCCEEDS(cublasCtrmv_v2)
SUCCEEDS(cublasCtrsv_v2)
SUCCEEDS(cublasDasum_v2)
SUCCEEDS(cublasDaxpy_v2)
SUCCEEDS(cublasDcopy_v2)
SUCCEEDS(cublasDdot_v2)
SUCCEEDS(cublasDgemmBatched)
SUCCEEDS(cublasDgemmStridedBatched)
SUCCEEDS(cublasDgemm_v2)
SUCCEEDS(cublasDgemv_v2)
SUCCEEDS(cublasDger_v2)
SUCCEEDS(cublasDnrm2_v2)
SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasDrot_v2)
SUCCEEDS(cublasDrotg_v2)
SUCCEEDS(cublasDrotm_v2)
SUCCEEDS(cublasDrotmg_v2)
SUCCEEDS(cublasDscal_v2)
SUCCEEDS(cublasDswap_v2)
SUCCEEDS(cublasDsymm_v2)
SUCCEEDS(cublasDsymv_v2)
SUCCEEDS(cublasDsyr2_v2)
SUCCEEDS(cublasDsyr2k_v2)
SUCCEEDS(cublasDsyr_v2)
SUCCEEDS(cublasDsyrk_v2)
SUCCEEDS(cublasDtrmm_v2)
SUCCEEDS(cublasDtrmv_v2)
SUCCEEDS(cublasDtrsv_v2)
SUCCEEDS(cublasDzasum_v2)
SUCCEEDS(cublasDznrm2_v2)
SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasGetMatrixAsync)
SUCCEEDS(cublasGetVectorAsync)
SUCCEEDS(cublasIcamax_v2)
SUCCEEDS(cublasIcamin_v2)
SUCCEEDS(cublasIdamax_v2)
SUCCEEDS(cublasIdamin_v2)
SUCCEEDS(cublasIsamax_v2)
SUCCEEDS(cublasIsamin_v2)
SUCCEEDS(cublasIzamax_v2)
SUCCEEDS(cublasIzamin_v2)
SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulAlgoCheck)
SUCCEEDS(cublasLtMatmulAlgoConfigGetAttribute)
SUCCEEDS(cublasLtMatmulAlgoConfigSetAttribute)
SUCCEEDS(cublasLtMatmulAlgoInit)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasSasum_v2)
SUCCEEDS(cublasSaxpy_v2)
SUCCEEDS(cublasScasum_v2)
SUCCEEDS(cublasScnrm2_v2)
SUCCEEDS(cublasScopy_v2)
SUCCEEDS(cublasSdot_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetMatrixAsync)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetVectorAsync)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSgemmBatched)
SUCCEEDS(cublasSgemmEx)
SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasSger_v2)
SUCCEEDS(cublasSnrm2_v2)
SUCCEEDS(cublasSrot_v2)
SUCCEEDS(cublasSrotg_v2)
SUCCEEDS(cublasSrotm_v2)
SUCCEEDS(cublasSrotmg_v2)
SUCCEEDS(cublasSscal_v2)
SUCCEEDS(cublasSswap_v2)
SUCCEEDS(cublasSsymm_v2)
SUCCEEDS(cublasSsymv_v2)
SUCCEEDS(cublasSsyr2_v2)
SUCCEEDS(cublasSsyr2k_v2)
SUCCEEDS(cublasSsyr_v2)
SUCCEEDS(cublasSsyrk_v2)
SUCCEEDS(cublasStrmm_v2)
SUCCEEDS(cublasStrmv_v2)
SUCCEEDS(cublasStrsv_v2)
SUCCEEDS(cublasZaxpy_v2)
SUCCEEDS(cublasZcopy_v2)
SUCCEEDS(cublasZdotc_v2)
SUCCEEDS(cublasZdotu_v2)
SUCCEEDS(cublasZdrot_v2)
SUCCEEDS(cublasZdscal_v2)
SUCCEEDS(cublasZgemmBatched)
SUCCEEDS(cublasZgemmStridedBatched)
SUCCEEDS(cublasZgemm_v2)
SUCCEEDS(cublasZgemv_v2)
SUCCEEDS(cublasZgerc_v2)
SUCCEEDS(cublasZgeru_v2)
SUCCEEDS(cublasZhemm_v2)
SUCCEEDS(cublasZhemv_v2)
SUCCEEDS(cublasZher2_v2)
SUCCEEDS(cublasZher2k_v2)
SUCCEEDS(cublasZher_v2)
SUCCEEDS(cublasZherk_v2)
SUCCEEDS(cublasZrot_v2)
SUCCEEDS(cublasZrotg_v2)
SUCCEEDS(cublasZscal_v2)
SUCCEEDS(cublasZswap_v2)
SUCCEEDS(cublasZsymm_v2)
SUCCEEDS(cublasZsymv_v2)
SUCCEEDS(cublasZsyr2_v2)
SUCCEEDS(cublasZsyr2k_v2)
SUCCEEDS(cublasZsyr_v2)
SUCCEEDS(cublasZsyrk_v2)
SUCCEEDS(cublasZtrmm_v2)
SUCCEEDS(cublasZtrmv_v2)
SUCCEEDS(cublasZtrsv_v2)
