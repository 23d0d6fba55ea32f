"""``ParallelReport``: one row a module: what replaced it, which kernel serves it, or why not."""

from __future__ import annotations

from dataclasses import dataclass, field

_COLUMNS = ("name", "kind", "action", "implementation", "reason")


@dataclass(frozen=True)
class ModuleRow:
    """What happened to one module.

    ``action`` is the parallel form it took, or ``"kept"``; ``implementation`` names the local
    kernel (on CUDA the measured table that each call asks) and the overlap strategy that serve
    it, ``"-"`` for a kept module.
    """

    name: str
    kind: str
    action: str
    implementation: str
    reason: str


@dataclass
class ParallelReport:
    """What :func:`tpkernels.parallelize` did, in the order of the model; ``print`` it.

    Attributes:
        modules: one :class:`ModuleRow` a module.
        world_size: ranks of the group; rank: this one.
        parameter_bytes: bytes of parameters on this rank, after; dense_bytes: before.
    """

    world_size: int
    rank: int
    modules: list[ModuleRow] = field(default_factory=list)
    parameter_bytes: int = 0
    dense_bytes: int = 0

    @property
    def replaced(self) -> list[ModuleRow]:
        """Rows of modules that were split."""
        return [row for row in self.modules if row.action != "kept"]

    @property
    def kept(self) -> list[ModuleRow]:
        """Rows of modules that every rank computes whole."""
        return [row for row in self.modules if row.action == "kept"]

    def __str__(self) -> str:
        rows = [_COLUMNS] + [
            tuple(getattr(row, column) or "(root)" for column in _COLUMNS) for row in self._folded()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
        lines = []
        for index, row in enumerate(rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
            if index == 0:
                lines.append("  ".join("-" * width for width in widths) + "  ------")
        share = self.parameter_bytes / self.dense_bytes if self.dense_bytes else 1.0
        lines.append(
            f"{len(self.replaced)} modules split over {self.world_size} ranks, {len(self.kept)} "
            f"kept; parameters on rank {self.rank}: {self.parameter_bytes / 1e6:.1f} MB of "
            f"{self.dense_bytes / 1e6:.1f} MB ({share:.0%})"
        )
        return "\n".join(lines)

    def _folded(self) -> list[ModuleRow]:
        """Rows that differ only in a layer number, as one: ``layer.{0..5}.mlp``."""
        groups: dict[tuple[str, ...], list[ModuleRow]] = {}
        for row in self.modules:
            key = (_without_numbers(row.name), *(getattr(row, c) for c in _COLUMNS[1:]))
            groups.setdefault(key, []).append(row)
        return [
            rows[0]
            if len(rows) == 1
            else ModuleRow(
                _span(rows[0].name, rows[-1].name, len(rows)),
                *(getattr(rows[0], column) for column in _COLUMNS[1:]),
            )
            for rows in groups.values()
        ]


def _without_numbers(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _span(first: str, last: str, count: int) -> str:
    parts = [
        a if a == b else f"{{{a}..{b}}}"
        for a, b in zip(first.split("."), last.split("."), strict=True)
    ]
    return ".".join(parts) + f" x{count}"
