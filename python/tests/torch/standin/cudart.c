// A stand-in for CUDA's runtime over host memory, so that the real PyTorch runs where there is no GPU. It is
// for tests, and preloaded: what it does not define is CUDA's own, which fails without a driver.
//
// Device memory is host memory that costs what is touched; each device has a capacity. Kernels do nothing,
// copies and fills are done at once. Work on a stream is over at once too, unless events are late: then what
// was recorded on a stream is over when somebody synchronises with it. Captures record nothing.
//
//   LASTREF_STANDIN_MIB        memory of each device (81920)
//   LASTREF_STANDIN_DEVICES    how many there are (1)
//   LASTREF_STANDIN_OTHER_MIB  memory of each that another process holds (0)
//   LASTREF_STANDIN_LATE=1     events are late; also standin_set_late(int), at run time
//
// Calls of the kinds that have a price in a latency table are counted, with the bytes that they name and, where they
// move memory, the time that they take here: standin_counts.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <pthread.h>
#include <search.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cudart.h"

enum { MAX_DEVICES = 16 };
static const size_t MIB = (size_t)1 << 20;
static const size_t PAGE = (size_t)2 << 20;

static size_t capacity;
static size_t others;
static int num_devices = 1;
static atomic_int events_are_late;
static _Atomic size_t used[MAX_DEVICES];
static _Atomic size_t peak[MAX_DEVICES];

static __thread int current;
static __thread cudaError_t last_error;

static size_t number(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text == NULL || *text == 0 ? otherwise : strtoull(text, NULL, 10);
}

__attribute__((constructor)) static void begin(void) {
  capacity = number("LASTREF_STANDIN_MIB", 81920) * MIB;
  others = number("LASTREF_STANDIN_OTHER_MIB", 0) * MIB;
  num_devices = (int)number("LASTREF_STANDIN_DEVICES", 1);
  if (num_devices > MAX_DEVICES) num_devices = MAX_DEVICES;
  events_are_late = (int)number("LASTREF_STANDIN_LATE", 0);
}

// For tests, and for the other two libraries.
void standin_set_late(int late) { events_are_late = late; }
int standin_num_devices(void) { return num_devices; }
size_t standin_used(int device) { return used[device]; }
size_t standin_others(void) { return others; }
size_t standin_peak(int device) { return peak[device]; }

#define COUNTED(X)                                                                                             \
  X(cudaMalloc) X(cudaFree) X(cudaMemGetInfo) X(cudaDeviceSynchronize)                                          \
  X(cudaStreamCreate) X(cudaStreamDestroy) X(cudaStreamSynchronize) X(cudaStreamQuery) X(cudaStreamWaitEvent)   \
  X(cudaEventCreate) X(cudaEventDestroy) X(cudaEventRecord) X(cudaEventQuery) X(cudaEventSynchronize)           \
  X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap)           \
  X(cuMemSetAccess)

#define KIND(name) COUNT_##name,
#define NAME(name) #name,
enum kind { COUNTED(KIND) NUM_COUNTED };
static const char* const names[] = {COUNTED(NAME)};
static struct {
  atomic_ullong calls, bytes, nanoseconds;
} counts[NUM_COUNTED];

static void count(enum kind kind, size_t bytes) {
  atomic_fetch_add_explicit(&counts[kind].calls, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&counts[kind].bytes, bytes, memory_order_relaxed);
}

static unsigned long long now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (unsigned long long)time.tv_sec * 1000000000 + (unsigned long long)time.tv_nsec;
}

// Counts the function it stands in, and the time until that returns.
struct timed {
  enum kind kind;
  unsigned long long start;
};
static void stop(struct timed* timed) {
  atomic_fetch_add_explicit(&counts[timed->kind].nanoseconds, now() - timed->start, memory_order_relaxed);
}
#define COUNT_TIMED(name, bytes)  \
  count(COUNT_##name, bytes);     \
  __attribute__((cleanup(stop))) struct timed timed = {COUNT_##name, now()}

size_t standin_counts(struct standin_count* out, size_t room) {
  for (size_t i = 0; i < NUM_COUNTED && i < room; ++i) {
    out[i] = (struct standin_count){names[i], counts[i].calls, counts[i].bytes, counts[i].nanoseconds};
  }
  return NUM_COUNTED;
}

void standin_reset_counts(void) {
  memset(counts, 0, sizeof counts);
  for (int i = 0; i < num_devices; ++i) peak[i] = used[i];
}

static cudaError_t said(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

static int take(int device, size_t bytes) {
  size_t before = atomic_fetch_add(&used[device], bytes);
  if (before + bytes + others <= capacity) {
    size_t most = peak[device];
    while (most < before + bytes && !atomic_compare_exchange_weak(&peak[device], &most, before + bytes)) {
    }
    return 1;
  }
  atomic_fetch_sub(&used[device], bytes);
  return 0;
}

// Address space that begins at a page, of whole pages.
static void* reserve(void* hint, size_t bytes, int protection) {
  char* all = mmap(hint, bytes + PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return NULL;
  char* start = (char*)(((size_t)all + PAGE - 1) & ~(PAGE - 1));
  if (start > all) munmap(all, (size_t)(start - all));
  size_t rest = (size_t)(all + bytes + PAGE - (start + bytes));
  if (rest > 0) munmap(start + bytes, rest);
  return start;
}

// ---- allocations -------------------------------------------------------------------------------------

struct allocation {
  void* start;
  size_t bytes;
  int device;
};
static void* allocations;
static pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;

static int by_start(const void* a, const void* b) {
  const struct allocation *one = a, *other = b;
  return one->start < other->start ? -1 : one->start > other->start;
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  COUNT_TIMED(cudaMalloc, bytes);
  size_t whole = (bytes + PAGE - 1) & ~(PAGE - 1);
  if (!take(current, whole)) return said(cudaErrorMemoryAllocation);
  struct allocation* made = malloc(sizeof *made);
  made->start = reserve(NULL, whole, PROT_READ | PROT_WRITE);
  made->bytes = whole;
  made->device = current;
  if (made->start == NULL) {
    atomic_fetch_sub(&used[current], whole);
    free(made);
    return said(cudaErrorMemoryAllocation);
  }
  pthread_mutex_lock(&allocations_lock);
  tsearch(made, &allocations, by_start);
  pthread_mutex_unlock(&allocations_lock);
  *out = made->start;
  return cudaSuccess;
}

cudaError_t cudaFree(void* start) {
  if (start == NULL) return cudaSuccess;
  COUNT_TIMED(cudaFree, 0);
  struct allocation key = {start, 0, 0}, *found = NULL;
  pthread_mutex_lock(&allocations_lock);
  struct allocation** node = tfind(&key, &allocations, by_start);
  if (node != NULL) {
    found = *node;
    tdelete(&key, &allocations, by_start);
  }
  pthread_mutex_unlock(&allocations_lock);
  if (found == NULL) return said(cudaErrorInvalidValue);
  munmap(found->start, found->bytes);
  atomic_fetch_sub(&used[found->device], found->bytes);
  free(found);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void* start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaMallocHost(void** out, size_t bytes) {
  *out = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
  return *out == NULL ? said(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags) { return cudaMallocHost(out, bytes); }
cudaError_t cudaFreeHost(void* start) {
  free(start);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  count(COUNT_cudaMemGetInfo, 0);
  *total = capacity;
  *free_bytes = capacity - others - used[current];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = (cudaMemPool_t)(size_t)(device + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void* value) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void* value) {
  *(unsigned long long*)value = used[current];
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }

// ---- devices -----------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices) return said(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* out, int device) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "stand-in for tests");
  out->totalGlobalMem = capacity;
  out->major = 9;
  out->multiProcessorCount = 64;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 0x7fffffff;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->sharedMemPerBlock = 48 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 64 << 10;
  out->textureAlignment = 512;
  out->unifiedAddressing = 1;
  out->pciBusID = device + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr which, int device) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 64; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int device) {
  snprintf(out, (size_t)length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

// ---- streams, events, captures --------------------------------------------------------------------------

struct stream {
  atomic_ulong recorded; // events recorded on it
  atomic_ulong over; // and as many of them are over
  atomic_ullong capture; // the number of the capture underway, or 0
};
struct event {
  struct stream* stream;
  unsigned long place;
};
static struct stream default_stream;
static atomic_ullong num_captures;

static struct stream* of(cudaStream_t stream) {
  // Small numbers name the default stream of the process and of the thread.
  return (size_t)stream < 16 ? &default_stream : (struct stream*)stream;
}

static void finish(struct stream* stream, unsigned long place) {
  unsigned long over = stream->over;
  while (over < place && !atomic_compare_exchange_weak(&stream->over, &over, place)) {
  }
}

// Streams are never freed, as PyTorch does not free its own: an event may refer to one.
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream* streams[4096];
static size_t num_streams;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  count(COUNT_cudaStreamCreate, 0);
  struct stream* made = calloc(1, sizeof *made);
  pthread_mutex_lock(&streams_lock);
  if (num_streams < sizeof streams / sizeof *streams) streams[num_streams++] = made;
  pthread_mutex_unlock(&streams_lock);
  *out = (cudaStream_t)made;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  count(COUNT_cudaStreamDestroy, 0);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count(COUNT_cudaStreamSynchronize, 0);
  finish(of(stream), of(stream)->recorded);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  count(COUNT_cudaStreamQuery, 0);
  return !events_are_late || of(stream)->over >= of(stream)->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  count(COUNT_cudaStreamWaitEvent, 0);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
  count(COUNT_cudaDeviceSynchronize, 0);
  finish(&default_stream, default_stream.recorded);
  pthread_mutex_lock(&streams_lock);
  for (size_t i = 0; i < num_streams; ++i) finish(streams[i], streams[i]->recorded);
  pthread_mutex_unlock(&streams_lock);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  count(COUNT_cudaEventCreate, 0);
  *out = (cudaEvent_t)calloc(1, sizeof(struct event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  count(COUNT_cudaEventDestroy, 0);
  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  count(COUNT_cudaEventRecord, 0);
  struct event* recorded = (struct event*)event;
  recorded->stream = of(stream);
  recorded->place = ++recorded->stream->recorded;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  count(COUNT_cudaEventQuery, 0);
  struct event* asked = (struct event*)event;
  int over = !events_are_late || asked->stream == NULL || asked->stream->over >= asked->place;
  return over ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count(COUNT_cudaEventSynchronize, 0);
  struct event* asked = (struct event*)event;
  if (asked->stream != NULL) finish(asked->stream, asked->place);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = 0;
  return cudaSuccess;
}

static char graph;
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  of(stream)->capture = ++num_captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  of(stream)->capture = 0;
  *out = (cudaGraph_t)&graph;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = of(stream)->capture != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream,
    enum cudaStreamCaptureStatus* status,
    unsigned long long* id,
    cudaGraph_t* out,
    const cudaGraphNode_t** dependencies,
    const cudaGraphEdgeData** edges,
    size_t* num_dependencies) {
  cudaStreamIsCapturing(stream, status);
  if (id != NULL) *id = of(stream)->capture;
  if (out != NULL) *out = (cudaGraph_t)&graph;
  if (dependencies != NULL) *dependencies = NULL;
  if (edges != NULL) *edges = NULL;
  if (num_dependencies != NULL) *num_dependencies = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t from, unsigned long long flags) {
  *out = (cudaGraphExec_t)&graph;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t from, unsigned long long flags) {
  return cudaGraphInstantiate(out, from, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t from, cudaGraphNode_t* nodes, size_t* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t what, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t what) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t what) { return cudaSuccess; }

// ---- copies and kernels ----------------------------------------------------------------------------------

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
  memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(
    void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return cudaMemset(to, value, bytes);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void* kernel) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->ptxVersion = out->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, enum cudaFuncAttribute which, int value) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* count, const void* kernel, int block, size_t shared, unsigned flags) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void* kernel, int block, size_t shared) {
  *count = 2;
  return cudaSuccess;
}

// ---- errors ----------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of the stand-in";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in";
}

// ---- virtual memory: functions of the driver, which PyTorch asks the runtime for --------------------------

struct physical {
  size_t bytes;
  int file;
  int device;
};

// Each range lies above those before it, so that which one PyTorch fills first does not depend on the host.
static _Atomic size_t next_range = (size_t)16 << 40;

static CUresult address_reserve(
    CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  COUNT_TIMED(cuMemAddressReserve, bytes);
  if (hint == 0) hint = atomic_fetch_add(&next_range, (bytes + 2 * PAGE - 1) & ~(PAGE - 1));
  *out = (CUdeviceptr)reserve((void*)hint, bytes, PROT_NONE);
  return *out == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
static CUresult address_free(CUdeviceptr start, size_t bytes) {
  COUNT_TIMED(cuMemAddressFree, bytes);
  munmap((void*)start, bytes);
  return CUDA_SUCCESS;
}
static CUresult create(
    CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* properties, unsigned long long flags) {
  COUNT_TIMED(cuMemCreate, bytes);
  int device = properties->location.id;
  if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  struct physical* made = malloc(sizeof *made);
  *made = (struct physical){bytes, memfd_create("stand-in", MFD_CLOEXEC), device};
  if (made->file < 0 || ftruncate(made->file, (off_t)bytes) != 0) {
    if (made->file >= 0) close(made->file);
    free(made);
    atomic_fetch_sub(&used[device], bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = (CUmemGenericAllocationHandle)made;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  struct physical* gone = (struct physical*)handle;
  COUNT_TIMED(cuMemRelease, gone->bytes);
  close(gone->file);
  atomic_fetch_sub(&used[gone->device], gone->bytes);
  free(gone);
  return CUDA_SUCCESS;
}
static CUresult map(
    CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  COUNT_TIMED(cuMemMap, bytes);
  struct physical* what = (struct physical*)handle;
  int how = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  void* mapped = mmap((void*)start, bytes, PROT_NONE, how, what->file, (off_t)offset);
  return mapped == MAP_FAILED ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
static CUresult unmap(CUdeviceptr start, size_t bytes) {
  COUNT_TIMED(cuMemUnmap, bytes);
  int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  return mmap((void*)start, bytes, PROT_NONE, how, -1, 0) == MAP_FAILED ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
static CUresult set_access(CUdeviceptr start, size_t bytes, const CUmemAccessDesc* who, size_t num_who) {
  COUNT_TIMED(cuMemSetAccess, bytes);
  return mprotect((void*)start, bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
static CUresult granularity(
    size_t* out, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags which) {
  *out = PAGE;
  return CUDA_SUCCESS;
}
static CUresult device_get(CUdevice* out, int ordinal) {
  *out = ordinal;
  return CUDA_SUCCESS;
}
static CUresult device_attribute(int* value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  return CUDA_SUCCESS;
}
static CUresult context_get(CUcontext* out) {
  *out = (CUcontext)8;
  return CUDA_SUCCESS;
}
static CUresult context_set(CUcontext context) { return CUDA_SUCCESS; }
static CUresult primary_state(CUdevice device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = used[device] > 0 || device == current;
  return CUDA_SUCCESS;
}
static CUresult error_string(CUresult error, const char** out) {
  *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in";
  return CUDA_SUCCESS;
}
static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name,
    void** out,
    unsigned version,
    unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* status) {
  static const struct {
    const char* name;
    void* function;
  } known[] = {
      {"cuMemAddressReserve", address_reserve},
      {"cuMemAddressFree", address_free},
      {"cuMemCreate", create},
      {"cuMemRelease", release},
      {"cuMemMap", map},
      {"cuMemUnmap", unmap},
      {"cuMemSetAccess", set_access},
      {"cuMemGetAllocationGranularity", granularity},
      {"cuDeviceGet", device_get},
      {"cuDeviceGetAttribute", device_attribute},
      {"cuCtxGetCurrent", context_get},
      {"cuCtxSetCurrent", context_set},
      {"cuDevicePrimaryCtxGetState", primary_state},
      {"cuGetErrorString", error_string},
  };
  *out = unsupported;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (strcmp(name, known[i].name) == 0) *out = known[i].function;
  }
  if (status != NULL) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
