"""Which heads each rank holds: every query head once, beside its key-value head."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tpkernels.errors import UnsupportedModuleError
from tpkernels.modules import HeadPartition

counts = st.integers(1, 12)


@given(kv_heads=counts, per_kv=counts, world=st.integers(1, 9))
def test_every_split_is_whole_and_local(kv_heads, per_kv, world):
    heads = kv_heads * per_kv
    try:
        partition = HeadPartition.of(heads, kv_heads, 4, world, "attn")
    except UnsupportedModuleError as error:
        assert str(error).startswith(f"attn: {heads} query heads with {kv_heads} key-value heads")
        assert world not in allowed_sizes(str(error))
        return
    covered = [head for start, count in partition.q for head in range(start, start + count)]
    assert covered == list(range(heads))
    held = {kv for start, count in partition.kv for kv in range(start, start + count)}
    assert held == set(range(kv_heads))
    for rank in range(world):
        (q_start, q_count), (kv_start, kv_count) = partition.q[rank], partition.kv[rank]
        assert q_count > 0
        assert q_count % kv_count == 0  # equally many queries for each local key-value head
        local_group = q_count // kv_count
        for i in range(q_count):
            assert (q_start + i) // per_kv == kv_start + i // local_group
    assert partition.num_kv_heads == kv_heads  # TP-27


@given(kv_heads=counts, per_kv=counts)
def test_every_size_that_the_refusal_names_works(kv_heads, per_kv):
    heads = kv_heads * per_kv
    with pytest.raises(UnsupportedModuleError) as caught:
        HeadPartition.of(heads, kv_heads, 4, heads + 1, "attn")
    for world in allowed_sizes(str(caught.value)):
        HeadPartition.of(heads, kv_heads, 4, world, "attn")


def allowed_sizes(message: str) -> list[int]:
    listed = re.search(r"from 1 to (\d+)(?:, or ([\d, ]+))?", message)
    last, more = listed.group(1), listed.group(2)
    sizes = [int(size) for size in more.split(", ")] if more else []
    return [*range(1, int(last) + 1), *sizes]


def test_the_splits_that_a_report_shows():
    assert HeadPartition.of(12, 12, 8, 2, "a").describe() == "6+6 heads"
    assert HeadPartition.of(9, 3, 64, 2, "a").describe() == "6+3 heads, 2+1 KV heads"
    assert HeadPartition.of(9, 3, 64, 3, "a").q_rows() == [(0, 192), (192, 192), (384, 192)]
    replicated = HeadPartition.of(8, 2, 16, 4, "a")
    assert replicated.kv_rows() == [(0, 16), (0, 16), (16, 16), (16, 16)]
