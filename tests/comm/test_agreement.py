"""Ranks that hold different values are told so, all of them, with the tensor's name."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from tpkernels import TPMLP, RowParallelLinear, check_agreement, parallelize
from tpkernels.comm.agreement import CHECKED_CALLS, InputCheck
from tpkernels.comm.group import resolve_group
from tpkernels.errors import AgreementError, ConfigError
from tpkernels.kernels import available
from tpkernels.testing import RankError, count_collectives

BASE = torch.arange(24.0).view(4, 6)
ALIKE = {
    "float": BASE,
    "bf16": BASE.bfloat16(),
    "strided": BASE.t(),
    "expanded": BASE[:1].expand(4, 6),
    "offset": BASE.flatten()[1:],
    "int": BASE.long(),
    "bool": BASE > 3,
    "complex": torch.complex(BASE, BASE),
    "fp8": BASE.to(torch.float8_e4m3fn),
    "nan": torch.full((3,), torch.nan),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 5),
    "none": None,
    "parameter": torch.nn.Parameter(BASE),
}


def compare(group, given, odd=None):
    """Compare `given`; the odd rank holds `odd` instead."""
    mine = odd if odd is not None and group.rank() == 1 else given
    check_agreement(mine, group, "inputs of the test")


def compare_alike(group):
    compare(group, ALIKE)


def test_equal_values_pass(pool):
    pool.run(compare_alike, world_size=3)


def changed(position, value):
    other = BASE.clone()
    other.view(-1)[position] += value
    return other


DIFFERENT = {
    "first value": (BASE, changed(0, 1e-6), "values"),
    "last value": (BASE, changed(-1, 1e-6), "values"),
    "swapped values": (BASE, BASE.flip(1), "values"),
    "swapped rows": (BASE, BASE.flip(0), "values"),
    "sign of zero": (torch.zeros(3), -torch.zeros(3), "values"),
    "one byte": (torch.zeros(9, dtype=torch.uint8), torch.eye(9, dtype=torch.uint8)[8], "values"),
    "shape": (BASE, BASE.view(6, 4), "shape"),
    "rows": (BASE, BASE[:3], "shape"),
    "dimensions": (BASE, BASE[None], "number of dimensions"),
    "empty shape": (torch.zeros(0, 5), torch.zeros(0, 6), "shape"),
    "dtype": (BASE, BASE.double(), "dtype"),
    "bf16 for fp16": (BASE.bfloat16(), BASE.half(), "dtype"),
    "none": (BASE, {"none": None}, "number of dimensions"),
}


def all_differences(group):
    """The message of every difference on this rank, or what else happened."""
    seen = {}
    for label, (value, other, _) in DIFFERENT.items():
        other = other["none"] if isinstance(other, dict) else other
        try:
            compare(group, {"same": BASE, "hidden": value}, {"same": BASE, "hidden": other})
            seen[label] = "no error"
        except AgreementError as error:
            seen[label] = str(error)
    return seen


def test_a_difference_is_told_on_every_rank_by_name(pool):
    for rank, seen in enumerate(pool.run(all_differences, world_size=3)):
        for label, (_, _, field) in DIFFERENT.items():
            message = seen[label]
            assert f"inputs of the test: 'hidden' differs in {field}" in message, (rank, label)
            assert "ranks [1] of the group" in message and f"this is rank {rank}" in message
            assert "Fix: " in message


def test_different_numbers_of_tensors(pool):
    with pytest.raises(RankError, match=r"different numbers of tensors: \[1, 2\]") as caught:
        pool.run(compare, {"a": BASE}, {"a": BASE, "b": BASE}, world_size=2)
    assert [f.type_name.split(".")[-1] for f in caught.value.failures] == ["AgreementError"] * 2


def any_single_value(group, size, position):
    x = torch.zeros(size)
    if group.rank() == 1:
        x[position] = 1e-30
    try:
        check_agreement({"x": x}, group, "test")
    except AgreementError:
        return True
    return False


def test_one_changed_value_is_seen_wherever_it_is(pool):
    for size in (1, 7, 1021, 1022, 70_001):
        for position in {0, size // 2, size - 1}:
            assert pool.run(any_single_value, size, position, world_size=2) == [True, True]


def checked_calls(group, calls):
    group, check, checked = resolve_group(group), InputCheck(), []
    for _ in range(calls):
        with count_collectives() as counts:
            check({"x": BASE}, group, "layer")
        checked.append(counts.total.calls > 0)
    return checked


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, [True] * CHECKED_CALLS + [False] * 2),
        ("first", [True] * CHECKED_CALLS + [False] * 2),
        ("always", [True] * (CHECKED_CALLS + 2)),
        ("off", [False] * (CHECKED_CALLS + 2)),
    ],
)
def test_modes_of_the_check(pool, mode, expected):
    env = {} if mode is None else {"TPKERNELS_CHECK": mode}
    assert pool.run(checked_calls, len(expected), world_size=2, env=env) == [expected] * 2


def test_an_unknown_mode_is_refused(pool):
    with pytest.raises(RankError, match="TPKERNELS_CHECK='often' is not known") as caught:
        pool.run(checked_calls, 1, world_size=2, env={"TPKERNELS_CHECK": "often"})
    assert isinstance(caught.value.__cause__, ConfigError)


def overlap_differs(group, odd, given, values):
    """The message, and what was sent, where the odd rank asks for another overlap."""
    group, check = resolve_group(group), InputCheck()
    setting = odd if group.rank == 1 else given
    os.environ.pop("TPKERNELS_OVERLAP", None)
    if setting is not None:
        os.environ["TPKERNELS_OVERLAP"] = setting
    with count_collectives() as counts:
        try:
            check(values, group, "layer")
            found = "no error"
        except AgreementError as error:
            found = str(error)
    return found, counts.total.calls


@pytest.mark.parametrize("values", [{"x": BASE}, {}], ids=["tensors", "none"])
@pytest.mark.parametrize(
    ("odd", "given", "names"),
    [
        ("off", "signaled", ["signaled", "off", "signaled"]),
        ("signaled", None, ["auto", "signaled", "auto"]),
        ("chunked", "off", ["off", "chunked", "off"]),
        ("nonsense", "off", ["off", "not a strategy", "off"]),
    ],
)
def test_another_overlap_is_told_on_every_rank_before_any_other_collective(
    pool, odd, given, names, values
):
    found = pool.run(overlap_differs, odd, given, values, world_size=3)
    for rank, (message, calls) in enumerate(found):
        assert message.startswith("inputs of layer: TPKERNELS_OVERLAP differs between the ranks")
        assert f"{', '.join(names)} by rank of the group" in message
        assert f"this is rank {rank}: {names[rank]})" in message
        assert "Fix: export the same TPKERNELS_OVERLAP on every rank" in message
        assert calls == 1


@pytest.mark.parametrize("setting", [None, "off", "signaled", "nonsense"])
def test_one_overlap_agrees(pool, setting):
    """One that no rank can have is for the ops to refuse."""
    found = pool.run(overlap_differs, setting, setting, {"x": BASE}, world_size=2)
    assert found == [("no error", 2)] * 2


def test_unset_is_auto(pool):
    assert pool.run(overlap_differs, None, "auto", {"x": BASE}, world_size=2)[0][0] == "no error"


def call_module(group, build, settings):
    os.environ["TPKERNELS_OVERLAP"] = settings[group.rank()]
    return build(group)(torch.ones(8, 4))


def mlp(group):
    return TPMLP(4, 8, group=group)


def linear(group):
    return RowParallelLinear(4, 4, input_is_parallel=False, group=group)


def whole_model(group):
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    model = nn.Sequential(block)
    parallelize(model, group)
    return model


@pytest.mark.parametrize("build", [mlp, linear, whole_model])
@pytest.mark.parametrize("settings", [("chunked", "off"), ("off", "signaled")])
def test_a_module_s_ranks_with_other_overlaps_raise_and_do_not_hang(pool, build, settings):
    if "signaled" in settings and build is whole_model and not available.status().available:
        pytest.skip("parallelize refuses signaled here")
    with pytest.raises(RankError, match="TPKERNELS_OVERLAP differs between") as caught:
        pool.run(call_module, build, settings, world_size=2, timeout=60)
    assert [f.type_name.split(".")[-1] for f in caught.value.failures] == ["AgreementError"] * 2


def test_a_group_of_one_agrees_with_itself():
    check_agreement({"x": BASE}, None, "test")


def checked_bytes(group):
    with count_collectives() as counts:
        check_agreement({"x": torch.zeros(10_000), "y": None}, group, "test")
    return counts.total.bytes


def test_what_is_sent_is_small_whatever_the_tensors(pool):
    assert pool.run(checked_bytes, world_size=2) == [2 * 32 + 2 * 2 * 32] * 2
