#include "host/engine.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <csignal>
#include <system_error>

#include "host/queue.h"

namespace mori {

namespace {

constexpr uint64_t kTurnBytes = 8 << 20;
constexpr int64_t kFirstSlice = 1'000'000;
constexpr int64_t kLongestSlice = 10'000'000;
constexpr int64_t kUntilCalled = 3'600'000'000'000;

// Threads inherit the mask: signals stay with the threads of the program.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Engines::Engines(Node& node) : node_(node), threads_(new std::vector<std::thread>) {
  const SignalsBlocked blocked;
  try {
    for (int number = 0; number < node.settings.num_engines; ++number) threads_->emplace_back([this, number] { run(number); });
  } catch (const std::system_error& error) {
    node.closing.store(true);
    join();
    throw system_error("pthread_create", error.code().value());
  }
}

void Engines::join() {
  if (!threads_) return;
  if (node_.fork.crossed()) {
    static_cast<void>(threads_.release());
    return;
  }
  node_.own().engines.wake();
  for (std::thread& thread : *threads_) thread.join();
  threads_.reset();
}

void Engines::run(int number) {
  pthread_setname_np(pthread_self(), "mori-engine");
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; kHandOverNs would double with the usual 50 us
  int64_t slice_ns = kFirstSlice;
  while (!node_.closing.load()) {
    if (node_.serve({UINT64_MAX, kTurnBytes}, true, number).progress || sleep(number, &slice_ns)) slice_ns = kFirstSlice;
  }
}

// True if there was something to do after all.
bool Engines::sleep(int number, int64_t* slice_ns) {
  ControlPage& page = node_.own();
  const uint32_t seen = page.engines.prepare();
  page.pollers.fetch_add(1);
  const Node::Served served = node_.serve({UINT64_MAX, kTurnBytes}, true, number);
  if (!served.pending) page.pollers.fetch_sub(1);
  const int64_t length_ns = served.reserved ? kHandOverNs : served.pending ? *slice_ns : kUntilCalled;
  if (!served.progress && !node_.closing.load()) page.engines.sleep(seen, length_ns);
  if (served.pending) page.pollers.fetch_sub(1);
  page.engines.leave();
  if (!served.reserved) *slice_ns = std::min(2 * *slice_ns, kLongestSlice);
  return served.progress;
}

}  // namespace mori
