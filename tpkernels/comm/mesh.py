"""``init_mesh``: one ``DeviceMesh`` for every axis, from torchrun's variables or from none."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpkernels import envs
from tpkernels.comm import tpshm
from tpkernels.errors import ConfigError

tpshm.register()

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def init_mesh(
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int | None = None,
    cp: int = 1,
    tp: int = 1,
    *,
    device_type: str | None = None,
) -> DeviceMesh:
    """A ``DeviceMesh`` with dimensions ``("pp", "dp_replicate", "dp_shard", "cp", "tp")``.

    The process group is started from torchrun's variables (``RANK``, ``WORLD_SIZE``, ...) when
    none runs yet; a plain ``python`` is a world of one. It then runs on ``tpshm``, which is Gloo
    where ranks share no host, and on ``nccl`` for CUDA. Flattened dimensions ``"dp"``
    (dp_replicate x dp_shard) and ``"dp_shard_cp"`` can be taken by name as well.

    Args:
        pp, dp_replicate, cp, tp: ranks along each axis; exactly one argument may be None and
            is filled with what the world size leaves (by default ``dp_shard``).
        device_type: ``"cuda"`` or ``"cpu"``; default: cuda if a GPU is there.

    Collective over all ranks. The time limit of its collectives is ``TPKERNELS_TIMEOUT``; where it
    is not set, a process group that the caller started keeps its own.

    Raises:
        ConfigError: sizes that do not multiply to the world size, naming what would; a device type
            that cannot be had.
    """
    device_type = _checked_device_type(device_type)
    limited = not dist.is_initialized() or bool(os.environ.get("TPKERNELS_TIMEOUT"))
    timeout = datetime.timedelta(seconds=envs.timeout())
    _start_process_group(device_type, timeout)
    given = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    sizes = _fill(given, dist.get_world_size())
    mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    flattened = [
        mesh["dp_replicate", "dp_shard"]._flatten("dp"),
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp"),
    ]
    if limited:
        for group in (*mesh.get_all_groups(), *(each.get_group() for each in flattened)):
            _limit(group, timeout)
    return mesh


def _limit(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """As ``_set_pg_timeout``, which passes over every backend that is not PyTorch's own."""
    for device in group._device_types:
        backend = group._get_backend(device)
        # The second name for those that PyTorch's debug mode wraps, where this torch has it.
        for name in ("_set_default_timeout", "set_timeout"):
            if hasattr(backend, name):
                with contextlib.suppress(RuntimeError):  # a backend without limits
                    getattr(backend, name)(timeout)
                break


def _checked_device_type(device_type: str | None) -> str:
    has_cuda = torch.cuda.is_available()
    if device_type is None:
        return "cuda" if has_cuda else "cpu"
    if device_type not in ("cuda", "cpu"):
        raise ConfigError(
            f"device_type={device_type!r} is not known; allowed: 'cuda', 'cpu'. Fix: leave it out "
            "to take cuda if a GPU is there"
        )
    if device_type == "cuda" and not has_cuda:
        raise ConfigError(
            f"device_type='cuda', but torch {torch.__version__} finds no CUDA device. Fix: "
            "device_type='cpu', or install a torch with CUDA on a machine with a GPU"
        )
    return device_type


def _fill(given: dict[str, int | None], world: int) -> dict[str, int]:
    for axis, size in given.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"{axis}={size!r} must be a whole number of ranks, at least 1")
    missing = [axis for axis, size in given.items() if size is None]
    if len(missing) > 1:
        raise ConfigError(
            f"{' and '.join(missing)} are None; at most one axis can be filled from the world size"
        )
    product = 1
    for size in given.values():
        product *= size or 1
    shown = " x ".join(f"{axis}={size}" for axis, size in given.items() if size not in (1, None))
    shown = shown or "all axes 1"
    if (missing and world % product) or (not missing and product != world):
        raise ConfigError(
            f"{shown} needs {'a multiple of ' if missing else ''}{product} ranks, but the world "
            f"has {world}. Fix: start {product} ranks (torchrun --nproc-per-node {product}) or "
            f"choose sizes whose product {'divides' if missing else 'is'} {world}"
        )
    return {axis: world // product if size is None else size for axis, size in given.items()}


def _start_process_group(device_type: str, timeout: datetime.timedelta) -> None:
    if dist.is_initialized():
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # All ranks ask for the same, or they wait for each other; where a rank cannot have tpshm, all
    # agree on Gloo while they make the group.
    cpu = tpshm.NAME if sys.platform.startswith("linux") else "gloo"
    backend = f"cpu:{cpu},cuda:nccl" if device_type == "cuda" else cpu
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device
        )
