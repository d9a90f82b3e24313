// Tensor operations: views and storage here, everything else by torch's CPU kernels.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <string>

#include "device.h"

namespace fake_xpu {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;

inline std::map<std::string, int64_t> calls; // how often each operation ran on the device

inline void count_call(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> lock(mutex);
  calls[op.schema().name()]++;
}

// The same memory as a CPU tensor, which keeps the tensor alive.
inline Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != XPU)
    return tensor;
  auto* start = tensor.storage().nbytes() ? tensor.data_ptr() : nullptr;
  auto host = at::from_blob(start, tensor.sizes(), tensor.strides(), [tensor](void*) {},
                            at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

// Tensors are made by the allocator that counts.
inline c10::DeviceGuard guard_of(std::optional<at::Device> device) {
  return c10::DeviceGuard({XPU, or_current(device ? device->index() : -1)});
}

inline Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<at::Device> device,
                    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto guard = guard_of(device);
  return at::detail::empty_generic(sizes, &DeviceMemory::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::XPU),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<at::Device> device, std::optional<bool>) {
  auto guard = guard_of(device);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::XPU),
                                           c10::dtype_or_default(dtype));
}

// The fallback cannot change the storage of its arguments, nor return a view of them; hence these.

inline const Tensor& resize(const Tensor& self, IntArrayRef sizes,
                            std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  auto guard = guard_of(self.device());
  auto storage = self.storage();
  auto elements = self.storage_offset() + c10::multiply_integers(sizes);
  auto bytes = size_t(elements) * self.element_size();
  if (storage.nbytes() < bytes) {
    auto larger = DeviceMemory::get().allocate(bytes);
    if (storage.nbytes())
      std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset,
                           SymIntArrayRef sizes, SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  return self;
}

inline Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  auto elements = int64_t(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.sym_storage_offset(), other.sym_sizes(),
                     other.sym_strides());
}

inline Tensor as_strided(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides,
                         std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides), start);
}

inline Tensor view(const Tensor& self, SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

inline Tensor reshape_alias(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}

// Between devices, which torch's copy_ does for the devices that it was built with.
inline Tensor& copy(Tensor& self, const Tensor& from, bool) {
  on_host(self).copy_(on_host(from));
  return self;
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes())
    fake_xpu::resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

inline void record_stream(Tensor&, at::Stream) {}

// What aten::convolution calls on devices whose convolution it does not choose itself.
inline Tensor convolution(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, SymIntArrayRef stride,
                          SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                          SymIntArrayRef output_padding, c10::SymInt groups) {
  auto host_bias = bias ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return at::convolution_symint(on_host(input), on_host(weight), host_bias, stride, padding,
                                dilation, transposed, output_padding, std::move(groups))
      .to(input.device());
}

inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, SymIntArrayRef stride,
    SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
    SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  std::vector<c10::SymInt> bias{grad.sym_size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(grad), on_host(input), on_host(weight),
      wanted[2] ? at::OptionalSymIntArrayRef(bias) : at::OptionalSymIntArrayRef(), stride, padding,
      dilation, transposed, output_padding, std::move(groups), wanted);
  auto back = [&](const Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// torch's choice of a kernel for attention ends for kinds of devices that it was not built with.
inline Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const std::optional<Tensor>& mask, double dropout, bool is_causal,
                        std::optional<double> scale, bool enable_gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, enable_gqa));
}

inline c10::DeviceIndex device_of(c10::ArrayRef<c10::IValue> arguments) {
  for (auto& value : arguments)
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == XPU)
      return value.toTensor().device().index();
  return current_device;
}

// Everything else runs on copies of the arguments on the CPU, and draws from the device's numbers.
inline void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count_call(op);
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  auto device = device_of(torch::jit::last(*stack, arguments.size()));
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    bool draws = arguments[i].type()->str().find("Generator") != std::string::npos;
    if (!draws || (value.isGenerator() && value.toGenerator().device().type() != XPU))
      continue;
    auto generator = value.isNone() ? Random::of(device) : value.toGenerator();
    value = static_cast<Random*>(generator.unsafeGetGeneratorImpl())->cpu;
  }
  at::native::cpu_fallback(op, stack);
}

} // namespace fake_xpu

TORCH_LIBRARY_IMPL(_, XPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_xpu::on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, XPU, m) {
  m.impl("empty.memory_format", fake_xpu::empty);
  m.impl("empty_strided", fake_xpu::empty_strided);
  m.impl("resize_", fake_xpu::resize);
  m.impl("set_.source_Storage_storage_offset", fake_xpu::set_storage);
  m.impl("set_.source_Storage", fake_xpu::set_whole_storage);
  m.impl("set_.source_Tensor", fake_xpu::set_tensor);
  m.impl("as_strided", fake_xpu::as_strided);
  m.impl("view", fake_xpu::view);
  m.impl("_reshape_alias", fake_xpu::reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("copy_", fake_xpu::copy);
  m.impl("_copy_from", fake_xpu::copy_from);
  m.impl("_copy_from_and_resize", fake_xpu::copy_from_and_resize);
  m.impl("record_stream", fake_xpu::record_stream);
  m.impl("convolution_overrideable", fake_xpu::convolution);
  m.impl("scaled_dot_product_attention", fake_xpu::attention);
  m.impl("convolution_backward_overrideable", fake_xpu::convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradXPU, m) { // made of differentiable operations
  m.impl("scaled_dot_product_attention", fake_xpu::attention);
}
