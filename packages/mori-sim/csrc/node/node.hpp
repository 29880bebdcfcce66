// One process's view of the node: devices, modules, streams, and the thread that executes what the streams hold.
//
// A launch: launch() checks it, takes what it needs of memory and queues an operation -> the executor thread finds it at
// the head of its stream with everything it waits for reached -> its step submits it to the machine -> the machine advances
// all kernels in flight together, slice by slice -> the step sees it ended -> its mark is reached and waiting host threads
// wake. What may not be there (memory, file descriptors) is thus missed in the call, whose error it is.
// Streams of one process run together in this way; ranks are processes and run together anyway.
//
// Locks: queue_mutex_ for streams and marks (short), machine_mutex_ for the machine (as long as one slice). The
// executor thread holds the second while it runs; copy engines take it only in strict mode, for the checker.
//
// A fault is final: it is printed, written to the report file, and then the process aborts (as on hardware), or, with
// MORI_SIM_ON_FAULT=error, every later call fails with the fault's code and the process cannot exit with success.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exec/machine.hpp"
#include "loader/code_object.hpp"
#include "loader/kernarg.hpp"
#include "node/memory.hpp"
#include "node/report.hpp"
#include "node/settings.hpp"
#include "node/stream.hpp"

namespace mori_sim {

constexpr int kExitAfterFault = 70;  // of a process whose program swallowed the fault

enum HipCode {
  kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidConfiguration = 9,
  kInvalidDevicePointer = 17, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201, kMapFailed = 205,
  kFileNotFound = 301, kInvalidHandle = 400, kIllegalState = 401, kNotFound = 500, kNotReady = 600,
  kIllegalAddress = 700, kLaunchTimeOut = 702, kPeerAccessAlreadyEnabled = 704, kPeerAccessNotEnabled = 705,
  kHostMemoryAlreadyRegistered = 712, kHostMemoryNotRegistered = 713, kLaunchFailure = 719, kNotSupported = 801,
  kStreamCaptureUnsupported = 900, kStreamCaptureUnmatched = 903, kUnknown = 999,
};

class ApiError : public std::runtime_error {
 public:
  ApiError(HipCode code, const std::string& text) : std::runtime_error(text), code(code) {}
  const HipCode code;
};

struct Module;
struct Kernel {  // the handle of hipModuleGetFunction
  Module* module;
  KernelInfo info;
};
struct Module {
  CodeObject object;
  uint64_t address = 0;  // of the image, an allocation
  std::shared_ptr<Code> code;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

class CopyEngines;

// State of the HIP door that must not exist once for each name under which the door was loaded.
int& last_error();                              // of this thread
std::map<uint64_t, uint64_t>& opened_ipc();     // address handed out -> start of the mapping it lies in

class Node {
 public:
  static Node& instance();  // starts nothing; throws std::invalid_argument for a bad setting

  const Settings settings;
  AddressSpace memory;
  const ReportFile report;

  // ---- devices. Callers use ordinals (HIP_VISIBLE_DEVICES applied); everything inside is physical.
  int num_visible() const { return static_cast<int>(visible_.size()); }
  int physical(int ordinal) const;  // throws kInvalidDevice
  int ordinal(int physical) const;  // -1 when hidden
  int current_ordinal() const;
  int current_device() const { return physical(current_ordinal()); }
  void set_current(int ordinal);

  // ---- modules.cpp
  Module* load_module(const void* image, size_t nbytes);
  void unload_module(Module* module);
  Kernel* find_kernel(Module* module, const std::string& name);

  // ---- streams.cpp
  Stream* null_stream(int device);
  Stream* create_stream(int device, bool with_null);
  Stream* known(void* handle);  // a created stream, or the current device's null stream for 0, 1, 2
  void destroy_stream(Stream* stream);
  void synchronize(Stream* stream);
  void synchronize_device(int device);
  void synchronize_mark(const MarkPtr& mark);
  bool finished(Stream* stream);
  bool anything_pending();

  // ---- launch.cpp, and the rest in operations.cpp
  void launch(Stream* stream, Kernel* kernel, const LaunchShape& shape, void* const* parameters, const void* packed,
              size_t packed_nbytes);
  void copy(Stream* stream, uint64_t to, uint64_t from, uint64_t nbytes);
  void fill(Stream* stream, uint64_t to, uint64_t value, unsigned width, uint64_t count);
  void write_value(Stream* stream, uint64_t to, uint64_t value, unsigned width);
  void wait_value(Stream* stream, uint64_t at, uint64_t value, unsigned width, unsigned compare, uint64_t mask);
  void host_call(Stream* stream, std::function<void()> call);
  void record(Event* event, Stream* stream);
  void wait_event(Stream* stream, Event* event);

  // ---- graphs.cpp
  void begin_capture(Stream* stream);
  std::shared_ptr<Graph> end_capture(Stream* stream);
  void launch_graph(Stream* stream, const std::shared_ptr<Graph>& graph);

  // ---- faults and figures
  void check_alive() const;                      // throws the sticky error
  int sticky_code() const { return sticky_; }
  std::string fault_text() const;
  void fail(HipCode code, const std::string& text);
  std::string counters_json();
  uint64_t instructions();
  size_t num_reports();

  CopyEngines& copy_engines();
  // Strict mode: what a copy engine or the host read and wrote, told to the checker. `observed`: an engine saw this
  // value in a doorbell or write pointer. `forget`: memory is given back, and what comes there has no history.
  void engine_pointer(uint64_t address);
  void polled(const std::string& agent, int device, uint64_t address, uint64_t nbytes);
  void observed(const std::string& agent, int device, uint64_t address, uint64_t value);
  void reads(const std::string& agent, int device, uint64_t address, uint64_t nbytes, const std::string& what);
  void writes(const std::string& agent, int device, uint64_t address, uint64_t nbytes, const std::string& what);
  void forget(uint64_t address, uint64_t nbytes);
  // Strict mode: no wave runs and no engine looks at memory while this is held. A word that they poll changes under it,
  // together with what the checker is told of it, and is looked at under it, together with the question what the
  // checker knows: whoever saw the value before the checker knew of it would be blamed for nothing.
  std::unique_lock<std::recursive_mutex> hold_waves();
  void delay_record() const;  // MORI_SIM_RECORD_DELAY_US

 private:
  Node();
  void stop_at_exit();
  static void forked();

  // ---- executor.cpp
  void start_executor();
  void execute();                                // the executor thread
  bool advance_streams();
  void run_machine();
  void collect_reports();
  void pace();                                   // the schedule's delays between slices

  // ---- streams.cpp, operations.cpp, launch.cpp
  void enqueue(Stream* stream, std::string what, std::function<std::function<bool(Operation&)>()> make_step);
  void check_reachable(int device, uint64_t address, uint64_t nbytes, uint8_t rights, const char* what);
  bool uses_lent_memory(const KernelInfo& kernel, const std::vector<uint8_t>& kernarg);
  class Arguments;
  std::shared_ptr<Arguments> acquire_arguments(size_t nbytes);
  uint64_t queue_page();

  std::vector<int> visible_;
  std::unique_ptr<Machine> machine_;
  std::recursive_mutex machine_mutex_;
  std::mutex queue_mutex_;
  std::condition_variable work_, done_;
  std::mutex arguments_mutex_;
  std::map<size_t, std::vector<uint64_t>> free_arguments_;  // by size class
  std::vector<std::unique_ptr<Stream>> streams_;
  std::map<int, Stream*> null_streams_;
  std::set<void*> live_streams_;
  std::set<Module*> modules_;
  std::thread executor_;
  bool started_ = false, stopping_ = false, forked_ = false;
  std::atomic<int> sticky_{0};
  std::string fault_text_;
  size_t num_reports_ = 0;
  uint64_t next_dispatch_ = 0, queue_page_ = 0;
  uint64_t random_state_ = 0;
  std::unique_ptr<CopyEngines> copy_engines_;
};

}  // namespace mori_sim
