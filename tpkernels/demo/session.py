"""What the demos of all models share: the ranks, the options, and the one rank that talks."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tpkernels
from tpkernels.testing.comparison import max_relative_error


@dataclass(frozen=True)
class Session:
    """One rank's view of a run of the demo; None in `batch` or `repeat` leaves it to the model."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    batch: int | None
    repeat: int | None

    @staticmethod
    def start(
        device_type: str, dtype: torch.dtype, batch: int | None, repeat: int | None
    ) -> Session:
        """Join the other ranks (a plain `python` is a world of one)."""
        mesh = tpkernels.init_mesh(tp=_world_size(), device_type=device_type)
        group = mesh["tp"].get_group()
        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return Session(group, device, dtype, batch, repeat)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    def say(self, text: str = "") -> None:
        """Print a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show a step while it runs, and how long it took."""
        if self.rank == 0:
            print(f"{text} ...", end="", flush=True)
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.say(" failed")
            raise
        self.say(f" {time.perf_counter() - start:.1f} s")

    def parallelize(self, dense: nn.Module) -> tuple[nn.Module, tpkernels.ParallelReport]:
        """A tensor-parallel copy of `dense`; its report is shown."""
        with self.step(f"parallelize over {counted(self.world_size, 'rank')}"):
            parallel = copy.deepcopy(dense)
            report = tpkernels.parallelize(parallel, self.group)
        self.say(str(report))
        return parallel, report

    def show(self, outcome: Outcome) -> None:
        """Print the checks, each with its limit."""
        for check in outcome.checks:
            self.say(str(check))

    def from_rank_0(self, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Rank 0's tensors on every rank; the others give None."""
        box: list[Any] = [None if tensors is None else [t.cpu() for t in tensors]]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return [tensor.to(self.device) for tensor in box[0]]

    def largest(self, values: list[float]) -> list[float]:
        """The largest of the ranks' values, element by element."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def ranks_agree(self, tensor: torch.Tensor) -> bool:
        """Whether every rank holds bitwise the same."""
        (expected,) = self.from_rank_0([tensor] if self.rank == 0 else None)
        (differs,) = self.largest([float(not torch.equal(tensor, expected))])
        return differs == 0.0


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Check:
    """A number, and what it may be at most; `reason` says where the limit comes from."""

    name: str
    value: float
    limit: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for a NaN

    def __str__(self) -> str:
        verdict = "OK" if self.passed else "FAILED"
        if self.limit == 0:  # a count
            return f"{self.name}: {self.value:g}  (must be 0)  {verdict}"
        reason = f" = {self.reason}" if self.reason else ""
        return f"{self.name}: {self.value:.1e}  (limit {self.limit:.1e}{reason})  {verdict}"


@dataclass
class Outcome:
    """What a model's demo found; `as_dict` is its JSON form."""

    model: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        checks = [
            {"name": c.name, "value": c.value, "limit": c.limit, "passed": c.passed}
            for c in self.checks
        ]
        return {"model": self.model, "passed": self.passed, "checks": checks, **self.facts}


def error_check(
    ours: torch.Tensor,
    dense: torch.Tensor,
    dense_float32: torch.Tensor,
    float32_limit: float,
) -> Check:
    """`max relative error` of `ours`, with the limit its dtype calls for.

    In float32 it is the distance from the dense run, and the limit is given. A lower precision
    rounds so much that two right answers differ visibly: there both runs are compared with the
    dense one in float32, and ours may be at most twice as far off, plus one rounding unit.
    """
    if ours.dtype == torch.float32:
        return Check("max relative error", max_relative_error(ours, dense), float32_limit)
    eps = torch.finfo(ours.dtype).eps
    theirs = max_relative_error(dense, dense_float32)
    name = str(ours.dtype).removeprefix("torch.")
    return Check(
        "max relative error",
        max_relative_error(ours, dense_float32),
        2 * theirs + eps,
        f"2 x the dense {name} run's {theirs:.1e} + one rounding unit, both against float32",
    )
