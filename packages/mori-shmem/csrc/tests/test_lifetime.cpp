// Dead ranks, forked children, and giving everything back. Ranks are processes here.
#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstring>
#include <thread>

#include "host/clock.h"
#include "ranks.h"

using namespace mori;

namespace {

constexpr int64_t kLong = 20'000'000'000;
constexpr uint32_t kAtLeast = MORI_SDMA_GREATER_EQUAL;

int pidfd_of(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

int num_descriptors() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/fd");
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

int num_threads() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/task");
  while (readdir(directory)) ++count;
  closedir(directory);
  return count - 2;
}

// Rank 0 is this process, rank 1 a child that runs `body` and then sleeps until it is killed.
struct Pair {
  template <class Body>
  explicit Pair(Body body) {
    const std::vector<int> pages{create_memory(kControlBytes, "page"), create_memory(kControlBytes, "page")};
    const std::vector<int> parts{create_memory(65536, "part"), create_memory(65536, "part")};
    std::fflush(stdout);
    child = fork();
    Settings settings = small_settings();
    settings.world_size = 2;
    settings.rank = child == 0 ? 1 : 0;
    const int other = pidfd_of(child == 0 ? getppid() : child);
    fabric = std::make_shared<Fabric>(settings, pages, child == 0 ? std::vector<int>{other, -1} : std::vector<int>{-1, other});
    window = fabric->map_window(parts, 65536);
    close(other);
    for (const int fd : pages) close(fd);
    for (const int fd : parts) close(fd);
    if (child != 0) return;
    body(*this);
    for (;;) sleep_ns(1'000'000'000);
  }
  ~Pair() {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  uint64_t at(int rank, uint64_t offset) const { return window->base + static_cast<uint64_t>(rank) * window->stride + offset; }

  pid_t child;
  std::shared_ptr<Fabric> fabric;
  std::shared_ptr<const Mapping> window;
};

std::thread kill_soon(pid_t pid, int64_t* killed_ns) {
  return std::thread([=] {
    sleep_ns(150'000'000);
    *killed_ns = monotonic_ns();
    kill(pid, SIGKILL);
  });
}

template <class Call>
void check_notices_death(Pair& pair, Call call) {
  int64_t killed_ns = 0;
  std::thread killer = kill_soon(pair.child, &killed_ns);
  const Error error = error_of(call);
  const int64_t noticed_ns = monotonic_ns();
  killer.join();
  const double seconds = static_cast<double>(noticed_ns - killed_ns) * 1e-9;
  std::printf("  noticed after %.3f s\n", seconds);
  CHECK(error.kind == "peer_died" && fact<std::vector<int>>(error, "ranks") == std::vector<int>({1}));
  CHECK(seconds < 2);
}

}  // namespace

TEST(a_dead_rank_ends_a_wait) {
  Pair pair([](Pair&) {});
  check_notices_death(pair, [&] { pair.fabric->wait(pair.at(0, 0), 1, kAtLeast, 1, kLong); });
  CHECK(error_of([&] { pair.fabric->wait(pair.at(0, 0), 1, kAtLeast, -1, kLong); }).kind == "peer_died");
  CHECK(pair.fabric->peer_states()[1] == "dead");
}

TEST(a_dead_rank_ends_a_barrier) {
  Pair pair([](Pair&) {});
  check_notices_death(pair, [&] { pair.fabric->barrier(kLong); });
}

TEST(a_dead_rank_ends_quiet_where_the_queue_waits_for_it) {
  Pair pair([](Pair&) {});
  Queue& queue = queue_of(*pair.fabric, 1);
  submit(queue, [&](Program& p) { p.wait(pair.at(0, 0), 1, kAtLeast); });
  check_notices_death(pair, [&] { queue.quiet(kLong); });
}

TEST(what_a_rank_wrote_before_it_died_still_counts) {
  Pair pair([](Pair& me) {
    me.fabric->barrier(kLong);
    put(queue_of(*me.fabric, 0), me.at(0, 64), me.at(1, 0), 8);
    signal(queue_of(*me.fabric, 0), me.at(0, 0), 5);
    raise(SIGKILL);
  });
  pair.fabric->barrier(kLong);
  sleep_ns(200'000'000);
  CHECK(pair.fabric->wait(pair.at(0, 0), 5, kAtLeast, 1, kLong) == 5);
}

TEST(processes_exchange_and_leave) {
  Pair pair([](Pair& me) {
    for (uint64_t i = 1; i <= 2000; ++i) {
      me.fabric->wait(me.at(1, 0), i, kAtLeast, 0, kLong);
      put(queue_of(*me.fabric, 0), me.at(0, 64), me.at(1, 64), 8);
      signal(queue_of(*me.fabric, 0), me.at(0, 0), i);
    }
    me.fabric->barrier(kLong);
    me.fabric->close();
  });
  Queue& queue = queue_of(*pair.fabric, 1);
  for (uint64_t i = 1; i <= 2000; ++i) {
    *reinterpret_cast<uint64_t*>(pair.at(0, 128)) = i * i;
    put(queue, pair.at(1, 64), pair.at(0, 128), 8);
    signal(queue, pair.at(1, 0), i);
    pair.fabric->wait(pair.at(0, 0), i, kAtLeast, 1, kLong);
    CHECK(*reinterpret_cast<uint64_t*>(pair.at(0, 64)) == i * i);
  }
  pair.fabric->barrier(kLong);
  CHECK(error_of([&] { pair.fabric->barrier(kLong); }).kind == "peer_left");
}

TEST(create_and_close_two_hundred_times) {
  int descriptors = 0, threads = 0;
  for (int round = 0; round < 200; ++round) {
    {
      Ranks ranks(2, 65536);
      put(queue_of(ranks[0], 1), ranks.at(0, 1, 0), ranks.at(0, 0, 0), 65536);
      if (round % 2) queue_of(ranks[0], 1).quiet(kLong);
      if (round % 3 == 0) ranks[0].close();
    }
    if (round == 5) descriptors = num_descriptors(), threads = num_threads();
  }
  CHECK(num_descriptors() == descriptors);
  CHECK(num_threads() <= threads);
}

TEST(closing_while_a_large_copy_and_a_blocked_queue_are_under_way) {
  Ranks ranks(2, 1 << 30);
  const std::vector<Queue*> queues = ranks[0].open_queues(1, {0, 1});
  put(*queues[0], ranks.at(0, 1, 0), ranks.at(0, 0, 0), 1 << 30);  // untouched memory: every page is a fault
  submit(*queues[1], [&](Program& p) { p.wait(ranks.at(0, 0, 0), 1, kAtLeast); });
  sleep_ns(5'000'000);
  const int64_t begin_ns = monotonic_ns();
  ranks[0].close();
  CHECK(monotonic_ns() - begin_ns < 1'000'000'000);
  const Queue& queue = *queues[0];
  CHECK(queue.completed_bytes() != queue.submitted_bytes());  // or this test has tested nothing
}

TEST(a_forked_child_is_refused_and_harms_nobody) {
  Ranks ranks(2);
  Queue& queue = queue_of(ranks[0], 1);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = error_of([&] { ranks[0].read(ranks.at(0, 0, 0)); }).kind == "forked" &&
                         error_of([&] { put(queue, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 8); }).kind == "forked" &&
                         error_of([&] { ranks[0].barrier(kLong); }).kind == "forked";
    ranks[0].close();
    ranks.fabrics.clear();
    ranks.windows.clear();
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(ranks[1].peer_states()[0] == "alive");
  put(queue, ranks.at(0, 1, 0), ranks.at(0, 0, 0), 8);
  queue.quiet(kLong);
}

TEST_MAIN
