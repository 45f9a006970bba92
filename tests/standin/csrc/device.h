// What the files of the device that know tensors share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "runtime.h"

namespace standin {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// The memory of one allocation. Tensors and queued work share it, so that late work never touches what is not there.
struct Block {
  Block(size_t bytes, int device, int64_t stream);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* memory = nullptr;
  const size_t bytes;
  const int device;
  const int64_t stream;  // the one that was current as it was made
  // Other streams that use it, as `record_stream` has said.
  std::mutex mutex;
  std::vector<int64_t> used_by;
};
using BlockRef = std::shared_ptr<Block>;

BlockRef block_of(const c10::StorageImpl* storage);
c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Another stream uses this memory: it is not poisoned before that stream has come to where it was freed.
void record_use(const c10::DataPtr& data, c10::Stream stream);
// The storage gets memory of another size, with what was in it, in the order of the current stream.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// A generator of the processor that kernels on a device draw from in its place.
at::Generator inner(const at::Generator& generator);
const at::Generator& default_generator(int device);

}  // namespace standin
