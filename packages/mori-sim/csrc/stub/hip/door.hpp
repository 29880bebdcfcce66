// libamdhip64.so.7: the HIP entry points that this project, FlyDSL and their tests call, in front of the node; one file
// for each kind of call. This is what they share: a body runs guarded(), and what it throws becomes a HIP code.
//
// Each entry point checks its pointers and turns handles into the node's objects; what it means is in node/.
// Structures are declared where they are used, as bytes or small structs with the offsets of HIP 7.1.
#pragma once
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "node/device.hpp"
#include "node/node.hpp"

namespace mori_sim {

// Runs one call's body; what it throws becomes the code that is returned and remembered.
template <class Body>
int guarded(const char* name, Body body) {
  int code = kSuccess;
  try {
    body();
  } catch (const ApiError& error) {
    code = error.code;
    if (code != kNotReady) std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
  } catch (const std::invalid_argument& error) {
    code = kInvalidValue;
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
  } catch (const std::bad_alloc&) {
    code = kOutOfMemory;
  } catch (const std::exception& error) {
    code = kOutOfMemory;
    std::fprintf(stderr, "mori-sim: %s: %s\n", name, error.what());
  }
  if (code != kSuccess) last_error() = code;
  return code;
}
#define HIP(name, ...) return guarded(name, [&] __VA_ARGS__)

inline void need(const void* pointer, const char* what) {
  if (pointer == nullptr) throw ApiError(kInvalidValue, std::string(what) + " is a null pointer");
}
inline Node& node() { return Node::instance(); }
inline uint64_t at(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace mori_sim
