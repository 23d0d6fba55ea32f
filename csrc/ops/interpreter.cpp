#include "ops/interpreter.h"

namespace tpkernels {
namespace {
Interpreter current;
}  // namespace

void set_interpreter(const Interpreter& interpreter) { current = interpreter; }
const Interpreter& interpreter() { return current; }

}  // namespace tpkernels
