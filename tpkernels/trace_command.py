"""The ``tpkernels trace`` command: starts the ranks of a program and merges what they recorded."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tpkernels import launch
from tpkernels.cli import USAGE_ERROR, CommandParser, rank_count
from tpkernels.errors import ConfigError
from tpkernels.trace.outputs import Outputs, write_all
from tpkernels.trace.recording import Recording, read
from tpkernels.traced_script import Program, run

# Tells the ranks where the launcher looks for their recordings; not for users.
_DIRECTORY = "TPKERNELS_TRACE_DIRECTORY"


def main(argv: list[str]) -> int:
    """Run the command; the exit status is the program's."""
    parser = _parser()
    options = parser.parse_args(argv)
    words = options.program[options.program[:1] == ["--"] :]  # which torchrun leaves out
    try:
        outputs = Outputs(options.out)
        outputs.check()
        if options.merge:
            if words:
                raise ConfigError("--merge runs nothing: leave out the program after --")
            return _merge(options.merge, outputs)
        program = Program.parse(words)
        nproc = _ranks(options.nproc)
    except ConfigError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if launch.inside_rank():
        return _rank_main(program, outputs)
    return _launch(argv, nproc, outputs)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tpkernels trace",
        usage="tpkernels trace [--nproc N] [--out PAGE] -- [python] script.py [arguments]",
        description=(
            "Run a program on several ranks and show, for each layer, what it computes, "
            "communicates, and waits for. The program needs no change."
        ),
        epilog=(
            "After -- also: python -m module ..., python -c code ..., tpkernels demo .... "
            "Under torchrun the command joins its ranks."
        ),
    )
    parser.add_argument(
        "--nproc",
        type=rank_count,
        help="ranks to start on this machine (default: 2; under torchrun, its world size)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("trace.html"),
        metavar="PAGE",
        help="the page; beside it PAGE.perfetto.json and PAGE.summary.json (default: trace.html)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing: make the page of ranks' own files (*.rank0.json ...)",
    )
    return parser


def _ranks(nproc: int | None) -> int:
    if not launch.inside_rank():
        return nproc or 2
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise ConfigError(
            f"--nproc {nproc} under a launcher that started {world} ranks. Fix: leave --nproc out"
        )
    return world


def _rank_main(program: Program, outputs: Outputs) -> int:
    directory = os.environ.pop(_DIRECTORY, None)  # the program may start others
    try:
        return run(program, outputs, None if directory is None else Path(directory))
    except Exception as error:
        return launch.report_failure(error)


def _launch(argv: list[str], nproc: int, outputs: Outputs) -> int:
    with tempfile.TemporaryDirectory(prefix="tpkernels-trace-") as directory:
        os.environ[_DIRECTORY] = directory
        status = launch.start_ranks(["tpkernels", "trace", *argv], nproc)
        recordings = read(sorted(Path(directory).glob("rank*.json")))
    if not recordings:
        print("tpkernels trace: no rank recorded anything, so there is no page", file=sys.stderr)
        return status or 1
    try:
        _write(recordings, nproc, outputs)
    except OSError as error:
        print(f"tpkernels trace: error: cannot write the page: {error}", file=sys.stderr)
        return status or 1
    if status in (0, launch.INTERRUPTED):
        return status
    return next((each.exit_status for each in recordings if each.exit_status), status)


def _merge(paths: list[Path], outputs: Outputs) -> int:
    recordings = read(paths)
    sizes = {recording.world_size for recording in recordings}
    if len(sizes) > 1:
        raise ConfigError(
            f"--merge: the files are of runs of {' and '.join(map(str, sorted(sizes)))} ranks. "
            "Fix: give the files of one run"
        )
    _write(recordings, sizes.pop(), outputs)
    return 0


def _write(recordings: list[Recording], world_size: int, outputs: Outputs) -> None:
    write_all(recordings, world_size, outputs)
    known = {recording.rank for recording in recordings}
    absent = [str(rank) for rank in range(world_size) if rank not in known]
    if absent:
        print(
            f"tpkernels trace: nothing is known of rank {', '.join(absent)}: it died before it "
            "could write",
            file=sys.stderr,
        )
    page, *others = outputs.paths
    print(
        f"tpkernels trace: wrote {page}, with {' and '.join(path.name for path in others)}",
        file=sys.stderr,
    )
