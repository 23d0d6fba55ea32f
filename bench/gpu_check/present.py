"""The extension of a dry run: the one that was copied where it serves here, else a build of it."""

from __future__ import annotations

import os
import sys

from tpkernels import native
from tpkernels.build import record
from tpkernels.build.sources import PACKAGE, source_root, sources_hash


def main() -> None:
    """Say that it loads, or become ``python -m tpkernels.build --optional``."""
    built = record.read(PACKAGE).get("sources")
    if built == sources_hash(source_root()) and native.load() is not None:
        print(f"{record.extension_path(PACKAGE).name} is there already, and loads")
        return
    print(f"the extension that was copied does not serve {sys.executable}", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "tpkernels.build", "--optional"])


if __name__ == "__main__":
    main()
