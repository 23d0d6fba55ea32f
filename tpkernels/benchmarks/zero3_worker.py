"""One rank of the ZeRO-3 benchmark: checks every variant, then times those that are right in turns.

Run by `zero3.py` as `python -m tpkernels.benchmarks.zero3_worker ORDER RESULTS`; rank 0 appends one
JSON line a model to RESULTS, so that an interrupt keeps the models that are done.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpkernels.benchmarks.harness import first_line
from tpkernels.benchmarks.zero3_model import MODELS, ModelShape, make_batch, make_model
from tpkernels.benchmarks.zero3_variants import NotInstalled, Plan, Trained, build

TOLERANCE = 1e-5  # of the norm of the truth: sums of fp32 in another order
_LINK_BYTES, _LINK_REPEATS = 8 << 20, 5
# Of ZeroManager.stats(), what grows with every step, and the most that there was at once.
_COUNTED: tuple[str, ...] = ("gathers", "hits", "misses", "wasted", "stall_seconds")
_COUNTED += ("gather_bytes_sent", "reduce_bytes_sent")
_PEAKS = ("peak_idle_bytes", "peak_gathered_bytes", "peak_live_bytes")
_WARM_UP = 1  # rounds beside the check's step: from then on every order is known


@dataclass(frozen=True)
class Order:
    """What the ranks are asked for.

    Attributes:
        models: (name in MODELS, its plans).
        repeats: rounds that are timed, at most; at least `least`, whatever `seconds` says.
        seconds: that the rounds of one model should take in all.
    """

    models: list[tuple[str, list[Plan]]]
    repeats: int
    seconds: float
    timeout: float
    least: int = 3

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        given = json.loads(text)
        given["models"] = [
            (name, [Plan(**plan) for plan in plans]) for name, plans in given["models"]
        ]
        return Order(**given)


@dataclass
class Outcome:
    """What became of one plan on this rank.

    Attributes:
        forward_us, step_us: one a round; `step_us` is forward and backward.
        sent: bytes that the network interface sent in each round.
        cpu_us: processor time of this rank in each round.
        stats: counters of ours, a round; peaks as they are.
        relative_error: of the loss or a gradient, the largest, against compute alone on the ranks'
            batches concatenated.
    """

    plan: Plan
    trained: Trained | None = None
    relative_error: float | None = None
    error: str | None = None
    forward_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    stats: dict[str, float] | None = None


def main(argv: Sequence[str]) -> int:
    warnings.simplefilter("ignore")  # peers' deprecations, once a rank
    order, results = Order.from_json(argv[0]), Path(argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=order.timeout))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    bandwidth = measure_link()
    for name, plans in order.models:
        outcomes = run_model(MODELS[name], plans, mesh, order)
        record = {
            "model": name,
            "world": dist.get_world_size(),
            "bandwidth": bandwidth,
            "outcomes": [_record(outcome) for outcome in outcomes],
        }
        if dist.get_rank() == 0:
            with results.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        del outcomes
        gc.collect()
    dist.destroy_process_group()
    return 0


def measure_link() -> float:
    """Bytes/s of a bare send from rank 0 to rank 1, on all ranks."""
    data, rank = torch.randn(_LINK_BYTES // 4), dist.get_rank()
    times = []
    for _ in range(1 + _LINK_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(data, 1)
        elif rank == 1:
            dist.recv(data, 0)
        times.append(time.perf_counter() - start)
    # The receiver knows when the last byte is there.
    seconds = torch.tensor(median(times[1:]) if rank == 1 else 0.0, dtype=torch.float64)
    dist.all_reduce(seconds)
    return _LINK_BYTES / float(seconds)


def run_model(
    shape: ModelShape, plans: Sequence[Plan], mesh: DeviceMesh, order: Order
) -> list[Outcome]:
    """Every plan, checked, and timed where it is right; collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = make_batch(shape, rank)
    truth = alone_on_all(shape, world)
    outcomes = [Outcome(plan) for plan in plans]
    for outcome in outcomes:
        _say(f"{shape.name}: check {outcome.plan.name}")
        check(outcome, shape, mesh, batch, truth)
    running = [outcome for outcome in outcomes if outcome.error is None]
    before = time.perf_counter()
    for _ in range(_WARM_UP):
        for outcome in running:
            step(outcome, batch)
    rounds = _rounds((time.perf_counter() - before) / _WARM_UP, order)
    _say(f"{shape.name}: {len(running)} variants, {rounds} rounds")
    earlier = [_stats(outcome) for outcome in running]
    for number in range(rounds):
        start = number % len(running)
        for outcome in (*running[start:], *running[:start]):
            for values, value in zip(_series(outcome), step(outcome, batch), strict=True):
                values.append(value)
    for outcome, counted in zip(running, earlier, strict=True):
        after = _stats(outcome)
        if counted is not None and after is not None:
            outcome.stats = a_step(counted, after, rounds)
        for values in _series(outcome):
            values[:] = _largest(values)
    return outcomes


def alone_on_all(shape: ModelShape, world: int) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of the unsharded model on the batches of all ranks, concatenated."""
    model = make_model(shape)
    batches = [make_batch(shape, rank) for rank in range(world)]
    x, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = model(x, target)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def check(
    outcome: Outcome,
    shape: ModelShape,
    mesh: DeviceMesh,
    batch: tuple[Tensor, Tensor],
    truth: tuple[Tensor, list[Tensor]],
) -> None:
    """One step; fills in `trained`, `relative_error`, and `error` where there is one."""
    error = wrong = None
    worst = float("nan")
    try:
        outcome.trained = build(outcome.plan, shape, mesh)
        worst, wrong = compare(outcome.trained, batch, truth)
        outcome.trained.update()
    except NotInstalled as absent:
        error = str(absent)
    except Exception as failed:  # whatever a peer raises is its row's result
        error = f"cannot run: {first_line(failed)}"
    if error is None and wrong is not None:
        error = f"wrong: {wrong}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (error, worst))
    outcome.error = next((text for text, _ in everyone if text is not None), None)
    largest = max(value for _, value in everyone)
    outcome.relative_error = largest if largest == largest else None
    if outcome.error is not None:
        outcome.trained = None
        gc.collect()


def compare(
    trained: Trained, batch: tuple[Tensor, Tensor], truth: tuple[Tensor, list[Tensor]]
) -> tuple[float, str | None]:
    """(largest relative error, what is wrong or None) of one step."""
    loss = trained.model(*batch)
    trained.backward(loss)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    names = ["loss", *(f"gradient {i}" for i in range(len(truth[1])))]
    found, expected = [mean, *trained.gradients()], [truth[0], *truth[1]]
    if len(found) != len(expected):
        return float("nan"), f"{len(found) - 1} gradients instead of {len(expected) - 1}"
    worst, where = 0.0, "loss"
    for name, ours, theirs in zip(names, found, expected, strict=True):
        if ours.shape != theirs.shape:
            shapes = f"{tuple(ours.shape)} instead of {tuple(theirs.shape)}"
            return float("nan"), f"{name} is {shapes}"
        error = float((ours - theirs).norm() / theirs.norm())
        if not error <= worst:  # also a NaN
            worst, where = error, name
            if error != error:
                break
    if worst <= TOLERANCE:
        return worst, None
    return worst, f"{where}: relative error {worst:.1e}, allowed: {TOLERANCE:.0e}"


def _series(outcome: Outcome) -> tuple[list[float], ...]:
    """What `step` gives, in its order."""
    return outcome.forward_us, outcome.step_us, outcome.sent, outcome.cpu_us


def step(outcome: Outcome, batch: tuple[Tensor, Tensor]) -> tuple[float, float, float, float]:
    """(us of the forward pass, of both, bytes sent, us of processor time) of one training step.

    The weights are then changed, which is not timed.
    """
    trained = outcome.trained
    assert trained is not None
    dist.barrier()
    before = sent_bytes()
    cpu, start = time.process_time(), time.perf_counter()
    loss = trained.model(*batch)
    forward = time.perf_counter()
    trained.backward(loss)
    end = time.perf_counter()
    cpu, sent = time.process_time() - cpu, sent_bytes() - before
    trained.update()
    return 1e6 * (forward - start), 1e6 * (end - start), sent, 1e6 * cpu


def sent_bytes() -> float:
    """What the ranks' network interface has sent since it is up; 0 where the system does not say.

    On a host of its own it is this rank's; on loopback it is everybody's.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            return float(counters.split()[8])
    return 0.0


def a_step(before: Mapping[str, Any], after: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """What was counted in `rounds` steps, per step; peaks as they are."""
    found = {name: (after[name] - before[name]) / rounds for name in _COUNTED}
    return {**found, **{name: after[name] for name in _PEAKS}}


def _stats(outcome: Outcome) -> Mapping[str, Any] | None:
    assert outcome.trained is not None
    return outcome.trained.stats()


def _rounds(seconds_a_round: float, order: Order) -> int:
    """As many as fit; the same on all ranks."""
    wanted = torch.tensor(order.seconds / max(seconds_a_round, 1e-9), dtype=torch.float64)
    dist.all_reduce(wanted, dist.ReduceOp.MIN)
    return int(max(min(order.least, order.repeats), min(order.repeats, float(wanted))))


def _largest(values_here: list[float]) -> list[float]:
    """Round by round, the largest of the ranks'."""
    values = torch.tensor(values_here, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def _record(outcome: Outcome) -> dict[str, Any]:
    return {
        "plan": asdict(outcome.plan),
        "relative_error": outcome.relative_error,
        "error": outcome.error,
        "forward_us": outcome.forward_us,
        "step_us": outcome.step_us,
        "sent": outcome.sent,
        "cpu_us": outcome.cpu_us,
        "stats": outcome.stats,
        "traffic": asdict(outcome.trained.traffic) if outcome.trained else None,
    }


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
