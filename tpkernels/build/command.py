"""``tpkernels build``: compile the native extension in place, for the torch that is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tpkernels.build.compile import CompileError
from tpkernels.build.extension import build
from tpkernels.build.sources import PACKAGE
from tpkernels.build.toolchain import Unavailable
from tpkernels.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Build if sources, torch or flags have changed; 0 when the extension is there."""
    parser = argparse.ArgumentParser(
        prog="tpkernels build",
        description="Compile the native extension in place, for the torch that is installed.",
    )
    parser.add_argument("--force", action="store_true", help="install anew even if up to date")
    parser.add_argument(
        "--optional",
        action="store_true",
        help="where native code cannot be built, say what is lost and exit with 0",
    )
    options = parser.parse_args(argv)
    try:
        built = build(force=options.force)
    except Unavailable as missing:
        if options.optional:
            print(f"native kernels: none, plain PyTorch serves instead; {missing}", file=sys.stderr)
            return 0
        print(f"tpkernels build: {missing}", file=sys.stderr)
        return 1
    except (CompileError, ConfigError) as error:
        print(f"tpkernels build: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        fix = "run it as the user who installed tpkernels, or pip install --user"
        print(f"tpkernels build: cannot write to {PACKAGE}: {error}. Fix: {fix}", file=sys.stderr)
        return 1
    if built:
        print("tpkernels build: done")
    elif not options.optional:
        print("tpkernels build: up to date")
    return 0
