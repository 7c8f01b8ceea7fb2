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

// Products, and settings.
SUCCEEDS(cublasCdotc_v2)
SUCCEEDS(cublasCdotu_v2)
SUCCEEDS(cublasCgemmStridedBatched)
SUCCEEDS(cublasCgemm_v2)
SUCCEEDS(cublasCgemv_v2)
SUCCEEDS(cublasDdot_v2)
SUCCEEDS(cublasDgemmStridedBatched)
SUCCEEDS(cublasDgemm_v2)
SUCCEEDS(cublasDgemv_v2)
SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulAlgoCheck)
SUCCEEDS(cublasLtMatmulAlgoConfigGetAttribute)
SUCCEEDS(cublasLtMatmulAlgoConfigSetAttribute)
SUCCEEDS(cublasLtMatmulAlgoInit)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasSdot_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSgemmEx)
SUCCEEDS(cublasSgemmStridedBatched)
SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasZdotc_v2)
SUCCEEDS(cublasZdotu_v2)
SUCCEEDS(cublasZgemmStridedBatched)
SUCCEEDS(cublasZgemm_v2)
SUCCEEDS(cublasZgemv_v2)
