"""ZeRO-3 against its peers between hosts: DDP, FSDP2, DeepSpeed, ours, and the limit.

`tpkernels bench zero3` makes the hosts (`shaped_hosts.py`), runs one rank on each
(`zero3_worker.py`), and shows the rows (`zero3_report.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tpkernels.benchmarks import options, row_files, rows, zero3_report, zero3_rows
from tpkernels.benchmarks.shaped_hosts import (
    UNSHAPED,
    CannotShape,
    Host,
    ShapedNetwork,
    module_path,
    run_ranks,
)
from tpkernels.benchmarks.zero3_model import FULL, MODELS, QUICK
from tpkernels.benchmarks.zero3_rows import Zero3Row
from tpkernels.benchmarks.zero3_variants import BASELINES, COMPUTE, OURS, plans
from tpkernels.benchmarks.zero3_worker import Order
from tpkernels.cli import CommandParser, positive
from tpkernels.errors import ConfigError

DESCRIPTION = "ZeRO-3 over rate-limited links against DDP, FSDP2, DeepSpeed, and the limit"
_RATE, _REPEATS, _QUICK_REPEATS = "1gbit", 7, 3
_SECONDS = 220.0  # of rounds, all models together
_BUDGETS, _SWEEP_UNITS = ("0", "1unit", "2units", "256MiB"), (1, 2, 3)
# Beside the rounds: starting ranks, and one step of every variant that is checked and warmed up.
_SET_UP_SECONDS, _VARIANT_SECONDS = 120.0, 60.0
_RANK_SECONDS = 120.0  # that a rank waits for another: DeepSpeed compiles at its first use
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # as tc spells them
_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

Budget = tuple[str, Callable[[int], int]]  # as it was written; bytes from those of a unit


def rate(text: str) -> str:
    """An argument's type: `1gbit`, `500mbit`, or `none`."""
    if text == "none" or (_bits(text) or 0) >= 1e5:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a rate; allowed: a number with kbit, mbit or gbit, from 100kbit; none. "
        "Fix: --rate 1gbit"
    )


def _bits(text: str) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    return float(found[1]) * _BITS[found[2]] if found else None


def host_count(text: str) -> int:
    """An argument's type: from 2 to 254."""
    if not text.isascii() or not text.isdecimal() or not 2 <= int(text) <= 254:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of hosts; allowed: 2 to 254. Fix: --hosts 2"
        )
    return int(text)


def budget(text: str) -> Budget:
    """An argument's type: `0`, bytes (`64MiB`), or units (`2units`)."""
    units = re.fullmatch(r"(\d+)units?", text)
    if units:
        count = int(units[1])
        return text, lambda unit_bytes: count * unit_bytes
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a prefetch budget; allowed: bytes (0, 64MiB, 1GiB) or units (1unit, "
            "2units). Fix: --budgets 0 2units 256MiB"
        )
    size = int(float(found[1]) * _BYTES[found[2]])
    return text, lambda unit_bytes: size


def add_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--hosts", type=host_count, default=2, metavar="N", help="one rank on each (default: 2)"
    )
    parser.add_argument(
        "--rate",
        type=rate,
        metavar="RATE",
        help="what each host may send: 1gbit, 500mbit; none: local ranks over loopback (default: "
        f"{_RATE} where it can be had: Linux, root, iproute2)",
    )
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help=f"rounds, at most (default: {_REPEATS})"
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=budget,
        metavar="SIZE",
        help=f"ours' prefetch_bytes: bytes or units (default: {' '.join(_BUDGETS)})",
    )
    parser.add_argument(
        "--units", nargs="+", type=positive, metavar="N", help="blocks a unit (default: 1)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        metavar="MODEL",
        help=f"blocks x width: {', '.join(MODELS)} (default: {' '.join(FULL)})",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*BASELINES, OURS),
        metavar="NAME",
        help=f"only these, beside {COMPUTE}: {', '.join(map(repr, (*BASELINES[1:], OURS)))}",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="only ours, with 1, 2 and 3 blocks a unit: gathered bytes against time",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few rounds: a look whether it works"
    )
    parser.add_argument(
        "--seconds",
        type=options.seconds,
        default=_SECONDS,
        help=f"for the rounds; fewer, from 3, where they take longer (default: {_SECONDS:g})",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows, JSONL")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw the sweep: FILE.svg or FILE.png"
    )
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="show these rows; nothing is measured"
    )
    parser.add_argument(
        "--commit", metavar="TEXT", help="the commit to name in the results, without git"
    )


def run(parsed: Namespace) -> int:
    """`tpkernels bench zero3`; 1 where a variant was wrong."""
    for option in ("out", "markdown", "chart"):
        options.check_output(f"--{option}", getattr(parsed, option))
    if parsed.chart is not None and parsed.chart.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"--chart {parsed.chart}: its suffix is {parsed.chart.suffix!r}; allowed: .svg, .png. "
            f"Fix: --chart {parsed.chart.with_suffix('.svg')}"
        )
    found: list[Zero3Row] = []
    try:
        if parsed.read is not None:
            found += zero3_rows.read(parsed.read)
        else:
            _measure(parsed, found)
    finally:  # also after an interrupt: the models that are done
        if found:
            _show(parsed, found)
    return 1 if any((row.error or "").startswith("wrong") for row in found) else 0


def _measure(parsed: Namespace, found: list[Zero3Row]) -> None:
    """Add the rows to `found`, and to `--out`."""
    order = _order(parsed)
    origin = rows.origin(torch.device("cpu"), parsed.commit)
    origin = replace(origin, threads=1, versions={**origin.versions, **_deepspeed_version()})
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(rows.appending(parsed.out)) if parsed.out else None
        results = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "results.jsonl"
        link, hosts = stack.enter_context(_hosts(parsed.hosts, parsed.rate))
        bits = _bits(link)
        worker = [sys.executable, "-m", "tpkernels.benchmarks.zero3_worker"]
        try:
            run_ranks(
                [*worker, order.to_json(), str(results)],
                hosts,
                seconds=_limit_seconds(order),
                environment=module_path(),
            )
        finally:
            lines = results.read_text().splitlines() if results.exists() else []
            for line in lines:
                made = zero3_rows.make_rows(
                    json.loads(line), link, bits / 8e6 if bits else None, origin
                )
                found += made
                if out is not None:
                    row_files.write(made, out)


@contextlib.contextmanager
def _hosts(count: int, asked: str | None) -> Iterator[tuple[str, Sequence[Host]]]:
    """(link, hosts): shaped where that was not declined and can be had.

    Raises:
        ConfigError: a rate was asked for, and this process cannot have it.
    """
    if asked == "none":
        yield UNSHAPED, [Host()] * count
        return
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(ShapedNetwork(count, asked or _RATE))
        except CannotShape as error:
            if asked is not None:
                raise ConfigError(
                    f"--rate {asked}: {error}. Fix: run as root with iproute2, or --rate none"
                ) from error
            print(
                f"tpkernels bench zero3: links are not shaped: {error}; local ranks over "
                "loopback, where sending takes the core that computes",
                file=sys.stderr,
            )
            yield UNSHAPED, [Host()] * count
            return
        yield network.rate, network.hosts


def _order(parsed: Namespace) -> Order:
    names = parsed.models or (QUICK if parsed.quick else FULL[:1] if parsed.sweep else FULL)
    asked = parsed.variants or ([OURS] if parsed.sweep else [*BASELINES, OURS])
    units = parsed.units or (_SWEEP_UNITS if parsed.sweep else (1,))
    budgets = (parsed.budgets or [budget(text) for text in _BUDGETS]) if OURS in asked else []
    baselines = [kind for kind in BASELINES if kind == COMPUTE or kind in asked]
    for name in names:
        if max(units) > MODELS[name].blocks:
            raise ConfigError(
                f"--units {max(units)}: {name} has {MODELS[name].blocks} blocks. Fix: at most that"
            )
    repeats = parsed.repeats or (_QUICK_REPEATS if parsed.quick else _REPEATS)
    return Order(
        [(name, plans(baselines, budgets, units, MODELS[name])) for name in names],
        repeats,
        parsed.seconds / len(names),
        _RANK_SECONDS,
    )


def _limit_seconds(order: Order) -> float:
    """After that the ranks are killed: far more than they need."""
    variants = sum(len(plans) for _, plans in order.models)
    return _SET_UP_SECONDS + 2 * order.seconds * len(order.models) + _VARIANT_SECONDS * variants


def _deepspeed_version() -> dict[str, str]:
    try:
        return {"deepspeed": importlib.metadata.version("deepspeed")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _show(parsed: Namespace, found: list[Zero3Row]) -> None:
    swept = len({row.blocks_per_unit for row in found}) > 1
    markdown = zero3_report.text(found, sweep=swept)
    print(markdown, flush=True)
    if parsed.markdown is not None:
        try:
            parsed.markdown.write_text(markdown + "\n")
        except OSError as error:
            raise rows.unwritable("--markdown", parsed.markdown, error) from error
    if parsed.chart is not None:
        from tpkernels.benchmarks import zero3_chart  # matplotlib is optional

        try:
            zero3_chart.draw(found, parsed.chart)
        except OSError as error:
            raise rows.unwritable("--chart", parsed.chart, error) from error
    if parsed.out is not None:
        print(f"{len(found)} rows appended to {parsed.out}", flush=True)
