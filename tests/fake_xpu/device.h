// Which device is current, its streams and events, its random numbers, and what torch asks of it.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <vector>

#include "memory.h"

namespace fake_xpu {

using Clock = std::chrono::steady_clock;

// Work is done when it is asked for, so streams have names only and an event is a time of the host.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return XPU; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count); }

  c10::Device getDevice() const override { return {XPU, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count, "invalid device ordinal: ", int(device.index()),
                "; the fake has ", device_count, " XPU devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = or_current(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  static c10::Stream& current_stream(c10::DeviceIndex device) {
    static thread_local std::vector<c10::Stream> streams;
    for (auto next = streams.size(); next < MAX_DEVICES; next++)
      streams.emplace_back(c10::Stream::DEFAULT, c10::Device(XPU, c10::DeviceIndex(next)));
    return streams[or_current(device)];
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {XPU, or_current(device.index())});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, {XPU, or_current(device.index())}, ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return std::exchange(current_stream(stream.device_index()), stream);
  }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event)
      *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override { // ms
    auto passed = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(begin);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

// The numbers of a CPU generator: with one seed a device draws what the CPU draws, so that training
// on it can be compared with training on the CPU. (Real devices draw others.)
struct Random final : c10::GeneratorImpl {
  at::Generator cpu;

  explicit Random(c10::DeviceIndex device)
      : GeneratorImpl({XPU, device}, c10::DispatchKeySet(c10::DispatchKey::XPU)),
        cpu(at::detail::createCPUGenerator()) {}

  c10::GeneratorImpl* numbers() const { return cpu.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { numbers()->set_current_seed(seed); }
  uint64_t current_seed() const override { return numbers()->current_seed(); }
  uint64_t seed() override { return numbers()->seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the fake generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the fake generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override { numbers()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Random(device_.index());
    copy->set_state(*get_state());
    return copy;
  }

  static at::Generator& of(c10::DeviceIndex device) {
    static std::vector<at::Generator> defaults;
    for (auto next = defaults.size(); next < MAX_DEVICES; next++)
      defaults.push_back(at::make_generator<Random>(c10::DeviceIndex(next)));
    return defaults[or_current(device)];
  }
};

struct Hooks final : at::XPUHooksInterface {
  template <class... Arguments> // torch 2.11 gives one, 2.15 none
  explicit Hooks(const Arguments&...) {}

  void init() const override {}
  bool hasXPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "fake"; }
  c10::DeviceIndex getNumGPUs() const override { return deviceCount(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override { return fake_xpu::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({XPU, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({XPU, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Device getDeviceFromPtr(void*) const override { return {XPU, fake_xpu::current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return Random::of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(or_current(device));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::get().holds(pointer); }
};

// torch refuses to be of two accelerators, and a wheel that was built for CUDA says that it is of
// CUDA also on a machine without. These are the answers of a wheel without CUDA.
struct NoCuda final : at::CUDAHooksInterface {
  template <class... Arguments>
  explicit NoCuda(const Arguments&...) {}
};

} // namespace fake_xpu
