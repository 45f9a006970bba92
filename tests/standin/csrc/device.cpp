// What torch asks of a kind of device: which one is current, streams, events, generators, hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "device.h"

namespace standin {
namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device device_of(int index) { return Device(kType, static_cast<DeviceIndex>(index)); }

struct Event {
  MarkRef mark;  // of its last recording
  int device = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    const Device before = device_of(current_device());
    if (device.index() != before.index()) set_device(device.index());
    return before;
  }
  Device getDevice() const override { return device_of(current_device()); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) set_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }

  static int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }
  static Stream stream_of(int device, int64_t id) { return Stream(Stream::UNSAFE, device_of(device), id); }
  static Queue& queue_of(const Stream& stream) { return queue(stream.device_index(), stream.id()); }
  Stream getStream(Device device) const override {
    return stream_of(index_of(device), current_stream(index_of(device)));
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream_of(index_of(device), new_stream(index_of(device)));
  }
  Stream getNewStream(Device device, int) const override {
    return stream_of(index_of(device), new_stream(index_of(device)));
  }
  Stream exchangeStream(Stream stream) const override {
    return stream_of(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    check(stream.device_index());
    return queue_of(stream).idle();
  }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).sync(); }
  void synchronizeDevice(const DeviceIndex device) const override { sync_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_use(data, stream);
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    check(stream.device_index());
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {queue_of(stream).mark(), stream.device_index()};
  }
  void block(void* event, const Stream& stream) const override {
    if (recorded(event)) queue_of(stream).wait_for(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    if (!recorded(event)) return true;
    check(static_cast<Event*>(event)->device);
    return static_cast<Event*>(event)->mark->done();
  }
  void synchronizeEvent(void* event) const override {
    if (!recorded(event)) return;
    const Event waited = *static_cast<Event*>(event);
    check(waited.device);
    ++counts(waited.device).waits;
    waited.mark->wait(waited.device);
    check(waited.device);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(recorded(first) && recorded(second), "standin: both events must be recorded");
    const auto &from = static_cast<Event*>(first)->mark, &to = static_cast<Event*>(second)->mark;
    TORCH_CHECK(from->done() && to->done(), "standin: both events must have come");
    return std::chrono::duration<double, std::milli>(to->at() - from->at()).count();
  }
  static bool recorded(void* event) { return event != nullptr && static_cast<Event*>(event)->mark != nullptr; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A generator whose numbers are those of the processor's with the same seed. Kernels draw from it late, on their stream;
// to seed it is one more step of the current stream, so that the host need not wait.
struct Numbers final : c10::GeneratorImpl {
  explicit Numbers(int device)
      : GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawn(at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

  void set_current_seed(uint64_t number) override {
    last_seed = number;
    later([number](at::Generator& each) { each.set_current_seed(number); });
  }
  void set_state(const c10::TensorImpl& state) override {
    auto kept = state.shallow_copy_and_detach(c10::VariableVersion(0), true);
    settle();  // the caller may write on in its tensor
    drawn.unsafeGetGeneratorImpl()->set_state(*kept);
    last_seed = drawn.current_seed();
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return drawn.unsafeGetGeneratorImpl()->get_state();
  }
  uint64_t current_seed() const override { return last_seed; }
  uint64_t seed() override {
    settle();
    return last_seed = drawn.seed();
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "standin: its generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "standin: its generators have no offset"); }
  Numbers* clone_impl() const override {
    settle();
    auto made = std::make_unique<Numbers>(device().index());
    made->drawn = drawn.clone();
    made->last_seed = last_seed;
    return made.release();
  }

  at::Generator drawn;
  uint64_t last_seed = c10::default_rng_seed_val;

 private:
  void settle() const {
    if (initialized()) sync_device(device().index());
  }
  template <class Change>
  void later(Change change) {
    if (!initialized()) return change(drawn);
    current_queue(device().index()).follow([held = drawn, change]() mutable {
      std::lock_guard<std::mutex> lock(held.mutex());
      change(held);
    });
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return initialized(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Numbers>(device < 0 ? current_device() : device);
  }
  Device getDeviceFromPtr(void*) const override { return device_of(current_device()); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = static_cast<DeviceIndex>(current_device());
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? static_cast<DeviceIndex>(current_device()) : exchangeDevice(device);
  }
  // FSDP2 frees and takes its flat memory by the size of storages.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard at(storage.device());
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// DDP's reducer asks for one; it times by the host's clock.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event first, Event second) override {
    const int64_t from = getTimeRef(first), to = getTimeRef(second);
    return to < from ? std::nullopt : std::optional<int64_t>(to - from);
  }
};

}  // namespace

at::Generator inner(const at::Generator& generator) {
  return static_cast<Numbers*>(generator.unsafeGetGeneratorImpl())->drawn;
}
const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < device_count(); index++) made->push_back(at::make_generator<Numbers>(index));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

}  // namespace standin

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, standin::HostTimer)
}
