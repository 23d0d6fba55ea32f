"""Variants of one computation, gated for correctness and timed in turns within one process.

In turns, so that whatever else the machine does meets all of them; on inputs that rotate through
enough copies to exceed the last-level cache, so that the next call finds nothing of its own there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpkernels.benchmarks import gate
from tpkernels.benchmarks.ceilings import Work
from tpkernels.benchmarks.gate import Truth
from tpkernels.benchmarks.timers import Sample, Timer, percentile

Inputs = tuple[Tensor, ...]
_MOST_COPIES = 256
WARM_UP = 2  # calls beside the gate's


@dataclass
class Variant:
    """One way to compute a case.

    Attributes:
        name: `eager` is what the others are compared with.
        run: from the inputs to the outputs, in the order of the case's truths.
        within: entered around each call, outside of what is timed.
        served_by: what a choice of ours stands for, where `name` does not say it.
        cannot: why it cannot run here; then nothing else is used.
    """

    name: str
    run: Callable[[Inputs], Sequence[Tensor]]
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    served_by: str | None = None
    cannot: str | None = None


@dataclass
class Case:
    """One shape of one op: its inputs, the ways to compute it, and the truth."""

    op: str
    title: str
    make_inputs: Callable[[], Inputs]
    variants: list[Variant]
    truths: Callable[[Inputs], list[Truth]]
    work: Work


@dataclass
class Measurement:
    """What became of a variant: samples, or the reason there are none."""

    variant: Variant
    samples: list[Sample] = field(default_factory=list)
    relative_error: float | None = None
    error: str | None = None

    @property
    def us(self) -> tuple[float, float, float]:
        """p20, p50 and p80."""
        values = [sample.us for sample in self.samples]
        return percentile(values, 20), percentile(values, 50), percentile(values, 80)

    @property
    def host_us(self) -> float | None:
        values = [sample.host_us for sample in self.samples if sample.host_us is not None]
        return percentile(values, 50) if values else None


@dataclass(frozen=True)
class Settings:
    """How often to repeat.

    Attributes:
        seconds: that the repetitions of one case should take in all.
        least, most: repetitions, whatever `seconds` says.
        rotate_bytes: the inputs' copies exceed this; 0 for one copy, warm in the caches.
    """

    seconds: float = 1.0
    least: int = 5
    most: int = 50
    rotate_bytes: int = 0


def run_case(case: Case, timer: Timer, settings: Settings) -> list[Measurement]:
    """Gate every variant, then time those that passed.

    Returns:
        One a variant, in their order. What failed has `error` and no samples; if that is `eager`,
        nothing is timed, since there is nothing to compare with.
    """
    inputs = case.make_inputs()
    measurements = gated(case, inputs)
    if measurements[0].error is None:
        measure(measurements, Rotation(inputs, settings.rotate_bytes), timer, settings)
    return measurements


def gated(case: Case, inputs: Inputs) -> list[Measurement]:
    """One a variant, without samples; `error` where it cannot run or is wrong."""
    measurements = [Measurement(variant) for variant in case.variants]
    truths: list[Truth] = []
    eager: Sequence[Tensor] = ()
    for measurement in measurements:
        variant = measurement.variant
        if variant.cannot:
            measurement.error = f"cannot run: {variant.cannot}"
            continue
        try:
            with variant.within():
                outputs = [output.detach() for output in variant.run(inputs)]
            if not truths:
                if variant is not case.variants[0]:
                    measurement.error = "not measured: eager failed"
                    continue
                truths, eager = case.truths(inputs), outputs
            measurement.relative_error, wrong = gate.check(outputs, eager, truths)
        except Exception as failed:  # whatever a compiler or a kernel raises is this row's result
            measurement.error = f"cannot run: {first_line(failed)}"
            continue
        if wrong:
            measurement.error = f"wrong: {wrong}"
    return measurements


def measure(
    measurements: Sequence[Measurement],
    rotation: Iterator[Inputs],
    timer: Timer,
    settings: Settings,
) -> None:
    """Fill in the samples of all, in turns; each turn begins with another one.

    One that raises gets its `error`, loses its samples and takes no further turn.
    """
    host_us = dict.fromkeys((m.variant.name for m in measurements), 0.0)

    def once(measurement: Measurement) -> Sample | None:
        variant, inputs = measurement.variant, next(rotation)
        try:
            with variant.within():
                sample = timer(lambda: variant.run(inputs), host_us[variant.name])
        except Exception as failed:
            measurement.error = f"cannot run: {first_line(failed)}"
            measurement.samples.clear()
            return None
        host_us[variant.name] = sample.host_us or 0.0
        return sample

    def turn(number: int) -> list[tuple[Measurement, Sample]]:
        running = [each for each in measurements if each.error is None]
        start = number % max(1, len(running))
        taken = [(each, once(each)) for each in (*running[start:], *running[:start])]
        return [(each, sample) for each, sample in taken if sample is not None]

    for _ in range(WARM_UP):
        first = turn(0)
    seconds = sum(sample.us + 2 * (sample.host_us or 0.0) for _, sample in first) / 1e6
    for number in range(repetitions(seconds, settings)):
        for measurement, sample in turn(number):
            measurement.samples.append(sample)


def repetitions(seconds_a_turn: float, settings: Settings) -> int:
    """How many turns `settings` allows, given how long one takes."""
    wanted = settings.seconds / seconds_a_turn if seconds_a_turn > 0 else settings.most
    return int(max(settings.least, min(settings.most, wanted)))


class Rotation:
    """Inputs and copies of them, in turns, so many that all but one exceed `rotate_bytes`."""

    def __init__(self, inputs: Inputs, rotate_bytes: int) -> None:
        self._copies = [inputs]
        size = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        count = 1 + -(-rotate_bytes // size) if rotate_bytes and size else 1
        for _ in range(min(count, _MOST_COPIES) - 1):
            self._copies.append(
                tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
            )
        self._next = 0

    def __iter__(self) -> Rotation:
        return self

    def __next__(self) -> Inputs:
        self._next = (self._next + 1) % len(self._copies)
        return self._copies[self._next]

    def __len__(self) -> int:
        return len(self._copies)


def first_line(error: BaseException) -> str:
    """The type and first line of an error, at most 300 characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:300]


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "not enough memory" in str(error)
    )
