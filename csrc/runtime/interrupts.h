// How a thread that waits for other ranks learns of a signal, such as Ctrl-C: csrc knows nothing of
// the interpreter whose handlers are to run; python/module.cpp says how.
#pragma once

#include <chrono>
#include <exception>

namespace tpkernels {

// How late at most a thread that waits sees a signal, or that a rank is gone or late: it looks
// around this often.
inline constexpr std::chrono::milliseconds kLookAroundEvery{20};

// What a signal handler raised while this thread waited.
struct Interrupted {
  std::exception_ptr cause;
};

// Runs `body` where the interpreter has called: what was raised goes on as it was.
template <class Body>
decltype(auto) raising_causes(const Body& body) {
  try {
    return body();
  } catch (const Interrupted& interrupted) {
    std::rethrow_exception(interrupted.cause);
  }
}

// `check` runs the handlers of the signals that have come; what one of them raised, or null.
void set_interrupt_check(std::exception_ptr (*check)());

// Throws Interrupted if a handler raised something. Handlers may take their time: not to be called
// by a thread that holds a lock.
void check_interrupt();

}  // namespace tpkernels
