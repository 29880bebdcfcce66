// A reader for the msgpack subset that code object notes use. Every read is checked against the note's end.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace mori_sim::msgpack {

struct Value {
  enum class Kind { nil, boolean, integer, real, text, list, table } kind = Kind::nil;
  int64_t integer = 0;  // also 0/1 of a boolean
  double real = 0;
  std::string text;
  std::vector<Value> list;
  std::map<std::string, Value> table;

  // A missing key reads as nil, so that optional metadata needs no branches.
  const Value& operator[](const std::string& key) const;
  int64_t as_int(int64_t missing = 0) const { return kind == Kind::nil ? missing : integer; }
};

// Throws std::runtime_error when the bytes end early, nest too deep or hold a type that no code object uses.
Value parse(const uint8_t* bytes, size_t nbytes);

}  // namespace mori_sim::msgpack
