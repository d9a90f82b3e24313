// A device under torch's own XPU dispatch key, whose memory and kernels are the CPU's.
//
// torch.ops.fake_xpu.* are what __init__.py puts in the place of torch.xpu's C entry points, which a
// wheel without XPU lacks.
#include "collectives.h"

namespace fake_xpu {

C10_REGISTER_GUARD_IMPL(XPU, Guard);
const bool allocates = [] {
  c10::SetAllocator(XPU, &DeviceMemory::get());
  return true;
}();

void configure(int64_t devices, int64_t bytes) {
  TORCH_CHECK(devices >= 1 && devices <= MAX_DEVICES, "1 to ", MAX_DEVICES, " devices");
  device_count = int(devices);
  memory_bytes = size_t(bytes);
}

int64_t exchange_device(int64_t device) {
  return Guard().exchangeDevice({XPU, c10::DeviceIndex(device)}).index();
}

// Bytes now, at most, ever allocated, ever freed; then the number of tensors and of refusals.
std::vector<int64_t> memory(int64_t device) {
  auto stats = DeviceMemory::get().getDeviceStats(c10::DeviceIndex(device));
  auto& bytes = stats.allocated_bytes[0];
  return {bytes.current, bytes.peak, bytes.allocated, bytes.freed, stats.allocation[0].current,
          stats.num_ooms};
}

int64_t current_stream(int64_t device) {
  return Guard::current_stream(c10::DeviceIndex(device)).id();
}

void set_stream(int64_t id, int64_t device) {
  c10::Device place{XPU, c10::DeviceIndex(device)};
  Guard().setDevice(place);
  Guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, place, id));
}

c10::Dict<std::string, int64_t> all_calls() {
  std::lock_guard<std::mutex> lock(mutex);
  c10::Dict<std::string, int64_t> dict;
  for (auto& [name, number] : calls)
    dict.insert(name, number);
  return dict;
}

void forget_calls() {
  std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
}

} // namespace fake_xpu

namespace at { // where the macros look for the registries
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, fake_xpu::Hooks);
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED,
                                 fake_xpu::NoCuda);
} // namespace at

TORCH_LIBRARY(fake_xpu, m) {
  m.def("configure", fake_xpu::configure);
  m.def("exchange_device", fake_xpu::exchange_device);
  m.def("current_device", [] { return int64_t(fake_xpu::current_device); });
  m.def("current_stream", fake_xpu::current_stream);
  m.def("set_stream", fake_xpu::set_stream);
  m.def("memory", fake_xpu::memory);
  m.def("reset_peak", [](int64_t device) {
    fake_xpu::DeviceMemory::get().resetPeakStats(c10::DeviceIndex(device));
  });
  m.def("reset_accumulated", [](int64_t device) {
    fake_xpu::DeviceMemory::get().resetAccumulatedStats(c10::DeviceIndex(device));
  });
  m.def("generator", [](int64_t device) { return fake_xpu::Random::of(c10::DeviceIndex(device)); });
  m.def("calls", fake_xpu::all_calls);
  m.def("forget_calls", fake_xpu::forget_calls);
}
