// A tensor of the processor on the same memory as one of the device, for the processor's kernels.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "device.h"

namespace standin {

// Kernels run below autograd and autocast, which have done their part when the call came to the device.
const c10::DispatchKeySet kAbove = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// The twins of one call's tensors: those that share a storage on the device share one here. Each keeps the memory.
class Twins {
 public:
  at::Tensor of(const at::Tensor& tensor);
  // The device's storage whose twin this tensor looks at; null for memory of its own.
  const c10::Storage* origin(const at::Tensor& twin) const;

 private:
  std::vector<std::pair<c10::Storage, c10::Storage>> pairs_;  // the device's, its twin
};

at::Tensor twin(const at::Tensor& tensor);

}  // namespace standin
