// Reads the DWARF 4 and 5 line tables of a code object, so that reports can name source lines.
//
// Debug info is a convenience: a table that cannot be understood gives no lines, never an error.
#include <elf.h>

#include <cstring>
#include <stdexcept>

#include "loader/code_object.hpp"

namespace mori_sim {
namespace {

struct Bytes {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;

  size_t left() const { return static_cast<size_t>(end - at); }
  const uint8_t* take(uint64_t n) {
    if (n > left()) throw std::runtime_error("line table ends early");
    const uint8_t* here = at;
    at += n;
    return here;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  uint64_t uleb() {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const uint8_t byte = *take(1);
      if (shift < 64) value |= uint64_t{byte & 0x7fu} << shift;
      if (!(byte & 0x80)) return value;
    }
  }
  int64_t sleb() {
    int64_t value = 0;
    for (int shift = 0;;) {
      const uint8_t byte = *take(1);
      if (shift < 64) value |= static_cast<int64_t>(byte & 0x7f) << shift;
      shift += 7;
      if (!(byte & 0x80)) return shift < 64 && (byte & 0x40) ? value | -(int64_t{1} << shift) : value;
    }
  }
  std::string text() {
    const size_t n = strnlen(reinterpret_cast<const char*>(at), left());
    const auto* from = reinterpret_cast<const char*>(take(n + 1));
    return {from, n};
  }
};

struct Strings {
  Bytes line, other;  // .debug_line_str, .debug_str
};

std::string string_at(Bytes table, uint64_t offset) {
  table.take(offset);
  return table.text();
}

// One entry of a version 5 directory or file list: the path is what we want, the rest is skipped.
std::string entry_path(Bytes& in, const std::vector<std::pair<uint64_t, uint64_t>>& format, const Strings& strings) {
  constexpr uint64_t kPath = 1;
  std::string path;
  for (const auto& [content, form] : format) {
    std::string text;
    switch (form) {
      case 0x08: text = in.text(); break;
      case 0x1f: text = string_at(strings.line, in.number<uint32_t>()); break;
      case 0x0e: text = string_at(strings.other, in.number<uint32_t>()); break;
      case 0x0f: in.uleb(); break;
      case 0x0b: in.take(1); break;
      case 0x05: in.take(2); break;
      case 0x1e: in.take(16); break;
      default: throw std::runtime_error("unknown form in a line table");
    }
    if (content == kPath) path = text;
  }
  return path;
}

std::vector<std::string> entry_list(Bytes& in, const Strings& strings) {
  std::vector<std::pair<uint64_t, uint64_t>> format(*in.take(1));
  for (auto& [content, form] : format) content = in.uleb(), form = in.uleb();
  std::vector<std::string> entries;
  for (uint64_t n = in.uleb(); n > 0; --n) entries.push_back(entry_path(in, format, strings));
  return entries;
}

using Lines = std::vector<std::pair<uint64_t, std::string>>;

void read_unit(Bytes in, const Strings& strings, Lines& lines) {
  const auto version = in.number<uint16_t>();
  if (version != 4 && version != 5) return;
  if (version == 5) in.take(2);  // address and segment sizes
  const auto header_nbytes = in.number<uint32_t>();
  Bytes header{in.at, in.at + header_nbytes};
  in.take(header_nbytes);
  const uint8_t shortest = header.number<uint8_t>();
  header.take(2);  // operations per instruction, default is_stmt
  const int line_base = header.number<int8_t>();
  const int line_range = header.number<uint8_t>();
  const int first_special = header.number<uint8_t>();
  if (line_range == 0 || first_special == 0) return;
  std::vector<uint8_t> num_operands(static_cast<size_t>(first_special));
  for (int i = 1; i < first_special; ++i) num_operands[static_cast<size_t>(i)] = *header.take(1);
  std::vector<std::string> files;
  if (version == 5) {
    entry_list(header, strings);
    files = entry_list(header, strings);
  } else {
    while (!header.text().empty()) {}
    files.emplace_back();
    for (std::string name = header.text(); !name.empty(); name = header.text()) {
      files.push_back(name);
      header.uleb(), header.uleb(), header.uleb();
    }
  }

  uint64_t address = 0, file = 1;
  int64_t line = 1;
  const auto emit = [&] {
    std::string text = file < files.size() ? files[file] : "?";
    lines.emplace_back(address, text + ":" + std::to_string(line));
  };
  while (in.left() > 0) {
    const int op = *in.take(1);
    if (op >= first_special) {
      address += static_cast<uint64_t>((op - first_special) / line_range) * shortest;
      line += line_base + (op - first_special) % line_range;
      emit();
    } else if (op == 0) {
      const uint64_t nbytes = in.uleb();
      Bytes extended{in.at, in.at + nbytes};
      in.take(nbytes);
      const int what = *extended.take(1);
      if (what == 1) address = 0, file = 1, line = 1;
      else if (what == 2) address = extended.number<uint64_t>();
    } else if (op == 1) emit();
    else if (op == 2) address += in.uleb() * shortest;
    else if (op == 3) line += in.sleb();
    else if (op == 4) file = in.uleb();
    else if (op == 8) address += static_cast<uint64_t>((255 - first_special) / line_range) * shortest;
    else if (op == 9) address += in.number<uint16_t>();
    else for (int i = num_operands[static_cast<size_t>(op)]; i > 0; --i) in.uleb();
  }
}

}  // namespace

std::vector<std::pair<uint64_t, std::string>> CodeObject::lines() const {
  Lines lines;
  try {
    const Bytes whole{file_.data(), file_.data() + file_.size()};
    const auto at = [&](uint64_t offset) {
      Bytes bytes = whole;
      bytes.take(offset);
      return bytes;
    };
    const auto header = at(0).number<Elf64_Ehdr>();
    const auto section = [&](int i) { return at(header.e_shoff + static_cast<uint64_t>(i) * sizeof(Elf64_Shdr)).number<Elf64_Shdr>(); };
    const Elf64_Shdr names = section(header.e_shstrndx);
    Bytes table;
    Strings strings;
    for (int i = 0; i < header.e_shnum; ++i) {
      const Elf64_Shdr s = section(i);
      const std::string name = at(names.sh_offset + s.sh_name).text();
      if (name.rfind(".debug_", 0) != 0) continue;
      Bytes bytes = at(s.sh_offset);
      bytes.end = bytes.take(s.sh_size) + s.sh_size;
      bytes.at = bytes.end - s.sh_size;
      if (name == ".debug_line") table = bytes;
      if (name == ".debug_line_str") strings.line = bytes;
      if (name == ".debug_str") strings.other = bytes;
    }
    while (table.left() > 4) {
      const auto nbytes = table.number<uint32_t>();
      const uint8_t* unit = table.take(nbytes);
      read_unit({unit, unit + nbytes}, strings, lines);
    }
  } catch (const std::runtime_error&) {
    lines.clear();
  }
  return lines;
}

}  // namespace mori_sim
