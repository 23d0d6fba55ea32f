"""`python -m tpkernels` is the `tpkernels` command."""

import sys

from tpkernels.cli import main

sys.exit(main())
