"""Starting the ranks of a command: `--nproc N` through `torch.distributed.run`, on this machine.

The launcher is quiet: what the ranks print is all there is, and a rank that fails gives one
message and a non-zero exit status. Under `torchrun` nothing is started; the command joins.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Mapping

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

from tpkernels import errors
from tpkernels.testing.rank_errors import RankFailure, exit_status, rank_error

_LAUNCHED = "TPKERNELS_LAUNCHED"
INTERRUPTED = 130


def inside_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `torchrun`, or `start_ranks`, started this process as one of several ranks."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def prepare_rank() -> None:
    """To be called first thing in a rank.

    Ctrl-C then ends it at once, without a traceback, and what every rank would warn of is said
    once: by the launcher, or by rank 0 under `torchrun`.
    """
    launched = os.environ.get(_LAUNCHED)
    if launched:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if launched or os.environ["RANK"] != "0":
        warnings.simplefilter("ignore", errors.TPKernelsWarning)


def start_ranks(command: list[str], nproc: int) -> int:
    """Run `python -m COMMAND` on `nproc` ranks of this machine, and return the exit status.

    Each rank gets `max(1, cores // nproc)` threads unless `OMP_NUM_THREADS` says otherwise.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # Ranks share the cores: a thread that spins while it waits would take one from another rank.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform.startswith("linux"):
        # All ranks are on this machine, whose host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[_LAUNCHED] = "1"
    logging.disable(logging.CRITICAL)  # this process only waits; the messages below say it all
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={nproc}"]
    parsed = run.parse_args([*options, "-m", command[0]])
    # Past its parser, which would take `--nproc` for an abbreviation of its own option.
    parsed.training_script_args = command[1:]
    try:
        run.run(parsed)
    except ChildFailedError as error:
        print(flush=True)  # rank 0 may have been in the middle of a line
        print(_describe(error, nproc), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SignalException):
        print("tpkernels: interrupted; all ranks were ended", file=sys.stderr)
        return INTERRUPTED
    return 0


def report_failure(error: BaseException) -> int:
    """Tell the launcher why this rank fails; returns the exit status to end with."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)
    if not os.environ.get(_LAUNCHED):  # torchrun shows a summary, but not the message as it is
        print(f"tpkernels: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
    return 1


def _describe(error: ChildFailedError, nproc: int) -> str:
    failures = []
    for rank, failure in error.failures.items():
        recorded = failure.error_file_data.get("message")
        if isinstance(recorded, dict):
            type_name, _, message = recorded["message"].partition(": ")
            # An error of ours says what to do; any other is a bug, which the stack helps to find.
            stack = "" if hasattr(errors, type_name) else recorded["extraInfo"]["py_callstack"]
            failures.append(RankFailure(rank, "raised", message, type_name, stack))
        else:
            status = f"died: it {exit_status(failure.exitcode)}"
            failures.append(RankFailure(rank, "died", status))
    # SIGTERM is how the launcher ends the others once one has failed.
    causes = [failure for failure in failures if "SIGTERM" not in failure.message] or failures
    first = rank_error(causes, nproc)
    lines = [f"tpkernels: {first.failures[0].headline()}"]
    lines += first.failures[0].message.splitlines()[1:]
    if first.remote_traceback:
        lines.append(first.remote_traceback.rstrip())
    return "\n".join(lines)
