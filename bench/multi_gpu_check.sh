#!/usr/bin/env bash
# What two or more GPUs can tell about this checkout: see --help.
#
#   bench/multi_gpu_check.sh OUT_DIR [--quick] [--dry-run]
#
# PYTHON: the Python to use, with torch. Default: python3, or this checkout's .venv where python3
# has no torch.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$here/../.venv/bin/python" ] &&
  ! python3 -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null
then
  python=$here/../.venv/bin/python
fi
command -v "$python" >/dev/null || {
  echo "multi_gpu_check: $python not found. Fix: install Python 3.11 or newer, or set PYTHON" >&2
  exit 2
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "multi_gpu_check: $("$python" --version) is too old. Fix: PYTHON=python3.11 (or newer)" >&2
  exit 2
}
exec "$python" -B "$here/multi_gpu_check" "$@"
