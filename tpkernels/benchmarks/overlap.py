"""How much communication disappears: layers and blocks against DTensor, no overlap, the limit.

`tpkernels bench overlap` makes the hosts (`shaped_hosts.py`), runs one rank on each
(`overlap_worker.py`), then the same on this machine alone, and shows the rows
(`overlap_report.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tpkernels import launch
from tpkernels.benchmarks import (
    options,
    overlap_report,
    overlap_rows,
    overlap_tune,
    row_files,
    rows,
)
from tpkernels.benchmarks.collectives import show_markdown
from tpkernels.benchmarks.collectives_backends import GLOO, TPSHM, absent
from tpkernels.benchmarks.collectives_options import add_files
from tpkernels.benchmarks.overlap_block import BLOCKS, HEAD
from tpkernels.benchmarks.overlap_layers import LAYERS, ROW
from tpkernels.benchmarks.overlap_rows import OverlapRow
from tpkernels.benchmarks.overlap_variants import NAMES, chunked
from tpkernels.benchmarks.overlap_worker import Case, Link, Order
from tpkernels.benchmarks.ranks import chosen_world
from tpkernels.benchmarks.shaped_hosts import (
    CannotShape,
    Host,
    ShapedNetwork,
    module_path,
    run_ranks,
)
from tpkernels.cli import CommandParser, positive, rank_count
from tpkernels.errors import ConfigError
from tpkernels.testing.rank_errors import RankError

DESCRIPTION = "Overlap of layers and a block over rate-limited links against DTensor, and the limit"
# (M, K, N): tokens, a rank's part of the wide dimension, the model's width.
_SHAPES, _QUICK_SHAPES = (
    ((1024, 2048, 512), (2048, 2048, 1024), (4096, 1024, 512)),
    ((64, 128, 64),),
)
_BLOCK_TOKENS, _WIDTHS, _QUICK_WIDTHS = 1024, (512, 1024), (128,)
_QUICK_TOKENS = 64
_RATES: tuple[float | None, ...] = (0.5, 1.0, 4.0, None)
# Within 0.5 and 1.0, so that what is measured again beside the others is within, too.
_WIRE_RATIOS = (0.55, 0.75, 0.95)
_SECONDS, _QUICK_SECONDS = 10.0, 0.3  # of one case on one link, all variants together
_LEAST, _QUICK_LEAST, _MOST = 9, 3, 300  # turns
# Beside the turns: starting ranks; of a case, making and checking its variants.
_START_SECONDS, _CASE_SECONDS = 120.0, 120.0
_TURN_SECONDS = 10.0  # of one variant, at the most
_RANK_SECONDS = 120.0  # that a rank waits for another
_SLOWEST, _FASTEST = 1e-3, 100.0  # Gbit/s that a link can be given


def rate(text: str) -> float | None:
    """An argument's type: Gbit/s, or `none`."""
    if text == "none":
        return None
    with contextlib.suppress(ValueError):
        if _SLOWEST <= float(text) <= _FASTEST:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a rate; allowed: Gbit/s from {_SLOWEST:g} to {_FASTEST:g}; none: this "
        "machine alone. Fix: --rates 0.5 1 4 none"
    )


def ratio(text: str) -> float:
    """An argument's type: wire time over compute time."""
    with contextlib.suppress(ValueError):
        if 0.01 <= float(text) <= 100.0:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a ratio of wire time to compute time; allowed: 0.01 to 100. "
        "Fix: --wire-ratio 0.55 0.75 0.95"
    )


def shape(text: str) -> tuple[int, int, int]:
    """An argument's type: `M,K,N`."""
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isascii() and p.isdecimal() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; allowed: M,K,N, each a whole number from 1. "
            "Fix: --shapes 1024,2048,512"
        )
    m, k, n = map(int, parts)
    return m, k, n


def add_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--nproc",
        type=rank_count,
        metavar="N",
        help="ranks, each on a host of its own (default: 2)",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=(*LAYERS, *BLOCKS),
        metavar="CASE",
        help=f"only these: {', '.join((*LAYERS, *BLOCKS))}",
    )
    shown = " ".join(",".join(map(str, each)) for each in _SHAPES)
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="M,K,N",
        help="of the layers: tokens, a rank's part of the wide dimension, the model's width "
        f"(default: {shown})",
    )
    parser.add_argument(
        "--widths",
        nargs="+",
        type=positive,
        metavar="D",
        help=f"of the blocks, {_BLOCK_TOKENS} tokens (default: {' '.join(map(str, _WIDTHS))})",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=rate,
        metavar="GBITS",
        help="what each host may send, Gbit/s; none: ranks of this machine, without a link "
        "(default, unless --wire-ratio is given: 0.5 1 4 none)",
    )
    parser.add_argument(
        "--wire-ratio",
        nargs="+",
        type=ratio,
        metavar="X",
        help="links whose rate is chosen for each case, so that wire time is X of the measured "
        f"time of its arithmetic (default, unless --rates is given: "
        f"{' '.join(map(str, _WIRE_RATIOS))})",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("fp32", "bf16"),
        default=["fp32"],
        metavar="TYPE",
        help="fp32, bf16 (default: fp32)",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"only these, beside arithmetic and collectives alone: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--chunks",
        nargs="+",
        type=positive,
        metavar="C",
        default=[],
        help="ours also with so many chunks (gathers and scatters: of each rank's rows)",
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="turns of all variants (default: by --seconds)"
    )
    parser.add_argument(
        "--seconds",
        type=options.seconds,
        metavar="S",
        help=f"for the turns of each case on each link, at least {_LEAST} (default: {_SECONDS:g})",
    )
    parser.add_argument("--quick", action="store_true", help="tiny cases, few turns: does it work?")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measure into how many chunks it pays to cut, and keep it in the user's tables "
        "(TPKERNELS_CACHE)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="also trace the layers without overlap and ours, compare what the trace says was "
        "exposed with the clock, and leave the pages there",
    )
    add_files(parser)


def run(parsed: Namespace, argv: Sequence[str]) -> int:
    """`tpkernels bench overlap ARGV`; 1 where a variant was wrong, or a rank failed."""
    for option in ("out", "markdown"):
        options.check_output(f"--{option}", getattr(parsed, option))
    if parsed.tune:
        overlap_tune.check(parsed)
    if parsed.trace is not None:
        _make_folder(parsed.trace)
    found: list[OverlapRow] = []
    try:
        if parsed.read is not None:
            found += overlap_rows.read(parsed.read)
        else:
            _measure(parsed, found)
    except RankError as error:
        print(f"tpkernels bench overlap: {error}", file=sys.stderr)
        return 1
    finally:  # also after an interrupt: the cases that are done
        if found:
            _show(parsed, found)
    if parsed.tune:
        for line in overlap_tune.keep(found, " ".join(["tpkernels bench overlap", *argv])):
            print(line, flush=True)
    return 1 if any((row.error or "").startswith("wrong") for row in found) else 0


def _measure(parsed: Namespace, found: list[OverlapRow]) -> None:
    """Add the rows to `found`, and to `--out`: of links first, then of this machine alone.

    Raises:
        ConfigError: options that cannot work, or links alone were asked for and cannot be had.
    """
    if launch.inside_rank():
        raise ConfigError(
            "`tpkernels bench overlap` makes hosts and starts a rank on each. Fix: call it without "
            "torchrun"
        )
    world = chosen_world(parsed.nproc)
    cases, links = _cases(parsed, world), _links(parsed)
    shaped, alone = [link for link in links if link != Link()], Link() in links
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(rows.appending(parsed.out)) if parsed.out else None
        try:
            network = stack.enter_context(ShapedNetwork(world, "10gbit")) if shaped else None
        except CannotShape as error:
            if not alone:
                raise ConfigError(
                    f"--rates, --wire-ratio: {error}. Fix: run as root with iproute2, or "
                    "--rates none"
                ) from error
            print(f"tpkernels bench overlap: left out all links: {error}", file=sys.stderr)
            network = None
        if network is not None:
            order = _order(parsed, cases, shaped, [GLOO])
            _run(order, network.hosts, found, out)
        if alone:
            why = absent(TPSHM, "cpu")
            if why is not None:
                print(f"tpkernels bench overlap: left out tpshm: {why}", file=sys.stderr)
            backends = [GLOO] if why is not None else [TPSHM, GLOO]
            _run(_order(parsed, cases, [Link()], backends), [Host()] * world, found, out)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--trace {path}: it cannot be made: {error.strerror or error}. Fix: another folder"
        ) from error


def _run(order: Order, hosts: Sequence[Host], found: list[OverlapRow], out: TextIO | None) -> None:
    worker = [sys.executable, "-m", "tpkernels.benchmarks.overlap_worker"]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        try:
            run_ranks(
                [*worker, order.to_json(), str(results)],
                hosts,
                seconds=_limit_seconds(order),
                environment=module_path(),
            )
        finally:
            made = _written(results)
            found += made
            if out is not None:
                row_files.write(made, out)


def _written(results: Path) -> list[OverlapRow]:
    """The rows of what ranks wrote, without a last one that an interrupt cut off."""
    text = results.read_text() if results.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        return []
    results.write_text(whole)
    return overlap_rows.read(results)


def _cases(parsed: Namespace, world: int) -> list[Case]:
    """Layers by shape, then blocks by width.

    Raises:
        ConfigError: a size that ranks cannot share evenly.
    """
    asked = (ROW,) if parsed.tune else parsed.cases or (*LAYERS, *BLOCKS)
    usual = overlap_tune.SHAPES if parsed.tune else _SHAPES
    shapes = parsed.shapes or (_QUICK_SHAPES if parsed.quick else usual)
    widths = parsed.widths or (_QUICK_WIDTHS if parsed.quick else _WIDTHS)
    tokens = _QUICK_TOKENS if parsed.quick else _BLOCK_TOKENS
    for m, k, n in shapes:
        if m % world:
            raise ConfigError(
                f"--shapes {m},{k},{n}: {m} tokens cannot be shared evenly by {world} ranks. "
                f"Fix: a multiple of {world}"
            )
    for d in widths if set(asked) & set(BLOCKS) else ():
        if d % (HEAD * world) or tokens % world:
            raise ConfigError(
                f"--widths {d}: {world} ranks cannot share {tokens} tokens and heads of {HEAD} "
                f"evenly. Fix: a multiple of {HEAD * world}, and ranks that divide {tokens}"
            )
    return [
        Case(op, size, dtype)
        for dtype in parsed.dtype
        for op in (*LAYERS, *BLOCKS)
        if op in asked
        for size in (shapes if op in LAYERS else [(tokens, d) for d in widths])
    ]


def _links(parsed: Namespace) -> list[Link]:
    rates, ratios = parsed.rates, parsed.wire_ratio
    if rates is None and ratios is None:
        rates, ratios = _RATES, () if parsed.tune else _WIRE_RATIOS
    found = [Link(ratio=each) for each in ratios or ()]
    return [*found, *(Link(gbits=each) for each in rates or ())]


def _order(parsed: Namespace, cases: list[Case], links: list[Link], backends: list[str]) -> Order:
    seconds = parsed.seconds or (_QUICK_SECONDS if parsed.quick else _SECONDS)
    turns = (seconds, _QUICK_LEAST if parsed.quick else _LEAST, _MOST)
    if parsed.rounds:
        turns = (seconds, parsed.rounds, parsed.rounds)
    variants = [name for name in NAMES if name in (parsed.variants or NAMES)]
    variants += map(chunked, parsed.chunks)
    if parsed.tune:
        variants = overlap_tune.variants(parsed)
    folder = None if parsed.trace is None else str(parsed.trace.absolute())
    return Order(cases, links, backends, variants, turns, _RANK_SECONDS, parsed.commit, folder)


def _limit_seconds(order: Order) -> float:
    """After that the ranks are killed: far more than they need."""
    seconds, least, _ = order.turns
    each = max(10 * seconds, _TURN_SECONDS * least * (len(order.variants) + 3))
    cases = len(order.cases) * len(order.backends)
    return _START_SECONDS + cases * (_CASE_SECONDS + len(order.links) * each)


def _show(parsed: Namespace, found: list[OverlapRow]) -> None:
    markdown = overlap_report.text(found)
    print(markdown, flush=True)
    if parsed.markdown is not None:
        show_markdown(markdown, parsed.markdown)
    if parsed.out is not None:
        print(f"{len(found)} rows appended to {parsed.out}", flush=True)
