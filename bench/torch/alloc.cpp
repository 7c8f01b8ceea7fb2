// PyTorch's own CUDA allocator, measured: one work a process, its result as one line of JSON.
//
//   torch_alloc hot BYTES       nanoseconds for an allocation and its free
//   torch_alloc churn           the same with a thousand blocks of random sizes live
//   torch_alloc threads COUNT   hot pairs of 4 KiB on so many threads at once, for one of them
//   torch_alloc replay FILE     operations of a trace: 16 bytes each, as `struct operation`
//
// The works are those of src/work.rs, step by step. The device is the stand-in's. PYTORCH_CUDA_ALLOC_CONF chooses
// between the native allocator and its expandable segments.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cudart.h"

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using clock_type = std::chrono::steady_clock;

constexpr unsigned PAIRS = 10000;
constexpr int GOES = 7;

double nanoseconds_since(clock_type::time_point start) {
  return std::chrono::duration<double, std::nano>(clock_type::now() - start).count();
}

void* allocate(size_t bytes, cudaStream_t stream = nullptr) {
  return caching::raw_alloc_with_stream(bytes, stream);
}
void release(void* block) {
  if (block != nullptr) caching::raw_delete(block);
}

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t below(uint64_t end) { return next() % end; }
  // From 512 bytes to 4 MiB: every power of two equally likely.
  uint64_t size() {
    uint64_t octave = uint64_t{512} << below(13);
    return octave + below(octave);
  }

 private:
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

template <class Go>
double best(Go go) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < GOES; ++i) least = std::min(least, go());
  return least;
}

double hot(size_t bytes) {
  return best([&] {
    auto start = clock_type::now();
    for (unsigned i = 0; i < PAIRS; ++i) release(allocate(bytes));
    return nanoseconds_since(start) / PAIRS;
  });
}

double churn() {
  Random random(7);
  std::vector<void*> live(1000);
  for (auto& block : live) block = allocate(random.size());
  struct step {
    size_t at;
    uint64_t bytes;
  };
  std::vector<step> steps(PAIRS);
  for (auto& step : steps) {
    step.at = random.below(1000);
    step.bytes = random.size();
  }
  return best([&] {
    auto start = clock_type::now();
    for (const auto& step : steps) {
      release(live[step.at]);
      live[step.at] = allocate(step.bytes);
    }
    return nanoseconds_since(start) / PAIRS;
  });
}

double threads(int count) {
  std::barrier barrier(count);
  std::vector<double> times(count);
  std::vector<std::thread> all;
  for (int number = 0; number < count; ++number) {
    all.emplace_back([&, number] {
      c10::cuda::set_device(0);
      std::vector<double> goes;
      for (int i = 0; i < GOES; ++i) {
        barrier.arrive_and_wait();
        auto start = clock_type::now();
        for (unsigned j = 0; j < PAIRS * 10; ++j) release(allocate(4096));
        goes.push_back(nanoseconds_since(start) / (PAIRS * 10));
      }
      // Not the best one: in that, a thread may have been alone.
      std::sort(goes.begin(), goes.end());
      times[number] = goes[GOES / 2];
    });
  }
  double sum = 0;
  for (auto& thread : all) thread.join();
  for (double time : times) sum += time;
  return sum / count;
}

struct operation {
  uint64_t bytes;
  uint32_t slot;
  uint16_t stream; // 0 is the default stream
  uint16_t is_free;
};
static_assert(sizeof(operation) == 16);

std::vector<operation> read(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) {
    std::perror(path);
    std::exit(2);
  }
  std::vector<operation> operations;
  operation buffer[4096];
  while (size_t count = std::fread(buffer, sizeof *buffer, 4096, file)) {
    operations.insert(operations.end(), buffer, buffer + count);
  }
  std::fclose(file);
  return operations;
}

void replay(const char* path) {
  auto operations = read(path);
  uint32_t slots = 0;
  uint16_t streams = 0;
  for (const auto& operation : operations) {
    slots = std::max(slots, operation.slot + 1);
    streams = std::max<uint16_t>(streams, operation.stream + 1);
  }
  std::vector<cudaStream_t> stream(streams, nullptr);
  for (uint16_t i = 1; i < streams; ++i) cudaStreamCreate(&stream[i]);
  std::vector<void*> blocks(slots, nullptr);
  uint64_t live = 0, peak = 0;
  size_t done = 0;
  bool out_of_memory = false;

  standin_reset_counts();
  auto start = clock_type::now();
  for (const auto& operation : operations) {
    void*& block = blocks[operation.slot];
    if (operation.is_free) {
      release(block);
      live -= operation.bytes;
    } else {
      try {
        block = allocate(operation.bytes, stream[operation.stream]);
      } catch (const c10::OutOfMemoryError&) {
        out_of_memory = true;
        break;
      }
      live += operation.bytes;
      peak = std::max(peak, live);
    }
    ++done;
  }
  double host = nanoseconds_since(start);
  size_t reserved = standin_peak(0);
  auto stats = caching::getDeviceStats(0);
  struct standin_count counts[64];
  size_t count = std::min<size_t>(standin_counts(counts, 64), 64);
  for (size_t i = 0; i < count; ++i) host -= static_cast<double>(counts[i].nanoseconds);

  std::printf(
      "{\"operations\": %zu, \"out_of_memory\": %s, \"nanoseconds\": %.2f, \"peak_live_bytes\": %llu, "
      "\"peak_reserved_bytes\": %zu, \"stats\": {\"reserved_bytes.all.peak\": %lld, \"num_device_alloc\": %lld, "
      "\"num_device_free\": %lld, \"num_alloc_retries\": %lld}, \"calls\": {",
      done, out_of_memory ? "true" : "false", host / static_cast<double>(std::max<size_t>(done, 1)),
      static_cast<unsigned long long>(peak), reserved, static_cast<long long>(stats.reserved_bytes[0].peak),
      static_cast<long long>(stats.num_device_alloc), static_cast<long long>(stats.num_device_free),
      static_cast<long long>(stats.num_alloc_retries));
  for (size_t i = 0; i < count; ++i) {
    std::printf(
        "%s\"%s\": {\"calls\": %llu, \"bytes\": %llu}", i == 0 ? "" : ", ", counts[i].name, counts[i].calls,
        counts[i].bytes);
  }
  std::printf("}}\n");
}

} // namespace

int main(int count, char** arguments) {
  std::string work = count > 1 ? arguments[1] : "";
  const char* argument = count > 2 ? arguments[2] : "";
  c10::cuda::set_device(0);
  c10::cuda::detail::init_p2p_access_cache(1);
  caching::init(1);
  if (work == "replay") {
    replay(argument);
  } else if (work == "hot") {
    std::printf("{\"nanoseconds\": %.2f}\n", hot(std::strtoull(argument, nullptr, 10)));
  } else if (work == "churn") {
    std::printf("{\"nanoseconds\": %.2f}\n", churn());
  } else if (work == "threads") {
    std::printf("{\"nanoseconds\": %.2f}\n", threads(std::atoi(argument)));
  } else {
    std::fprintf(stderr, "torch_alloc: hot BYTES, churn, threads COUNT or replay FILE, not %s\n", work.c_str());
    return 2;
  }
}
