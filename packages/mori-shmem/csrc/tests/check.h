// A test is a function registered by TEST; CHECK says where and what, and ends the program at once.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

struct Test {
  const char* name;
  void (*run)();
  static std::vector<Test>& all() {
    static std::vector<Test> tests;
    return tests;
  }
  Test(const char* name_, void (*run_)()) : name(name_), run(run_) { all().push_back(*this); }
};

#define TEST(name)                             \
  static void name();                          \
  static const Test registered_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

// Runs the tests whose names contain the first argument, or all.
inline int run_tests(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  int num_run = 0;
  for (const Test& test : Test::all()) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++num_run;
  }
  CHECK(num_run > 0);
  return 0;
}

#define TEST_MAIN \
  int main(int argc, char** argv) { return run_tests(argc, argv); }
