// One communicator's share of this process, as Python sees it: windows, queues, signals, waits and the barrier.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/engine.h"
#include "host/node.h"
#include "host/queue.h"

namespace mori {

class Fabric;

class Window {
 public:
  Window(std::shared_ptr<Fabric> fabric, std::shared_ptr<const Mapping> mapping, int rank);
  ~Window();

  void close();
  bool closed() const { return !std::atomic_load(&mapping_); }
  // Keeps the mapping alive; throws closed, out_of_range.
  std::shared_ptr<const Mapping> span(int rank, uint64_t offset_bytes, uint64_t nbytes) const;

  const uint64_t base, stride, nbytes;
  const int rank, world_size;

 private:
  std::shared_ptr<Fabric> fabric_;
  std::shared_ptr<const Mapping> mapping_;
};

class Fabric {
 public:
  Fabric(const Settings& settings, const std::vector<int>& control_fds, const std::vector<int>& pidfds);
  ~Fabric() { close(); }

  std::shared_ptr<const Mapping> map_window(const std::vector<int>& fds, uint64_t nbytes);
  void unmap_window(const Mapping* mapping);
  std::vector<Queue*> open_queues(int peer, const std::vector<int>& indices);

  void signal(uint64_t where, uint64_t value, SignalOp op);
  void signal_all(const std::vector<uint64_t>& where, uint64_t value);  // set
  uint64_t read(uint64_t where);
  // With peer -1 any rank's death ends the wait, but nobody's leaving does.
  uint64_t wait(uint64_t where, uint64_t value, uint32_t comparison, int peer, int64_t timeout_ns);
  // Several words, each with the peer that writes it; returns the values seen. One deadline for all.
  std::vector<uint64_t> wait_all(const std::vector<uint64_t>& where, uint64_t value, const std::vector<int>& peers,
                                 int64_t timeout_ns);
  void wake(int rank);
  void barrier(int64_t timeout_ns);
  std::vector<std::string> peer_states();
  bool serve();
  void close();
  bool closed() const { return node_.closing.load(); }

  Node& node() { return node_; }
  const AddressSpace& space() const { return node_.space; }

 private:
  void check_rank(int rank);
  Queue* find_queue(int peer, int index);

  Node node_;
  std::mutex queues_mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::mutex barrier_mutex_;
  bool in_barrier_ = false;  // one that timed out is taken up again by the next call
  std::mutex close_mutex_;
  std::unique_ptr<Engines> engines_;  // last: gone before what it serves
};

}  // namespace mori
