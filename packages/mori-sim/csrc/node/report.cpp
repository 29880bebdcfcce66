#include "node/report.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace mori_sim {

std::string ReportFile::quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\') out += '\\', out += c;
    else if (c == '\n') out += "\\n";
    else if (static_cast<unsigned char>(c) < 0x20) std::snprintf(escaped, sizeof escaped, "\\u%04x", c), out += escaped;
    else out += c;
  }
  return out + "\"";
}

void ReportFile::write(const std::string& kind, const std::vector<std::pair<std::string, std::string>>& fields) const {
  if (path_.empty()) return;
  const char* rank = std::getenv("RANK");
  std::string line = "{\"kind\": " + quoted(kind) + ", \"pid\": " + std::to_string(getpid()) +
                     ", \"rank\": " + (rank ? quoted(rank) : "null");
  for (const auto& [name, value] : fields) line += ", " + quoted(name) + ": " + value;
  line += "}\n";
  const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0 || ::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    std::fprintf(stderr, "mori-sim: cannot write the report file %s\n", path_.c_str());
  if (fd >= 0) close(fd);
}

}  // namespace mori_sim
