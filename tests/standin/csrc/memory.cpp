// Memory of the device, and memory of the host that it can reach without a copy.
//
// New memory is full of NaN. What a tensor frees counts as held until the stream that made it has come to that point. A
// real allocator gives it to the next tensor that is made on that stream, so there it is poisoned: work on another
// stream that still uses it, neither recorded by `record_stream` nor waited for by then (as FSDP2 waits), finds NaN.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "device.h"

namespace standin {
namespace {

constexpr int kPoison = 0xFF;  // a NaN in every type of floats
constexpr size_t kAlignment = 64;

bool poisons() {
  static const bool yes = setting("STANDIN_POISON", 1) != 0;
  return yes;
}

void* host_memory(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, kAlignment, std::max<size_t>(bytes, 1)) == 0, "standin: the host has no memory");
  return memory;
}

// What was freed, by device and the stream that made it, until the next tensor is made there.
std::mutex freed_mutex;
std::map<std::pair<int, int64_t>, std::vector<std::weak_ptr<Block>>>& freed_blocks() {
  static auto* all = new std::map<std::pair<int, int64_t>, std::vector<std::weak_ptr<Block>>>;
  return *all;
}

// A tensor is made on a stream: what was freed there, and is still used by others, gets other contents.
void use_again(int device, int64_t stream) {
  if (!poisons() || forked()) return;
  std::vector<std::weak_ptr<Block>> freed;
  {
    std::lock_guard<std::mutex> held(freed_mutex);
    freed.swap(freed_blocks()[{device, stream}]);
  }
  for (const auto& each : freed)
    if (const BlockRef block = each.lock())
      queue(device, stream).follow([block] { std::memset(block->memory, kPoison, block->bytes); });
}

// A tensor's last storage has gone: its memory stays until the streams that use it have come here.
void release(void* context) {
  std::unique_ptr<BlockRef> freed(static_cast<BlockRef*>(context));
  Block& block = **freed;
  counts(block.device).live -= static_cast<int64_t>(block.bytes);
  if (forked() || !initialized() || block.bytes == 0) return;
  Queue& own = queue(block.device, block.stream);
  for (const int64_t stream : block.used_by) own.wait_for(queue(block.device, stream).mark());
  own.follow([block = *freed] {});
  std::lock_guard<std::mutex> held(freed_mutex);
  freed_blocks()[{block.device, block.stream}].push_back(*freed);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    use_again(device, current_stream(device));
    auto block = std::make_unique<BlockRef>(std::make_shared<Block>(bytes, device, current_stream(device)));
    Counts& all = counts(device);
    all.live += static_cast<int64_t>(bytes);
    ++all.allocations;
    if (all.live > all.peak) all.peak = all.live.load();
    void* memory = (*block)->memory;
    return {memory, block.release(), &release, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    sync_device(current_device());
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return standin::initialized(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats said;
    const Counts& all = counts(device);
    said.allocated_bytes[0].current = said.active_bytes[0].current = all.live;
    said.allocated_bytes[0].peak = said.active_bytes[0].peak = all.peak;
    said.reserved_bytes[0].current = said.reserved_bytes[0].peak = all.held;
    said.num_device_alloc = all.allocations;
    return said;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { counts(device).peak = counts(device).live.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const int64_t total = total_memory();
    return {static_cast<size_t>(std::max<int64_t>(0, total - counts(device).held)), static_cast<size_t>(total)};
  }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

// Host memory that copies can leave or reach while the host goes on.
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* made = host_memory(bytes);
    std::lock_guard<std::mutex> held(mutex);
    spans[reinterpret_cast<uintptr_t>(made)] = std::max<size_t>(bytes, 1);
    return {made, made, &let_go, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  static void let_go(void* made);
  bool holds(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> held(mutex);
    auto next = spans.upper_bound(address);
    return next != spans.begin() && address < (--next)->first + next->second;
  }
  std::mutex mutex;
  std::map<uintptr_t, size_t> spans;
};
Pinned& pinned() {
  static auto* one = new Pinned;  // tensors may outlive statics
  return *one;
}
void Pinned::let_go(void* made) {
  std::lock_guard<std::mutex> held(pinned().mutex);
  pinned().spans.erase(reinterpret_cast<uintptr_t>(made));
  std::free(made);
}

}  // namespace

Block::Block(size_t bytes, int device, int64_t stream) : bytes(bytes), device(device), stream(stream) {
  check(device);
  initialize();
  if (bytes == 0) return;
  const auto needed = static_cast<int64_t>(bytes);
  if (counts(device).held + needed > total_memory()) sync_device(device);  // what is only late comes back
  TORCH_CHECK_WITH(OutOfMemoryError, counts(device).held + needed <= total_memory(),
                   "standin out of memory. Tried to allocate ", bytes, " bytes on device ", device);
  memory = host_memory(bytes);
  if (poisons()) std::memset(memory, kPoison, bytes);
  counts(device).held += needed;
}
Block::~Block() {
  if (memory == nullptr) return;
  std::free(memory);
  counts(device).held -= static_cast<int64_t>(bytes);
}

BlockRef block_of(const c10::StorageImpl* storage) {
  const auto& data = storage->data_ptr();
  return data.get_context() != nullptr && data.get_deleter() == &release ? *static_cast<BlockRef*>(data.get_context())
                                                                         : nullptr;
}
void record_use(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get_context() == nullptr || data.get_deleter() != &release) return;
  Block& block = **static_cast<BlockRef*>(data.get_context());
  if (stream.id() == block.stream) return;
  std::lock_guard<std::mutex> held(block.mutex);
  block.used_by.push_back(stream.id());
}
c10::Allocator* allocator() { return &memory; }
c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* pointer) { return pinned().holds(pointer); }

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const BlockRef from = block_of(storage);
  auto made = memory.allocate(bytes);
  const BlockRef to = *static_cast<BlockRef*>(made.get_context());
  if (const size_t kept = std::min<size_t>(bytes, storage->nbytes()); kept > 0 && from != nullptr)
    current_queue(to->device).launch([from, to, kept] { std::memcpy(to->memory, from->memory, kept); });
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

}  // namespace standin
