// What the stand-in for CUDA's runtime tells a program that links it.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Calls of one kind, since the process began or standin_reset_counts.
struct standin_count {
  const char* name; // CUDA's, without a version or "WithFlags"
  unsigned long long calls;
  unsigned long long bytes; // that the calls named: the size of an allocation, a handle, a range
  unsigned long long nanoseconds; // that they took here; 0 for those that neither move memory nor reserve any
};

// Writes up to `room` of them, and returns how many there are.
size_t standin_counts(struct standin_count* out, size_t room);

// Forgets them. The peak becomes what is in use.
void standin_reset_counts(void);

// The most bytes of a device that were in use at one moment.
size_t standin_peak(int device);

#ifdef __cplusplus
}
#endif
