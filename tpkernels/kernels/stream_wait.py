"""``cuStreamWaitValue32``: a stream waits for a count in device memory, and no kernel spins.

The GPU's front end waits, so no multiprocessor is taken from the GEMM that counts. The comparison
is cyclic, ``(int32_t)(*address - target) >= 0``, as counts that wrap around need it (CUDA driver
API, Stream Memory Operations, ``CU_STREAM_WAIT_VALUE_GEQ``).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from tpkernels.errors import TPKernelsError

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ, cuda.h
_SUCCESS = 0  # CUDA_SUCCESS, cuda.h


@lru_cache
def _driver() -> Any:
    """``cuStreamWaitValue32_v2`` of the CUDA driver, or None without one that has it."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call


def is_supported(stream: torch.cuda.Stream, reached: torch.Tensor) -> bool:
    """Whether the driver lets ``stream`` wait: by a wait for 0, which ``reached`` [1] holds.

    Asked by a call: the attribute ``CAN_USE_STREAM_MEM_OPS`` of before CUDA 12 says no where the
    calls of today work.
    """
    driver = _driver()
    if driver is None:
        return False
    return driver(stream.cuda_stream, reached.data_ptr(), 0, _GEQ) == _SUCCESS


def wait_until(stream: torch.cuda.Stream, counts: torch.Tensor, index: int, target: int) -> None:
    """``stream`` waits until ``counts[index]``, int32, is at ``target`` or beyond (mod 2^32).

    CUDA does not know of the order that this makes, so what counts must be launched before, in a
    stream that waits for nothing that comes after.

    Raises:
        TPKernelsError: the driver refuses; :func:`is_supported` was not asked.
    """
    address = counts.data_ptr() + index * counts.element_size()
    status = _driver()(stream.cuda_stream, address, target % 2**32, _GEQ)
    if status != _SUCCESS:
        raise TPKernelsError(
            f"cuStreamWaitValue32 on {counts.device} failed with CUresult {status}"
        )
