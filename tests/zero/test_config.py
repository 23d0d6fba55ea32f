"""``ZeroConfig`` and sizes in bytes: what is read, what is refused, what the report says."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.errors import ConfigError
from tpkernels.zero.byte_sizes import UNLIMITED, format_bytes, parse_bytes
from tpkernels.zero.config import TrainingHints, ZeroConfig
from tpkernels.zero.policies import Offload, Precision


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (5, 5),
        (5e7, 50_000_000),
        ("268435456", 2**28),
        ("7B", 7),
        ("256MiB", 2**28),
        (" 1.5 GiB ", 3 * 2**29),
        ("1GB", 10**9),
        ("0.3 kB", 300),
        ("1.1GiB", int(1.1 * 2**30)),
        ("2 tib", 2**41),
        ("64kb", 64_000),
        (math.inf, UNLIMITED),
        ("Infinite", UNLIMITED),
        (2**63, UNLIMITED),
    ],
)
def test_a_size_is_read(value, size):
    assert parse_bytes(value, "prefetch_bytes") == size


@pytest.mark.parametrize(
    "value",
    [
        *(-1, "-1", True, math.nan, -math.inf, 0.5, "0.5", "0.5B", "1,5GB", "1e9"),
        *("64k", "64M", "64Mb", "", "MiB", "x", None, [1]),
    ],
)
def test_what_is_no_size_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=re.escape(f"max_live_bytes={value!r}")) as error:
        parse_bytes(value, "max_live_bytes")
    assert "allowed" in str(error.value) and "Fix" in str(error.value)


def test_an_ambiguous_unit_is_spelled_out_in_the_fix():
    with pytest.raises(ConfigError, match='Fix: write "64KiB" or "64KB"'):
        parse_bytes("64k", "units")


@given(st.integers(0, UNLIMITED))
def test_a_formatted_size_reads_back_to_four_digits(size):
    again = parse_bytes(format_bytes(size) if size < UNLIMITED else "unlimited", "size")
    assert abs(again - size) <= 1e-3 * size
    assert parse_bytes(format_bytes(size, round_up=True), "size") >= size


def test_a_proposed_bound_is_never_too_small():
    for size in (2**20 + 1, 3 * 2**60 + 1, 1024**2 - 1, 1234 * 2**20 + 1):
        assert parse_bytes(format_bytes(size, round_up=True), "size") >= size
        assert parse_bytes(format_bytes(size), "size") < size or size == 1024**2 - 1


def test_sizes_are_shown_in_the_largest_unit():
    sizes = [0, 1023, 1024, 2**20 - 1, 2**28, 3 * 2**29, 5 * 10**15, UNLIMITED]
    assert [format_bytes(size) for size in sizes] == (
        ["0 B", "1023 B", "1 KiB", "1024 KiB", "256 MiB", "1.5 GiB", "4.441 PiB", "unlimited"]
    )


def test_settings_are_kept_in_one_form():
    config = ZeroConfig(prefetch_bytes="1MiB", max_live_bytes=math.inf, mp_policy="bf16")
    assert config.prefetch_bytes == 2**20 and config.max_live_bytes is None
    assert config.mp_policy == Precision(torch.bfloat16, torch.float32)
    assert ZeroConfig().precision == ZeroConfig(mp_policy=None).mp_policy
    assert ZeroConfig(offload_optimizer="cpu", pin_memory=False).offload == Offload("cpu", False)
    assert dataclasses.replace(config, stage=2) == ZeroConfig(
        2, prefetch_bytes=2**20, mp_policy=torch.bfloat16
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_reduce_dtype_goes_into_the_precision_or_contradicts_it():
    config = ZeroConfig(mp_policy=Precision(torch.bfloat16), reduce_dtype=torch.float32)
    assert config.precision == Precision(torch.bfloat16, torch.float32)
    assert dataclasses.replace(config, reduce_dtype=torch.bfloat16).precision.reduce_dtype == (
        torch.bfloat16
    )
    assert ZeroConfig(reduce_dtype="bf16").reduce_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="differ"):
        ZeroConfig(mp_policy="bf16", reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 0}, "DistributedDataParallel"),
        ({"stage": 4}, "allowed: 1, 2, 3"),
        ({"stage": True}, "stage=True"),
        ({"stage": 3.0}, "stage=3.0"),
        ({"prefetch_bytes": None}, "prefetch_bytes=None"),
        ({"prefetch_bytes": None}, "Fix: math.inf"),
        ({"max_live_bytes": "64k"}, "max_live_bytes='64k'"),
        ({"mp_policy": "fast"}, "mp_policy='fast'"),
        ({"reduce_dtype": "int8"}, "None, torch.bfloat16, torch.float32, torch.float64."),
        ({"mp_policy": torch.int8}, "None, torch.bfloat16, torch.float32, torch.float64."),
        ({"prefetch_bytes": -1}, "Fix: math.inf"),
        ({"prefetch_bytes": "-1"}, "Fix: math.inf"),
        ({"persistence_limit": "10"}, "Fix: persistence_limit=10"),
        ({"persistence_limit": -1}, "Fix: persistence_limit=None"),
        ({"persistence_limit": True}, "Fix: persistence_limit=None"),
        ({"reduce_dtype": torch.float16}, "loss scaler"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer='nvme' is not supported"),
        ({"offload_optimizer": "gpu"}, "offload_optimizer='gpu' is not known"),
        ({"reshard_after_forward": 2}, "smaller group"),
        ({"strict": 1}, "strict=1 must be True or False"),
        ({"persistence_threshold": -1}, "persistence_threshold=-1"),
        ({"persistence_limit": 1.5}, "persistence_limit=1.5"),
        ({"max_pending_reduces": 0}, "allowed: a whole number >= 1"),
        ({"gradient_clipping": 0}, "gradient_clipping=0"),
        ({"gradient_clipping": math.nan}, "gradient_clipping=nan"),
        ({"training": {"train_batch_size": 8}}, "TrainingHints"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        ZeroConfig(**settings)
    assert "Fix: " in str(error.value)


def test_hints_are_whole_numbers():
    with pytest.raises(ConfigError, match=r"training\.micro_batch_size=0"):
        TrainingHints(micro_batch_size=0)


def test_hints_that_contradict_each_other_are_refused():
    TrainingHints(8, 16, 2)
    with pytest.raises(ConfigError, match=r"train_batch_size=7 is not a multiple of .* = 4"):
        TrainingHints(2, 7, 2)
    TrainingHints(train_batch_size=8, micro_batch_size=2).check_world(2)
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size 2 \\* ranks 3 = 6"):
        TrainingHints(train_batch_size=8, micro_batch_size=2).check_world(3)


def test_the_report_says_what_each_setting_is_and_from_where():
    config = ZeroConfig(stage=2, max_live_bytes="2GiB", mp_policy="bf16")
    assert str(config) == config.report()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in str(config).splitlines()}
    assert rows["stage"].split() == ["2", "given"]
    assert rows["max_live_bytes"].split() == ["2", "GiB", "given"]
    assert rows["prefetch_bytes"].split() == ["256", "MiB", "default"]
    assert "param_dtype bfloat16, reduce_dtype float32" in rows["mp_policy"]
    shown = {each.name for each in dataclasses.fields(config)} - {"notes", "origins", "training"}
    assert shown <= set(rows)


def test_a_setting_changed_after_reading_is_no_longer_from_its_key():
    read = ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 3}})
    changed = dataclasses.replace(read, stage=2)
    assert re.search(r"^stage +3 +zero_optimization\.stage$", str(read), re.MULTILINE)
    assert re.search(r"^stage +2 +given$", str(changed), re.MULTILINE)
