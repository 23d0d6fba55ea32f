"""What a step must take at least: computing, what each schedule must send, and what cannot overlap.

    limit = max(compute, bytes / bandwidth) + first gather + last reduce-scatter

`bytes` is what one rank sends at the least (as much as it receives). Nothing can be computed before
the first unit is gathered, and the last gradients are sent after everything is computed. Where the
link is the bottleneck the two are in `bytes` as well, and a step may come under the limit by them.
"""

# P bytes of parameters, N ranks: an all-gather or a reduce-scatter sends P (N-1) / N, an all-reduce
# twice that

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DDP_FIRST_BUCKET, _DDP_BUCKET = 1 << 20, 25 << 20  # torch's defaults


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank must send in a step, phase by phase.

    Attributes:
        forward: gathered in the forward pass.
        backward: gathered and reduced in the backward pass.
        first: of `forward`, before anything can be computed.
        last: of `backward`, after everything is computed.
    """

    forward: float = 0.0
    backward: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Limit:
    """The formula's parts, in microseconds."""

    compute_us: float
    wire_us: float
    first_us: float
    last_us: float

    @property
    def us(self) -> float:
        return max(self.compute_us, self.wire_us) + self.first_us + self.last_us


def limit(traffic: Traffic, compute_us: float, bandwidth: float, *, backward: bool) -> Limit:
    """Of the forward pass, or of the whole step; `bandwidth` in bytes/s, one way."""
    sent = traffic.total if backward else traffic.forward
    last = traffic.last if backward else 0.0
    wire, first, after = (1e6 * part / bandwidth for part in (sent, traffic.first, last))
    return Limit(compute_us, wire, first, after)


def sharded(
    units: Sequence[int],
    root: int,
    ranks: int,
    *,
    gather_backward: bool = True,
    gather_root_backward: bool = True,
) -> Traffic:
    """ZeRO-3: gathered in forward, again in backward, gradients reduce-scattered.

    Args:
        units: bytes of each unit, in order; `root`: bytes of what is in none of them.
        gather_backward: False where gathered weights are kept from forward to backward.
        gather_root_backward: False where only the root's are.
    """
    share = (ranks - 1) / ranks
    total = sum(units) + root
    again = (sum(units) + root * gather_root_backward) if gather_backward else 0
    first = units[0] if units else root
    return Traffic(share * total, share * (again + total), share * first, share * first)


def ddp(parameters: Sequence[int], ranks: int) -> Traffic:
    """DistributedDataParallel: buckets are all-reduced as their gradients are there.

    Args:
        parameters: bytes of each, in the model's order.
    """
    buckets, most = [0], _DDP_FIRST_BUCKET
    for size in reversed(parameters):
        if buckets[-1] >= most:
            buckets.append(0)
            most = _DDP_BUCKET
        buckets[-1] += size
    share = 2 * (ranks - 1) / ranks
    return Traffic(backward=share * sum(parameters), last=share * buckets[-1])
