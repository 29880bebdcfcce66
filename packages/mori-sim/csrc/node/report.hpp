// The report file: one JSON object a line, written whole, so that the lines of many processes never mix.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mori_sim {

class ReportFile {
 public:
  explicit ReportFile(std::string path) : path_(std::move(path)) {}
  // `fields` are (name, value) with values already JSON: use quoted() for text. pid and rank are added.
  void write(const std::string& kind, const std::vector<std::pair<std::string, std::string>>& fields) const;
  static std::string quoted(const std::string& text);

 private:
  std::string path_;
};

}  // namespace mori_sim
