// A simulated GPU on a CPU: torch's PrivateUse1 backend, named "simgpu" by simgpu.py.
//
// Its tensors have memory of their own, which is counted. Every operator copies its arguments to the host, computes
// there and copies the results back (at::native::cpu_fallback). An operator whose tensors are partly on the host raises
// as with CUDA: only a tensor without dimensions, or the indices of an index, may be there. Collectives travel over the
// host, so a process group needs gloo alone.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

// -- Memory ----------------------------------------------------------------------------------------------------------
std::atomic<int64_t> allocated{0}, most_allocated{0};
std::atomic<int64_t> host_reads{0};  // scalars and tensors that were copied to the host

struct Block {
  void* data;
  size_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= static_cast<int64_t>(block->bytes);
  c10::free_cpu(block->data);
  delete block;
}

struct SimulatedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, kDevice};
    auto* block = new Block{c10::alloc_cpu(bytes), bytes};
    allocated += static_cast<int64_t>(bytes);
    if (allocated > most_allocated) most_allocated = allocated.load();
    return {block->data, block, &free_block, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
SimulatedAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// -- What torch asks a device for ------------------------------------------------------------------------------------
c10::Stream defaults(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return defaults(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return defaults(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = allocator.allocate(bytes);
    if (const auto kept = std::min(bytes, impl->nbytes())) std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};
Hooks hooks;

// -- Operators that must not copy ------------------------------------------------------------------------------------
using Format = std::optional<at::MemoryFormat>;

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, Format format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic_symint(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_symint_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// A host tensor over the device's bytes, which only this file can make.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  if (self.numel() == 0) return target;
  if (target.device().is_cpu()) ++host_reads;
  on_host(target).copy_(on_host(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  ++host_reads;
  return on_host(self).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(self, std::move(storage), std::move(offset), size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_meta__symint(self, std::move(storage), 0, c10::SymInt(count), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_meta__symint(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(),
                                              source.sym_strides());
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, Format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_sizes_contiguous(sizes);
  const auto items = static_cast<size_t>(impl->storage_offset() + c10::multiply_integers(sizes));
  const size_t bytes = items * impl->dtype().itemsize();
  if (bytes > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

// -- Every other operator --------------------------------------------------------------------------------------------
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name.rfind("aten::index_put", 0) == 0 || name == "aten::_index_put_impl_";
}

void check_device(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || tensor.device().type() == kType || tensor.dim() == 0,
              "Expected all tensors to be on the same device, but found at least two devices, simgpu:0 and ",
              tensor.device(), " (when checking arguments of ", name, ")");
}

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  if (!takes_host_indices(name)) {
    for (const auto& argument : torch::jit::last(stack, op.schema().arguments().size())) {
      if (argument.isTensor()) check_device(name, argument.toTensor());
      if (argument.isTensorList())
        for (const at::Tensor& tensor : argument.toTensorVector()) check_device(name, tensor);
      if (argument.isOptionalTensorList())
        for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector())
          if (tensor) check_device(name, *tensor);
    }
  }
  const auto reads = host_reads.load();
  at::native::cpu_fallback(op, stack);
  host_reads = reads;  // a GPU computes without these copies
}

// torch asks each further backend for its own convolutions.
using Sizes = c10::SymIntArrayRef;

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                       c10::SymInt groups) {
  for (const auto& tensor : {input, weight, bias.value_or(at::Tensor())}) check_device("aten::convolution", tensor);
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  return at::convolution_symint(on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed,
                                output_padding, std::move(groups))
      .to(kDevice);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Sizes stride, Sizes padding,
    Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  for (const auto& tensor : {gradient, input, weight}) check_device("aten::convolution_backward", tensor);
  const c10::SymInt channels = gradient.sym_size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      on_host(gradient), on_host(input), on_host(weight), Sizes(channels), stride, padding, dilation, transposed,
      output_padding, std::move(groups), mask);
  const auto moved = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(kDevice) : tensor; };
  return {moved(of_input), moved(of_weight), moved(of_bias)};
}

// -- Collectives -----------------------------------------------------------------------------------------------------
struct Copies {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // on the device, on the host

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      if (!tensor.defined() || tensor.device().type() != kType) return value;
      auto copy = on_host(tensor).clone(at::MemoryFormat::Contiguous);
      pairs.emplace_back(tensor, copy);
      return copy;
    }
    return mapped(value, [this](const c10::IValue& one) { return to_host(one); });
  }

  c10::IValue to_device(const c10::IValue& value) const {
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      for (const auto& [device, host] : pairs)
        if (host.is_same(tensor)) return device;
      return value;
    }
    return mapped(value, [this](const c10::IValue& one) { return to_device(one); });
  }

  // Only what the collective wrote: an input may be a part of an output's memory.
  void write_back() const {
    std::vector<bool> written;
    for (const auto& [device, host] : pairs) {
      const auto before = on_host(device).contiguous();
      written.push_back(host.nbytes() && std::memcmp(before.data_ptr(), host.data_ptr(), host.nbytes()) != 0);
    }
    for (size_t place = 0; place < pairs.size(); ++place)
      if (written[place]) on_host(pairs[place].first).copy_(pairs[place].second);
  }

 private:
  template <class Function>
  static c10::IValue mapped(const c10::IValue& value, Function function) {
    if (!value.isList()) return value;
    const auto list = value.toList();
    c10::impl::GenericList made(list.elementType());
    for (const c10::IValue& one : list) made.push_back(function(one));
    return made;
  }
};

// gloo's work of a message that has arrived would wait for another message.
struct Arrived final : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

void communicate_over_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::NoGradGuard no_grad;
  Copies copies;
  const auto arguments = static_cast<int64_t>(op.schema().arguments().size());
  for (auto place = stack->end() - arguments; place != stack->end(); ++place) *place = copies.to_host(*place);
  op.callBoxed(*stack);
  const auto results = stack->end() - static_cast<int64_t>(op.schema().returns().size());
  // A message that is sent is written nowhere here, and the other rank may first send its own.
  if (op.schema().name() != "c10d::send") {
    for (auto result = results; result != stack->end(); ++result)
      if (result->isCustomClass()) result->toCustomClass<c10d::Work>()->wait();
    copies.write_back();
  }
  for (auto result = results; result != stack->end(); ++result) *result = copies.to_device(*result);
  if (op.schema().name() == "c10d::recv_") {
    stack->pop_back();
    stack->emplace_back(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<Arrived>()));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("alias", at::native::alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const auto* name :
       {"allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "reduce_", "broadcast_", "gather_", "scatter_", "alltoall_",
        "alltoall_base_", "send", "recv_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&communicate_over_host>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("memory_allocated", [] { return allocated.load(); });
  m.def("max_memory_allocated", [] { return most_allocated.load(); });
  m.def("reset_peak_memory_stats", [] { most_allocated = allocated.load(); });
  m.def("host_reads", [] { return host_reads.load(); });
}
