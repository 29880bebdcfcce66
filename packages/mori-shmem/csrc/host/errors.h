// What the core throws: a kind and facts, no prose. The kinds and their facts are listed in _core.pyi.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace mori {

using Fact = std::variant<int64_t, uint64_t, double, std::string, std::vector<int>, std::vector<uint32_t>>;
using Facts = std::vector<std::pair<std::string, Fact>>;

class Error : public std::exception {
 public:
  Error(std::string kind_, Facts facts_) : kind(std::move(kind_)), facts(std::move(facts_)) {}
  const char* what() const noexcept override { return kind.c_str(); }

  std::string kind;
  Facts facts;
};

inline Error system_error(const char* call, int code = errno) {
  return Error("system", {{"call", std::string(call)}, {"errno", int64_t{code}}, {"error", std::string(strerror(code))}});
}

inline Error bad_value(const char* what, Fact given, const char* allowed) {
  return Error("bad_value", {{"what", std::string(what)}, {"given", std::move(given)}, {"allowed", std::string(allowed)}});
}

}  // namespace mori
