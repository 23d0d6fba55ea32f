"""Who carries out a collective: torch.distributed's backends, our direct call, DeepSpeed's op.

gloo        dist.* on a Gloo group
tpshm       dist.* on a group of ours, through shared memory
direct      tpkernels.comm.all_reduce_ on that group, without torch.distributed in between
deepspeed   the op behind deepspeed.comm.inference_all_reduce, where DeepSpeed is installed
nccl        dist.* on an NCCL group; GPUs
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.benchmarks.collectives_ops import ALL_REDUCE, Exchange, c10d_call
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.comm import tpshm
from tpkernels.comm.direct import all_reduce_, has_peers
from tpkernels.errors import ConfigError

GLOO, TPSHM, DIRECT, DEEPSPEED, NCCL = "gloo", "tpshm", "direct", "deepspeed", "nccl"
NAMES = {"cpu": (GLOO, TPSHM, DIRECT, DEEPSPEED), "cuda": (GLOO, NCCL)}
_DIRECT_REDOPS = ("sum", "avg", "max", "min")
_DEEPSPEED_DTYPES = ("fp32", "bf16", "fp16")
_AVX512, _AVX2 = 2, 1  # as DeepSpeed's vector_kernel_level() counts


@dataclass(frozen=True)
class Backend:
    """How to call one.

    Attributes:
        call: of an exchange on one pair of buffers, (exchange, input, output) -> call.
        refusal: why it has not this exchange, or None.
    """

    name: str
    call: Callable[[Exchange, Tensor, Tensor], Callable[[], object]]
    refusal: Callable[[Exchange], str | None]


def absent(name: str, device_type: str) -> str | None:
    """Why `name` is not here, with the fix, or None; looked up before ranks start."""
    if name not in NAMES[device_type]:
        return f"it is not for {device_type}. Fix: one of {', '.join(NAMES[device_type])}"
    if name in (TPSHM, DIRECT):
        available, reason, fix = tpshm.availability()
        if not available:
            return f"{reason}. Fix: {fix or 'leave it out'}"
    if name == DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed. Fix: pip install tpkernels[peers]"
    if name == NCCL and not dist.is_nccl_available():
        return "this torch is built without NCCL. Fix: a torch for CUDA"
    return None


def only_all_reduce(name: str, op: str, dtype: str, redop: str) -> str | None:
    """What `direct` and `deepspeed` have not."""
    if name not in (DIRECT, DEEPSPEED):
        return None
    if op != ALL_REDUCE:
        return "it has only all_reduce"
    if name == DEEPSPEED and redop != "sum":
        return "it has only sum"
    if name == DEEPSPEED and dtype not in _DEEPSPEED_DTYPES:
        return f"it has only {', '.join(_DEEPSPEED_DTYPES)}"
    return None


def connect(names: Sequence[str], asked: bool, ranks: Ranks) -> list[Backend]:
    """The backends, in that order; collective.

    Raises:
        ConfigError: `asked` for one that does not work here.
    """
    found: list[Backend] = []
    shared: Any = None
    for name in names:
        error = None
        try:
            if name in (TPSHM, DIRECT):
                shared = shared or shared_memory_group()
                found.append(_shared(name, shared))
            elif name == DEEPSPEED:
                found.append(_deepspeed(ranks))
            else:
                group = dist.new_group(backend=name)
                found.append(through_c10d(name, group))
        except Exception as failed:
            error = str(failed)
        error = ranks.first_error(error)
        if error is None:
            continue
        if asked:
            raise ConfigError(f"--backends {name}: {error}. Fix: leave it out")
        ranks.note(f"left out {name}: {error}")
        found = [each for each in found if each.name != name]
    return found


def _refusal(name: str) -> Callable[[Exchange], str | None]:
    return lambda exchange: only_all_reduce(name, exchange.op, exchange.dtype, exchange.redop)


def through_c10d(name: str, group: Any) -> Backend:
    """torch.distributed's functions on `group`."""

    def call(exchange: Exchange, given: Tensor, taken: Tensor) -> Callable[[], object]:
        return c10d_call(exchange, given, taken, group)

    return Backend(name, call, _refusal(name))


def shared_memory_group() -> Any:
    """A group of all ranks on tpshm; collective.

    Raises:
        ConfigError: they share no memory.
    """
    group: Any = dist.new_group(backend="tpshm")
    if not has_peers(group.group_name):
        raise ConfigError(f"the ranks share no memory: {tpshm.served_by(group).reason}")
    return group


def _shared(name: str, group: Any) -> Backend:
    if name == TPSHM:
        return through_c10d(name, group)

    def call(exchange: Exchange, given: Tensor, taken: Tensor) -> Callable[[], object]:
        return partial(all_reduce_, given, group, exchange.redop)

    return Backend(name, call, _refusal(name))


def _deepspeed(ranks: Ranks) -> Backend:
    """Its op itself, which is a little faster than `deepspeed.comm.inference_all_reduce`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["LOCAL_SIZE"] = str(ranks.world)  # without it, the op returns and does nothing
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with _quiet():
        importlib.import_module("deepspeed")
        op: Any = importlib.import_module("deepspeed.comm.torch").build_shm_op()
    if op is None:
        raise ConfigError("its shared-memory op cannot be built here")
    level = op.vector_kernel_level() if hasattr(op, "vector_kernel_level") else _AVX512
    op.initialize(ranks.world, ranks.rank)
    all_reduce = torch.ops.deepspeed.inference_all_reduce_.default

    def refusal(exchange: Exchange) -> str | None:
        needed = _AVX2 if exchange.dtype == "fp32" else _AVX512
        if level < needed:
            return "this processor has not the vector instructions that it needs"
        return _refusal(DEEPSPEED)(exchange)

    def call(exchange: Exchange, given: Tensor, taken: Tensor) -> Callable[[], object]:
        return partial(all_reduce, given)

    return Backend(DEEPSPEED, call, refusal)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints while it is imported and built; also its compiler, a child process."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    logging.disable(logging.WARNING)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        logging.disable(logging.NOTSET)
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
