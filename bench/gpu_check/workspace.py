"""The temporary copy of the checkout that everything is built and run in."""

from __future__ import annotations

import shutil
from pathlib import Path

# Results of earlier builds and runs, environments, histories: never part of what is checked.
_LEFT_OUT = {".git", ".venv", "__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache"}
_LEFT_OUT_AT_THE_TOP = {"build", "dist", ".ruff_cache"}


class Workspace:
    """A folder of one run: ``tree``, the copy; ``cache``, what tuning finds; ``scratch``."""

    def __init__(self, root: Path, folder: Path, out: Path) -> None:
        self.root, self.out = root, out
        self.tree, self.cache, self.scratch = (folder / n for n in ("tree", "cache", "scratch"))
        for path in (self.tree, self.cache, self.scratch):
            path.mkdir()

    def copy(self, *, with_extension: bool) -> None:
        """Copy the checkout, whether git tracks a file or not."""

        def left_out(folder: str, names: list[str]) -> set[str]:
            path = Path(folder)
            skipped = {name for name in names if name in _LEFT_OUT or name.endswith(".egg-info")}
            skipped |= {name for name in names if (path / name).resolve() == self.out}
            if path == self.root:
                skipped |= _LEFT_OUT_AT_THE_TOP.intersection(names)
            if path == self.root / "tpkernels" and not with_extension:
                skipped |= {n for n in names if n.startswith("_C") or n == "_build_info.json"}
            return skipped

        shutil.copytree(self.root, self.tree, ignore=left_out, symlinks=True, dirs_exist_ok=True)

    def keep_table(self) -> None:
        """Copy the table that tuning wrote, if it did, to OUT_DIR."""
        for table in sorted((self.cache / "tables").glob("*.json"))[:1]:
            part = self.out / "table.json.part"
            shutil.copyfile(table, part)
            part.replace(self.out / "table.json")
