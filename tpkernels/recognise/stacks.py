"""The stacks of repeated blocks of a model, in the order in which they are registered."""

from __future__ import annotations

from torch import nn

from tpkernels.recognise.scope import repeated_items


def block_stacks(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Path of a ModuleList or Sequential -> path -> block, of the outermost such stacks.

    A stack inside a block (a list of experts) belongs to the block.
    """
    stacks: dict[str, dict[str, nn.Module]] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        items = repeated_items(module)
        if items:
            names = {child: f"{path}.{name}".lstrip(".") for name, child in module.named_children()}
            stacks[path] = {names[item]: item for item in items}
            inside.update(inner for item in items for inner in item.modules())
    return stacks
