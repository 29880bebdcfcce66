#include "node/node.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "node/copy_engines.hpp"
#include "node/device.hpp"

namespace mori_sim {
namespace {

constexpr uint64_t kSlice = 1 << 15;              // wave instructions between two looks at the streams
constexpr auto kPollPeriod = std::chrono::microseconds(100);
constexpr double kQuietBeforeYield_s = 0.0005;    // everything in flight only polls: let whoever it waits for run
constexpr uint64_t kQuietSlice = 512;
constexpr int kQuietSleep_us = 200;
constexpr int kExitAfterFault = 70;
constexpr size_t kArgumentSlab = 1 << 20, kSmallestArguments = 512;

thread_local int t_current_ordinal = 0;
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

// NAME-HASH.hsaco, so that versions of one kernel lie side by side and the same one is written once.
void save_code(const std::string& folder, const std::string& kernel, const uint8_t* bytes, size_t nbytes) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t i = 0; i < nbytes; ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  char name[32];
  std::snprintf(name, sizeof name, "-%08x.hsaco", static_cast<unsigned>(hash ^ hash >> 32));
  const std::string path = folder + "/" + kernel + name, unfinished = path + "." + std::to_string(getpid());
  std::FILE* file = std::fopen(unfinished.c_str(), "we");
  if (file == nullptr || std::fwrite(bytes, 1, nbytes, file) != nbytes) std::fprintf(stderr, "mori-sim: cannot write %s\n", unfinished.c_str());
  if (file != nullptr) std::fclose(file);
  std::rename(unfinished.c_str(), path.c_str());
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
  copy_engines_ = std::make_unique<CopyEngines>(*this);
  pthread_atfork(nullptr, nullptr, &Node::forked);
  std::atexit([] { instance().stop_at_exit(); });
}

void Node::forked() { instance().forked_ = true; }

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

// ---------------------------------------------------------------------------------------------- modules
Module* Node::load_module(const void* image, size_t nbytes) {
  check_alive();
  auto module = std::make_unique<Module>();
  const auto* bytes = static_cast<const uint8_t*>(image);
  try {
    if (nbytes == 0) nbytes = CodeObject::file_nbytes(image);
    module->object = CodeObject::parse({bytes, bytes + nbytes});
  } catch (const std::runtime_error& error) {
    throw ApiError(kInvalidImage, error.what());
  }
  const CodeObject& object = module->object;
  if (!settings.save_code.empty() && !object.kernels.empty()) save_code(settings.save_code, object.kernels[0].name, bytes, nbytes);
  module->address = memory.allocate(object.image_nbytes(), current_device(), false, RangeKind::code);
  auto* placed = reinterpret_cast<uint8_t*>(module->address);
  object.place(placed, module->address);
  module->code = std::make_shared<Code>(module->address + object.text_offset, placed + object.text_offset, object.text_nbytes);
  for (const auto& info : object.kernels) {
    module->code->add_symbol(module->address + info.entry_offset, info.name);
    module->kernels[info.name] = std::make_unique<Kernel>(Kernel{module.get(), info});
  }
  for (const auto& [offset, line] : object.lines()) module->code->add_line(module->address + offset, line);
  modules_.insert(module.get());
  return module.release();
}

void Node::unload_module(Module* module) {
  if (modules_.erase(module) == 0) throw ApiError(kInvalidHandle, "not a loaded module");
  if (!stopping_ && sticky_ == 0)
    for (int ordinal = 0; ordinal < num_visible(); ++ordinal) synchronize_device(physical(ordinal));
  memory.release(module->address);
  delete module;
}

Kernel* Node::find_kernel(Module* module, const std::string& name) {
  if (modules_.count(module) == 0) throw ApiError(kInvalidHandle, "not a loaded module");
  const auto found = module->kernels.find(name);
  if (found == module->kernels.end()) throw ApiError(kNotFound, "no kernel " + name + " in this module");
  return found->second.get();
}

// ---------------------------------------------------------------------------------------------- streams
Stream* Node::null_stream(int device) {
  std::lock_guard lock(queue_mutex_);
  Stream*& stream = null_streams_[device];
  if (stream == nullptr) {
    streams_.push_back(std::make_unique<Stream>());
    stream = streams_.back().get();
    stream->device = device;
    stream->is_null = true;
  }
  return stream;
}

Stream* Node::create_stream(int device, bool with_null) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  streams_.push_back(std::make_unique<Stream>());
  Stream* stream = streams_.back().get();
  stream->device = device;
  stream->with_null = with_null;
  live_streams_.insert(stream);
  return stream;
}

Stream* Node::known(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return null_stream(current_device());  // null, legacy, per-thread
  std::lock_guard lock(queue_mutex_);
  if (live_streams_.count(handle) == 0) throw ApiError(kInvalidHandle, "not a stream of this process");
  return static_cast<Stream*>(handle);
}

void Node::destroy_stream(Stream* stream) {
  synchronize(stream);
  std::lock_guard lock(queue_mutex_);
  live_streams_.erase(stream);
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), [&](const auto& s) { return s.get() == stream; }), streams_.end());
}

void Node::synchronize_mark(const MarkPtr& mark) {
  if (mark != nullptr) {
    std::unique_lock lock(queue_mutex_);
    done_.wait(lock, [&] { return mark->reached || sticky_ != 0 || stopping_; });
  }
  if (settings.machine.strict && newest_finished_ != 0) {
    std::lock_guard lock(machine_mutex_);
    machine_->agent_joined("host", newest_finished_);
  }
  check_alive();
}

void Node::synchronize(Stream* stream) {
  check_alive();
  MarkPtr last;
  {
    std::lock_guard lock(queue_mutex_);
    if (stream->capturing) throw ApiError(kStreamCaptureUnsupported, "a stream cannot be synchronized while it is captured");
    last = stream->last;
  }
  synchronize_mark(last);
}

void Node::synchronize_device(int device) {
  check_alive();
  std::vector<MarkPtr> marks;
  {
    std::lock_guard lock(queue_mutex_);
    for (const auto& stream : streams_)
      if (stream->device == device && stream->last) marks.push_back(stream->last);
  }
  for (const auto& mark : marks) synchronize_mark(mark);
}

bool Node::finished(Stream* stream) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  return !stream->last || stream->last->reached;
}

bool Node::anything_pending() {
  std::lock_guard lock(queue_mutex_);
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& s) { return !s->queue.empty(); });
}

void Node::enqueue(Stream* stream, std::string what, std::function<std::function<bool(Operation&)>()> make_step) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  if (stream->capturing) {
    stream->capturing->nodes.push_back({std::move(what), std::move(make_step), stream->captured_last});
    stream->captured_last = {stream->capturing->nodes.size() - 1};
    return;
  }
  Operation operation;
  operation.what = std::move(what);
  operation.step = make_step();
  operation.after.swap(stream->extra);
  for (const auto& other : streams_)
    if (other->device == stream->device && other.get() != stream && other->last && !other->last->reached &&
        ((stream->is_null && other->with_null) || (stream->with_null && other->is_null)))
      operation.after.push_back(other->last);
  stream->last = operation.done;
  stream->queue.push_back(std::move(operation));
  start_executor();
  work_.notify_one();
}

// ---------------------------------------------------------------------------------------------- the executor thread
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
    if (operation.done->dispatch != 0) newest_finished_ = std::max<DispatchId>(newest_finished_, operation.done->dispatch);
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
  else if (quiet_s > kQuietBeforeYield_s) usleep(kQuietSleep_us);
  else if (settings.machine.order == Options::Order::random) {
    random_state_ = random_state_ * 6364136223846793005ull + 1442695040888963407ull;
    if ((random_state_ >> 60) == 0) usleep(static_cast<useconds_t>(random_state_ >> 33 & 0xff));
  }
}

// ---------------------------------------------------------------------------------------------- operations
uint64_t Node::acquire_arguments(size_t nbytes) {
  auto& free = free_arguments_[nbytes];
  if (free.empty()) {
    const uint64_t slab = memory.allocate(std::max(kArgumentSlab, nbytes), kHostMemory, true, RangeKind::host);
    for (uint64_t at = 0; at + nbytes <= std::max(kArgumentSlab, nbytes); at += nbytes) free.push_back(slab + at);
  }
  const uint64_t address = free.back();
  free.pop_back();
  return address;
}
void Node::release_arguments(uint64_t address, size_t nbytes) { free_arguments_[nbytes].push_back(address); }

// What hidden_queue_ptr and the queue pointer SGPRs show: a queue's page with the two aperture words set.
uint64_t Node::queue_page() {
  if (queue_page_ == 0) {
    queue_page_ = memory.allocate(4096, kHostMemory, true, RangeKind::host);
    const uint32_t apertures[2] = {0x10000, 0x20000};
    std::memcpy(reinterpret_cast<uint8_t*>(queue_page_) + 0x40, apertures, sizeof apertures);
  }
  return queue_page_;
}

bool Node::uses_lent_memory(const KernelInfo& kernel, const std::vector<uint8_t>& kernarg) {
  if (!settings.lend_host_memory) return false;
  for (const auto& argument : kernel.arguments) {
    if (argument.hidden() || argument.nbytes != 8) continue;
    uint64_t value;
    std::memcpy(&value, kernarg.data() + argument.offset, sizeof value);
    if (value != 0 && memory.lent(value)) return true;
  }
  return false;
}

void Node::launch(Stream* stream, Kernel* kernel, const LaunchShape& shape, void* const* parameters, const void* packed,
                  size_t packed_nbytes) {
  const KernelInfo& info = kernel->info;
  const uint64_t items = uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
  const uint64_t lds = uint64_t{std::max(info.lds_nbytes, info.descriptor.lds_nbytes)} + shape.dynamic_lds_nbytes;
  const bool empty = shape.grid[0] == 0 || shape.grid[1] == 0 || shape.grid[2] == 0;
  if (empty || items == 0 || items > std::min<uint64_t>(info.max_workgroup_size, mi355x::kMaxWorkgroup))
    throw ApiError(kInvalidConfiguration, info.name + ": " + std::to_string(items) + " work items in a workgroup (at most " +
                   std::to_string(info.max_workgroup_size) + "), grid " + std::to_string(shape.grid[0]) + "x" +
                   std::to_string(shape.grid[1]) + "x" + std::to_string(shape.grid[2]));
  if (lds > mi355x::kLdsBytes) throw ApiError(kInvalidValue, info.name + ": " + std::to_string(lds) + " bytes of LDS, a CU has " + std::to_string(mi355x::kLdsBytes));
  memory.host_mappings_may_have_changed();
  const uint64_t queue = queue_page();
  std::vector<uint8_t> kernarg = packed != nullptr ? build_kernarg(info, shape, packed, packed_nbytes, queue)
                                                   : build_kernarg(info, shape, parameters, queue);
  const bool blocking = stream->is_null && !stream->capturing && uses_lent_memory(info, kernarg);
  const int device = stream->device;
  auto start = [this, kernel, shape, lds, kernarg, device, queue](Operation& operation) {
    const KernelInfo& info = kernel->info;
    size_t block = kSmallestArguments;
    while (block < kernarg.size() + 64) block *= 2;
    const uint64_t arguments = acquire_arguments(block);
    std::memcpy(reinterpret_cast<void*>(arguments), kernarg.data(), kernarg.size());

    Dispatch d;
    d.code = kernel->module->code;
    d.name = info.name;
    d.entry = kernel->module->address + info.entry_offset;
    d.device = device;
    d.rank = settings.rank >= 0 ? settings.rank : device;
    for (int i = 0; i < 3; ++i) d.num_workgroups[i] = shape.grid[i], d.block[i] = shape.block[i];
    d.lds_bytes = static_cast<uint32_t>(lds);
    d.scratch_bytes = std::max(info.scratch_nbytes, info.descriptor.scratch_nbytes);
    d.rsrc1 = info.descriptor.rsrc1;
    d.rsrc2 = info.descriptor.rsrc2;
    d.rsrc3 = info.descriptor.rsrc3;
    d.properties = info.descriptor.properties;
    d.preload = info.descriptor.preload;
    d.kernarg = arguments;
    d.queue = queue;
    d.dispatch_id = ++next_dispatch_;

    // An AQL dispatch packet, for kernels that ask for its address.
    uint8_t packet[64] = {};
    const auto put = [&packet](size_t at, auto value) { std::memcpy(packet + at, &value, sizeof value); };
    const uint16_t dimensions = shape.grid[2] * shape.block[2] > 1 ? 3 : shape.grid[1] * shape.block[1] > 1 ? 2 : 1;
    put(0, uint16_t{2});
    put(2, dimensions);
    for (int i = 0; i < 3; ++i) {
      put(4 + 2 * i, static_cast<uint16_t>(shape.block[i]));
      put(12 + 4 * i, shape.grid[i] * shape.block[i]);
    }
    put(24, d.scratch_bytes);
    put(28, d.lds_bytes);
    put(32, kernel->module->address + info.descriptor_offset);
    put(40, arguments);
    d.dispatch_packet = arguments + block - 64;
    std::memcpy(reinterpret_cast<void*>(d.dispatch_packet), packet, sizeof packet);

    std::lock_guard lock(machine_mutex_);
    operation.done->dispatch = machine_->submit(std::move(d));
    return std::make_pair(arguments, block);
  };
  enqueue(stream, "kernel " + info.name, [this, start] {
    return [this, start, arguments = std::pair<uint64_t, size_t>()](Operation& operation) mutable {
      if (arguments.first == 0) {
        arguments = start(operation);
        return false;
      }
      {
        std::lock_guard lock(machine_mutex_);
        if (!machine_->done(operation.done->dispatch)) return false;
      }
      release_arguments(arguments.first, arguments.second);
      return true;
    };
  });
  // Nothing else orders the program's next look at an ordinary tensor, so on the null stream the launch itself does.
  if (blocking) synchronize(stream);
}

void Node::check_reachable(int device, uint64_t address, uint64_t nbytes, uint8_t rights, const char* what) {
  Range range;
  const bool tracked = memory.find(address, &range) || memory.reserved(address);
  if (!tracked) {  // an ordinary host pointer: only a run into tracked memory could be noticed
    if (address == 0) throw ApiError(kInvalidValue, std::string(what) + ": null pointer");
    return;
  }
  if (address + nbytes > range.end || range.end == 0) {
    if (!memory.covers(device, address, nbytes, rights))
      throw ApiError(kInvalidValue, std::string(what) + " of " + std::to_string(nbytes) + " bytes: " + memory.describe(std::max(address, range.end)));
  }
}

void Node::copy(Stream* stream, uint64_t to, uint64_t from, uint64_t nbytes) {
  if (nbytes == 0) return;
  check_reachable(stream->device, to, nbytes, 2, "copy to");
  check_reachable(stream->device, from, nbytes, 1, "copy from");
  const int device = stream->device;
  enqueue(stream, "copy", [=] {
    return [=](Operation&) {
      reads("host", device, from, nbytes, "hipMemcpy");
      std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes);
      writes("host", device, to, nbytes, "hipMemcpy");
      return true;
    };
  });
}

void Node::fill(Stream* stream, uint64_t to, uint64_t value, unsigned width, uint64_t count) {
  if (count == 0) return;
  check_reachable(stream->device, to, count * width, 2, "fill of");
  const int device = stream->device;
  enqueue(stream, "fill", [=] {
    return [=](Operation&) {
      auto* out = reinterpret_cast<uint8_t*>(to);
      if (width == 1) std::memset(out, static_cast<int>(value), count);
      else for (uint64_t i = 0; i < count; ++i) std::memcpy(out + i * width, &value, width);
      writes("host", device, to, count * width, "hipMemset");
      return true;
    };
  });
}

void Node::write_value(Stream* stream, uint64_t to, uint64_t value, unsigned width) {
  check_reachable(stream->device, to, width, 2, "hipStreamWriteValue to");
  if (to % width) throw ApiError(kInvalidValue, "hipStreamWriteValue: the address is not aligned");
  const int device = stream->device;
  enqueue(stream, "write value", [=] {
    return [=](Operation&) {
      if (width == 4) __atomic_store_n(reinterpret_cast<uint32_t*>(to), static_cast<uint32_t>(value), __ATOMIC_RELEASE);
      else __atomic_store_n(reinterpret_cast<uint64_t*>(to), value, __ATOMIC_RELEASE);
      writes("host", device, to, width, "hipStreamWriteValue");
      return true;
    };
  });
}

void Node::wait_value(Stream* stream, uint64_t at, uint64_t value, unsigned width, unsigned compare, uint64_t mask) {
  check_reachable(stream->device, at, width, 1, "hipStreamWaitValue on");
  if (at % width || compare > 3) throw ApiError(kInvalidValue, "hipStreamWaitValue: unaligned address or unknown comparison");
  const int device = stream->device;
  if (width == 4) mask &= 0xffffffffu, value &= 0xffffffffu;
  enqueue(stream, "wait value", [=] {
    return [=](Operation&) {
      const uint64_t seen = mask & (width == 4 ? __atomic_load_n(reinterpret_cast<uint32_t*>(at), __ATOMIC_ACQUIRE)
                                               : __atomic_load_n(reinterpret_cast<uint64_t*>(at), __ATOMIC_ACQUIRE));
      const bool met = compare == 0   ? (width == 4 ? static_cast<int32_t>(seen - value) >= 0 : static_cast<int64_t>(seen - value) >= 0)
                       : compare == 1 ? seen == value
                       : compare == 2 ? (seen & value) != 0
                                      : ~(seen | value) != 0;
      if (met) observed("host", device, at, width);
      return met;
    };
  });
}

void Node::host_call(Stream* stream, std::function<void()> call) {
  enqueue(stream, "host function", [=] { return [=](Operation&) { call(); return true; }; });
}

void Node::record(Event* event, Stream* stream) {
  check_alive();
  {
    std::lock_guard lock(queue_mutex_);
    if (stream->capturing) {
      event->capturing = stream->capturing.get();
      event->has_node = !stream->captured_last.empty();
      if (event->has_node) event->node = stream->captured_last.back();
      return;
    }
  }
  event->capturing = nullptr;
  enqueue(stream, "event", [] { return [](Operation&) { return true; }; });
  std::lock_guard lock(queue_mutex_);
  event->recorded = stream->last;
}

void Node::wait_event(Stream* stream, Event* event) {
  check_alive();
  std::unique_lock lock(queue_mutex_);
  if (event->capturing != nullptr) {  // joins the capture the event was recorded in
    if (!stream->capturing) {
      for (const auto& other : streams_)
        if (other->capturing.get() == event->capturing) stream->capturing = other->capturing;
      if (!stream->capturing) throw ApiError(kStreamCaptureUnmatched, "the event belongs to a capture that has ended");
    }
    if (event->has_node) stream->captured_last.push_back(event->node);
    return;
  }
  const MarkPtr mark = event->recorded;
  lock.unlock();
  if (mark == nullptr || mark->reached) return;
  {
    std::lock_guard again(queue_mutex_);
    stream->extra.push_back(mark);
  }
  enqueue(stream, "wait for an event", [] { return [](Operation&) { return true; }; });
}

// ---------------------------------------------------------------------------------------------- graphs
void Node::begin_capture(Stream* stream) {
  check_alive();
  std::lock_guard lock(queue_mutex_);
  if (stream->is_null || stream->capturing) throw ApiError(kStreamCaptureUnsupported, "the null stream, or a stream in capture, cannot be captured");
  stream->capturing = std::make_shared<Graph>();
  stream->captured_last.clear();
}

std::shared_ptr<Graph> Node::end_capture(Stream* stream) {
  std::lock_guard lock(queue_mutex_);
  if (!stream->capturing) throw ApiError(kStreamCaptureUnmatched, "the stream is not being captured");
  const std::shared_ptr<Graph> graph = stream->capturing;
  for (const auto& other : streams_)
    if (other->capturing == graph) {
      other->capturing.reset();
      other->captured_last.clear();
    }
  return graph;
}

// One operation that steps the graph's nodes in dependency order; nodes without an order between them run together.
void Node::launch_graph(Stream* stream, const std::shared_ptr<Graph>& graph) {
  enqueue(stream, "graph", [graph] {
    struct Progress {
      std::vector<Operation> operations;
      std::vector<bool> ended;
    };
    auto progress = std::make_shared<Progress>();
    for (const auto& node : graph->nodes) {
      progress->operations.emplace_back();
      progress->operations.back().what = node.what;
      progress->operations.back().step = node.make_step();
    }
    progress->ended.resize(graph->nodes.size());
    return [graph, progress](Operation& whole) {
      bool all = true;
      for (size_t i = 0; i < graph->nodes.size(); ++i) {
        if (progress->ended[i]) continue;
        const auto& after = graph->nodes[i].after;
        const bool ready = std::all_of(after.begin(), after.end(), [&](size_t j) { return progress->ended[j]; });
        if (ready && progress->operations[i].step(progress->operations[i])) {
          progress->ended[i] = true;
          whole.done->dispatch = std::max(whole.done->dispatch, progress->operations[i].done->dispatch);
        } else {
          all = false;
        }
      }
      return all;
    };
  });
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
void Node::observed(const std::string& agent, int device, uint64_t address, uint64_t nbytes) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  if (newest_finished_ != 0) machine_->agent_joined("host", newest_finished_);  // who rang, if no wave did
  machine_->agent_observed(agent, device, address, nbytes);
}
void Node::reads(const std::string& agent, int device, uint64_t address, uint64_t nbytes, const std::string& what) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  if (agent == "host" && newest_finished_ != 0) machine_->agent_joined("host", newest_finished_);
  machine_->agent_reads(agent, device, address, nbytes, what);
  collect_reports();
}
void Node::writes(const std::string& agent, int device, uint64_t address, uint64_t nbytes, const std::string& what) {
  if (!settings.machine.strict) return;
  std::lock_guard lock(machine_mutex_);
  if (agent == "host" && newest_finished_ != 0) machine_->agent_joined("host", newest_finished_);
  machine_->agent_writes(agent, device, address, nbytes, what);
  collect_reports();
}

}  // namespace mori_sim
