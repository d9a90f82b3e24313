// Collectives of XPU tensors, carried by the gloo backend that stands in the place of xccl.
#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "operators.h"

namespace fake_xpu {

using c10d::ProcessGroup;

// A group of the same ranks that gives tensors of the CPU to the backend of the XPU.
inline c10::intrusive_ptr<ProcessGroup> with_host_tensors(
    const c10::intrusive_ptr<ProcessGroup>& group) {
  auto twin = c10::make_intrusive<ProcessGroup>(group->getRank(), group->getSize());
  auto gloo = ProcessGroup::BackendType::GLOO;
  twin->setBackend(c10::DeviceType::CPU, gloo, group->getBackend(XPU));
  twin->setDefaultBackend(gloo);
  return twin;
}

inline c10::IValue with_host_tensors(const c10::IValue& value) {
  if (value.isTensor())
    return on_host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> hosts;
    for (Tensor tensor : value.toTensorList())
      hosts.push_back(on_host(tensor));
    return hosts;
  }
  if (value.isList()) {
    auto list = value.toList();
    c10::impl::GenericList hosts(list.elementType());
    for (c10::IValue item : list)
      hosts.push_back(with_host_tensors(item));
    return hosts;
  }
  return value;
}

inline void by_gloo(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  count_call(op);
  const auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    bool is_group = arguments[i].type()->str().find("ProcessGroup") != std::string::npos;
    value = is_group ? c10::IValue(with_host_tensors(value.toCustomClass<ProcessGroup>()))
                     : with_host_tensors(value);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

} // namespace fake_xpu

TORCH_LIBRARY_IMPL(c10d, XPU, m) {
  for (const char* name :
       {"allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_",
        "alltoall_base_", "barrier", "broadcast_", "gather_", "recv_", "recv_any_source_",
        "reduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "scatter_", "send"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fake_xpu::by_gloo>());
}
