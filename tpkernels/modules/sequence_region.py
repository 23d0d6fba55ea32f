"""A stack of blocks between whose ends activations are sharded on the sequence.

    [B, S, D] -> scatter -> [B, s_r, D] block [B, s_r, D] block ... block -> gather -> [B, S, D]

The first block takes the whole sequence, the last one gives it back. Blocks in between know a
shard by its storage, which the block before has noted: so recomputation in backward finds how the
sequence was cut in *its* forward, and a tensor that came another way is not taken for a shard.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tpkernels.comm.group import Group
from tpkernels.comm.regions import gather_from_tensor_model_parallel_region as gather_from_region
from tpkernels.comm.regions import scatter_to_sequence_parallel_region as scatter_to_region
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules.sequence import SEQUENCE, SequenceShards
from tpkernels.overlap import sequence_sizes

FIX = "sequence_parallel=False"
_UNKNOWN = object()


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Cuts:
    """How the tensors that went through blocks are cut, as long as their memory lives.

    Known by storage, not by identity: autograd and checkpointing hand on other objects that
    share it. A storage is held weakly, and its address is not given anew while it is.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Any, list[int] | None]] = {}
        self._most = 64

    def note(self, x: Tensor, sizes: list[int] | None) -> None:
        """``x`` is cut into ``sizes``, or whole (None)."""
        reference = StorageWeakRef(x.untyped_storage())
        self._known[reference.cdata] = reference, _place(x), sizes
        if len(self._known) > self._most:
            kept = {key: each for key, each in self._known.items() if not each[0].expired()}
            self._known, self._most = kept, max(64, 2 * len(kept))

    def of(self, x: Tensor) -> Any:
        """How ``x`` is cut: a list of sizes, None (whole), or ``_UNKNOWN``."""
        reference = StorageWeakRef(x.untyped_storage())
        _, place, sizes = self._known.get(reference.cdata, (None, None, None))
        return sizes if place == _place(x) else _UNKNOWN

    def __deepcopy__(self, memo: dict[int, Any]) -> _Cuts:
        return _Cuts()  # of a copied model no forward has run


def _place(x: Tensor) -> Any:
    return x.shape, x.stride(), x.storage_offset()


class SequenceRegion:
    """What the blocks of one stack share.

    Args:
        group: over whose ranks the sequence is cut.
        name: path of the stack, for messages.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self.shards = SequenceShards()
        self.shards.active = False
        self._cuts = _Cuts()
        self._sizes: list[int] | None = None  # of the forward that runs
        self._is_open = False
        self._wants_whole = False  # the caller asked for hidden states
        self._last = ""  # block that ran

    @torch.compiler.disable
    def enter(self, x: Tensor, name: str, is_first: bool) -> list[int] | None:
        """How the sequence is cut in this call of block ``name``; None: it runs on all of it.

        Raises:
            ConfigError: a tensor that no block of this stack has given.
        """
        recomputes = in_backward()
        if is_first and not recomputes:
            sizes = self._sizes = self._cut(x)
            self._is_open = sizes is not None
        else:
            sizes = self._cuts.of(x)
            if sizes is _UNKNOWN and is_first:
                sizes = self._cut(x)
            elif sizes is _UNKNOWN and self._sizes is None and not recomputes:
                sizes = None
            elif sizes is _UNKNOWN:
                raise ConfigError(
                    f"{name}: its input {tuple(x.shape)} was not given by a block of {self.name} "
                    f"(the one before was {self._last or 'none'}), so that it is not known to be a "
                    "shard of the sequence. Something between the blocks makes a new tensor: a "
                    f"hook, a cast, code of the model. Fix: {FIX}"
                )
        self._cuts.note(x, sizes)
        self._last = name
        return sizes

    def _cut(self, x: Tensor) -> list[int] | None:
        """Sizes for a forward of ``x`` [.., S, D]; None where the sequence stays whole.

        It does where there are fewer tokens than ranks (decoding with a cache), and where hidden
        states are recorded, which are whole. The same on every rank, since x is.
        """
        world = self.group.size
        plain = x.layout is torch.strided and not x.is_nested and x.is_floating_point()
        if not plain or x.dim() < 2 or x.shape[SEQUENCE] < world:
            return None
        if self._wants_whole or recorded("hidden_states"):
            return None
        return sequence_sizes(x.shape[SEQUENCE], world)

    @torch.compiler.disable
    def scatter(self, x: Tensor, sizes: list[int]) -> Tensor:
        """This rank's shard of a whole ``x``."""
        return scatter_to_region(x, self.group.name, SEQUENCE, sizes)

    @torch.compiler.disable
    def leave(self, result: Any, sizes: list[int], name: str, is_last: bool) -> Any:
        """What block ``name`` gives: its shard, noted, or after the last block the whole."""
        y = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(y, Tensor) or y.dim() < 2 or y.shape[SEQUENCE] != sizes[self.group.rank]:
            shown = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise UnsupportedModuleError(
                f"{name}: of a shard of {sizes[self.group.rank]} tokens it gives {shown}, not a "
                f"tensor of as many tokens (or a tuple that begins with one). Fix: {FIX}"
            )
        if is_last:
            y = gather_from_region(y, self.group.name, SEQUENCE, sizes)
            if not in_backward():
                self._is_open, self._sizes = False, None
        else:
            self._cuts.note(y, sizes)
        if not isinstance(result, tuple):
            return y
        make = getattr(type(result), "_make", type(result))  # a namedtuple's own
        return make((y, *result[1:]))

    @torch.compiler.disable
    def passed(self, result: Any) -> None:
        """A block gave ``result`` of whole sequences: so is what the next one gets."""
        y = result[0] if isinstance(result, tuple) and result else result
        if isinstance(y, Tensor) and y.layout is torch.strided:
            self._cuts.note(y, None)

    @torch.compiler.disable
    def begin_root(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook (with keywords) before the forward of the whole model."""
        if not in_backward():
            self._wants_whole = False
            self.begin(module, args, kwargs)

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook (with keywords) before the forward of a module that runs the stack."""
        if not in_backward():
            self._is_open, self._sizes, self._last = False, None, ""
            config = getattr(module, "config", None)
            asked = kwargs.get("output_hidden_states")
            if asked is None:
                asked = getattr(config, "output_hidden_states", None)
            self._wants_whole |= asked is not None and asked is not False

    @torch.compiler.disable
    def finish(self, module: nn.Module, *_: Any) -> None:
        """Hook after it: the sequence must be whole again.

        Raises:
            ConfigError: the last block was not called.
        """
        if self._is_open and not in_backward():
            self._is_open, self._sizes = False, None
            raise ConfigError(
                f"{type(module).__name__} left {self.name} after block {self._last}, not after its "
                "last one, which gathers the sequence: every rank computed with its shard as if it "
                "were the whole. Fix: call parallelize on the blocks that are used (cut the "
                f"ModuleList before), or {FIX}"
            )


def recorded(*kinds: str) -> bool:
    """Whether transformers records such outputs of modules now (``output_hidden_states=True``)."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    kept = (None if collector is None else collector.get()) or {}
    return any(kind in kept for kind in kinds or kept)
