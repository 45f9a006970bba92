// Collectives of the device, as NCCL's are: on streams of their own, connected at the first call, for whose end the
// host does not wait. A collective whose peer has gone, or whose peers call another one, never ends before the abort.
//
// Every rank speaks to every other one through a socket; sums are added up in the order of ranks.
#include <ATen/core/ivalue.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <thread>

#include "twins.h"

namespace standin {
namespace {
using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkRef = c10::intrusive_ptr<c10d::Work>;

constexpr int kLookMs = 20;  // how often who waits looks whether it was aborted meanwhile
constexpr int64_t kFirstStream = 1000;  // above those that scripts make

enum Fault : int { kNone, kHang, kError, kHoldConnect, kDieInConnect };
std::atomic<int> fault{kNone};
std::atomic<int64_t> fault_after{0};
std::atomic<int64_t> made{0};

// Whether this fault is to happen at this call: once in a process.
bool strikes(std::initializer_list<Fault> kinds, Fault* which) {
  const int armed = fault;
  for (const Fault kind : kinds)
    if (armed == kind && fault_after-- <= 0) {
      fault = kNone;
      *which = kind;
      return true;
    }
  return false;
}

// What all of one communicator share, its streams too: they may outlive it.
struct Shared {
  std::atomic<bool> aborted{false};
  std::atomic<int> error{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, int> sockets;  // (lane, peer) to a socket
  int listening = -1;

  void abort() {
    std::lock_guard<std::mutex> held(mutex);
    aborted = true;
    if (listening >= 0) ::shutdown(listening, SHUT_RDWR);
    for (auto& [key, socket] : sockets) ::shutdown(socket, SHUT_RDWR);
    changed.notify_all();
  }
  // As a kernel that polls for who never comes: nothing of this communicator goes on before the abort.
  void spin(int device) {
    std::unique_lock<std::mutex> held(mutex);
    while (!aborted && !failed(device)) changed.wait_for(held, std::chrono::milliseconds(kLookMs));
  }
  ~Shared() {
    for (auto& [key, socket] : sockets) ::close(socket);
    if (listening >= 0) ::close(listening);
  }
};
using SharedRef = std::shared_ptr<Shared>;

struct Head {
  uint32_t operation;
  uint32_t sender;
  uint64_t bytes;
};

// One way of one collective: to a peer, or from it.
struct Move {
  int socket;
  bool out;
  char* at;
  uint64_t left;
  Head head;
  size_t head_done = 0;
};

sockaddr_un address_of(const std::string& name, socklen_t* length) {
  sockaddr_un made{};
  made.sun_family = AF_UNIX;
  std::memcpy(made.sun_path + 1, name.data(), name.size());  // a name that no file has
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return made;
}

// Moves all there is; false where that will never end by itself.
bool exchange(Shared& shared, int device, std::vector<Move>& moves) {
  for (;;) {
    if (shared.aborted || failed(device)) return false;
    std::vector<pollfd> waited;
    std::vector<Move*> open;
    for (auto& each : moves)
      if (each.head_done < sizeof(Head) || each.left > 0) {
        waited.push_back({each.socket, static_cast<short>(each.out ? POLLOUT : POLLIN), 0});
        open.push_back(&each);
      }
    if (open.empty()) return true;
    if (::poll(waited.data(), waited.size(), kLookMs) <= 0) continue;
    for (size_t index = 0; index < open.size(); index++) {
      if (waited[index].revents == 0) continue;
      Move& each = *open[index];
      const bool heading = each.head_done < sizeof(Head);
      char* at = heading ? reinterpret_cast<char*>(&each.head) + each.head_done : each.at;
      const size_t left = heading ? sizeof(Head) - each.head_done : each.left;
      const Head expected = each.head;
      Head heard{};
      ssize_t moved = 0;
      if (each.out) {
        moved = ::send(each.socket, at, left, MSG_DONTWAIT | MSG_NOSIGNAL);
      } else if (heading) {
        moved = ::recv(each.socket, &heard, sizeof(Head), MSG_DONTWAIT | MSG_WAITALL | MSG_PEEK);
        if (moved > 0 && moved < static_cast<ssize_t>(sizeof(Head))) continue;
        if (moved > 0) ::recv(each.socket, &heard, sizeof(Head), 0);
      } else {
        moved = ::recv(each.socket, at, left, MSG_DONTWAIT);
      }
      if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) continue;
      if (moved <= 0) return false;  // the peer has gone
      if (heading) {
        each.head_done += static_cast<size_t>(moved);
        if (!each.out && (heard.operation != expected.operation || heard.bytes != expected.bytes)) return false;
      } else {
        each.at += moved;
        each.left -= static_cast<uint64_t>(moved);
      }
    }
  }
}

struct Done final : c10d::Work {
  Done(int rank, OpType type, int device, Tensors outputs, SharedRef shared, bool holds_host)
      : Work(rank, type), device(device), outputs(std::move(outputs)), shared(std::move(shared)), holds_host(holds_host) {}
  bool isCompleted() override {
    check(device);
    return mark->done();
  }
  bool isSuccess() const override { return !shared->aborted && !failed(device); }
  std::exception_ptr exception() const override {
    if (isSuccess()) return nullptr;
    return std::make_exception_ptr(std::runtime_error("standin: the communicator was aborted"));
  }
  void synchronize() override { current_queue(device).wait_for(mark); }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (holds_host || timeout != kNoTimeout) {
      const auto until = std::chrono::steady_clock::now() + timeout;
      while (!mark->done() && !failed(device) && !shared->aborted) {
        TORCH_CHECK_WITH(DistBackendError, timeout == kNoTimeout || std::chrono::steady_clock::now() < until,
                         "standin: a collective was not done within ", timeout.count(), " ms");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    TORCH_CHECK_WITH(DistBackendError, !shared->aborted, "standin: the communicator was aborted");
    return true;
  }
  void abort() override { shared->abort(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  MarkRef mark;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  const int device;
  const Tensors outputs;
  const SharedRef shared;
  const bool holds_host;
};

struct Settings final : c10d::Backend::Options {
  explicit Settings(std::chrono::milliseconds timeout) : Options("standinccl", timeout) {}
};

std::string bytes_of(const std::vector<uint8_t>& said) { return {said.begin(), said.end()}; }

class Communicator final : public c10d::Backend {
 public:
  Communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), store_(std::move(store)), settings_(c10::make_intrusive<Settings>(timeout)), id_(++made) {}
  ~Communicator() override { shared_->abort(); }

  const std::string getBackendName() const override { return "standinccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return settings_; }
  void setTimeout(std::chrono::milliseconds timeout) override { settings_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  c10d::ErrorType getError() override { return static_cast<c10d::ErrorType>(shared_->error.load()); }
  void abort() override { shared_->abort(); }
  void shutdown() override {}

  void startCoalescing() override { together_ = std::make_unique<std::vector<WorkRef>>(); }
  WorkRef endCoalescing() override {
    const auto works = std::move(together_);
    TORCH_CHECK(works && !works->empty(), "standin: nothing was put together");
    const auto& first = static_cast<Done&>(*works->front());
    c10::DeviceGuard at(c10::Device(kType, static_cast<c10::DeviceIndex>(first.device)));
    Tensors all;
    Queue& own = queue(first.device, stream_of(0));
    for (const auto& each : *works) {
      for (const auto& tensor : static_cast<Done&>(*each).outputs) all.push_back(tensor);
      own.wait_for(static_cast<Done&>(*each).mark);
    }
    return work_of(OpType::COALESCED, first.device, all, 0, false);
  }

  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return each(OpType::ALLREDUCE, tensors, tensors, [this, op = options.reduceOp](Tensor into, Tensor given) {
      return [this, op, into, given](int device) { return reduce_all(device, into, given, op); };
    });
  }
  WorkRef allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return each(OpType::BROADCAST, tensors, tensors, [this, root = static_cast<int>(options.rootRank)](Tensor at, Tensor) {
      return [this, root, at](int device) {
        std::vector<Move> moves;
        if (getRank() == root) {
          for (int peer = 0; peer < getSize(); peer++) out(moves, 0, peer, at, OpType::BROADCAST);
        } else {
          in(moves, 0, root, at, OpType::BROADCAST);
        }
        return exchange(*shared_, device, moves);
      };
    });
  }
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    return each(OpType::REDUCE, tensors, tensors, [this, op = options.reduceOp, root](Tensor into, Tensor given) {
      return [this, op, root, into, given](int device) {
        const Tensor target = getRank() == root ? into : into.clone();
        return reduce_all(device, target, given, op);
      };
    });
  }
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return many(OpType::ALLGATHER, outputs[0], inputs[0], outputs[0], [this, into = twins(outputs[0]), given = flat(inputs[0])](int device) {
      return gather_all(device, into, given);
    });
  }
  WorkRef _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return many(OpType::_ALLGATHER_BASE, {output}, input, {output}, [this, into = parts(flat(output)), given = flat(input)](int device) {
      return gather_all(device, into, given);
    });
  }
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return each(OpType::COALESCED, outputs, inputs, [this](Tensor into, Tensor given) {
      return [this, into = parts(into), given](int device) { return gather_all(device, into, given); };
    });
  }
  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    const auto op = options.reduceOp;
    return many(OpType::REDUCE_SCATTER, outputs, inputs[0][0], outputs, [this, op, into = flat(outputs[0]), given = twins(inputs[0])](int device) {
      return reduce_parts(device, into, given, op);
    });
  }
  WorkRef _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const auto op = options.reduceOp;
    return many(OpType::_REDUCE_SCATTER_BASE, {output}, input, {output}, [this, op, into = flat(output), given = parts(flat(input))](int device) {
      return reduce_parts(device, into, given, op);
    });
  }
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    const auto op = options.reduceOp;
    return each(OpType::COALESCED, outputs, inputs, [this, op](Tensor into, Tensor given) {
      return [this, op, into, given = parts(given)](int device) { return reduce_parts(device, into, given, op); };
    });
  }
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const Tensors none, &all = outputs.empty() ? none : outputs[0];
    return many(OpType::GATHER, all, inputs[0], all, [this, root, into = twins(all), given = flat(inputs[0])](int device) {
      std::vector<Move> moves;
      if (getRank() == root) {
        Tensors held = into;
        held[static_cast<size_t>(root)].copy_(given);
        for (int peer = 0; peer < getSize(); peer++) in(moves, 0, peer, held[static_cast<size_t>(peer)], OpType::GATHER);
      } else {
        out(moves, 0, root, given, OpType::GATHER);
      }
      return exchange(*shared_, device, moves);
    });
  }
  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const Tensors none, &all = inputs.empty() ? none : inputs[0];
    return many(OpType::SCATTER, outputs, outputs[0], outputs, [this, root, into = flat(outputs[0]), given = twins(all)](int device) {
      std::vector<Move> moves;
      Tensor held = into;
      if (getRank() == root) {
        held.copy_(given[static_cast<size_t>(root)]);
        for (int peer = 0; peer < getSize(); peer++) out(moves, 0, peer, given[static_cast<size_t>(peer)], OpType::SCATTER);
      } else {
        in(moves, 0, root, held, OpType::SCATTER);
      }
      return exchange(*shared_, device, moves);
    });
  }
  WorkRef alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions&) override {
    return many(OpType::ALLTOALL_BASE, {output}, input, {output},
                [this, into = rows(output, out_splits), given = rows(input, in_splits)](int device) {
                  return swap(device, into, given);
                });
  }
  WorkRef alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return many(OpType::ALLTOALL, outputs, inputs[0], outputs, [this, into = twins(outputs), given = twins(inputs)](int device) {
      return swap(device, into, given);
    });
  }
  WorkRef send(Tensors& tensors, int to, int) override {
    connect(lane_to(getRank(), to), to);
    return run(OpType::SEND, tensors[0].get_device(), tensors, lane_to(getRank(), to), [this, to, at = flat(tensors[0], lane_to(getRank(), to))](int device) {
      std::vector<Move> moves;
      out(moves, lane_to(getRank(), to), to, at, OpType::SEND);
      return exchange(*shared_, device, moves);
    });
  }
  WorkRef recv(Tensors& tensors, int from, int) override {
    connect(lane_to(from, getRank()), from);
    return run(OpType::RECV, tensors[0].get_device(), tensors, lane_to(from, getRank()), [this, from, at = flat(tensors[0], lane_to(from, getRank()))](int device) {
      std::vector<Move> moves;
      in(moves, lane_to(from, getRank()), from, at, OpType::SEND);
      return exchange(*shared_, device, moves);
    });
  }
  WorkRef barrier(const c10d::BarrierOptions&) override {
    const c10::Device here(kType, static_cast<c10::DeviceIndex>(current_device()));
    Tensors one{at::zeros({1}, at::TensorOptions().device(here))};
    return each(OpType::BARRIER, one, one, [this](Tensor into, Tensor given) {
      return [this, into, given](int device) { return reduce_all(device, into, given, c10d::ReduceOp::SUM); };
    });
  }

 private:
  using Body = std::function<bool(int device)>;

  // --- tensors of the processor on the same memory -----------------------------------------------------------------

  // The stream of a collective uses them: who gives one away before its end may not have its memory poisoned.
  Tensor flat(const Tensor& tensor, int lane = 0) const {
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "standin: tensors of a collective must be dense");
    record_use(tensor.storage().data_ptr(), c10::Stream(c10::Stream::UNSAFE, tensor.device(), stream_of(lane)));
    return twin(tensor);
  }
  Tensors twins(const Tensors& tensors) const {
    Tensors all;
    for (const auto& each : tensors) all.push_back(flat(each));
    return all;
  }
  Tensors parts(const Tensor& twin) const {
    c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    const int64_t size = getSize(), count = twin.numel() / size;
    Tensors all;
    for (int64_t index = 0; index < size; index++)
      all.push_back(twin.as_strided({count}, {1}, twin.storage_offset() + index * count));
    return all;
  }
  Tensors rows(const Tensor& tensor, const std::vector<int64_t>& splits) const {
    const Tensor whole = flat(tensor);
    if (splits.empty()) return parts(whole);
    c10::impl::ExcludeDispatchKeyGuard below(kAbove);
    const int64_t row = whole.size(0) == 0 ? 0 : whole.numel() / whole.size(0);
    Tensors all;
    int64_t at = whole.storage_offset();
    for (const int64_t count : splits) {
      all.push_back(whole.as_strided({count * row}, {1}, at));
      at += count * row;
    }
    return all;
  }

  // --- what one collective does, on its stream ---------------------------------------------------------------------

  void out(std::vector<Move>& moves, int lane, int peer, const Tensor& at, OpType type) {
    if (peer == getRank() && lane == 0) return;
    add(moves, true, lane, peer, static_cast<char*>(at.data_ptr()), static_cast<uint64_t>(at.nbytes()), type);
  }
  void in(std::vector<Move>& moves, int lane, int peer, const Tensor& at, OpType type) {
    if (peer == getRank() && lane == 0) return;
    add(moves, false, lane, peer, static_cast<char*>(at.data_ptr()), static_cast<uint64_t>(at.nbytes()), type);
  }
  void add(std::vector<Move>& moves, bool outward, int lane, int peer, char* at, uint64_t bytes, OpType type) {
    std::lock_guard<std::mutex> held(shared_->mutex);
    const Head head{static_cast<uint32_t>(type), static_cast<uint32_t>(getRank()), bytes};
    moves.push_back({shared_->sockets.at({lane, peer}), outward, at, bytes, head});
  }
  bool gather_all(int device, Tensors into, const Tensor& given) {
    std::vector<Move> moves;
    for (int peer = 0; peer < getSize(); peer++) {
      out(moves, 0, peer, given, OpType::ALLGATHER);
      in(moves, 0, peer, into[static_cast<size_t>(peer)], OpType::ALLGATHER);
    }
    Tensor mine = into[static_cast<size_t>(getRank())];
    if (mine.data_ptr() != given.data_ptr()) mine.view(-1).copy_(given.reshape(-1));
    return exchange(*shared_, device, moves);
  }
  bool swap(int device, Tensors into, const Tensors& given) {
    std::vector<Move> moves;
    for (int peer = 0; peer < getSize(); peer++) {
      out(moves, 0, peer, given[static_cast<size_t>(peer)], OpType::ALLTOALL);
      in(moves, 0, peer, into[static_cast<size_t>(peer)], OpType::ALLTOALL);
    }
    into[static_cast<size_t>(getRank())].copy_(given[static_cast<size_t>(getRank())]);
    return exchange(*shared_, device, moves);
  }
  bool reduce_all(int device, Tensor into, const Tensor& given, const c10d::ReduceOp& op) {
    Tensors heard;
    for (int peer = 0; peer < getSize(); peer++) heard.push_back(peer == getRank() ? given.clone() : at::empty_like(given));
    std::vector<Move> moves;
    for (int peer = 0; peer < getSize(); peer++) {
      out(moves, 0, peer, given, OpType::ALLREDUCE);
      in(moves, 0, peer, heard[static_cast<size_t>(peer)], OpType::ALLREDUCE);
    }
    return exchange(*shared_, device, moves) && (into.copy_(sum(heard, op)), true);
  }
  bool reduce_parts(int device, Tensor into, const Tensors& given, const c10d::ReduceOp& op) {
    const Tensor& mine = given[static_cast<size_t>(getRank())];
    Tensors heard;
    for (int peer = 0; peer < getSize(); peer++) heard.push_back(peer == getRank() ? mine.clone() : at::empty_like(mine));
    std::vector<Move> moves;
    for (int peer = 0; peer < getSize(); peer++) {
      out(moves, 0, peer, given[static_cast<size_t>(peer)], OpType::REDUCE_SCATTER);
      in(moves, 0, peer, heard[static_cast<size_t>(peer)], OpType::REDUCE_SCATTER);
    }
    return exchange(*shared_, device, moves) && (into.view(-1).copy_(sum(heard, op).reshape(-1)), true);
  }
  static Tensor sum(Tensors& heard, const c10d::ReduceOp& op) {
    Tensor all = heard[0];
    for (size_t index = 1; index < heard.size(); index++) {
      switch (op) {
        case c10d::ReduceOp::MIN: all = at::minimum(all, heard[index]); break;
        case c10d::ReduceOp::MAX: all = at::maximum(all, heard[index]); break;
        case c10d::ReduceOp::PRODUCT: all.mul_(heard[index]); break;
        default: all.add_(heard[index]);
      }
    }
    if (op == c10d::ReduceOp::AVG) all.div_(static_cast<double>(heard.size()));
    return all;
  }

  // --- from the host to the stream ---------------------------------------------------------------------------------

  template <class Make>
  WorkRef each(OpType type, const Tensors& outputs, const Tensors& inputs, Make make) {
    std::vector<Body> all;
    for (size_t index = 0; index < outputs.size(); index++) all.push_back(make(flat(outputs[index]), flat(inputs[index])));
    return many(type, outputs, inputs[0], outputs, [all](int device) {
      for (const auto& body : all)
        if (!body(device)) return false;
      return true;
    });
  }
  WorkRef many(OpType type, const Tensors&, const Tensor& first, const Tensors& outputs, Body body) {
    for (int peer = 0; peer < getSize(); peer++)
      if (peer != getRank()) connect(0, peer);
    return run(type, first.get_device(), outputs, 0, std::move(body));
  }
  WorkRef run(OpType type, int device, const Tensors& outputs, int lane, Body body) {
    TORCH_CHECK_WITH(DistBackendError, !shared_->aborted, "standin: the communicator was aborted");
    c10::DeviceGuard at(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
    ++calls_;
    Fault struck = kNone;
    strikes({kHang, kError}, &struck);
    if (struck == kError) shared_->error = static_cast<int>(c10d::ErrorType::REMOTE_ERROR);
    Queue& own = queue(device, stream_of(lane));
    own.wait_for(current_queue(device).mark());
    own.launch([shared = shared_, body = std::move(body), device, struck] {
      c10::impl::ExcludeDispatchKeyGuard below(kAbove);
      if (shared->aborted) return;
      if (struck != kNone || !body(device)) shared->spin(device);
    });
    return work_of(type, device, outputs, lane, type == OpType::BARRIER);
  }
  WorkRef work_of(OpType type, int device, const Tensors& outputs, int lane, bool holds_host) {
    auto work = c10::make_intrusive<Done>(getRank(), type, device, outputs, shared_, holds_host);
    work->mark = queue(device, stream_of(lane)).mark();
    const c10::Device here(kType, static_cast<c10::DeviceIndex>(device));
    c10::StreamGuard at(c10::Stream(c10::Stream::UNSAFE, here, stream_of(lane)));
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                            std::vector<c10::Device>{here});
    work->future->markCompleted(c10::IValue(outputs));
    if (together_) together_->push_back(work);
    return work;
  }
  int64_t stream_of(int lane) const { return kFirstStream * (1 + id_) + lane; }
  // Sends between two ranks, one way, have a connection of their own, as all collectives of a group together have.
  int lane_to(int from, int to) const { return 1 + from * getSize() + to; }

  // --- connecting --------------------------------------------------------------------------------------------------

  // Returns when there is a connection, as NCCL's init: with a rank that never comes, not before the abort.
  void connect(int lane, int peer) {
    {
      std::lock_guard<std::mutex> held(shared_->mutex);
      if (shared_->sockets.count({lane, peer}) != 0) return;
    }
    TORCH_CHECK(peer != getRank(), "standin: a rank cannot send to itself");
    Fault struck = kNone;
    if (strikes({kHoldConnect, kDieInConnect}, &struck)) {
      if (struck == kDieInConnect) ::kill(::getpid(), SIGKILL);
      shared_->spin(current_device());
    }
    listen();
    if (peer < getRank())
      call(lane, peer);
    else
      await(lane, peer);
  }
  void listen() {
    if (shared_->listening >= 0) return;
    const std::string name = "standin/" + std::to_string(::getpid()) + "/" + std::to_string(id_) + "/" +
                             std::to_string(std::chrono::steady_clock::now().time_since_epoch().count());
    socklen_t length = 0;
    const sockaddr_un here = address_of(name, &length);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool good = socket >= 0 && ::bind(socket, reinterpret_cast<const sockaddr*>(&here), length) == 0 &&
                      ::listen(socket, 64) == 0;
    TORCH_CHECK_WITH(DistBackendError, good, "standin: cannot listen: ", std::strerror(errno));
    {
      std::lock_guard<std::mutex> held(shared_->mutex);
      shared_->listening = socket;
    }
    std::thread([shared = shared_, socket] { accept_all(shared, socket); }).detach();
    store_->set("standin/" + std::to_string(getRank()), std::vector<uint8_t>(name.begin(), name.end()));
  }
  static void accept_all(const SharedRef& shared, int listening) {
    while (!shared->aborted) {
      pollfd waited{listening, POLLIN, 0};
      if (::poll(&waited, 1, kLookMs) <= 0) continue;
      const int socket = ::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0) continue;
      int32_t said[2] = {};
      if (::recv(socket, said, sizeof(said), MSG_WAITALL) != static_cast<ssize_t>(sizeof(said))) {
        ::close(socket);
        continue;
      }
      std::lock_guard<std::mutex> held(shared->mutex);
      shared->sockets[{said[0], said[1]}] = socket;
      shared->changed.notify_all();
    }
  }
  void call(int lane, int peer) {
    const std::string key = "standin/" + std::to_string(peer);
    while (!store_->check({key})) rest();
    socklen_t length = 0;
    const sockaddr_un there = address_of(bytes_of(store_->get(key)), &length);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (::connect(socket, reinterpret_cast<const sockaddr*>(&there), length) != 0) rest();  // it may have gone
    const int32_t said[2] = {lane, getRank()};
    ::send(socket, said, sizeof(said), MSG_NOSIGNAL);
    std::lock_guard<std::mutex> held(shared_->mutex);
    shared_->sockets[{lane, peer}] = socket;
  }
  void await(int lane, int peer) {
    std::unique_lock<std::mutex> held(shared_->mutex);
    while (shared_->sockets.count({lane, peer}) == 0 && !shared_->aborted)
      shared_->changed.wait_for(held, std::chrono::milliseconds(kLookMs));
    TORCH_CHECK_WITH(DistBackendError, !shared_->aborted, "standin: the communicator was aborted");
  }
  void rest() {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    TORCH_CHECK_WITH(DistBackendError, !shared_->aborted, "standin: the communicator was aborted");
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Settings> settings_;
  const int64_t id_;
  const SharedRef shared_ = std::make_shared<Shared>();
  std::atomic<uint64_t> calls_{0};
  std::unique_ptr<std::vector<WorkRef>> together_;
};

}  // namespace
}  // namespace standin

extern "C" {
// Once, at a call of a collective after so many of this process: it never begins (1), or its communicator has an error
// too (2); at a connection: it is never made (3), or the process is killed (4).
void standin_spoil(int64_t kind, int64_t after) {
  standin::fault_after = after;
  standin::fault = static_cast<int>(kind);
}
}

namespace {
void abort_at(void* communicator) { static_cast<standin::Communicator*>(communicator)->abort(); }
}  // namespace

PYBIND11_MODULE(standin_groups, module) {
  using standin::Communicator;
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");  // has the class below it
  py::class_<Communicator, c10::intrusive_ptr<Communicator>, c10d::Backend>(module, "Communicator")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double seconds) {
        const std::chrono::milliseconds timeout(static_cast<int64_t>(seconds * 1000));
        return c10::make_intrusive<Communicator>(store, rank, size, timeout);
      }))
      .def("native_abort",
           [](Communicator& self) {
             return std::make_pair(reinterpret_cast<uintptr_t>(&abort_at), reinterpret_cast<uintptr_t>(&self));
           })
      .def("get_error", &Communicator::getError, py::call_guard<py::gil_scoped_release>());
}
