"""From a model's repeated blocks to regions in which the sequence is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from tpkernels.comm.group import Group
from tpkernels.errors import UnsupportedModuleError
from tpkernels.modules.class_swap import recorded
from tpkernels.modules.sequence_parallel import SequenceParallelBlock
from tpkernels.modules.sequence_proof import SequenceProof
from tpkernels.modules.sequence_region import FIX, SequenceRegion
from tpkernels.recognise import Recognition, block_stacks
from tpkernels.replace import LEAVES, Replacement


@dataclass(frozen=True)
class _Stack:
    path: str
    blocks: dict[str, nn.Module]
    runs: list[nn.Module]  # whose forward calls the blocks: the root, and who is nearest to them


def plan_sequence_parallel(
    model: nn.Module, split: list[Replacement], recognition: Recognition | None, group: Group
) -> list[Replacement]:
    """One replacement for each block, to be made after those of ``split``, which are inside.

    ``group`` has several ranks.

    Every stack of blocks with a split module in it becomes a region of its own.

    Raises:
        UnsupportedModuleError: no such blocks, or one that is known not to work on shards.
    """
    names = {name.split(" + ")[0] for name in (each.name for each in split)}
    stacks = [
        _Stack(path, blocks, _runners(model, path))
        for path, blocks in block_stacks(model).items()
        if any(name == block or name.startswith(f"{block}.") for name in names for block in blocks)
    ]
    if not stacks:
        raise UnsupportedModuleError(
            f"sequence_parallel=True: {type(model).__name__} has no repeated blocks (a ModuleList "
            f"or Sequential of layers of one class) with a split module in them. Fix: {FIX}"
        )
    whole = {each.name for each in split if each.action != LEAVES}
    for stack in stacks:
        for path, block in stack.blocks.items():
            _check(path, block, whole, recognition)
    return [each for stack in stacks for each in _replacements(stack, group)]


def _check(path: str, block: nn.Module, whole: set[str], recognition: Recognition | None) -> None:
    problem = None
    if path in whole:
        problem = "the block is itself one split module, with nothing around it to shard"
    for name, module in block.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            problem = f"{name!r} ({type(module).__name__}) normalises over all tokens"
    for found in () if recognition is None else recognition.found:
        if found.path.startswith(f"{path}.") and getattr(found.structure, "cross", False):
            problem = f"{found.path!r} attends to another sequence"
    if problem is not None:
        raise UnsupportedModuleError(
            f"sequence_parallel=True: {path} ({type(block).__name__}) cannot work on shards of the "
            f"sequence: {problem}. Fix: {FIX}"
        )


def _runners(model: nn.Module, path: str) -> list[nn.Module]:
    """The root, and the nearest module above the stack that has a forward of its own."""
    parts = path.split(".") if path else []
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    own = [each for each in above if not isinstance(each, nn.ModuleList | nn.Sequential)]
    return list(dict.fromkeys([model, *own[-1:]]))


def _replacements(stack: _Stack, group: Group) -> list[Replacement]:
    region, proof = SequenceRegion(group, stack.path or "the model"), SequenceProof()
    paths = list(stack.blocks)
    detail = f"tokens over {group.size} ranks; gathered in split modules and after the last block"

    def make(path: str) -> Callable[[], None]:
        def apply() -> None:
            is_first, is_last = path == paths[0], path == paths[-1]
            SequenceParallelBlock.shard_(
                stack.blocks[path], region, proof, name=path, is_first=is_first, is_last=is_last
            )
            for index, module in enumerate(stack.runs if is_first else ()):
                with recorded(module):
                    begin = region.begin if index else region.begin_root
                    module.register_forward_pre_hook(begin, with_kwargs=True)
                    module.register_forward_hook(region.finish)

        return apply

    return [
        Replacement(path, "block", "SequenceParallelBlock", detail, make(path)) for path in paths
    ]
