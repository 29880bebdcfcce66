// Sleeping until something happens, across processes, with no call into the kernel while nobody sleeps.
//
//   sleeper:  seen = prepare()         counts itself in, then reads the counter
//             look at the condition    if it holds: leave()
//             sleep(seen, ns)          returns at once if the counter has moved since; then leave()
//   waker:    change the condition     with a sequentially consistent store
//             notify()                 looks at the count of sleepers; moves the counter and wakes them if there are any
// All four accesses are sequentially consistent: either the waker sees the sleeper counted in, or the sleeper sees the
// changed condition. Zeroed memory is a valid Event. A process that dies asleep only costs later wakers a system call.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace mori {

struct Event {
  std::atomic<uint32_t> counter;
  std::atomic<uint32_t> sleepers;

  uint32_t prepare() {
    sleepers.fetch_add(1);
    return counter.load();
  }
  void leave() { sleepers.fetch_sub(1); }

  void sleep(uint32_t seen, int64_t ns) {
    const timespec length{ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, address(), FUTEX_WAIT, seen, &length, nullptr, 0);
  }

  void notify(int how_many = INT_MAX) {
    if (sleepers.load() != 0) wake(how_many);
  }
  void wake(int how_many = INT_MAX) {
    counter.fetch_add(1);
    syscall(SYS_futex, address(), FUTEX_WAKE, how_many, nullptr, nullptr, 0);
  }

 private:
  uint32_t* address() { return reinterpret_cast<uint32_t*>(&counter); }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4, "a futex is 4 plain bytes");

}  // namespace mori
