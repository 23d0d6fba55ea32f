// What ops ask of the Python above them, which csrc knows nothing of: python/module.cpp says how.
#pragma once

#include <string>

#include "runtime/interrupts.h"
#include "runtime/peer_memory.h"

namespace tpkernels {

struct Interpreter {
  // Lets the interpreter's lock go if this thread holds it; what it gives is for `acquire`.
  void* (*release)() = nullptr;
  void (*acquire)(void*) = nullptr;
  // Throws tpkernels.errors.CommunicationError; called with the lock.
  void (*raise_communication_error)(const std::string& message) = nullptr;
};

void set_interpreter(const Interpreter& interpreter);
const Interpreter& interpreter();

// Runs `wait`, which waits for other ranks, without the interpreter's lock: other threads of this
// process go on meanwhile. A PeerError becomes Python's, and so
// does what a signal's handler raised.
template <class Wait>
void without_interpreter(const Wait& wait) {
  struct Released {
    Released() : state(interpreter().release ? interpreter().release() : nullptr) {}
    ~Released() {
      if (state) interpreter().acquire(state);
    }
    void* state;
  };
  try {
    const Released released;
    raising_causes(wait);
  } catch (const PeerError& error) {
    if (interpreter().raise_communication_error) {
      interpreter().raise_communication_error(error.what());
    }
    throw;
  }
}

}  // namespace tpkernels
