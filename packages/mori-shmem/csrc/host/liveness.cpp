#include "host/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "host/errors.h"

namespace mori {

Liveness::Liveness(const std::vector<int>& pidfds) : ended_(new std::atomic<bool>[pidfds.size()]()) {
  for (const int fd : pidfds) {
    const int own = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0 && fd >= 0) {
      const int code = errno;
      close();
      throw system_error("fcntl(F_DUPFD_CLOEXEC)", code);
    }
    pidfds_.push_back(own);
  }
}

void Liveness::close() {
  for (int& fd : pidfds_) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
}

void Liveness::refresh(int64_t now_ns, int64_t max_age_ns) {
  if (now_ns - asked_ns_.load(std::memory_order_relaxed) < max_age_ns) return;
  asked_ns_.store(now_ns, std::memory_order_relaxed);
  std::vector<pollfd> asked;
  for (const int fd : pidfds_) asked.push_back({fd, POLLIN, 0});  // poll skips negative descriptors
  if (poll(asked.data(), asked.size(), 0) <= 0) return;
  for (size_t rank = 0; rank < asked.size(); ++rank)
    if (asked[rank].revents != 0) ended_[rank].store(true, std::memory_order_release);
}

}  // namespace mori
