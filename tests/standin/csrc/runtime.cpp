// Streams, marks, errors that stick, and the calls by which tests steer the device.
#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>
#include <vector>

namespace standin {
namespace {

// How often who waits looks whether the device has failed meanwhile.
constexpr auto kLook = std::chrono::milliseconds(20);
// Streams of a device that scripts make are given again, in turn, as from CUDA's pool.
constexpr int64_t kPool = 8;

struct Device {
  std::mutex mutex;
  std::map<int64_t, Queue*> queues;
  int64_t streams_made = 0;
  std::atomic<bool> bad{false};
  std::string why;
  Counts counts;
};

// Never destroyed: streams still run while the process ends.
Device& device_at(int device) {
  static auto* devices = new Device[kMostDevices];
  return devices[device];
}

std::atomic<bool> started{false}, in_fork{false};
std::atomic<int64_t> most_launches{0};
thread_local int here = 0;
thread_local int64_t stream_here[kMostDevices] = {};

bool traces() {
  static const bool yes = setting("STANDIN_TRACE", 0) != 0;
  return yes;
}

}  // namespace

int64_t setting(const char* name, int64_t otherwise) {
  const char* said = std::getenv(name);
  return said != nullptr && *said != '\0' ? std::atoll(said) : otherwise;
}

void Mark::set() {
  std::lock_guard<std::mutex> held(mutex_);
  done_ = true;
  at_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Mark::wait(int device) {
  std::unique_lock<std::mutex> held(mutex_);
  while (!done_ && !failed(device)) changed_.wait_for(held, kLook);
}

bool Mark::done() {
  std::lock_guard<std::mutex> held(mutex_);
  return done_;
}

Queue::Queue(int device, int64_t id) : lag_us(setting("STANDIN_LAG_US", 0)), device_(device), id_(id) {}

void Queue::launch(std::function<void()> kernel) {
  check(device_);
  if (most_launches == 0) most_launches = setting("STANDIN_QUEUE", 1024);
  std::unique_lock<std::mutex> held(mutex_);
  ++waiting_;
  while (launches_ >= static_cast<uint64_t>(most_launches) && !failed(device_)) moved_.wait_for(held, kLook);
  --waiting_;
  ++launches_;
  ++counts(device_).launches;
  add(held, {std::move(kernel), true});
}

void Queue::follow(std::function<void()> step) {
  std::unique_lock<std::mutex> held(mutex_);
  add(held, {std::move(step), false});
}

void Queue::add(std::unique_lock<std::mutex>&, Task task) {
  if (!started_) {
    started_ = true;
    initialize();
    std::thread([this] { run_tasks(); }).detach();
  }
  tasks_.push_back(std::move(task));
  ++queued_;
  work_.notify_one();
}

MarkRef Queue::mark() {
  auto made = std::make_shared<Mark>();
  follow([made] { made->set(); });
  return made;
}

void Queue::wait_for(const MarkRef& mark) {
  if (!mark->done()) follow([mark, device = device_] { mark->wait(device); });
}

void Queue::run_tasks() {
  std::unique_lock<std::mutex> held(mutex_);
  for (;;) {
    while (tasks_.empty()) work_.wait(held);
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    held.unlock();
    run_one(task);
    task.run = nullptr;  // what it holds is let go before it counts as done
    held.lock();
    if (task.launched) --launches_;
    ++done_;
    if (waiting_ > 0) moved_.notify_all();
  }
}

void Queue::run_one(Task& task) {
  if (task.launched && failed(device_)) return;
  if (const int64_t us = task.launched ? lag_us.load() : 0; us > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  try {
    task.run();
  } catch (const std::exception& error) {
    if (traces()) std::fprintf(stderr, "standin:%d stream %lld: %s\n", device_, static_cast<long long>(id_), error.what());
    fail(device_, "device-side assert triggered");
  }
}

void Queue::sync() {
  check(device_);
  ++counts(device_).waits;
  std::unique_lock<std::mutex> held(mutex_);
  const uint64_t until = queued_;
  ++waiting_;
  while (done_ < until && !failed(device_)) moved_.wait_for(held, kLook);
  --waiting_;
  held.unlock();
  check(device_);
}

int device_count() noexcept {
  static const int count = static_cast<int>(std::min<int64_t>(kMostDevices, setting("STANDIN_DEVICES", 2)));
  return count;
}
int current_device() noexcept { return here; }
void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "standin error: invalid device ordinal ", device);
  here = device;
}

bool initialized() noexcept { return started; }
bool forked() noexcept { return in_fork; }
void initialize() {
  TORCH_CHECK(!in_fork, "Cannot re-initialize standin in forked subprocess: its streams stayed in the parent");
  if (!started.exchange(true)) pthread_atfork(nullptr, nullptr, [] { in_fork = true; });
}

Queue& queue(int device, int64_t stream) {
  TORCH_CHECK(!in_fork, "Cannot re-initialize standin in forked subprocess: its streams stayed in the parent");
  Device& at = device_at(device);
  std::lock_guard<std::mutex> held(at.mutex);
  auto& found = at.queues[stream];
  if (found == nullptr) found = new Queue(device, stream);
  return *found;
}
Queue& current_queue(int device) { return queue(device, current_stream(device)); }
int64_t new_stream(int device) {
  Device& at = device_at(device);
  std::lock_guard<std::mutex> held(at.mutex);
  return 1 + at.streams_made++ % kPool;  // 0 is the default stream
}
int64_t current_stream(int device) { return stream_here[device]; }
int64_t exchange_stream(int device, int64_t stream) { return std::exchange(stream_here[device], stream); }

void sync_device(int device) {
  check(device);
  std::vector<Queue*> all;
  {
    Device& at = device_at(device);
    std::lock_guard<std::mutex> held(at.mutex);
    for (auto& [id, each] : at.queues) all.push_back(each);
  }
  for (auto* each : all) each->sync();
}

void fail(int device, const std::string& why) {
  Device& at = device_at(device);
  std::lock_guard<std::mutex> held(at.mutex);
  if (at.bad) return;
  at.why = why;
  at.bad = true;
}
bool failed(int device) noexcept { return device_at(device).bad; }
void check(int device) {
  Device& at = device_at(device);
  if (C10_LIKELY(!at.bad)) return;
  constexpr int32_t kAssert = 710;
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kAssert,
      "standin error: " + at.why +
          "\nErrors of kernels are reported asynchronously at some later call, so the stack below may be another's.");
}

Counts& counts(int device) { return device_at(device).counts; }
int64_t total_memory() noexcept {
  static const int64_t bytes = setting("STANDIN_MEMORY", int64_t{8} << 30);
  return bytes;
}

namespace {
std::mutex gates_mutex;
std::map<int64_t, MarkRef>& gates() {
  static auto* all = new std::map<int64_t, MarkRef>;
  return *all;
}
}  // namespace
}  // namespace standin

// What tests call by ctypes, which lets go of the interpreter's lock meanwhile. None of them throws.
extern "C" {
int standin_devices() { return standin::device_count(); }
int standin_initialized() { return standin::initialized(); }
int standin_forked() { return standin::forked(); }
int standin_failed(int device) { return standin::failed(device); }
// The device fails at once, or as its current stream comes to this point.
void standin_fail(int device) { standin::fail(device, "device-side assert triggered"); }
void standin_fail_in_stream(int device) {
  standin::current_queue(device).follow([device] { standin::fail(device, "device-side assert triggered"); });
}
// The current stream stands at this point until the gate is opened.
int64_t standin_close_gate(int device) {
  static std::atomic<int64_t> made{0};
  auto gate = std::make_shared<standin::Mark>();
  const int64_t id = ++made;
  {
    std::lock_guard<std::mutex> held(standin::gates_mutex);
    standin::gates()[id] = gate;
  }
  standin::current_queue(device).follow([gate, device] { gate->wait(device); });
  return id;
}
void standin_open_gate(int64_t id) {
  std::lock_guard<std::mutex> held(standin::gates_mutex);
  const auto found = standin::gates().find(id);
  if (found == standin::gates().end()) return;
  found->second->set();
  standin::gates().erase(found);
}
// Launches as of an extension that keeps the interpreter's lock, where it is called so; the kernels do nothing. With the
// lock in hand that process is killed first (0: none), so that nobody hears of it before there is room for all.
void standin_launch(int device, int64_t times, int64_t victim) {
  if (victim > 0) ::kill(static_cast<pid_t>(victim), SIGKILL);
  try {
    for (int64_t made = 0; made < times; made++) standin::current_queue(device).launch([] {});
  } catch (const std::exception&) {  // the device has failed, which the next call says
  }
}
void standin_queue_limit(int64_t launches) { standin::most_launches = launches; }
int64_t standin_depth(int device) { return static_cast<int64_t>(standin::current_queue(device).depth()); }
int64_t standin_launches(int device) { return standin::counts(device).launches; }
int64_t standin_waits(int device) { return standin::counts(device).waits; }
int64_t standin_live(int device) { return standin::counts(device).live; }
int64_t standin_held(int device) { return standin::counts(device).held; }
int64_t standin_peak(int device) { return standin::counts(device).peak; }
int64_t standin_total() { return standin::total_memory(); }
}
