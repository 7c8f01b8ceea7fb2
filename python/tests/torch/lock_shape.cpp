// For a test: a thread that allocates with a lock held and without the interpreter lock, and one that wants that
// lock with the interpreter lock held. Calls of the first kind are made through ctypes.CDLL, of the second through
// ctypes.PyDLL.
#include <c10/cuda/CUDACachingAllocator.h>

#include <chrono>
#include <mutex>
#include <thread>

namespace {
std::mutex shared;
} // namespace

// Allocates under the lock, `milliseconds` after it took it, and frees. 1 if that succeeded.
extern "C" __attribute__((visibility("default"))) int allocate_locked(size_t bytes, int milliseconds) {
  std::lock_guard<std::mutex> lock(shared);
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  try {
    c10::cuda::CUDACachingAllocator::raw_delete(c10::cuda::CUDACachingAllocator::raw_alloc(bytes));
    return 1;
  } catch (const c10::OutOfMemoryError&) {
    return 0;
  }
}

extern "C" __attribute__((visibility("default"))) void take_the_lock() {
  std::lock_guard<std::mutex> lock(shared);
}

// Keeps the interpreter lock, if called through ctypes.PyDLL.
extern "C" __attribute__((visibility("default"))) void stay(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}
