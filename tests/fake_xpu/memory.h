// Memory of the fake device: the host's, counted as torch.xpu.memory_stats counts it.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace fake_xpu {

constexpr auto XPU = c10::DeviceType::XPU;
constexpr int MAX_DEVICES = 16;

inline int device_count = 2;
inline size_t memory_bytes = size_t(1) << 32; // of each device
inline thread_local c10::DeviceIndex current_device = 0;
inline std::mutex mutex; // of everything counted

inline c10::DeviceIndex or_current(c10::DeviceIndex device) {
  return device < 0 ? current_device : device;
}

inline void* aligned(size_t bytes) {
  void* start = nullptr;
  TORCH_CHECK(posix_memalign(&start, 64, bytes ? bytes : 1) == 0, "the host is out of memory");
  return start;
}

struct Block {
  void* start;
  size_t bytes;
  c10::DeviceIndex device;
};

// A DeviceAllocator, which torch.accelerator's memory functions ask for, rather than an Allocator.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::CachingDeviceAllocator::DeviceStats stats[MAX_DEVICES];

  static DeviceMemory& get() {
    static auto* memory = new DeviceMemory; // outlives the last tensor
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device;
    count(device, bytes);
    auto* block = new Block{bytes ? aligned(bytes) : nullptr, bytes, device};
    return {block->start, block, &DeviceMemory::release, c10::Device(XPU, device)};
  }

  // The message begins as that of the real device, which callers search.
  void count(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& s = stats[device];
    if (size_t(s.allocated_bytes[0].current) + bytes > memory_bytes) {
      s.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "XPU out of memory. Tried to allocate ", bytes,
                       " bytes. GPU ", int(device), " has a total capacity of ", memory_bytes);
    }
    s.allocation[0].increase(1);
    for (auto* sum : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      (*sum)[0].increase(bytes);
  }

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto& s = get().stats[block->device];
      s.allocation[0].decrease(1);
      for (auto* sum : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
        (*sum)[0].decrease(block->bytes);
    }
    std::free(block->start);
    delete block;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {} // nothing is cached
  void recordStream(const c10::DataPtr&, c10::Stream) override {} // work is done when it is asked
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    stats[device].allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return {memory_bytes - stats[device].allocated_bytes[0].current, memory_bytes};
  }
};

// Pinned host memory, of which tensor.is_pinned() can tell that it is.
struct PinnedMemory final : c10::Allocator {
  std::map<const char*, size_t> blocks;

  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* start = aligned(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<char*>(start)] = bytes ? bytes : 1;
    return {start, start, &PinnedMemory::release, c10::Device(c10::kCPU)};
  }

  static void release(void* start) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      get().blocks.erase(static_cast<char*>(start));
    }
    std::free(start);
  }

  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto* place = static_cast<const char*>(pointer);
    auto next = blocks.upper_bound(place);
    if (next == blocks.begin())
      return false;
    auto [start, bytes] = *std::prev(next);
    return place < start + bytes;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace fake_xpu
