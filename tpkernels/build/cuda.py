"""Whether the CUDA sources are compiled, why not, and for which architectures.

``TPKERNELS_CUDA``: ``auto`` (compile where nvcc and a CUDA torch of the same major are there),
``1`` (or fail saying what is missing), ``0`` (skip).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tpkernels.build.sources import source_files
from tpkernels.build.toolchain import Unavailable
from tpkernels.build.torch_install import TorchInstall
from tpkernels.errors import ConfigError

DEFAULT_ARCHITECTURES = ("8.0", "9.0a")  # Ampere; Hopper with wgmma and TMA
MODES = ("auto", "1", "0")


@dataclass(frozen=True)
class CudaToolkit:
    """nvcc, and what to compile for."""

    nvcc: Path
    version: str
    architectures: tuple[str, ...]

    @property
    def home(self) -> Path:
        """The toolkit's directory, with include and lib64."""
        return self.nvcc.parent.parent


def cuda_sources(root: Path) -> list[Path]:
    """The ``.cu`` files of the extension."""
    return [path for path in source_files(root) if path.suffix == ".cu"]


def find_toolkit() -> CudaToolkit:
    """nvcc of ``$CUDA_HOME``, of PATH or of /usr/local/cuda.

    Raises:
        Unavailable: there is none, or it does not run.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    on_path = shutil.which("nvcc")
    candidates = [Path(home, "bin", "nvcc") for home in homes[:2] if home]
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path(str(homes[2]), "bin", "nvcc")]
    for nvcc in candidates:
        if nvcc.is_file():
            break
    else:
        raise Unavailable("no nvcc", "install the CUDA toolkit, or set CUDA_HOME to where it is")
    output = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+\.\d+)", output)
    if release is None:
        raise Unavailable(f"{nvcc} --version names no release", "reinstall the CUDA toolkit")
    # A wrapper script on PATH says where the toolkit is through its own macro.
    top = re.search(r"^#\$ TOP=(.+)$", _dry_run(nvcc), re.MULTILINE)
    home = (nvcc.parent / ".." if top is None else Path(top.group(1).strip())).resolve()
    return CudaToolkit(home / "bin" / "nvcc", release.group(1), architectures())


def _dry_run(nvcc: Path) -> str:
    command = [str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True).stderr


def architectures() -> tuple[str, ...]:
    """``TORCH_CUDA_ARCH_LIST`` as in torch, else :data:`DEFAULT_ARCHITECTURES`.

    Raises:
        ConfigError: an entry that is not like 8.0, 9.0a or 9.0+PTX.
    """
    listed = [
        arch for arch in re.split(r"[;, ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")) if arch
    ]
    for arch in listed:
        if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", arch):
            raise ConfigError(
                f"TORCH_CUDA_ARCH_LIST: {arch!r} is not an architecture; allowed: numbers like "
                "8.0, 9.0a or 9.0+PTX, separated by semicolons. "
                "Fix: TORCH_CUDA_ARCH_LIST='8.0;9.0a'"
            )
    return tuple(listed) or DEFAULT_ARCHITECTURES


def gencode_flags(source: Path, listed: tuple[str, ...]) -> list[str]:
    """nvcc's flags for ``source``; none if no listed architecture is for it.

    A file named ``*_sm90.cu`` uses instructions of that architecture only: it is compiled for
    sm_90a where 9.0 or 9.0a is listed, and not at all elsewhere. Other files, ``*_sm80.cu`` too,
    are for every architecture.
    """
    own = re.search(r"_sm(\d+)$", source.stem)
    codes: list[str] = []
    for arch in listed:
        number = arch.removesuffix("+PTX").replace(".", "")
        if own and int(own.group(1)) >= 90:
            if number.rstrip("af") == own.group(1):
                codes.append(f"arch=compute_{own.group(1)}a,code=sm_{own.group(1)}a")
            continue
        codes.append(f"arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            codes.append(f"arch=compute_{number},code=compute_{number}")
    return [word for code in dict.fromkeys(codes) for word in ("-gencode", code)]


def choose(torch: TorchInstall, root: Path) -> CudaToolkit | str:
    """The toolkit to compile the CUDA sources with, or the reason why they are left out.

    Raises:
        ConfigError: ``TPKERNELS_CUDA`` is not auto, 1 or 0, or is 1 and something is missing.
    """
    if _mode() == "0":
        return "TPKERNELS_CUDA=0"
    try:
        return _require(torch, root)
    except Unavailable as missing:
        refuse_if_demanded(missing)
        return missing.reason


def refuse_if_demanded(missing: Unavailable) -> None:
    """Raise :class:`ConfigError` where ``TPKERNELS_CUDA=1`` asks for what ``missing`` prevents."""
    if _mode() == "1":
        raise ConfigError(f"TPKERNELS_CUDA=1, but {missing}")


def _mode() -> str:
    mode = os.environ.get("TPKERNELS_CUDA", "auto") or "auto"
    if mode not in MODES:
        raise ConfigError(
            f"TPKERNELS_CUDA={mode!r} is not known; allowed: {', '.join(MODES)}. "
            "Fix: unset TPKERNELS_CUDA"
        )
    return mode


def _require(torch: TorchInstall, root: Path) -> CudaToolkit:
    if torch.cuda is None:
        raise Unavailable(
            f"torch {torch.version} is built without CUDA", "install a CUDA build of torch"
        )
    toolkit = find_toolkit()
    if toolkit.version.split(".")[0] != torch.cuda.split(".")[0]:
        raise Unavailable(
            f"nvcc is {toolkit.version} and torch's CUDA is {torch.cuda}: the majors differ",
            f"install the CUDA {torch.cuda} toolkit and set CUDA_HOME to it",
        )
    if not cuda_sources(root):
        raise Unavailable("this version has no CUDA sources", "unset TPKERNELS_CUDA")
    return toolkit
