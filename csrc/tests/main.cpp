#include "tests/check.h"

int main() { return tpkernels::testing::run_all(); }
