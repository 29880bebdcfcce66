// The executor thread: steps the head of every stream, runs the machine for a slice, turns what went wrong into a fault.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "node/node.hpp"

namespace mori_sim {
namespace {

constexpr uint64_t kSlice = 1 << 15;              // wave instructions between two looks at the streams
constexpr auto kPollPeriod = std::chrono::microseconds(100);
constexpr double kQuietBeforeYield_s = 0.0005;    // everything in flight only polls: let whoever it waits for run
constexpr uint64_t kQuietSlice = 512;
constexpr int kQuietSleep_us = 200, kLongestSleep_us = 2000;

thread_local bool t_is_executor = false;
struct sigaction g_previous_segv;

// A kernel touched lent memory that the process has unmapped in the meantime: say so before dying.
void on_segv(int number, siginfo_t* info, void* context) {
  if (t_is_executor) {
    char text[200];
    const int n = std::snprintf(text, sizeof text,
                                "mori-sim: a kernel touched %p, ordinary process memory that is no longer mapped; "
                                "keep the tensor alive, or synchronize before it is freed\n", info->si_addr);
    if (n > 0 && write(2, text, static_cast<size_t>(n)) < 0) _exit(kExitAfterFault);
    abort();
  }
  if (g_previous_segv.sa_flags & SA_SIGINFO) return g_previous_segv.sa_sigaction(number, info, context);
  if (g_previous_segv.sa_handler != SIG_DFL && g_previous_segv.sa_handler != SIG_IGN) return g_previous_segv.sa_handler(number);
  signal(SIGSEGV, SIG_DFL);
}

// A kernel's fault names an access of N bytes at an address: the node knows what lies there, or next to it.
std::string with_place(const std::string& fault, AddressSpace& memory) {
  const size_t where = fault.find(" bytes at 0x"), who = fault.find(", device ");
  if (where == std::string::npos || who == std::string::npos) return fault;
  const size_t number = fault.rfind(' ', where - 1) + 1;
  const uint64_t nbytes = std::strtoull(fault.c_str() + number, nullptr, 10);
  const uint64_t address = std::strtoull(fault.c_str() + where + 10, nullptr, 16);
  const int device = std::atoi(fault.c_str() + who + 9);
  if (device < 0 || device >= kMaxDevices) return fault;
  return fault + "\n  " + memory.describe_access(device, address, nbytes);
}

}  // namespace

void Node::start_executor() {
  if (started_) return;
  started_ = true;
  struct sigaction action{};
  action.sa_sigaction = on_segv;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &g_previous_segv);
  executor_ = std::thread([this] {
    t_is_executor = true;
    pthread_setname_np(pthread_self(), "mori-sim exec");
    execute();
  });
}

void Node::execute() {
  while (true) {
    const bool moved = advance_streams();
    bool in_flight;
    {
      std::lock_guard lock(machine_mutex_);
      in_flight = !machine_->idle();
      if (in_flight) run_machine();
    }
    if (in_flight) pace();
    std::unique_lock lock(queue_mutex_);
    if (stopping_) return;
    if (in_flight || moved) continue;
    const auto has_work = [&] {
      return stopping_ || std::any_of(streams_.begin(), streams_.end(), [](const auto& s) { return !s->queue.empty(); });
    };
    if (has_work()) work_.wait_for(lock, kPollPeriod);  // what is queued waits for memory or for other streams
    else work_.wait(lock, has_work);
  }
}

// Steps the head of every stream once. References into a deque survive push_back, so steps run without the lock.
bool Node::advance_streams() {
  std::vector<Stream*> ready;
  {
    std::lock_guard lock(queue_mutex_);
    for (const auto& stream : streams_)
      if (!stream->queue.empty() && stream->queue.front().ready()) ready.push_back(stream.get());
  }
  bool moved = false;
  for (Stream* stream : ready) {
    Operation& operation = stream->queue.front();
    bool ended = false;
    try {
      ended = operation.step(operation);
    } catch (const std::exception& error) {
      fail(kLaunchFailure, operation.what + ": " + error.what());
      return false;
    }
    if (!ended) continue;
    moved = true;
    std::lock_guard lock(queue_mutex_);
    operation.done->when = std::chrono::steady_clock::now();
    operation.done->reached = true;
    stream->queue.pop_front();
    done_.notify_all();
  }
  return moved;
}

void Node::run_machine() {
  const bool quiet = machine_->quiet_seconds() > kQuietBeforeYield_s;
  const Machine::State state = machine_->run(settings.delayed() ? settings.machine.slice : quiet ? kQuietSlice : kSlice);
  collect_reports();
  if (state == Machine::State::fault) {
    const std::string text = with_place(machine_->fault(), memory);
    machine_->clear_fault();
    fail(text.find(" bytes at 0x") != std::string::npos ? kIllegalAddress : kLaunchFailure, text);
  } else if (machine_->quiet_seconds() > settings.watchdog_s) {
    const std::string text = "stuck (MORI_SIM_WATCHDOG_S): " + machine_->watchdog_report();
    machine_->clear_fault();
    fail(kLaunchTimeOut, text);
  }
}

void Node::collect_reports() {
  const auto& reports = machine_->reports();
  for (; num_reports_ < reports.size(); ++num_reports_) {
    const Report& r = reports[num_reports_];
    std::fprintf(stderr, "mori-sim: %s\n", r.text.c_str());
    report.write("coherence", {{"rule", ReportFile::quoted(r.rule)}, {"text", ReportFile::quoted(r.text)},
                               {"device", std::to_string(r.device)}, {"kernel", ReportFile::quoted(r.kernel)},
                               {"pc", std::to_string(r.pc)}, {"address", std::to_string(r.addr)}});
  }
}

void Node::pace() {
  double quiet_s;
  {
    std::lock_guard lock(machine_mutex_);
    quiet_s = machine_->quiet_seconds();
  }
  if (settings.delayed()) usleep(1000);
  else if (quiet_s > kQuietBeforeYield_s)  // ever longer, and never by more than an eighth of the wait so far
    usleep(std::clamp(static_cast<int>(quiet_s * 1e6 / 8), kQuietSleep_us, kLongestSleep_us));
  else if (settings.machine.order == Options::Order::random) {
    random_state_ = random_state_ * 6364136223846793005ull + 1442695040888963407ull;
    if ((random_state_ >> 60) == 0) usleep(static_cast<useconds_t>(random_state_ >> 33 & 0xff));
  }
}

}  // namespace mori_sim
