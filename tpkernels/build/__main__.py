"""``python -m tpkernels.build``: as ``tpkernels build``."""

from tpkernels.build.command import main

if __name__ == "__main__":
    raise SystemExit(main())
