"""Tile configurations: their text, the default rule, and what operands that are not aligned get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.errors import ConfigError
from tpkernels.kernels.config import (
    OPS,
    GemmConfig,
    configs,
    default_config,
    unaligned_config,
)

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
powers = st.integers(4, 8).map(lambda e: 2**e)
numbers = st.integers(1, 16)


parts = st.sampled_from((1, 2, 4))


@given(st.tuples(powers, powers, powers, numbers, numbers, numbers, parts, parts, st.booleans()))
def test_the_text_of_a_configuration_is_read_back(fields):
    config = GemmConfig(*fields)
    assert GemmConfig.parse(str(config)) == config


@pytest.mark.parametrize("text", ["", "128x128", "128x128x64 g8 s3", "128x128x64 g8 s3 w8 mma"])
def test_another_text_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="not a tile configuration; allowed: a text like '128x"):
        GemmConfig.parse(text)


@pytest.mark.parametrize("op", OPS)
def test_every_list_is_short_and_fits_the_architecture(op):
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            found = configs(op, dtype, capability)
            assert 1 <= len(found) <= 9 and len(set(found)) == len(found)
            copies = (9, 0) <= capability < (12, 0)
            assert all(config.tma is copies for config in found)
            for config in found:  # powers of two, no block too narrow for a tensor core
                for block in (config.block_m, config.block_n, config.block_k):
                    assert block >= 16 and block & (block - 1) == 0
                assert config.block_n // config.epilogue >= 16


@given(st.integers(0, 20000), st.integers(1, 60000), st.integers(0, 20000))
def test_the_default_is_one_of_the_list_and_no_tile_is_mostly_empty(m, n, k):
    for op in OPS:
        for capability in CAPABILITIES:
            config = default_config(op, torch.bfloat16, capability, m, n, k)
            listed = configs(op, torch.bfloat16, capability)
            assert config in listed
            assert config.block_m < 2 * max(m, 1) or config in listed[-2:]


def test_large_sizes_take_large_tiles_and_few_rows_take_few():
    def chosen(m, n):
        return default_config("gemm_act", torch.bfloat16, (9, 0), m, n, 4096)

    assert (chosen(8192, 12288).block_m, chosen(8192, 12288).block_n) == (128, 256)
    assert chosen(1, 12288).block_m == 16
    few = chosen(1024, 1600)
    assert few.block_m * few.block_n < 128 * 256  # so that there are enough of them


@pytest.fixture
def precision():
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


def test_float32_keeps_to_tiles_without_tensor_cores_unless_tf32_is_allowed(precision):
    for setting, block_k in (("ieee", 16), ("tf32", 32)):
        precision.fp32_precision = setting
        config = default_config("gemm_act", torch.float32, (9, 0), 4096, 4096, 64)
        assert config.block_k == block_k


def test_operands_that_are_not_aligned_get_tiles_that_do_not_spill():
    large, small = GemmConfig(128, 256, 64), GemmConfig(16, 32, 16)
    assert unaligned_config(large, 4097).volume < large.volume
    assert unaligned_config(large, 3).block_m == 16
    assert unaligned_config(small, 4097) == small
