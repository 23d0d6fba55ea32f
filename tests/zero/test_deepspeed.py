"""DeepSpeed's JSON: files in use, every spelling of a value, and what is refused by name."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tpkernels.errors import ConfigError, TPKernelsWarning
from tpkernels.zero.config import TrainingHints, ZeroConfig
from tpkernels.zero.deepspeed import keys
from tpkernels.zero.policies import Precision

DATA = Path(__file__).parent / "data"
HIDDEN = 4096


@pytest.fixture(autouse=True)
def no_warning_unless_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error", TPKernelsWarning)
        yield


def zero(reading_of=None, **values):
    """The config of a file with these keys in its section; ``reading_of`` are its other keys."""
    section = {"stage": 3, **values}
    return ZeroConfig.from_deepspeed({"zero_optimization": section, **(reading_of or {})})


def note_of(config, key):
    (note,) = [note for note in config.notes if note.startswith(f"{key} = ")]
    return note


def test_axolotl_zero3_bf16():
    config = ZeroConfig.from_deepspeed(DATA / "axolotl_zero3_bf16.json", hidden_size=HIDDEN)
    assert config == ZeroConfig(
        stage=3,
        prefetch_bytes=0,  # max_live_parameters 0: it must train, and gather nothing ahead
        max_live_bytes=None,
        mp_policy=Precision(torch.bfloat16),
        persistence_threshold=10 * HIDDEN,
    )
    assert f"{HIDDEN**2} elements" in note_of(config, "zero_optimization.reduce_bucket_size")


def test_llama_factory_z3():
    path = str(DATA / "llama_factory_z3.json")
    config = ZeroConfig.from_deepspeed(path, hidden_size=HIDDEN, param_dtype="bf16")
    assert config == ZeroConfig(
        stage=3,
        prefetch_bytes=2 * int(0.9 * HIDDEN**2),
        max_live_bytes=2 * 10**9,
        persistence_threshold=10 * HIDDEN,
        max_pending_reduces=1,
    )
    assert "off" in note_of(config, "bf16.enabled") and "off" in note_of(config, "fp16.enabled")
    assert "not read here" in note_of(config, "comms_config")


@pytest.mark.parametrize("name", ["axolotl_zero3_bf16.json", "llama_factory_z3.json"])
def test_every_key_of_a_file_has_a_note(name):
    given = json.loads((DATA / name).read_text())
    leaves = [f"zero_optimization.{key}" for key in given.pop("zero_optimization")]
    for section in {"bf16", "fp16"} & set(given):
        leaves += [f"{section}.{key}" for key in given.pop(section)]
    noted = [note.split(" = ")[0] for note in ZeroConfig.from_deepspeed(DATA / name).notes]
    assert sorted(noted) == sorted([*leaves, *given])


def test_auto_without_a_hidden_size_is_our_default_and_says_so():
    config = zero(prefetch_bucket_size="auto", stage3_param_persistence_threshold="auto")
    assert config == ZeroConfig(stage=3)
    note = note_of(config, "zero_optimization.prefetch_bucket_size")
    assert "our default of prefetch_bytes; give hidden_size=" in note


def test_auto_everywhere_is_never_an_error():
    section = {name: "auto" for name in keys.ZERO_KEYS}
    top = {name: "auto" for name in keys.TOP_KEYS if name != "zero_optimization"}
    config = ZeroConfig.from_deepspeed({"zero_optimization": section, **top}, hidden_size=64)
    assert config.stage == 3 and config.prefetch_bytes == 4 * int(0.9 * 64 * 64)


@pytest.mark.parametrize("spelled", [5e7, 50_000_000, "5e7", "50000000", " 5E7 "], ids=repr)
@pytest.mark.parametrize("name", ["prefetch_bucket_size", "stage3_prefetch_bucket_size"])
def test_numbers_are_read_however_they_are_spelled(name, spelled):
    assert zero(**{name: spelled}).prefetch_bytes == 4 * 50_000_000


@pytest.mark.parametrize(
    ("other", "param_dtype", "itemsize"),
    [
        ({}, None, 4),
        ({"bf16": {"enabled": True}}, None, 2),
        ({"bfloat16": {"enabled": "true"}}, None, 2),
        ({"bf16": {"enabled": "auto"}}, torch.bfloat16, 2),
        ({"bf16": {"enabled": True}}, torch.float32, 4),
        ({}, torch.float64, 8),
    ],
    ids=str,
)
def test_elements_become_bytes_of_the_gathered_dtype(other, param_dtype, itemsize):
    given = {"zero_optimization": {"stage": 3, "max_live_parameters": 1000}, **other}
    config = ZeroConfig.from_deepspeed(given, param_dtype=param_dtype)
    assert config.max_live_bytes == 1000 * itemsize


def test_precision_that_the_file_leaves_open_is_the_callers():
    """The note on "auto" names a call that works."""
    stage3 = {"zero_optimization": {"stage": 3, "max_live_parameters": 1000}}
    notes = ZeroConfig.from_deepspeed(stage3 | {"bf16": {"enabled": "auto"}}).notes
    assert any("from_deepspeed(..., mp_policy='bf16') turns it on" in note for note in notes)
    for other in ({}, {"bf16": {"enabled": "auto"}}, {"bf16": {}}, {"bf16": "auto"}):
        config = ZeroConfig.from_deepspeed(stage3 | other, mp_policy="bf16")
        assert config.mp_policy == Precision(torch.bfloat16, torch.float32)
        assert config.max_live_bytes == 2000
    assert ZeroConfig.from_deepspeed(
        stage3, mp_policy="fp32", param_dtype="bf16"
    ).max_live_bytes == (2000)
    for enabled in (True, False):
        with pytest.raises(ConfigError, match=rf"bf16.enabled={enabled} and mp_policy=.*Fix: "):
            ZeroConfig.from_deepspeed(stage3 | {"bf16": {"enabled": enabled}}, mp_policy="bf16")


def test_a_file_is_read_with_its_mark_and_refused_where_it_is_no_text(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8-sig")
    assert ZeroConfig.from_deepspeed(path).stage == 2
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot be read .*Fix: "):
        ZeroConfig.from_deepspeed(path)


def test_batch_sizes_that_contradict_each_other_are_refused():
    sizes = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises(ConfigError, match=r"train_batch_size=7 .*train_micro_batch_size_per_gpu"):
        ZeroConfig.from_deepspeed(
            {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2, **sizes}
        )


def test_limits_of_zero_and_without_end():
    """Z-50: 0 is visible as no prefetch, whatever the bucket, and a huge limit is no limit."""
    config = zero(max_live_parameters=0, prefetch_bucket_size=5e7)
    assert config.prefetch_bytes == 0 and config.max_live_bytes is None
    config = zero(max_live_parameters=sys.maxsize, model_persistence_threshold=sys.maxsize)
    assert config.max_live_bytes is None and config.persistence_limit is None
    assert zero(prefetch_bucket_size=0).prefetch_bytes == 0
    assert zero(model_persistence_threshold="1e6").persistence_limit == 10**6


@pytest.mark.parametrize(
    ("values", "setting", "value"),
    [
        ({"stage": "2"}, "stage", 2),
        ({"overlap_comm": False}, "max_pending_reduces", 1),
        ({"overlap_comm": True}, "max_pending_reduces", 2),
        ({"overlap_comm": None}, "max_pending_reduces", 2),
        ({"ignore_unused_parameters": True}, "find_unused_parameters", True),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "cpu"),
        ({"offload_optimizer": {"device": "none"}}, "offload_optimizer", "none"),
        ({"offload_optimizer": None}, "offload_optimizer", "none"),
        ({"offload_optimizer": {"pin_memory": False}}, "pin_memory", False),
        ({"cpu_offload": True}, "offload_optimizer", "cpu"),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "offload_optimizer", "cpu"),
        ({"cpu_offload_use_pin_memory": False}, "pin_memory", False),
        ({"offload_param": {"device": "none"}}, "offload_optimizer", "none"),
        ({"cpu_offload_param": False}, "offload_optimizer", "none"),
        ({"stage3_gather_fp16_weights_on_model_save": True}, "stage", 3),
        ({"leaf_module": {"classes": ["Block"]}}, "units", None),
        ({"mics_shard_size": -1, "zero_hpz_partition_size": "1"}, "stage", 3),
    ],
    ids=str,
)
def test_a_key_of_zero_optimization_is_read(values, setting, value):
    config = zero(**values)
    assert getattr(config, setting) == value
    assert len(config.notes) >= len({"stage", *values})


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping", 1.0),
        ({"gradient_clipping": "0.5"}, "gradient_clipping", 0.5),
        ({"gradient_clipping": 0}, "gradient_clipping", None),
        ({"communication_data_type": "fp32"}, "reduce_dtype", torch.float32),
        ({"communication_data_type": "BF16"}, "reduce_dtype", torch.bfloat16),
        (
            {"bf16": {"enabled": False}, "fp16": {"enabled": False}},
            "mp_policy",
            ZeroConfig().mp_policy,
        ),
        ({"gradient_allreduce_op": "mean"}, "stage", 3),
        ({"tensor_parallel": {"autotp_size": 1}, "torch_autocast": {"enabled": False}}, "stage", 3),
        ({"data_types": {"grad_accum_dtype": "fp32"}, "amp": {"enabled": False}}, "stage", 3),
        ({"prescale_gradients": False, "gradient_predivide_factor": 1}, "stage", 3),
    ],
    ids=str,
)
def test_a_key_of_the_top_level_is_read(given, setting, value):
    assert getattr(zero(given), setting) == value


def test_batch_sizes_are_hints():
    given = {"gradient_accumulation_steps": 4, "train_batch_size": 64.0}
    config = zero({**given, "train_micro_batch_size_per_gpu": "2"})
    assert config.training == TrainingHints(4, 64, 2)
    assert re.search(r"training.micro_batch_size +2 +train_micro_batch_size_per_gpu", str(config))


def test_deepspeeds_first_format_is_a_flag():
    config = ZeroConfig.from_deepspeed({"zero_optimization": True, "allgather_size": 5e8})
    assert config.stage == 1 and "deprecated" in note_of(config, "zero_optimization")


def test_one_warning_names_all_that_is_not_honoured():
    values = {"zero_quantized_weights": True, "zero_hpz_partition_size": 8, "mics_shard_size": 4}
    values |= {"zenflow": {"topk_ratio": 0.1}, "contiguous_gradients": False}
    values |= {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "reduce_scatter": True}
    other = {"prescale_gradients": True, "bf16": {"enabled": True, "bf16_optimizer_states": True}}
    other |= {"data_types": {"grad_accum_dtype": "bf16"}}
    with pytest.warns(TPKernelsWarning) as caught:
        config = zero(other, **values)
    (warning,) = caught
    text = str(warning.message)
    for key in (
        "zenflow",
        "zero_optimization.offload_optimizer.ratio",
        "bf16.bf16_optimizer_states",
    ):
        assert f"{key} = " in text
    assert text.startswith("DeepSpeed configuration: 9 key(s)") and "reduce_scatter = " not in text
    assert Path(warning.filename) == Path(__file__)  # points at who reads the file
    assert "not honoured" in note_of(config, "zero_optimization.zenflow")
    assert config.offload_optimizer == "cpu"


REFUSED = [
    ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'?"),
    (
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket": 1}},
        "stage3_prefetch_bucket_size",
    ),
    ({"zero_optimization": {"stage": 3, "xyz": 1}}, "the key 'xyz' is not known to DeepSpeed"),
    ({"zero_optimization": {"stage": 0}}, "DistributedDataParallel"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4"),
    ({"zero_optimization": {}}, "DistributedDataParallel"),
    ({}, "zero_optimization.stage is not given"),
    ({"zero_optimization": False}, "DistributedDataParallel"),
    ({"zero_optimization": [3]}, "zero_optimization=[3]"),
]
REFUSED += [
    ({"zero_optimization": {"stage": 3, **values}}, words)
    for values, words in [
        ({"max_live_parameters": 1, "stage3_max_live_parameters": 2}, "are one setting and differ"),
        ({"max_live_parameters": -1}, "max_live_parameters=-1"),
        ({"max_live_parameters": True}, "max_live_parameters=True"),
        ({"max_live_parameters": 1.5}, "whole number"),
        ({"stage3_prefetch_bucket_size": "big"}, "stage3_prefetch_bucket_size='big'"),
        ({"stage3_prefetch_bucket_size": float("nan")}, "stage3_prefetch_bucket_size=nan"),
        ({"overlap_comm": "yes"}, "overlap_comm='yes'"),
        ({"contiguous_gradients": 3}, "contiguous_gradients=3"),
        ({"mics_shard_size": -2}, "mics_shard_size=-2"),
        ({"offload_optimizer": {"device": "nvme"}}, "device='nvme' is not supported"),
        ({"offload_optimizer": {"device": "disk"}}, "device='disk' is not known"),
        ({"offload_optimizer": {"devise": "cpu"}}, "did you mean 'device'?"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer='cpu' must be an object"),
        ({"offload_optimizer": {"device": "none"}, "cpu_offload": True}, "differ"),
        (
            {"offload_optimizer": {"pin_memory": True}, "cpu_offload_use_pin_memory": False},
            "differ",
        ),
        ({"offload_param": {"device": "cpu"}}, '"offload_optimizer": {"device": "cpu"}'),
        ({"offload_param": {"device": "nvme"}}, "offload_param.device='nvme'"),
        ({"offload_param": {"max_in_cpus": 1}}, "max_in_cpu"),
        ({"cpu_offload_param": True}, "cpu_offload_param=True"),
        ({"leaf_module": {"class": []}}, "did you mean 'classes'?"),
        ({"leaf_module": []}, "leaf_module=[] must be an object"),
    ]
]
REFUSED += [
    ({"zero_optimization": {"stage": 3}, **given}, words)
    for given, words in [
        ({"fp16": {"enabled": True}}, '"bf16": {"enabled": true}'),
        ({"fp16": {"loss_scales": 0}}, "did you mean 'loss_scale'?"),
        ({"bf16": {"enable": True}}, "did you mean 'enabled'?"),
        ({"bf16": True}, "bf16=True must be an object"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bf16 and bfloat16"),
        ({"amp": {"enabled": True}}, "amp.enabled=True"),
        ({"torch_autocast": {"enabled": True}}, "torch.autocast"),
        ({"communication_data_type": "fp16"}, "loss scaler"),
        ({"communication_data_type": "int8"}, "communication_data_type='int8'"),
        ({"gradient_allreduce_op": "sum"}, "multiply the loss"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1"),
        ({"gradient_clipping": "inf"}, "gradient_clipping='inf'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"train_batch_size": 1.5}, "train_batch_size=1.5"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tpkernels.parallelize"),
        ({"tensor_parallel": {"autotp_sizes": 2}}, "did you mean 'autotp_size'?"),
        ({"data_types": {"grad_dtype": "fp32"}}, "grad_accum_dtype"),
        ({"optimzer": {}}, "did you mean 'optimizer'?"),
    ]
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=lambda each: str(each)[:70])
def test_what_cannot_be_honoured_is_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        ZeroConfig.from_deepspeed(given)
    assert "Fix: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"zero_optimization": {"stage": 3}, // three\n}', "is no JSON"),
        ('{"zero_optimization": {"stage": 3, "stage": 2}}', "'stage' is given twice"),
        ("[3]", "holds a list"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, words):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        ZeroConfig.from_deepspeed(path)


def test_the_arguments_are_checked():
    given = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError, match="cannot be read"):
        ZeroConfig.from_deepspeed("no/such/file.json")
    with pytest.raises(ConfigError, match="path_or_dict=None"):
        ZeroConfig.from_deepspeed(None)
    with pytest.raises(ConfigError, match="hidden_size=0"):
        ZeroConfig.from_deepspeed(given, hidden_size=0)
    with pytest.raises(ConfigError, match="param_dtype='int3'"):
        ZeroConfig.from_deepspeed(given, param_dtype="int3")


def test_what_was_given_is_untouched():
    given = json.loads((DATA / "axolotl_zero3_bf16.json").read_text())
    before = json.dumps(given)
    ZeroConfig.from_deepspeed(given, hidden_size=HIDDEN)
    assert json.dumps(given) == before
