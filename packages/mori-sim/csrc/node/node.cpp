#include "node/node.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "node/copy_engines.hpp"

namespace mori_sim {
namespace {

thread_local int t_current_ordinal = 0;

std::vector<int> visible_devices(int num_devices) {
  std::vector<int> devices;
  const char* list = std::getenv("HIP_VISIBLE_DEVICES");
  if (list == nullptr) list = std::getenv("ROCR_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int i = 0; i < num_devices; ++i) devices.push_back(i);
    return devices;
  }
  while (*list != 0) {
    char* end = nullptr;
    const long device = std::strtol(list, &end, 10);
    if (end == list || device < 0 || device >= num_devices) break;  // as HIP: what follows a bad entry is hidden
    devices.push_back(static_cast<int>(device));
    list = *end == ',' ? end + 1 : end;
  }
  return devices;
}

}  // namespace

int& last_error() {
  thread_local int code = kSuccess;
  return code;
}
std::map<uint64_t, uint64_t>& opened_ipc() {
  static auto* opened = new std::map<uint64_t, uint64_t>();
  return *opened;
}

// ---------------------------------------------------------------------------------------------- life
Node& Node::instance() {
  static Node* node = new Node();  // never destroyed: stubs are called until the very end of the process
  return *node;
}

Node::Node()
    : settings(read_settings()),
      memory(settings.lend_host_memory, settings.poison),
      report(settings.report_file),
      visible_(visible_devices(settings.num_devices)) {
  Options options = settings.machine;
  options.seed += settings.rank > 0 ? static_cast<uint64_t>(settings.rank) * 0x9e3779b97f4a7c15ull : 0;
  machine_ = std::make_unique<Machine>(memory, options);
  random_state_ = options.seed * 2 + 1;
  memory.on_gone = [this](uint64_t address, uint64_t nbytes) { forget(address, nbytes); };
  copy_engines_ = std::make_unique<CopyEngines>(*this);
  pthread_atfork(nullptr, nullptr, &Node::forked);
  std::atexit([] { instance().stop_at_exit(); });
}

void Node::forked() { instance().forked_ = true; }

void Node::stop_at_exit() {
  if (forked_) return;
  copy_engines_->stop();
  size_t unfinished = 0;
  {
    std::lock_guard lock(queue_mutex_);
    stopping_ = true;
    for (const auto& stream : streams_) unfinished += stream->queue.size();
    work_.notify_all();
  }
  if (executor_.joinable()) executor_.join();
  if (unfinished > 0)
    std::fprintf(stderr, "mori-sim: the process ended with %zu operations unfinished: synchronize before exit\n", unfinished);
  if (started_) report.write("counters", {{"kernels", counters_json()}, {"unfinished", std::to_string(unfinished)}});
  if (sticky_ != 0) {  // the program may have swallowed the error: it must not end in success
    std::fflush(nullptr);
    _exit(kExitAfterFault);
  }
}

// ---------------------------------------------------------------------------------------------- devices
int Node::physical(int ordinal) const {
  if (ordinal < 0 || ordinal >= num_visible())
    throw ApiError(kInvalidDevice, "device " + std::to_string(ordinal) + " of " + std::to_string(num_visible()) + ": start with mori-sim run --devices N");
  return visible_[ordinal];
}
int Node::ordinal(int physical) const {
  const auto found = std::find(visible_.begin(), visible_.end(), physical);
  return found == visible_.end() ? -1 : static_cast<int>(found - visible_.begin());
}
int Node::current_ordinal() const { return t_current_ordinal; }
void Node::set_current(int ordinal) {
  physical(ordinal);
  t_current_ordinal = ordinal;
}

// ---------------------------------------------------------------------------------------------- faults and figures
void Node::check_alive() const {
  if (forked_) throw ApiError(kNotInitialized, "this process was forked after the node was started: start children with spawn or forkserver");
  if (sticky_ != 0) throw ApiError(static_cast<HipCode>(sticky_.load()), "an earlier fault is final: " + fault_text_);
}

std::string Node::fault_text() const { return fault_text_; }

void Node::fail(HipCode code, const std::string& text) {
  std::string rank = settings.rank >= 0 ? " rank " + std::to_string(settings.rank) : "";
  std::fprintf(stderr, "\nmori-sim: fault in process %d%s:\n%s\n", getpid(), rank.c_str(), text.c_str());
  report.write("fault", {{"code", std::to_string(code)}, {"text", ReportFile::quoted(text)}});
  if (settings.abort_on_fault) {
    std::fflush(nullptr);
    abort();
  }
  fault_text_ = text;
  sticky_ = code;
  std::lock_guard lock(queue_mutex_);
  for (const auto& stream : streams_) {
    for (auto& operation : stream->queue) operation.done->reached = true;
    stream->queue.clear();
  }
  done_.notify_all();
}

std::string Node::counters_json() {
  std::lock_guard lock(machine_mutex_);
  return machine_->counters_json();
}
uint64_t Node::instructions() {
  std::lock_guard lock(machine_mutex_);
  return machine_->instructions();
}
size_t Node::num_reports() {
  std::lock_guard lock(machine_mutex_);
  return machine_->reports().size();
}

CopyEngines& Node::copy_engines() { return *copy_engines_; }

std::unique_lock<std::recursive_mutex> Node::hold_waves() {
  return settings.machine.strict ? std::unique_lock(machine_mutex_) : std::unique_lock<std::recursive_mutex>();
}
void Node::engine_pointer(uint64_t address) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  machine_->engine_pointer(address);
}
void Node::polled(const std::string& agent, int device, uint64_t address, uint64_t nbytes) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  machine_->agent_polled(agent, device, address, nbytes);
}
void Node::observed(const std::string& agent, int device, uint64_t address, uint64_t value) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  machine_->agent_observed(agent, device, address, value);
}
void Node::reads(const std::string& agent, int device, uint64_t address, uint64_t nbytes, const std::string& what) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  machine_->agent_reads(agent, device, address, nbytes, what);
  collect_reports();
}
void Node::writes(const std::string& agent, int device, uint64_t address, uint64_t nbytes, const std::string& what) {
  if (!settings.machine.strict) return;
  delay_record();
  std::lock_guard lock(machine_mutex_);
  machine_->agent_writes(agent, device, address, nbytes, what);
  collect_reports();
}
void Node::forget(uint64_t address, uint64_t nbytes) {
  if (!settings.machine.strict || forked_) return;
  std::lock_guard lock(machine_mutex_);
  machine_->memory_released(address, nbytes);
}
void Node::delay_record() const {
  if (settings.record_delay_us > 0) usleep(static_cast<useconds_t>(settings.record_delay_us));
}

}  // namespace mori_sim
