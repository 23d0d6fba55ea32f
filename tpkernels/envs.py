"""The environment variables tpkernels reads, each when it is needed and never at import.

======================  ===========================  ==========================================
variable                values (default)             meaning
======================  ===========================  ==========================================
``TPKERNELS_GEMM``      auto, reference, cpu,        implementation that serves the local ops;
                        onednn, triton, cuda,        auto: on CPU the compiled kernels, on CUDA
                        cublaslt (auto)              what the measured table says is fastest;
                                                     onednn serves gemm_act on CPU; this version
                                                     lacks cuda: asking for it raises
``TPKERNELS_OVERLAP``   auto, off, chunked,          overlap strategy of GEMM and collective;
                        signaled, fused (auto)       auto: chunks as the measured table says;
                                                     signaled is for GPUs (on CPU a twin shows
                                                     that it is right), fused for CPU ranks that
                                                     share memory: what cannot serve raises
``TPKERNELS_CACHE``     a directory                  where ``tpkernels bench --tune`` keeps the
                        (~/.cache/tpkernels)         measured tables of this user
``TPKERNELS_CHECK``     first, always, off (first)   when ranks compare their inputs
``TPKERNELS_TIMEOUT``   seconds > 0 (300)            time limit of a collective
``TPKERNELS_NATIVE``    1, 0 (1)                     0: do not load the compiled extension
``TPKERNELS_CUDA``      auto, 1, 0 (auto)            read by the build: compile CUDA sources
======================  ===========================  ==========================================
"""

from __future__ import annotations

import os
from pathlib import Path

from tpkernels.errors import ConfigError

IMPLEMENTATIONS = ("reference", "cpu", "onednn", "triton", "cuda", "cublaslt")
OVERLAP_STRATEGIES = ("off", "chunked", "signaled", "fused")
CHECK_MODES = ("first", "always", "off")


def _one_of(variable: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(variable, default) or default
    if value not in allowed:
        raise ConfigError(
            f"{variable}={value!r} is not known; allowed: {', '.join(allowed)}. "
            f"Fix: unset {variable} or set one of these"
        )
    return value


def gemm() -> str:
    """The implementation asked for by ``TPKERNELS_GEMM``, or ``"auto"``."""
    return _one_of("TPKERNELS_GEMM", "auto", ("auto", *IMPLEMENTATIONS))


def overlap() -> str:
    """The overlap strategy asked for by ``TPKERNELS_OVERLAP``, or ``"auto"``."""
    return _one_of("TPKERNELS_OVERLAP", "auto", ("auto", *OVERLAP_STRATEGIES))


def check() -> str:
    """When ranks compare what they were given: ``first`` calls, ``always`` or ``off``."""
    return _one_of("TPKERNELS_CHECK", "first", CHECK_MODES)


def cache() -> Path:
    """The user's directory of measured tables (``TPKERNELS_CACHE``); it need not exist yet."""
    text = os.path.expanduser(os.environ.get("TPKERNELS_CACHE") or "~/.cache/tpkernels")
    path = Path(text)
    if os.path.exists(text) and not os.path.isdir(text):
        raise ConfigError(
            f"TPKERNELS_CACHE={str(path)!r} is a file; allowed: a directory, made where it is "
            "missing. Fix: unset TPKERNELS_CACHE"
        )
    return path


def native() -> bool:
    """Whether the compiled extension may be loaded (``TPKERNELS_NATIVE``)."""
    return _one_of("TPKERNELS_NATIVE", "1", ("0", "1")) == "1"


def timeout() -> float:
    """Seconds a collective may take before the waiting rank raises (``TPKERNELS_TIMEOUT``)."""
    text = os.environ.get("TPKERNELS_TIMEOUT") or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e8:
        raise ConfigError(
            f"TPKERNELS_TIMEOUT={text!r} is not a time limit; allowed: a number of seconds "
            "greater than 0. Fix: export TPKERNELS_TIMEOUT=300"
        )
    return seconds
