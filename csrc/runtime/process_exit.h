// The end of a process whose threads still wait. Once the interpreter goes, a thread that comes
// back to it is stopped where it stands, in the middle of destructors, which aborts the process.
#pragma once

namespace tpkernels {

// From now on threads that wait here for other ranks or threads do not come back, all but the
// process's first.
void begin_process_exit();
bool process_exits();
// What they call when their wait is over.
void stay_if_process_exits();

}  // namespace tpkernels
