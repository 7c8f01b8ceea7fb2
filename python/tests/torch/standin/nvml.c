// A stand-in for NVIDIA's management library, libnvidia-ml.so.1: which process holds how much of a device. The
// numbers are those of cudart.c, if that is in the process. A device is named by its index plus one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
typedef size_t device_handle;

struct process {
  unsigned pid;
  unsigned long long used;
};

static size_t ask(const char* name, int device) {
  size_t (*function)(int) = (size_t (*)(int))dlsym(RTLD_DEFAULT, name);
  return function == NULL ? 0 : function(device);
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  int (*function)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "standin_num_devices");
  *count = function == NULL ? 0 : (unsigned)function();
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_handle* out) {
  *out = index + 1;
  return SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, device_handle* out) {
  unsigned bus = 1;
  sscanf(id, "%*x:%x:", &bus);
  *out = bus;
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(device_handle device, unsigned* count, struct process* out) {
  size_t others = ask("standin_others", 0);
  unsigned wanted = others > 0 ? 2 : 1;
  unsigned room = *count;
  *count = wanted;
  if (room < wanted) return INSUFFICIENT_SIZE;
  out[0] = (struct process){(unsigned)getpid(), ask("standin_used", (int)device - 1)};
  if (others > 0) out[1] = (struct process){1, others};
  return SUCCESS;
}
// What the caller has set, namely that there is no fabric, stays.
int nvmlDeviceGetGpuFabricInfoV(device_handle device, void* info) { return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13020;
  return SUCCESS;
}

#define UNSUPPORTED(name) \
  int name(void) { return NOT_SUPPORTED; }

UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlDeviceGetP2PStatus)
