// The operators that a device has itself: memory, views, copies, and dropout in the form that accelerators are asked for.
#include <ATen/EmptyTensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "twins.h"

namespace at::native {
Tensor as_strided_tensorimpl(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset);
}

namespace standin {
namespace {
using at::Tensor;
using c10::IntArrayRef;
template <class T>
using Maybe = std::optional<T>;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef sizes, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool>,
             Maybe<c10::MemoryFormat> format) {
  c10::DeviceGuard at(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>,
                     Maybe<c10::Device> device, Maybe<bool>) {
  c10::DeviceGuard at(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys, c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, Maybe<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
Tensor view(const Tensor& self, IntArrayRef sizes) { return at::native::view(self, sizes); }
Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, self.storage_offset());
}
const Tensor& resize(const Tensor& self, IntArrayRef sizes, Maybe<c10::MemoryFormat> format) {
  c10::DeviceGuard at(self.device());
  return at::native::resize_(self, sizes, format);
}
Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

void copy_later(Queue& queue, const Tensor& from, const Tensor& to) {
  queue.launch([from, to]() mutable {
    c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    to.copy_(from);
  });
}
// As CUDA copies: within a device on its stream; from ordinary host memory by way of a staging buffer, so that the caller
// may write on in it; to it, the host waits; and by pinned memory late, in both directions.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  if (to.numel() == 0) return to;
  const auto& ours = on_device(to) ? to : from;
  c10::DeviceGuard at(ours.device());
  Queue& queue = current_queue(ours.device().index());
  if (on_device(from) && on_device(to)) {
    const bool across = from.device() != to.device();
    if (across) sync_device(from.device().index());
    copy_later(queue, twin(from), twin(to));
    if (across) queue.sync();
  } else if (on_device(to)) {
    const bool pinned = from.is_pinned();
    copy_later(queue, pinned ? from.detach() : from.detach().expand(to.sizes()).clone(), twin(to));
    if (pinned && !non_blocking) queue.sync();
  } else {
    copy_later(queue, twin(from), to.detach());
    if (!non_blocking || !to.is_pinned()) queue.sync();
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const Tensor& self) {
  current_queue(self.device().index()).sync();
  c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  return twin(self).item();
}
void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream);
}

// The processor's arithmetic, so that its numbers are the processor's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, Maybe<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto noise = at::empty_like(input).bernoulli_(1 - p);
  auto mask = noise.to(at::kBool);
  return {input.mul(noise.div_(1 - p)), mask};
}
Tensor native_dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  return gradient.mul(mask.to(gradient.scalar_type()).div_(1 / scale));
}

int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe<Tensor>& mask, double p,
                         bool causal, Maybe<double> scale, bool grouped) {
  Twins twins;
  auto q = twins.of(query), k = twins.of(key), v = twins.of(value);
  q.set_requires_grad(query.requires_grad());
  return at::_fused_sdp_choice(q, k, v, mask && mask->defined() ? twins.of(*mask) : mask, p, causal, scale, grouped);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
}

// How Python gets at the generators.
TORCH_LIBRARY(standin, library) {
  library.def("default_generator", [](int64_t device) { return default_generator(static_cast<int>(device)); });
}

}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::attention_choice)
}
