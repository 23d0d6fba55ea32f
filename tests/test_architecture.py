"""The floors of the house: imports only go down, and the C++ has never heard of Python.

    7 cli, demo, doctor, benchmarks, ...   programs
    6 recognise, parallelize, trace, ...   policy over whole models
    5 modules          zero                nn.Modules (siblings)
    4 overlap                              compute and communication joined
    3 comm                                 groups and collectives
    2 ops                                  custom ops
    1 kernels, native                      Triton; the compiled extension
    0 reference, envs, errors, ...         plain PyTorch

A new module of ``tpkernels`` or folder of ``csrc`` must be given its floor here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "tpkernels"

FLOORS = {
    **dict.fromkeys(("benchmarks", "cli", "__main__", "demo", "doctor", "launch"), 7),
    **dict.fromkeys(("testing", "trace_command", "traced_script", "train"), 7),
    **dict.fromkeys(("parallelize", "plan", "planner"), 6),
    **dict.fromkeys(("recognise", "replace", "report", "sequence_blocks", "trace"), 6),
    **dict.fromkeys(("checkpoint", "clip_grad", "huggingface"), 5),
    **dict.fromkeys(("modules", "optimizer_checkpoint", "zero"), 5),
    "overlap": 4,
    "comm": 3,
    "ops": 2,
    **dict.fromkeys(("build", "kernels", "native"), 1),
    **dict.fromkeys(("chunked_tensor", "envs", "errors", "instrument", "library"), 0),
    **dict.fromkeys(("boxes", "part_functions", "reference", "shard_spec"), 0),
}
SIBLINGS = ({"comm", "ops"}, {"modules", "zero"})  # neither imports the other

CSRC_MAY_INCLUDE = {
    "common": {"common"},
    "kernels": {"common", "kernels"},
    "runtime": {"common", "runtime"},
    "host": {"common", "host"},
    "comm": {"common", "kernels", "runtime", "comm"},
    "ops": {"common", "kernels", "runtime", "comm", "ops"},
    "c10d": {"common", "kernels", "runtime", "comm", "c10d"},
    "tests": {"common", "kernels", "runtime", "comm", "host", "tests"},
}
# Compiled without torch, in seconds.
WITHOUT_TORCH = {"common", "kernels", "runtime", "comm", "host", "tests"}
TORCH_HEADER = re.compile(r"(ATen|c10|caffe2|torch)/")
PYTHON_HEADER = re.compile(r"(Python\.h|pybind11/|torch/(extension|python)\.h|torch/csrc/utils/py)")

SOURCES = ("*.py", "*.cpp", "*.h", "*.cu", "*.cuh")
MOST_LINES = 500


def imported(source: str, module: str, is_package: bool = False) -> set[str]:
    """Full names that ``source``, the text of ``module``, imports; not for type checking only."""
    names: set[str] = set()
    for node in _executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")
            if node.level:
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, *([node.module] if node.module else [])])
            else:
                base = node.module or ""
            # `from tpkernels import ops` names a module; elsewhere the package says enough
            names |= {f"{base}.{a.name}" for a in node.names} if base == PACKAGE else {base}
    return names


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _executed(other)
            continue
        yield child
        yield from _executed(child)


def unit_of(name: str) -> str | None:
    """The module or folder directly under ``tpkernels`` that ``name`` belongs to."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def upward_imports(sources: dict[str, str]) -> list[str]:
    """Every import of ``sources`` (module name -> text) that does not go down, in words."""
    found = []
    for module, text in sources.items():
        unit = unit_of(module)
        for name in imported(text, module, is_package=module.count(".") == 1):
            target = unit_of(name)
            if unit is None or target in (None, unit):
                continue
            if target not in FLOORS:
                if name == f"{PACKAGE}.{target}" and target.startswith("__"):
                    continue  # from tpkernels import __version__
                found.append(f"{module} imports {name}, which has no floor")
            elif FLOORS[target] > FLOORS[unit]:
                found.append(f"{module} ({FLOORS[unit]}) imports {name} ({FLOORS[target]})")
            elif {unit, target} in SIBLINGS:
                found.append(f"{module} imports its sibling {name}")
    return found


def python_sources() -> dict[str, str]:
    sources = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text()
    return sources


def test_every_module_has_a_floor():
    units = {
        path.stem
        for path in (ROOT / PACKAGE).iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
    }
    assert units - {"__init__"} <= set(FLOORS), "give the new module its floor in FLOORS"


def test_imports_only_go_down():
    assert upward_imports(python_sources()) == []


def test_importing_the_package_never_imports_torch():
    """``import tpkernels`` works without torch: nothing that needs it is imported before use."""
    sources, seen, pending = python_sources(), set(), [PACKAGE]
    while pending:
        module = pending.pop()
        seen.add(module)
        at_import = [
            n for n in ast.parse(sources[module]).body if not isinstance(n, ast.FunctionDef)
        ]
        text = ast.unparse(ast.Module(at_import, []))
        names = imported(text, module, is_package=module == PACKAGE)
        assert "torch" not in {name.split(".")[0] for name in names}, module
        pending += [name for name in names if name in sources and name not in seen]


@pytest.mark.parametrize(
    ("module", "line", "bad"),
    [
        ("ops.gemm_act", "from tpkernels.comm.group import Group", True),
        ("ops.gemm_act", "def f():\n    import tpkernels.modules.mlp", True),
        ("ops.gemm_act", "from tpkernels import comm", True),
        ("ops.gemm_act", "from ..comm import group", True),
        ("comm.regions", "from tpkernels.ops import gemm_act", True),
        ("modules.mlp", "from tpkernels.zero import manager", True),
        ("overlap.plan", "from tpkernels.new_thing import f", True),
        ("overlap.plan", "from tpkernels.ops import gemm_act", False),
        ("overlap.plan", "from .mlp import mlp", False),
        ("overlap.plan", "from tpkernels import __version__", False),
        ("ops.gemm_act", "if TYPE_CHECKING:\n    from tpkernels.comm import group", False),
        ("ops.gemm_act", "if TYPE_CHECKING:\n    pass\nelse:\n    import tpkernels.comm", True),
    ],
)
def test_the_import_check_sees(module, line, bad):
    assert bool(upward_imports({f"{PACKAGE}.{module}": line})) is bad


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def bad_includes(folder: str, text: str) -> list[str]:
    """The includes that a file of ``csrc/<folder>`` must not have."""
    bad = []
    for name in includes(text):
        first = name.split("/")[0]
        torch_header = TORCH_HEADER.match(name) and folder in WITHOUT_TORCH
        other = "/" in name and first in CSRC_MAY_INCLUDE and first not in CSRC_MAY_INCLUDE[folder]
        if PYTHON_HEADER.match(name) or torch_header or other or ".." in name:
            bad.append(name)
    return bad


def csrc_sources() -> Iterator[Path]:
    for pattern in SOURCES:
        yield from (ROOT / "csrc").rglob(pattern)


def test_every_folder_of_csrc_has_a_floor():
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} <= set(
        CSRC_MAY_INCLUDE
    ), "give the new folder its floor in CSRC_MAY_INCLUDE"


def test_includes_only_go_down_and_keep_torch_and_python_out():
    found = {}
    for path in csrc_sources():
        folder = path.relative_to(ROOT / "csrc").parts[0]
        if bad := bad_includes(folder, path.read_text()):
            found[str(path.relative_to(ROOT))] = bad
    assert found == {}


@pytest.mark.parametrize(
    ("folder", "line", "bad"),
    [
        ("kernels", "#include <ATen/core/Tensor.h>", True),
        ("common", '#include "c10/util/Half.h"', True),
        ("common", '#include "kernels/epilogue_cpu.h"', True),
        ("ops", "#include <pybind11/pybind11.h>", True),
        ("ops", "#include <torch/extension.h>", True),
        ("ops", '#  include "../../python/module.h"', True),
        ("ops", "#include <torch/library.h>", False),
        ("ops", '#include "kernels/epilogue_cpu.h"', False),
        ("kernels", "#include <cmath>", False),
    ],
)
def test_the_include_check_sees(folder, line, bad):
    assert bool(bad_includes(folder, line)) is bad


def all_sources() -> Iterator[Path]:
    for folder in (PACKAGE, "csrc", "python", "tests", "bench", "scripts"):
        for pattern in SOURCES:
            yield from (ROOT / folder).rglob(pattern)


def test_no_file_is_longer_than_500_lines():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in all_sources()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_files_are_named_by_what_they_hold():
    vague = re.compile(r"(utils?|helpers?|misc)$|fast_|.*_v\d+$|legacy")
    assert [str(p.relative_to(ROOT)) for p in all_sources() if vague.match(p.stem)] == []
