// Modules: a code object is parsed, placed in device memory, and its kernels are found by name.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

#include "node/node.hpp"

namespace mori_sim {
namespace {

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

}  // namespace

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

}  // namespace mori_sim
