// The shim under PyTorch: wraps PyTorch's allocator object, so that an allocation which finds the
// device full is tried again after the collector has run, and an error that leaves says what held the
// memory. Compiled against the installed torch, loaded with ctypes; knows no Python and no lastref but
// the functions it is given.
//
//   torch ──▶ c10::cuda::CUDACachingAllocator::allocator ──▶ Guard ──▶ PyTorch's own allocator
//                                                             │
//                                       Hooks (python/src/torch.rs): collect, callbacks, report
//
// Invariants
// 1. A Guard is never freed, nor this library unloaded: storages keep pointers to their allocator.
// 2. Every virtual function of the wrapped class is forwarded. Memory is freed by deleters that go to
//    PyTorch's allocator directly, so that taking the Guard out strands nothing.
// 3. Nothing is waited for in a catch block, nor with the interpreter lock held: see Unlocked.
// 4. No ladder is climbed during a graph capture, or when Python is being left: PyTorch's error then
//    leaves at once. A thread that itself collects does not wait, nor does a request that can never fit.
// 5. An attempt that a later one makes up for is seen by no observer attached to the Guard, and not
//    counted in num_ooms.
//
// Lock order: install_mutex, then observers_mutex; nothing is called with the second held. Hooks are
// called with neither.

#include <torch/headeronly/version.h>

#define LASTREF_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if LASTREF_TORCH < 213 || LASTREF_TORCH > 215
#error "lastref: the allocator class of this version of torch is not known to this shim"
#endif

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using namespace c10::CachingDeviceAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;

// ---- what the shim is given, and what it shares with python/src/torch.rs ----------------------------

constexpr uint64_t kAbi = 1;
constexpr size_t kRungs = 3;
enum Rung : size_t { kSearchAgain, kCollection, kCallbacks };

constexpr int64_t kTimedOut = -1;
constexpr int64_t kSwitchedOff = -2;
constexpr int64_t kInside = -3;
constexpr int64_t kNeverFits = -5; // -4 is said of callbacks only

struct FailureForReport {
  uint32_t device;
  int64_t collected;
  uint64_t requested;
  uint64_t rungs[kRungs][2]; // bytes, microseconds
  const char* summary; // what can be said without Python
};

struct Hooks {
  uint64_t abi;
  uint64_t (*in_use)(uint32_t device, uint64_t bytes, uint64_t capacity);
  int64_t (*collect)(uint64_t bytes);
  int64_t (*call_back)(uint32_t number, uint32_t device, uint64_t bytes);
  char* (*report)(const FailureForReport* failure);
  void (*free_text)(char* text);
  bool (*is_exiting)();
};

// Functions of CPython, whose library this one is not linked to.
struct Python {
  int (*holds_lock)(); // PyGILState_Check
  void* (*save)(); // PyEval_SaveThread
  void (*restore)(void*); // PyEval_RestoreThread
};

const Hooks* hooks = nullptr;
Python python{};
std::atomic<bool> active{false};

// Lets go of the interpreter lock, if this thread holds it: the collector's thread will want it.
class Unlocked {
 public:
  Unlocked() : state_(python.holds_lock() ? python.save() : nullptr) {}
  // Not noexcept: a thread that Python stops for good unwinds from here.
  ~Unlocked() noexcept(false) {
    if (state_ != nullptr) {
      python.restore(state_);
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  void* state_;
};

// ---- counters ------------------------------------------------------------------------------------

struct RungCounters {
  std::atomic<uint64_t> runs{0}; // allocations that came to it
  std::atomic<uint64_t> rescues{0}; // and succeeded by it
  std::atomic<uint64_t> bytes{0}; // that became free by it
  std::atomic<uint64_t> microseconds{0};
};

struct Counters {
  std::atomic<uint64_t> failures{0}; // errors that left
  std::atomic<uint64_t> not_climbed{0}; // of those, ones without a ladder (invariant 4)
  RungCounters rungs[kRungs];
} counters;

using Clock = std::chrono::steady_clock;

uint64_t microseconds_since(Clock::time_point start) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count());
}

// ---- what a thread knows -------------------------------------------------------------------------

// The bytes that may be allocated before they are compared with what is in use, and how deep the
// thread is in a Guard. In static thread storage: it is touched by every allocation.
struct Hot {
  int64_t budget;
  int32_t depth;
};
__attribute__((tls_model("initial-exec"))) thread_local Hot hot{0, 0};

// The latest failure on this thread, as PyTorch's own allocator told its observers.
struct Failure {
  bool is_told;
  int64_t device;
  size_t requested;
  size_t limit; // the device's memory, or what a fraction allows
  size_t device_free;
};
thread_local Failure latest{};

struct Deeper {
  Deeper() { ++hot.depth; }
  ~Deeper() { --hot.depth; }
};

// Threads on the ladder.
std::atomic<int> climbing{0};
struct Climbing {
  Climbing() { climbing.fetch_add(1); }
  ~Climbing() { climbing.fetch_sub(1); }
};
// Bytes that other threads got while somebody was on it.
std::atomic<uint64_t> taken{0};
// How often and how long memory is collected for one allocation while other threads take what is found.
constexpr int kMostInVain = 8;
constexpr auto kMostCollecting = std::chrono::seconds(60);

constexpr int64_t kMostBudget = int64_t{1} << 30;
constexpr int64_t kLeastBudget = int64_t{1} << 20;

// ---- observers -----------------------------------------------------------------------------------

std::mutex observers_mutex;
std::vector<OutOfMemoryObserver>* observers = new std::vector<OutOfMemoryObserver>;

void tell_observers(const Failure& failure) {
  std::vector<OutOfMemoryObserver> all;
  {
    std::lock_guard<std::mutex> lock(observers_mutex);
    all = *observers;
  }
  for (const auto& observer : all) {
    observer(failure.device, failure.requested, failure.limit, failure.device_free);
  }
}

// What PyTorch's own allocator calls at each failed attempt.
void observe(int64_t device, size_t requested, size_t limit, size_t device_free) {
  latest = {true, device, requested, limit, device_free};
  if (hot.depth == 0) {
    // Nobody above will try again.
    latest.is_told = false;
    tell_observers(latest);
  }
}

// Failed attempts by device that were made up for: PyTorch's own allocator has counted them.
constexpr size_t kDevices = 128;
std::atomic<int64_t> made_up_for[kDevices];

std::atomic<int64_t>& made_up_for_on(int64_t device) {
  return made_up_for[device >= 0 && device < int64_t{kDevices} ? device : 0];
}

// Graph captures underway, on any device.
std::atomic<int> captures{0};

std::string mebibytes(uint64_t bytes) {
  char text[48];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// ---- the wrapper ---------------------------------------------------------------------------------

class Guard final : public CUDAAllocator {
 public:
  explicit Guard(CUDAAllocator* wrapped) : wrapped_(wrapped) {
    observe_wrapped();
  }

  CUDAAllocator* wrapped() const {
    return wrapped_;
  }

  // The bytes of live tensors on a device.
  uint64_t device_bytes(DeviceIndex device) noexcept {
    try {
      if (!wrapped_->initialized()) {
        return 0;
      }
      const auto stats = wrapped_->getDeviceStats(device);
      return static_cast<uint64_t>(stats.allocated_bytes[0].current);
    } catch (...) {
      return 0;
    }
  }

  uint64_t bytes_freed() noexcept {
    try {
      uint64_t sum = 0;
      if (wrapped_->initialized()) {
        const int count = c10::cuda::device_count();
        for (int device = 0; device < count; ++device) {
          const auto stats = wrapped_->getDeviceStats(static_cast<DeviceIndex>(device));
          sum += static_cast<uint64_t>(stats.allocated_bytes[0].freed);
        }
      }
      return sum;
    } catch (...) {
      return 0;
    }
  }

  // ---- allocating

  DataPtr allocate(size_t bytes) override {
    return with_ladder(bytes, [&] { return wrapped_->allocate(bytes); });
  }
  void* raw_alloc(size_t bytes) override {
    return with_ladder(bytes, [&] { return wrapped_->raw_alloc(bytes); });
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return with_ladder(bytes, [&] { return wrapped_->raw_alloc_with_stream(bytes, stream); });
  }
  DataPtr allocateWithAddress(size_t bytes, void* address) override {
    return with_ladder(bytes, [&] { return wrapped_->allocateWithAddress(bytes, address); });
  }

  // ---- forwarded with a note

  void init(int device_count) override {
    wrapped_->init(device_count);
    observe_wrapped();
  }
  DeviceStats getDeviceStats(DeviceIndex device) override {
    auto stats = wrapped_->getDeviceStats(device);
    stats.num_ooms = std::max<int64_t>(0, stats.num_ooms - made_up_for_on(device).load());
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    wrapped_->resetAccumulatedStats(device);
    made_up_for_on(device).store(0);
  }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    std::lock_guard<std::mutex> lock(observers_mutex);
    observers->push_back(std::move(observer));
  }
  void markCaptureBegin(DeviceIndex device) override {
    captures.fetch_add(1);
    wrapped_->markCaptureBegin(device);
  }
  void markCaptureEnd(DeviceIndex device) override {
    captures.fetch_sub(1);
    wrapped_->markCaptureEnd(device);
  }

  // ---- forwarded as it is

  bool is_simple_data_ptr(const DataPtr& pointer) const override {
    return wrapped_->is_simple_data_ptr(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return wrapped_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    wrapped_->copy_data(to, from, bytes);
  }
  bool initialized() override {
    return wrapped_->initialized();
  }
  void emptyCache(MempoolId_t pool) override {
    wrapped_->emptyCache(pool);
  }
  void resetPeakStats(DeviceIndex device) override {
    wrapped_->resetPeakStats(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return wrapped_->getMemoryInfo(device);
  }
  void raw_delete(void* pointer) override {
    wrapped_->raw_delete(pointer);
  }
  double getMemoryFraction(DeviceIndex device) override {
    return wrapped_->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    wrapped_->setMemoryFraction(fraction, device);
  }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return wrapped_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override {
    wrapped_->enable(value);
  }
  bool isEnabled() const override {
    return wrapped_->isEnabled();
  }
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    wrapped_->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* pointer, size_t* bytes) override {
    return wrapped_->getBaseAllocation(pointer, bytes);
  }
  void recordStream(const DataPtr& pointer, c10::cuda::CUDAStream stream) override {
    wrapped_->recordStream(pointer, stream);
  }
  void recordStream(const DataPtr& pointer, c10::Stream stream) override {
    // Through the base: the class hides this overload behind the other.
    static_cast<c10::DeviceAllocator*>(wrapped_)->recordStream(pointer, stream);
  }
  SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override {
    return wrapped_->snapshot(pool, include_traces);
  }
  void beginAllocateToPool(
      DeviceIndex device,
      MempoolId_t pool,
      std::function<bool(cudaStream_t)> filter) override {
    wrapped_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    wrapped_->endAllocateToPool(device, pool);
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    wrapped_->releasePool(device, pool);
  }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return wrapped_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(
      DeviceIndex device,
      MempoolId_t pool,
      std::shared_ptr<CUDAAllocator> allocator) override {
    wrapped_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    wrapped_->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    wrapped_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(
      DeviceIndex device,
      MempoolId_t pool,
      const std::unordered_set<void*>& expected) override {
    return wrapped_->checkPoolLiveAllocations(device, pool, expected);
  }
  ShareableHandle shareIpcHandle(void* pointer) override {
    return wrapped_->shareIpcHandle(pointer);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return wrapped_->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override {
    return wrapped_->isHistoryEnabled();
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    return wrapped_->getContextForPointer(pointer);
  }
  void recordHistory(
      bool enabled,
      CreateContextFn recorder,
      size_t max_entries,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skipped) override {
    wrapped_->recordHistory(enabled, recorder, max_entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    wrapped_->recordAnnotation(pairs);
  }
  void pushCompileContext(std::string& context) override {
    wrapped_->pushCompileContext(context);
  }
  void popCompileContext() override {
    wrapped_->popCompileContext();
  }
  void setUserMetadata(const std::string& metadata) override {
    wrapped_->setUserMetadata(metadata);
  }
  std::string getUserMetadata() override {
    return wrapped_->getUserMetadata();
  }
#if LASTREF_TORCH >= 214
  bool supportsUserMetadata() override {
    return wrapped_->supportsUserMetadata();
  }
  void annotateMemory(const void* pointer, const std::string& metadata) override {
    wrapped_->annotateMemory(pointer, metadata);
  }
#endif
  // Of its own kind: a rejection is no failure of the device, and is never made up for.
  void attachOomRejectionObserver(OomRejectionObserver observer) override {
    wrapped_->attachOomRejectionObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    wrapped_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex from, DeviceIndex to) override {
    wrapped_->enablePeerAccess(from, to);
  }
  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t bytes,
      cudaStream_t stream,
      bool peer) override {
    return wrapped_->memcpyAsync(to, to_device, from, from_device, bytes, stream, peer);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return wrapped_->getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(
      DeviceIndex device,
      std::shared_ptr<AllocatorState> state) override {
    return wrapped_->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override {
    return wrapped_->name();
  }

 private:
  CUDAAllocator* const wrapped_;
  std::atomic<bool> observed_{false};

  // Before CUDA is initialised, PyTorch's allocator has no devices to keep an observer for.
  void observe_wrapped() {
    if (wrapped_->initialized() && !observed_.exchange(true)) {
      wrapped_->attachOutOfMemoryObserver(observe);
    }
  }

  template <class Attempt>
  auto with_ladder(size_t bytes, Attempt&& attempt) -> std::invoke_result_t<Attempt> {
    hot.budget -= static_cast<int64_t>(std::min(bytes, size_t{kMostBudget}));
    if (C10_UNLIKELY(hot.budget < 0)) {
      check_growth();
    }
    if (C10_UNLIKELY(!active.load(std::memory_order_relaxed) || hot.depth > 0)) {
      return attempt();
    }
    const Deeper deeper;
    std::exception_ptr error;
    try {
      auto result = attempt();
      if (C10_UNLIKELY(climbing.load(std::memory_order_relaxed) > 0)) {
        taken.fetch_add(bytes);
      }
      return result;
    } catch (const c10::Error& failed) {
      if (!is_out_of_memory(failed)) {
        throw;
      }
      if (!may_climb()) {
        counters.not_climbed.fetch_add(1);
        tell_final_failure();
        throw;
      }
      error = std::current_exception();
    }
    return climb(bytes, attempt, error);
  }

  // Without its cache (PYTORCH_NO_CUDA_MEMORY_CACHING) PyTorch passes the driver's error on.
  static bool is_out_of_memory(const c10::Error& error) noexcept {
    if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) {
      return true;
    }
    const auto* accelerators = dynamic_cast<const c10::AcceleratorError*>(&error);
    return accelerators != nullptr && accelerators->get_error_code() == cudaErrorMemoryAllocation;
  }

  // The first half of invariant 4. Which thread collects, only lastref knows.
  static bool may_climb() noexcept {
    if (captures.load() > 0 || hooks->is_exiting()) {
      return false;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    try {
      const auto stream = c10::cuda::getCurrentCUDAStream();
      return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
          status == cudaStreamCaptureStatusNone;
    } catch (...) {
      return false;
    }
  }

  static void tell_final_failure() {
    counters.failures.fetch_add(1);
    if (std::exchange(latest.is_told, false)) {
      tell_observers(latest);
    }
  }

  // Tries again; none if the device is still full, and then the error.
  template <class Attempt, class Result = std::invoke_result_t<Attempt>>
  static std::optional<Result> try_again(Attempt& attempt, std::exception_ptr& error) {
    if (std::exchange(latest.is_told, false)) {
      made_up_for_on(latest.device).fetch_add(1);
    }
    try {
      return attempt();
    } catch (const c10::Error& failed) {
      if (!is_out_of_memory(failed)) {
        throw;
      }
      error = std::current_exception();
      return std::nullopt;
    }
  }

  template <class Attempt>
  auto climb(size_t bytes, Attempt& attempt, const std::exception_ptr& first)
      -> std::invoke_result_t<Attempt> {
    const Climbing here;
    FailureForReport failure{};
    failure.device = static_cast<uint32_t>(latest.is_told ? latest.device : c10::cuda::current_device());
    failure.requested = bytes;
    std::exception_ptr error;
    if (latest.is_told && latest.requested > latest.limit) {
      failure.collected = kNeverFits;
      fail(failure, first);
    }
    auto climbed = [&](Rung rung, Clock::time_point start, uint64_t freed, bool rescued) {
      auto& counts = counters.rungs[rung];
      const uint64_t took = microseconds_since(start);
      failure.rungs[rung][0] += freed;
      failure.rungs[rung][1] += took;
      counts.bytes.fetch_add(freed);
      counts.microseconds.fetch_add(took);
      if (rescued) {
        counts.rescues.fetch_add(1);
        taken.fetch_add(bytes);
      }
    };

    // PyTorch does not search again after it has waited for pending frees.
    auto start = Clock::now();
    counters.rungs[kSearchAgain].runs.fetch_add(1);
    auto result = try_again(attempt, error);
    climbed(kSearchAgain, start, result ? bytes : 0, result.has_value());
    if (result) {
      return std::move(*result);
    }

    // What a collection finds, other threads may take first, and leave as garbage in their turn.
    counters.rungs[kCollection].runs.fetch_add(1);
    int in_vain = 0;
    const auto until = Clock::now() + kMostCollecting;
    while (true) {
      start = Clock::now();
      const uint64_t taken_before = taken.load();
      {
        const Unlocked unlocked;
        failure.collected = hooks->collect(bytes);
        if (failure.collected >= 0 || failure.collected == kTimedOut) {
          // At once, before others come; and also if nothing was found, for others may have freed meanwhile.
          result = try_again(attempt, error);
        }
      }
      climbed(kCollection, start, std::max<int64_t>(failure.collected, 0), result.has_value());
      if (result) {
        return std::move(*result);
      }
      // An earlier collection may have found it for others, and what they made of it was not dead in time.
      const bool others_took_it = taken.load() - taken_before >= bytes;
      in_vain = failure.collected > 0 ? 0 : in_vain + 1;
      if (failure.collected < 0 || (in_vain > 0 && !others_took_it) || in_vain >= kMostInVain ||
          Clock::now() > until) {
        break;
      }
    }

    // A thread that has not come back from a collection comes to no callback either.
    uint32_t number = 0;
    while (failure.collected >= 0 || failure.collected == kSwitchedOff) {
      start = Clock::now();
      const uint64_t before = device_bytes(static_cast<DeviceIndex>(failure.device));
      int64_t called;
      {
        const Unlocked unlocked;
        called = hooks->call_back(number, failure.device, bytes);
      }
      if (called < 0) {
        break;
      }
      if (number == 0) {
        counters.rungs[kCallbacks].runs.fetch_add(1);
      }
      const uint64_t after = device_bytes(static_cast<DeviceIndex>(failure.device));
      result = try_again(attempt, error);
      climbed(kCallbacks, start, before > after ? before - after : 0, result.has_value());
      if (result) {
        return std::move(*result);
      }
      ++number;
    }

    fail(failure, error);
  }

  [[noreturn]] void fail(FailureForReport& failure, const std::exception_ptr& error) {
    std::string text = where_memory_is(failure);
    const std::string summary = text;
    failure.summary = summary.c_str();
    tell_final_failure();
    if (failure.collected != kInside) {
      const Unlocked unlocked;
      if (char* report = hooks->report(&failure)) {
        text = report;
        hooks->free_text(report);
      }
    }
    try {
      std::rethrow_exception(error);
    } catch (c10::Error& out_of_memory) {
      // One piece of context would be put in brackets; two make two lines.
      const auto end = text.find('\n');
      out_of_memory.add_context(text.substr(0, end));
      if (end != std::string::npos) {
        out_of_memory.add_context(text.substr(end + 1));
      }
      throw;
    }
  }

  // What can be said without Python. Numbers are of now: another thread may have changed them.
  std::string where_memory_is(const FailureForReport& failure) noexcept {
    try {
      const auto device = static_cast<DeviceIndex>(failure.device);
      const auto stats = wrapped_->getDeviceStats(device);
      const auto live = stats.allocated_bytes[0].current;
      const auto active = stats.active_bytes[0].current;
      const auto reserved = stats.reserved_bytes[0].current;
      std::string text = "lastref: device " + std::to_string(failure.device) + " holds " +
          mebibytes(live) + " live, " + mebibytes(active - live) + " freed but pending on streams, " +
          mebibytes(reserved - active) + " cached";
      if (latest.limit > 0) {
        text += "; " + mebibytes(latest.device_free) + " of " + mebibytes(latest.limit) + " are free";
      }
      text += "\n";
      if (failure.collected == kNeverFits) {
        return text + "nothing was tried, since " + mebibytes(failure.requested) + " will never fit";
      }
      text += "search after pending frees: found nothing\n  cycle collection: ";
      const std::string took = std::to_string(failure.rungs[kCollection][1]) + " us";
      if (failure.collected >= 0) {
        text += "freed " + mebibytes(static_cast<uint64_t>(failure.collected)) + " in " + took;
      } else if (failure.collected == kTimedOut) {
        text += "did not end within " + took +
            ": another thread kept the interpreter lock, or a finalizer waits for a lock that this "
            "thread holds (lastref.gc.set_wait_bound sets how long to wait)";
      } else if (failure.collected == kSwitchedOff) {
        text += "was not run, since lastref.gc.set_before_out_of_memory(False) was called";
      } else {
        text += "was not run, since this thread is itself collecting: a finalizer or a callback allocates";
      }
      if (failure.rungs[kCallbacks][1] > 0) {
        text += "\n  callbacks: freed " + mebibytes(failure.rungs[kCallbacks][0]);
      }
      return text;
    } catch (...) {
      return "lastref: no memory became free";
    }
  }

  // Tells lastref what is in use, now and then, so that it collects when that has grown.
  void check_growth() noexcept {
    hot.budget = kMostBudget;
    if (!active.load() || captures.load() > 0 || hooks->is_exiting()) {
      return;
    }
    try {
      if (!wrapped_->initialized()) {
        hot.budget = 0;
        return;
      }
      const int count = c10::cuda::device_count();
      uint64_t left = kMostBudget;
      for (int device = 0; device < count; ++device) {
        left = std::min(left, told_growth(device));
      }
      hot.budget = std::max(kLeastBudget, static_cast<int64_t>(left));
    } catch (...) {
      // Then collections are driven by nothing but the ladder.
    }
  }

  uint64_t told_growth(int device) {
    static std::atomic<uint64_t> capacities[kDevices];
    const auto bytes = device_bytes(static_cast<DeviceIndex>(device));
    auto& capacity = capacities[static_cast<size_t>(device) % kDevices];
    if (capacity.load() == 0) {
      if (bytes == 0) {
        return kMostBudget; // Not used yet: asking for its size would make a context on it.
      }
      capacity.store(wrapped_->getMemoryInfo(static_cast<DeviceIndex>(device)).second);
    }
    return hooks->in_use(static_cast<uint32_t>(device), bytes, capacity.load());
  }
};

// ---- putting it in, and taking it out --------------------------------------------------------------

std::mutex install_mutex;
Guard* latest_guard = nullptr; // Never freed (invariant 1).
// Somebody put a wrapper of their own on top, so that ours had to stay where it was.
bool is_below_another = false;

thread_local std::string error_text;

} // namespace

#define LASTREF_EXPORT extern "C" __attribute__((visibility("default")))

// Puts a Guard in. Null, or why it cannot.
LASTREF_EXPORT const char* lastref_torch_install(
    uintptr_t hooks_address,
    uintptr_t holds_lock,
    uintptr_t save,
    uintptr_t restore) {
  try {
    std::lock_guard<std::mutex> lock(install_mutex);
    const auto* given = reinterpret_cast<const Hooks*>(hooks_address);
    if (given == nullptr || given->abi != kAbi) {
      return "the shim and lastref's extension are of different versions: delete the cached shim";
    }
    hooks = given;
    python.holds_lock = reinterpret_cast<int (*)()>(holds_lock);
    python.save = reinterpret_cast<void* (*)()>(save);
    python.restore = reinterpret_cast<void (*)(void*)>(restore);

    CUDAAllocator* now = allocator.load();
    const bool is_in = latest_guard != nullptr &&
        (now == latest_guard || (is_below_another && now != latest_guard->wrapped()));
    if (!is_in) {
      if (latest_guard == nullptr || latest_guard->wrapped() != now) {
        latest_guard = new Guard(now);
      }
      is_below_another = false;
      if (c10::GetAllocator(c10::DeviceType::CUDA) == now) {
        c10::SetAllocator(c10::DeviceType::CUDA, latest_guard, 255);
      }
      if (!allocator.compare_exchange_strong(now, latest_guard)) {
        return "another thread changed PyTorch's allocator at the same moment: try again";
      }
    }
    active.store(true);
    return nullptr;
  } catch (const std::exception& error) {
    error_text = error.what();
    return error_text.c_str();
  }
}

// Takes the Guard out. 1 if it had to stay, passive, since another wrapper is on top of it.
LASTREF_EXPORT int lastref_torch_uninstall() {
  std::lock_guard<std::mutex> lock(install_mutex);
  active.store(false);
  if (latest_guard == nullptr) {
    return 0;
  }
  if (c10::GetAllocator(c10::DeviceType::CUDA) == latest_guard) {
    c10::SetAllocator(c10::DeviceType::CUDA, latest_guard->wrapped(), 255);
  }
  CUDAAllocator* expected = latest_guard;
  is_below_another = !allocator.compare_exchange_strong(expected, latest_guard->wrapped());
  return is_below_another ? 1 : 0;
}

LASTREF_EXPORT uint64_t lastref_torch_device_bytes(uint32_t device) {
  Guard* guard = latest_guard;
  return guard == nullptr ? 0 : guard->device_bytes(static_cast<DeviceIndex>(device));
}

// Bytes freed on all devices since the statistics were reset.
LASTREF_EXPORT uint64_t lastref_torch_bytes_freed(uint32_t) {
  Guard* guard = latest_guard;
  return guard == nullptr ? 0 : guard->bytes_freed();
}

// failures, not climbed; then of each rung: runs, rescues, bytes, microseconds.
LASTREF_EXPORT void lastref_torch_counters(uint64_t* out) {
  *out++ = counters.failures.load();
  *out++ = counters.not_climbed.load();
  for (const auto& rung : counters.rungs) {
    *out++ = rung.runs.load();
    *out++ = rung.rescues.load();
    *out++ = rung.bytes.load();
    *out++ = rung.microseconds.load();
  }
}
