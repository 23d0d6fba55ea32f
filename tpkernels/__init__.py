"""tpkernels: tensor-parallel layers whose communication disappears, on whatever machine you have.

    mesh = tpkernels.init_mesh(tp=2)
    report = tpkernels.parallelize(model, mesh["tp"])

Names are imported when first used, so ``import tpkernels`` is quick, works without the compiled
extension and without a GPU, and never initialises CUDA.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from tpkernels import native
from tpkernels.comm import tpshm

__version__ = "0.1.0"

if TYPE_CHECKING:  # for type checkers; at run time __getattr__ imports them
    from tpkernels import comm as comm
    from tpkernels import ops as ops
    from tpkernels import trace as trace
    from tpkernels.checkpoint import full_state_dict as full_state_dict
    from tpkernels.checkpoint import load_full_state_dict as load_full_state_dict
    from tpkernels.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from tpkernels.comm.agreement import check_agreement as check_agreement
    from tpkernels.comm.mesh import init_mesh as init_mesh
    from tpkernels.modules import TPMLP as TPMLP
    from tpkernels.modules import ColumnParallelLinear as ColumnParallelLinear
    from tpkernels.modules import RowParallelLinear as RowParallelLinear
    from tpkernels.modules import TPAttention as TPAttention
    from tpkernels.modules import TPMultiheadAttention as TPMultiheadAttention
    from tpkernels.modules import VocabParallelEmbedding as VocabParallelEmbedding
    from tpkernels.modules import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tpkernels.optimizer_checkpoint import (
        full_optimizer_state_dict as full_optimizer_state_dict,
    )
    from tpkernels.optimizer_checkpoint import (
        load_full_optimizer_state_dict as load_full_optimizer_state_dict,
    )
    from tpkernels.parallelize import parallelize as parallelize
    from tpkernels.parallelize import unparallelize as unparallelize
    from tpkernels.report import ParallelReport as ParallelReport
    from tpkernels.shard_spec import ShardSpec as ShardSpec
    from tpkernels.shard_spec import spec_of as spec_of
    from tpkernels.zero import ZeroConfig as ZeroConfig
    from tpkernels.zero import ZeroManager as ZeroManager
    from tpkernels.zero import zero as zero

_EXPORTS = {
    "ColumnParallelLinear": "tpkernels.modules",
    "ParallelReport": "tpkernels.report",
    "RowParallelLinear": "tpkernels.modules",
    "SequenceParallel": "tpkernels.modules",
    "SequenceShards": "tpkernels.modules",
    "ShardSpec": "tpkernels.shard_spec",
    "TPAttention": "tpkernels.modules",
    "TPMLP": "tpkernels.modules",
    "TPMultiheadAttention": "tpkernels.modules",
    "VocabParallelEmbedding": "tpkernels.modules",
    "ZeroConfig": "tpkernels.zero",
    "ZeroManager": "tpkernels.zero",
    "check_agreement": "tpkernels.comm.agreement",
    "clip_grad_norm_": "tpkernels.clip_grad",
    "full_optimizer_state_dict": "tpkernels.optimizer_checkpoint",
    "full_state_dict": "tpkernels.checkpoint",
    "init_mesh": "tpkernels.comm.mesh",
    "load_full_optimizer_state_dict": "tpkernels.optimizer_checkpoint",
    "load_full_state_dict": "tpkernels.checkpoint",
    "parallelize": "tpkernels.parallelize",
    "spec_of": "tpkernels.shard_spec",
    "unparallelize": "tpkernels.parallelize",
    "vocab_parallel_cross_entropy": "tpkernels.modules",
    "zero": "tpkernels.zero",
}

_PACKAGES = ("comm", "ops", "trace")

__all__ = ["__version__", *_PACKAGES, *_EXPORTS]  # noqa: PLE0604 (names are lazy)

_TORCH_MISSING = (
    "tpkernels: torch is not installed and every tensor feature needs it. "
    "Fix: pip install 'torch>=2.11'"
)
_HAVE_TORCH = importlib.util.find_spec("torch") is not None

if not _HAVE_TORCH:
    print(_TORCH_MISSING, file=sys.stderr)
elif not getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
    # Else `import torch` asks for the backend, by its entry point: nobody asks for kernels yet.
    native.warn_if_missing()
    tpshm.register_if_loaded()


class _Package(types.ModuleType):
    """Importing ``tpkernels.parallelize`` does not hide the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _EXPORTS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _EXPORTS or name in _PACKAGES:
        if not _HAVE_TORCH:
            raise ImportError(_TORCH_MISSING)
        if name in _PACKAGES:
            return importlib.import_module(f"tpkernels.{name}")
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tpkernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
