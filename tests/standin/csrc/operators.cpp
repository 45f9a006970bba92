// Every operator that has no kernel of the device's own: the processor's kernel on the same memory, later, on the stream.
//
// The host needs the sizes of results before their kernel has run. They are learnt: the first call of its kind (operator,
// sizes, strides, types, whole numbers) is waited for, and later ones have results like its results.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <unordered_map>

#include "twins.h"

namespace standin {

at::Tensor Twins::of(const at::Tensor& tensor) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  c10::Storage shared;
  for (auto& [device, host] : pairs_)
    if (device.unsafeGetStorageImpl() == impl) shared = host;
  if (!shared) {
    const BlockRef block = block_of(impl);
    c10::DataPtr data(block ? block->memory : nullptr, block ? new BlockRef(block) : nullptr,
                      block ? [](void* held) { delete static_cast<BlockRef*>(held); } : &c10::detail::deleteNothing, c10::kCPU);
    shared = c10::Storage(c10::Storage::use_byte_size_t(), impl->nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
    pairs_.emplace_back(tensor.storage(), shared);
  }
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

const c10::Storage* Twins::origin(const at::Tensor& twin) const {
  for (const auto& [device, host] : pairs_)
    if (host.unsafeGetStorageImpl() == twin.storage().unsafeGetStorageImpl()) return &device;
  return nullptr;
}

at::Tensor twin(const at::Tensor& tensor) { return Twins().of(tensor); }

namespace {
using c10::IValue;
using torch::jit::Stack;

// `change` over every tensor of a value.
template <class Change>
IValue each(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

bool is_generator(const c10::Argument& argument) {
  auto kind = argument.type()->kind();
  if (kind == c10::TypeKind::OptionalType)
    kind = argument.type()->castRaw<c10::OptionalType>()->getElementType()->kind();
  return kind == c10::TypeKind::GeneratorType;
}

bool names_device(const IValue& value) { return value.isDevice() && value.toDevice().type() == kType; }

void run_on_host(const c10::OperatorHandle& op, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

at::Tensor empty_like_that(const at::Tensor& shape, int device) {
  const c10::Device there(kType, static_cast<c10::DeviceIndex>(device));
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(there));
}

using Shapes = std::vector<at::Tensor>;  // tensors without memory; undefined where nothing comes back

// What results of each kind of call are like.
class Learnt {
 public:
  const Shapes* find(const std::string& kind) {
    std::lock_guard<std::mutex> held(mutex_);
    const auto found = known_.find(kind);
    return found == known_.end() ? nullptr : &found->second;  // entries stay where they are
  }
  void keep(const std::string& kind, const Stack& results) {
    Shapes shapes;
    for (const IValue& result : results) {
      const at::Tensor tensor = result.isTensor() ? result.toTensor() : at::Tensor();
      if (tensor.defined())
        shapes.emplace_back(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
      else
        shapes.emplace_back();
    }
    std::lock_guard<std::mutex> held(mutex_);
    known_.emplace(kind, std::move(shapes));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, Shapes> known_;
};
Learnt& learnt() {
  static auto* one = new Learnt;
  return *one;
}

// One call of an operator with tensors of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), stack_(stack), arguments_(op.schema().arguments()), results_(op.schema().returns()),
        first_(stack.size() - arguments_.size()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device_)));
    check(device_);
    make_twins();
    look_at_results();
    Stack answer;
    if (!views_ && !needs_host_ && !makes_) {
      current_queue(device_).launch([op = op_, host = host_]() mutable { run_on_host(op, host); });
      for (const int argument : written_) answer.push_back(given(argument));
    } else if (const Shapes* shapes = (kind_ = kind_of_call()).empty() ? nullptr : learnt().find(kind_)) {
      answer = run_later(*shapes);
    } else {
      answer = run_now();
    }
    torch::jit::drop(stack_, arguments_.size());
    for (auto& value : answer) stack_.push_back(std::move(value));
  }

 private:
  const IValue& given(size_t argument) const { return stack_[first_ + argument]; }
  bool writes(size_t argument) const {
    const auto* alias = arguments_[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  void find_device() {
    bool host_tensor = false;
    for (size_t i = 0; i < arguments_.size(); i++) {
      each(given(i), [&](const at::Tensor& tensor) {
        if (on_device(tensor)) device_ = device_ < 0 ? tensor.device().index() : device_;
        else if (tensor.defined() && writes(i)) needs_host_ = true;
        else if (tensor.defined() && tensor.dim() > 0 && !given(i).isOptionalTensorList()) host_tensor = true;
        return tensor;
      });
      has_tensors_ = has_tensors_ || device_ >= 0;
      if (device_ < 0 && names_device(given(i)) && given(i).toDevice().has_index()) device_ = given(i).toDevice().index();
    }
    if (device_ < 0) device_ = current_device();
    TORCH_CHECK(!host_tensor, "Expected all tensors to be on the same device, but found at least two devices, standin:",
                device_, " and cpu! (", op_.schema().operator_name(), ")");
  }

  void make_twins() {
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (is_generator(arguments_[i]))
        host_.emplace_back(given(i).isNone()                                     ? inner(default_generator(device_))
                           : given(i).toGenerator().device().type() == kType ? inner(given(i).toGenerator())
                                                                             : given(i).toGenerator());
      else if (names_device(given(i)))
        host_.emplace_back(c10::Device(c10::kCPU));
      else
        host_.push_back(each(given(i), [&](const at::Tensor& tensor) { return host_tensor_of(tensor, writes(i)); }));
    }
  }

  at::Tensor host_tensor_of(const at::Tensor& tensor, bool written) {
    if (on_device(tensor)) return twins_.of(tensor);
    if (!tensor.defined() || written) return tensor;
    auto now = tensor.detach().clone();  // a host's value is taken at the call
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) now.unsafeGetTensorImpl()->set_wrapped_number(true);
    return now;
  }

  // A result is an argument that was written, a view of one, something new, or a value that the host wants.
  void look_at_results() {
    written_.assign(results_.size(), -1);
    for (size_t r = 0; r < results_.size(); r++) {
      const auto* alias = results_[r].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        for (size_t i = 0; i < arguments_.size(); i++)
          if (writes(i) && arguments_[i].alias_info()->beforeSets() == alias->beforeSets()) written_[r] = static_cast<int>(i);
      } else if (alias != nullptr) {
        views_ = true;
      } else {
        makes_ = true;
        if (!results_[r].type()->isSubtypeOf(*c10::TensorType::get())) needs_host_ = true;
      }
    }
    for (size_t i = 0; i < arguments_.size(); i++)  // the kernel gives an empty output its size
      if (writes(i))
        each(given(i), [&](const at::Tensor& tensor) {
          needs_host_ = needs_host_ || (tensor.defined() && tensor.numel() == 0);
          return tensor;
        });
  }

  // What decides the sizes of results; empty where values do, or where nothing is to be learnt.
  std::string kind_of_call() const {
    if (views_ || needs_host_ || op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output))
      return {};
    std::string kind = op_.operator_name().name + "." + op_.operator_name().overload_name;
    const auto add = [&](int64_t number) { kind.append(reinterpret_cast<const char*>(&number), sizeof number); };
    bool known = true;
    const auto add_tensor = [&](const at::Tensor& tensor) {
      add(tensor.defined() ? static_cast<int64_t>(tensor.scalar_type()) : -1);
      if (!tensor.defined()) return tensor;
      add(tensor.dim());
      for (const int64_t size : tensor.sizes()) add(size);
      for (const int64_t stride : tensor.strides()) add(stride);
      return tensor;
    };
    for (const IValue& value : host_) {
      if (value.isInt()) add(value.toInt());
      else if (value.isBool()) add(value.toBool());
      else if (value.isNone()) add(-2);
      else if (value.isIntList()) for (const int64_t one : value.toIntVector()) add(one);
      else if (value.isBoolList()) for (const bool one : value.toBoolList()) add(one);
      else if (value.isTensor() || value.isTensorList()) each(value, add_tensor);
      else if (value.isOptionalTensorList())
        each(value, [&](const at::Tensor& tensor) {  // a mask's values decide how many there are
          known = known && tensor.scalar_type() != at::kBool && tensor.scalar_type() != at::kByte;
          return add_tensor(tensor);
        });
      else if (value.isDouble()) known = known && has_tensors_;  // as `arange` has, whose length follows
      else if (!value.isGenerator() && !value.isString() && !value.isDevice()) known = false;
      add(-3);
    }
    return known ? kind : std::string();
  }

  Stack run_later(const Shapes& shapes) {
    Stack answer;
    std::vector<at::Tensor> targets;
    for (size_t r = 0; r < results_.size(); r++) {
      if (written_[r] >= 0) {
        answer.push_back(given(written_[r]));
        targets.emplace_back();
        continue;
      }
      const at::Tensor made = shapes[r].defined() ? empty_like_that(shapes[r], device_) : at::Tensor();
      answer.emplace_back(made);
      targets.push_back(made.defined() ? twins_.of(made) : at::Tensor());
    }
    current_queue(device_).launch([op = op_, host = host_, targets = std::move(targets)]() mutable {
      run_on_host(op, host);
      for (size_t r = 0; r < targets.size(); r++)
        if (targets[r].defined() && host[r].isTensor() && host[r].toTensor().defined()) targets[r].copy_(host[r].toTensor());
    });
    return answer;
  }

  Stack run_now() {
    if (!views_ || needs_host_) current_queue(device_).sync();
    Stack results = host_;
    run_on_host(op_, results);
    if (!kind_.empty()) learnt().keep(kind_, results);
    const auto back = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
      if (const auto* storage = twins_.origin(tensor)) return view_of(*storage, tensor);
      auto made = empty_like_that(tensor, device_);
      twin(made).copy_(tensor);
      return made;
    };
    take_over_resized();
    Stack answer;
    for (size_t r = 0; r < results_.size(); r++)
      answer.push_back(written_[r] >= 0 ? given(written_[r]) : each(results[r], back));
    return answer;
  }

  static at::Tensor view_of(const c10::Storage& storage, const at::Tensor& shape) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
    return made;
  }

  // An output that the kernel gave another size has the processor's memory there.
  void take_over_resized() {
    for (size_t i = 0; i < arguments_.size(); i++) {
      if (!writes(i) || !given(i).isTensor()) continue;
      const at::Tensor& ours = given(i).toTensor();
      const at::Tensor& host = host_[i].toTensor();
      if (!on_device(ours) || (host.sizes() == ours.sizes() && host.strides() == ours.strides())) continue;
      at::native::resize_(ours, host.sizes(), std::nullopt);
      current_queue(device_).sync();
      twin(ours).copy_(host);
    }
  }

  const c10::OperatorHandle op_;
  Stack& stack_;
  const std::vector<c10::Argument>& arguments_;
  const std::vector<c10::Argument>& results_;
  const size_t first_;
  int device_ = -1;
  bool has_tensors_ = false, needs_host_ = false, views_ = false, makes_ = false;
  Twins twins_;
  Stack host_;  // the call's arguments for the processor
  std::vector<int> written_;  // for each result the argument that it is, or -1
  std::string kind_;
};

void by_host_kernel(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  Call(op, *stack).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_host_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_host_kernel>());
  // Where the processor has a kernel besides a composite one, the composite one would be taken: other arithmetic.
  using c10::DispatchKey;
  auto& all = c10::Dispatcher::singleton();
  for (const auto& name : all.getAllOpNames()) {
    const auto op = all.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
        !op->hasKernelForDispatchKey(DispatchKey::CPU) ||
        (op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) &&
         !op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)))
      continue;
    if (op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd))
      library.impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&by_host_kernel>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace standin
