// The runtime of the stand-in device: streams that run later, marks in them, errors that stick, counts, gates.
//
// Nothing here knows tensors. A stream is a queue and a thread that takes tasks from it in order; the host goes on as
// soon as a task is queued, as it does with a real accelerator. Host code waits for marks, which streams set.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace standin {

// A point in a stream: it is set when all that was queued before it has run.
class Mark {
 public:
  void set();
  // Returns when it is set, or when the device has failed: then it may never be.
  void wait(int device);
  bool done();
  std::chrono::steady_clock::time_point at() const { return at_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point at_{};
};
using MarkRef = std::shared_ptr<Mark>;

// One stream of one device. Queues are never destroyed: their threads may outlive the interpreter.
class Queue {
 public:
  Queue(int device, int64_t id);

  // Runs `kernel` later. A full queue holds its caller, as a real launch does. Throws where the device has failed,
  // and a device that fails before the kernel's turn never runs it.
  void launch(std::function<void()> kernel);
  // Runs `step` later, always: on a failed device, and without room. So do events, waits and what frees memory.
  void follow(std::function<void()> step);
  MarkRef mark();
  // Lets this stream wait for a point of another one.
  void wait_for(const MarkRef& mark);

  bool idle() const { return queued_ == done_; }
  uint64_t depth() const { return queued_ - done_; }
  // Holds the host until all that is queued has run. Throws where the device has failed.
  void sync();

  std::atomic<int64_t> lag_us;  // how long each launch takes besides its arithmetic

 private:
  struct Task {
    std::function<void()> run;
    bool launched;
  };
  void add(std::unique_lock<std::mutex>& held, Task task);
  void run_tasks();
  void run_one(Task& task);

  const int device_;
  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable work_, moved_;
  std::deque<Task> tasks_;
  std::atomic<uint64_t> queued_{0}, done_{0};
  uint64_t launches_ = 0;  // of the tasks that are queued or run now
  int waiting_ = 0;
  bool started_ = false;
};

constexpr int kMostDevices = 16;
int device_count() noexcept;
int current_device() noexcept;
void set_device(int device);
bool initialized() noexcept;
void initialize();
bool forked() noexcept;

Queue& queue(int device, int64_t stream);
Queue& current_queue(int device);
int64_t new_stream(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
void sync_device(int device);

// The first error of a device is its last: it says that to every later call, until the process ends.
void fail(int device, const std::string& why);
bool failed(int device) noexcept;
void check(int device);

struct Counts {
  std::atomic<int64_t> launches{0};      // kernels and copies
  std::atomic<int64_t> waits{0};         // times that the host waited for the device
  std::atomic<int64_t> live{0};          // bytes that tensors have
  std::atomic<int64_t> held{0};          // bytes that tensors or queued work have
  std::atomic<int64_t> peak{0};          // the most bytes that tensors had
  std::atomic<int64_t> allocations{0};
};
Counts& counts(int device);
int64_t total_memory() noexcept;

int64_t setting(const char* name, int64_t otherwise);

}  // namespace standin
