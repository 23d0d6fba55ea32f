// A test is a function under TPK_TEST; a failed CHECK prints where and what, and the run goes on.
#pragma once

#include <cstdio>
#include <vector>

namespace tpkernels::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline int run_all() {
  for (const Test& test : tests()) {
    const int before = failures();
    test.run();
    std::printf("%s %s\n", failures() == before ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);  // so that a crash shows where, and a fork repeats nothing
  }
  std::printf("%zu tests, %d failed checks\n", tests().size(), failures());
  return tests().empty() || failures() ? 1 : 0;
}

}  // namespace tpkernels::testing

#define TPK_TEST(name)                                                                    \
  static void test_##name();                                                              \
  static const tpkernels::testing::Registration registration_##name(#name, &test_##name); \
  static void test_##name()

// CHECK(condition, printf format, arguments): the format says what was found.
#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (!(condition)) {                                           \
      ++tpkernels::testing::failures();                           \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (false)
