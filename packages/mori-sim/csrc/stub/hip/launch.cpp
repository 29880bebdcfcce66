// Modules, the kernels in them, and launches.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "stub/hip/door.hpp"

using namespace mori_sim;

namespace {

// A launch that cannot start is a fault: some callers print its error code and go on.
template <class Body>
int guarded_launch(const char* name, Body body) {
  return guarded(name, [&] {
    try {
      body();
    } catch (const ApiError& error) {
      if (node().sticky_code() == 0) node().fail(error.code, std::string(name) + ": " + error.what());
      throw;
    }
  });
}

}  // namespace

extern "C" {

int hipModuleLoadData(void** out, const void* image) {
  HIP("hipModuleLoadData", { need(out, "module"); need(image, "image"); *out = node().load_module(image, 0); });
}
int hipModuleLoadDataEx(void** out, const void* image, unsigned, void*, void**) { return hipModuleLoadData(out, image); }
int hipModuleLoad(void** out, const char* path) {
  HIP("hipModuleLoad", {
    need(out, "module");
    need(path, "path");
    std::ifstream file(path, std::ios::binary);
    if (!file) throw ApiError(kFileNotFound, std::string("cannot read ") + path);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    *out = node().load_module(bytes.data(), bytes.size());
  });
}
int hipModuleUnload(void* module) { HIP("hipModuleUnload", { node().unload_module(static_cast<Module*>(module)); }); }
int hipModuleGetFunction(void** out, void* module, const char* name) {
  HIP("hipModuleGetFunction", { need(out, "function"); need(name, "name"); *out = node().find_kernel(static_cast<Module*>(module), name); });
}
int hipModuleGetGlobal(void** out, size_t* nbytes, void* module, const char* name) {
  HIP("hipModuleGetGlobal", {
    const auto* m = static_cast<Module*>(module);
    const auto found = m->object.objects.find(name);
    if (found == m->object.objects.end()) throw ApiError(kNotFound, std::string("no global ") + name);
    if (out != nullptr) *out = pointer(m->address + found->second.offset);
    if (nbytes != nullptr) *nbytes = found->second.nbytes;
  });
}
int hipFuncGetAttribute(int* value, int which, void* function) {
  HIP("hipFuncGetAttribute", {
    need(value, "value");
    const KernelInfo& info = static_cast<Kernel*>(function)->info;
    switch (which) {
      case 0: *value = static_cast<int>(info.max_workgroup_size); break;
      case 1: *value = static_cast<int>(info.lds_nbytes); break;
      case 3: *value = static_cast<int>(info.scratch_nbytes); break;
      case 4: *value = static_cast<int>(info.num_vgprs); break;
      case 8: *value = static_cast<int>(mi355x::kLdsBytes - info.lds_nbytes); break;
      default: *value = 0;
    }
  });
}
int hipFuncSetAttribute(const void*, int, int) { return kSuccess; }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int block, size_t dynamic_lds) {
  HIP("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", {
    need(count, "count");
    const KernelInfo& info = static_cast<Kernel*>(function)->info;
    *count = workgroups_per_cu(info, static_cast<uint32_t>(block), static_cast<uint32_t>(dynamic_lds));
  });
}
int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned dynamic_lds, void* stream, void** parameters, void** extra) {
  return guarded_launch("hipModuleLaunchKernel", [&] {
    need(function, "function");
    const LaunchShape shape{{gx, gy, gz}, {bx, by, bz}, dynamic_lds};
    const void* packed = nullptr;
    size_t nbytes = 0;
    for (void** e = extra; e != nullptr && *e != reinterpret_cast<void*>(3); e += 2) {
      if (*e == reinterpret_cast<void*>(1)) packed = e[1];
      else if (*e == reinterpret_cast<void*>(2)) nbytes = *static_cast<size_t*>(e[1]);
      else throw ApiError(kInvalidValue, "unknown entry in the extra list");
    }
    auto* kernel = static_cast<Kernel*>(function);
    const bool wants = std::any_of(kernel->info.arguments.begin(), kernel->info.arguments.end(), [](const auto& a) { return !a.hidden(); });
    if (packed == nullptr && wants) need(parameters, "kernelParams");
    node().launch(node().known(stream), kernel, shape, parameters, packed, nbytes);
  });
}
int hipDrvLaunchKernelEx(const void* configuration, void* function, void** parameters, void** extra) {
  struct Configuration { unsigned g[3], b[3], lds; void* stream; void* attributes; unsigned num_attributes; };
  const auto& c = *static_cast<const Configuration*>(configuration);
  if (c.num_attributes != 0) return guarded_launch("hipDrvLaunchKernelEx", [] { throw ApiError(kNotSupported, "launch attributes (clusters) do not exist on gfx950"); });
  return hipModuleLaunchKernel(function, c.g[0], c.g[1], c.g[2], c.b[0], c.b[1], c.b[2], c.lds, c.stream, parameters, extra);
}

}  // extern "C"
