"""The README's code blocks run, in order, on two ranks; its commands exist."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

README = Path(__file__).parent.parent / "README.md"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 256)
        self.fc2 = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([_Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run_blocks(
    group: Any, blocks: list[str], folder: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y of the first block, y of the second, which is split; `out` of the modules' block)."""
    os.chdir(folder)  # for the page that one of them writes
    names: dict[str, Any] = {"MyModel": MyModel, "x": torch.ones(3, 64)}
    exec(blocks[0], names)
    dense = names["y"].detach()
    exec(blocks[1], names)
    split = names["y"].detach()
    for block in blocks[2:]:
        exec(block, names)
    return dense, split, names["out"].detach()


def test_code_blocks_run_and_the_split_model_answers_like_the_dense_one(
    pools: Any, tmp_path: Path
) -> None:
    results = pools(2).run(run_blocks, python_blocks(), str(tmp_path), timeout=90)
    assert (tmp_path / "step.html").is_file()
    for dense, split, out in results:
        torch.testing.assert_close(split, dense)
        assert torch.equal(out, results[0][2])


def test_commands_are_targets_and_subcommands() -> None:
    from tpkernels.cli import COMMANDS

    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in re.findall(r"^tpkernels (\S+)", text, re.MULTILINE):
        assert command in COMMANDS, command
