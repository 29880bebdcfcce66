#include "rocm/vendor.h"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

namespace mori::rocm {

namespace {

void* open_library(const std::vector<const char*>& names, std::string* tried) {
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL})
    for (const char* name : names)
      if (void* library = dlopen(name, flags)) return library;
  if (const char* const message = dlerror()) *tried = message;
  const char* const root = std::getenv("ROCM_PATH");
  for (const char* name : names) {
    const std::string path = std::string(root && *root ? root : "/opt/rocm") + "/lib/" + name;
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    *tried += "; " + path;
  }
  return nullptr;
}

class Library {
 public:
  Library(const std::vector<const char*>& names) : name_(names.front()) {
    std::string tried;
    handle_ = open_library(names, &tried);
    if (!handle_) throw Error("missing_library", {{"library", std::string(name_)}, {"tried", tried}});
  }

  template <class Function>
  void find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (!function)
      throw Error("missing_library", {{"library", std::string(name_)}, {"tried", std::string("it has no ") + name}});
  }

 private:
  const char* name_;
  void* handle_;
};

}  // namespace

#define MORI_FIND(name, result, arguments) library.find(table.name, #name);
const Hip& hip() {
  static const Hip found = [] {
    const Library library({"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"});
    Hip table;
    MORI_HIP_FUNCTIONS(MORI_FIND)
    return table;
  }();
  return found;
}

const Kmt& kmt() {
  static const Kmt found = [] {
    const Library library({"libhsakmt.so.1", "libhsakmt.so"});
    Kmt table;
    MORI_KMT_FUNCTIONS(MORI_FIND)
    const int code = table.hsaKmtOpenKFD();
    if (code != kKmtSuccess && code != kKmtAlreadyOpened) throw driver_error("hsaKmtOpenKFD", code, "");
    return table;
  }();
  return found;
}

const Hsa& hsa() {
  static const Hsa found = [] {
    const Library library({"libhsa-runtime64.so.1", "libhsa-runtime64.so"});
    Hsa table;
    MORI_HSA_FUNCTIONS(MORI_FIND)
    if (const int code = table.hsa_init()) throw driver_error("hsa_init", code, "");
    return table;
  }();
  return found;
}
#undef MORI_FIND

Error driver_error(const char* call, int code, const std::string& words) {
  return Error("driver", {{"call", std::string(call)},
                          {"code", int64_t{code}},
                          {"error", (words.empty() ? "status" : words) + " (" + std::to_string(code) + ")"}});
}

void check_hip(int code, const char* call) {
  if (code == kHipSuccess) return;
  hip().hipGetLastError();  // or the next call of somebody else would report it
  const char* const words = hip().hipGetErrorString(code);
  throw driver_error(call, code, words ? words : "");
}

}  // namespace mori::rocm
