"""Linear layers that read one input (Q, K and V), computed together: one dX, one gather."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tpkernels.errors import ConfigError
from tpkernels.modules.sequence import SEQUENCE, SequenceShards
from tpkernels.overlap import all_gather_gemm, column_gemm_act

if TYPE_CHECKING:
    from tpkernels.modules.linear import ColumnParallelLinear


class JointProjection:
    """Leaves that read one input (Q, K and V) computed together, so that backward sends one dX.

    Inside :meth:`region`, the first leaf called with a tensor computes all leaves' outputs on it;
    the others pick theirs up when called with the same tensor. On a sharded sequence
    :meth:`gather` computes them, and gives the tensor to call the leaves with.
    """

    def __init__(self, leaves: list[ColumnParallelLinear]) -> None:
        self._leaves = leaves
        self._open = False
        self._gathered = False
        self._layer = ""
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def region(self, layer: str = "") -> Iterator[None]:
        """Share outputs between the leaves' calls inside; keeps nothing afterwards.

        ``layer``: the module that is served, for errors and traces.
        """
        self._open, self._layer = True, layer
        try:
            yield
        finally:
            self._open, self._gathered, self._input, self._outputs = False, False, None, {}

    def gather(self, x: Tensor, shards: SequenceShards) -> Tensor:
        """x [..., s_r, K] of every rank, [..., S, K], for the calls of the leaves that follow."""
        leaf = self._leaves[0]
        gathered, outputs = all_gather_gemm(
            x,
            [each.local_weight() for each in self._leaves],
            [each.local_bias() for each in self._leaves],
            leaf.activation,
            leaf.group.name,
            dim=SEQUENCE,
            sizes=shards.sizes,
            layer=self._layer,
        )
        self._keep(gathered, outputs)
        self._gathered = True
        return gathered

    def take(self, leaf: ColumnParallelLinear, x: Tensor) -> Tensor | None:
        """``leaf(x)`` computed with its siblings', or None outside a region."""
        if not self._open:
            return None
        if x is not self._input or id(leaf) not in self._outputs:
            if self._gathered:
                raise ConfigError(
                    f"{self._layer or 'attention'}: a projection was called with another tensor "
                    f"{tuple(x.shape)} than the attention's input, or twice; on a sharded sequence "
                    "that is not supported. Fix: sequence_parallel=False"
                )
            outputs = column_gemm_act(
                x,
                [each.local_weight() for each in self._leaves],
                [each.local_bias() for each in self._leaves],
                leaf.activation,
                leaf.group.name,
                layer=self._layer,
            )
            self._keep(x, outputs)
        return self._outputs.pop(id(leaf))

    def _keep(self, x: Tensor, outputs: list[Tensor]) -> None:
        self._input = x
        self._outputs = {id(each): y for each, y in zip(self._leaves, outputs, strict=True)}

    def __deepcopy__(self, memo: dict[int, Any]) -> JointProjection:
        copied = JointProjection([])
        memo[id(self)] = copied
        copied._leaves = [copy.deepcopy(leaf, memo) for leaf in self._leaves]
        return copied
