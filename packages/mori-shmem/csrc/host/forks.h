// A forked child has its parent's objects but not the threads that serve them. It is told so instead of hanging.
#pragma once
#include <unistd.h>

#include "host/errors.h"

namespace mori {

uint64_t fork_generation();  // grows in the child at every fork

class ForkGuard {
 public:
  bool crossed() const { return fork_generation() != generation_; }
  void check() const {
    if (crossed()) throw Error("forked", {{"owner_pid", int64_t{owner_}}, {"pid", int64_t{getpid()}}});
  }

 private:
  const uint64_t generation_ = fork_generation();
  const pid_t owner_ = getpid();
};

}  // namespace mori
