"""Compiling launches for a GPU that is not there: what they take in registers and memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tpkernels.kernels.launch import STAND_IN

_WARP = 32
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_INSTRUCTIONS = {  # in PTX, by the names they have here
    "wgmma": "wgmma.mma_async",
    "mma.sync": "mma.sync",
    "tcgen05": "tcgen05.mma",
    "tma": "cp.async.bulk.tensor",
    "acquire": ".gpu.acquire",
    "release": ".sys.release",
}


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of one launch.

    Attributes:
        registers: a thread. spilled_bytes: of registers that a thread stores to memory.
        shared: bytes of shared memory a block.
        instructions: which of the tensor core, copy engine and ordering instructions its PTX
            has.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared: int
    instructions: tuple[str, ...]


class _AbsentGPU:
    """Stands where a launch asks for the device, and where Triton asks its driver for it."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        self.capability, self.multiprocessors = capability, multiprocessors
        self.compiled: list[CompiledKernel] = []
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], _WARP)

    def launch(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        active = driver._active
        driver.set_active(self)
        try:
            compiled = kernel.warmup(*args, grid=(1,), **options)
        finally:
            driver._active = active
        ptx = compiled.asm["ptx"]
        registers, in_memory = _resource_usage(compiled.asm["cubin"])
        spilled = _spilled_bytes(ptx, self._target.arch) if in_memory else 0
        used = tuple(name for name, text in _INSTRUCTIONS.items() if text in ptx)
        metadata = compiled.metadata
        self.compiled.append(
            CompiledKernel(metadata.name, registers, spilled, metadata.shared, used)
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return f"absent {self._target.arch}"  # a key of Triton's caches

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling_for(
    capability: tuple[int, int], multiprocessors: int = 132
) -> Iterator[list[CompiledKernel]]:
    """Compile every launch inside for a GPU of ``capability`` instead of running it.

    Gives the list that the results are appended to. Tensors may be of any device and need not
    have been written; results of the launchers have not.
    """
    absent = _AbsentGPU(capability, multiprocessors)
    token = STAND_IN.set(absent)
    try:
        yield absent.compiled
    finally:
        STAND_IN.reset(token)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) of a thread."""
    tool = _TOOLS / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, timeout=60
        )
    found = _USAGE.search(shown.stdout)
    if found is None:
        raise RuntimeError(f"{tool} does not say what a kernel uses: {shown.stdout}{shown.stderr}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _spilled_bytes(ptx: str, arch: int) -> int:
    """Bytes of registers stored to memory; a stack may also hold other things."""
    tool = _TOOLS / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    target = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        output = Path(folder, "kernel.cubin")
        command = [str(tool), "-v", f"--gpu-name={target}", str(source), "-o", str(output)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = _SPILLS.search(shown.stderr)
    if found is None:
        raise RuntimeError(f"{tool} does not say what a kernel spills: {shown.stderr}")
    return max(map(int, found.groups()))
