// A kernel launch: checked when it is called, submitted to the machine when its stream comes to it, over when the machine
// has ended it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "node/device.hpp"
#include "node/node.hpp"

namespace mori_sim {
namespace {

constexpr size_t kArgumentSlab = 1 << 20, kSmallestArguments = 512;
constexpr size_t kAqlNbytes = 64;

// What the code object and the launch say; where arguments and queue lie is added once the launch starts.
Dispatch dispatch_of(const Kernel& kernel, const LaunchShape& shape, uint32_t lds_bytes, int device) {
  const KernelInfo& info = kernel.info;
  Dispatch d;
  d.code = kernel.module->code;
  d.name = info.name;
  d.entry = kernel.module->address + info.entry_offset;
  d.device = device;
  for (int i = 0; i < 3; ++i) d.num_workgroups[i] = shape.grid[i], d.block[i] = shape.block[i];
  d.lds_bytes = lds_bytes;
  d.scratch_bytes = std::max(info.scratch_nbytes, info.descriptor.scratch_nbytes);
  d.rsrc1 = info.descriptor.rsrc1;
  d.rsrc2 = info.descriptor.rsrc2;
  d.rsrc3 = info.descriptor.rsrc3;
  d.properties = info.descriptor.properties;
  d.preload = info.descriptor.preload;
  return d;
}

// An AQL dispatch packet, for kernels that ask for its address.
void write_aql_packet(uint8_t* to, const Dispatch& d, uint64_t descriptor) {
  std::memset(to, 0, kAqlNbytes);
  const auto put = [to](size_t at, auto value) { std::memcpy(to + at, &value, sizeof value); };
  const uint16_t dimensions = d.num_workgroups[2] * d.block[2] > 1 ? 3 : d.num_workgroups[1] * d.block[1] > 1 ? 2 : 1;
  put(0, uint16_t{2});
  put(2, dimensions);
  for (int i = 0; i < 3; ++i) {
    put(4 + 2 * i, static_cast<uint16_t>(d.block[i]));
    put(12 + 4 * i, d.num_workgroups[i] * d.block[i]);
  }
  put(24, d.scratch_bytes);
  put(28, d.lds_bytes);
  put(32, descriptor);
  put(40, d.kernarg);
}

}  // namespace

// A block for one launch's arguments, given back with its last owner.
class Node::Arguments {
 public:
  Arguments(Node& node, uint64_t address, size_t nbytes) : address(address), nbytes(nbytes), node_(node) {}
  ~Arguments() {
    const std::lock_guard lock(node_.arguments_mutex_);
    node_.free_arguments_[nbytes].push_back(address);
  }
  const uint64_t address;
  const size_t nbytes;

 private:
  Node& node_;
};

std::shared_ptr<Node::Arguments> Node::acquire_arguments(size_t nbytes) {
  size_t block = kSmallestArguments;
  while (block < nbytes) block *= 2;
  uint64_t address;
  {
    const std::lock_guard lock(arguments_mutex_);
    auto& free = free_arguments_[block];
    if (free.empty()) {
      const uint64_t slab = memory.allocate(std::max(kArgumentSlab, block), kHostMemory, true, RangeKind::host);
      for (uint64_t at = 0; at + block <= std::max(kArgumentSlab, block); at += block) free.push_back(slab + at);
    }
    address = free.back();
    free.pop_back();
  }
  return std::make_shared<Arguments>(*this, address, block);
}

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
  auto start = [this, kernel, shape, lds, kernarg, device, queue](const Arguments& arguments) {
    const KernelInfo& info = kernel->info;
    std::memcpy(reinterpret_cast<void*>(arguments.address), kernarg.data(), kernarg.size());

    Dispatch d = dispatch_of(*kernel, shape, static_cast<uint32_t>(lds), device);
    d.rank = settings.rank >= 0 ? settings.rank : device;
    d.kernarg = arguments.address;
    d.queue = queue;
    d.dispatch_id = ++next_dispatch_;
    d.dispatch_packet = arguments.address + arguments.nbytes - kAqlNbytes;
    write_aql_packet(reinterpret_cast<uint8_t*>(d.dispatch_packet), d, kernel->module->address + info.descriptor_offset);

    std::lock_guard lock(machine_mutex_);
    return machine_->submit(std::move(d));
  };
  enqueue(stream, "kernel " + info.name, [this, start, nbytes = kernarg.size() + kAqlNbytes] {
    return [this, start, arguments = acquire_arguments(nbytes), dispatch = std::optional<DispatchId>()](Operation&) mutable {
      if (!dispatch) {
        dispatch = start(*arguments);
        return false;
      }
      {
        std::lock_guard lock(machine_mutex_);
        if (!machine_->done(*dispatch)) return false;
        machine_->agent_joined("host", *dispatch);  // whoever in the host comes after it knows it
      }
      arguments.reset();
      return true;
    };
  });
  // Nothing else orders the program's next look at an ordinary tensor, so on the null stream the launch itself does.
  if (blocking) synchronize(stream);
}

}  // namespace mori_sim
