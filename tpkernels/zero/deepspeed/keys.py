"""The keys that DeepSpeed (0.19) knows, and which of them are read, warned about or left alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from tpkernels.errors import ConfigError

# zero_optimization: `stage3_x` and `x` are one key
STAGE3_PREFIXED = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "partition_stream_chunk_size",
)
ZERO_ALIASES = {f"stage3_{name}": name for name in STAGE3_PREFIXED} | {
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}
ZERO_READ = (
    "stage",
    "overlap_comm",
    "reduce_bucket_size",
    "prefetch_bucket_size",
    "max_live_parameters",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "ignore_unused_parameters",
    "leaf_module",
)
# key -> why it changes nothing: the effect it asks for is had in another way
ZERO_MET = {
    "allgather_bucket_size": "a unit is gathered as one; its size is set by units=",
    "sub_group_size": "the optimizer steps over the shards of the rank as they are",
    "max_reuse_distance": "what stays gathered is decided by max_live_bytes and "
    "reshard_after_forward",
    "gather_16bit_weights_on_model_save": "tpkernels.full_state_dict(model) gives whole weights",
    "log_trace_cache_warnings": "a new order of modules is learnt without dropping the old one",
    "enable_sanity_checks": "checks are always on",
    "partition_stream_chunk_size": "parameters are sharded one unit at a time",
    "load_from_fp32_weights": "master shards are always saved and loaded in full precision",
}
# key -> (value that asks for nothing special, why any other is not honoured)
ZERO_WARNED: dict[str, tuple[Any, str]] = {
    "contiguous_gradients": (True, "gradients are always copied to one buffer a unit"),
    "reduce_scatter": (True, "gradients are always reduce-scattered"),
    "allgather_partitions": (True, "parameters are always gathered, never broadcast"),
    "round_robin_gradients": (False, "gradients are copied to the host in order"),
    "use_all_reduce_for_fetch_params": (False, "parameters are gathered by all-gather"),
    "allgather_sequential": (False, "a unit is gathered as one, without a copy out"),
    "use_multi_rank_bucket_allreduce": (True, "gradients are always reduce-scattered"),
    "module_granularity_threshold": (0, "units= says what is gathered together"),
    "memory_efficient_linear": (True, "linear layers are left as they are"),
    "override_module_apply": (True, "nn.Module.apply is left as it is"),
    "elastic_checkpoint": (False, "checkpoints load at every number of ranks anyway"),
    "legacy_stage1": (False, "there is one stage 1"),
    "zenflow": (None, "it is not supported: every gradient takes part in every step"),
    "zeropp_loco_param": (None, "gradients are not quantised"),
    "pipeline_loading_checkpoint": (False, "checkpoints are loaded through DCP"),
    "save_muon_momentum_buffer_in_memory": (False, "nothing is swapped to NVMe"),
    "zero_hpz_partition_size": (1, "no second shard within a node is kept; gathers span all ranks"),
    "zero_quantized_weights": (False, "weights are gathered as they are: right, more bytes"),
    "zero_quantized_nontrainable_weights": (False, "frozen weights are kept as they are"),
    "zero_quantized_gradients": (False, "gradients are reduced as they are: right, more bytes"),
    "mics_shard_size": (-1, 'give a mesh ("dp_replicate", "dp_shard") to shard within groups'),
    "mics_hierarchical_params_gather": (False, "parameters are gathered in one step"),
}
ZERO_KEYS = (*ZERO_ALIASES, *ZERO_READ, *ZERO_MET, *ZERO_WARNED)

OFFLOAD_OPTIMIZER_WARNED: dict[str, tuple[Any, str]] = {
    "ratio": (1.0, "all of the optimizer's state is offloaded"),
    "super_offload": (False, "the optimizer's step is torch's"),
}
_SWAP = ("device", "nvme_path", "buffer_count", "pin_memory")
OFFLOAD_OPTIMIZER_KEYS = (
    *_SWAP,
    *OFFLOAD_OPTIMIZER_WARNED,
    *("pipeline", "pipeline_read", "pipeline_write", "fast_init"),
    *("convert_grad_on_cpu", "cpuadam_cores_perc", "max_in_cpu", "buffer_size"),
)
OFFLOAD_PARAM_KEYS = (*_SWAP, "buffer_size", "max_in_cpu")
LEAF_MODULE_KEYS = ("classes", "names", "name_suffixes")

BF16_WARNED: dict[str, tuple[Any, str]] = {
    "bf16_master_weights_and_grads": (False, "master shards and their gradients are float32"),
    "bf16_optimizer_states": (False, "the optimizer's state has the dtype of the master shards"),
    "check_grad_overflow": (False, "gradients are not searched for infinities"),
}
BF16_KEYS = ("enabled", "immediate_grad_update", *BF16_WARNED)
FP16_KEYS = (
    *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window"),
    *("hysteresis", "consecutive_hysteresis", "min_loss_scale", "fused_mode"),
    "fp16_master_weights_and_grads",
)
AUTOTP_KEYS = (
    *("autotp_size", "dtype", "tp_overlap_comm", "tensor_parallel", "injection_policy_tuple"),
    *("keep_module_on_host", "replace_with_kernel_inject", "preset_model", "partition_config"),
)

TOP_READ = (
    *("zero_optimization", "bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"),
    *("gradient_clipping", "communication_data_type", "gradient_allreduce_op"),
    *("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("tensor_parallel", "allgather_size"),
)
TOP_WARNED: dict[str, tuple[Any, str]] = {
    "prescale_gradients": (False, "gradients are summed, then divided: the same mean"),
    "gradient_predivide_factor": (1.0, "gradients are summed, then divided: the same mean"),
    "sparse_gradients": (False, "gradients are dense"),
    "disable_allgather": (False, "parameters are always gathered"),
}
_CALLERS = "not read here: it is of the training loop or of another tool"
TOP_NOT_READ = {
    "optimizer": "not read here: give it to manager.optimizer(torch.optim.AdamW, lr=...)",
    "scheduler": "not read here: make it with torch.optim.lr_scheduler",
    "zero_allow_untested_optimizer": "not read here: every element-wise optimizer is allowed",
    "zero_force_ds_cpu_optimizer": "not read here: the optimizer is the one you give",
    "checkpoint": "not read here: checkpoints are DCP's and load at every number of ranks",
    "activation_checkpointing": "not read here: use torch.utils.checkpoint",
    "compile": "not read here: use torch.compile",
} | dict.fromkeys(
    (
        *("aio", "autotuning", "comms_config", "comms_logger", "compression_training"),
        *("csv_monitor", "curriculum_learning", "data_efficiency", "dataloader_drop_last"),
        *("datastates_ckpt", "dump_state", "eigenvalue", "elasticity", "expert_parallel"),
        *("flops_profiler", "graph_harvesting", "hybrid_engine", "log_level"),
        *("managed_gradient_accumulation", "memory_breakdown", "monitor_config", "nebula"),
        *("pipeline", "progressive_layer_drop", "quantize_training", "seq_parallel_comm_data_type"),
        *("sequence_parallel_size", "sparse_attention", "steps_per_print", "tensorboard"),
        *("comet", "wandb", "timers", "use_data_before_expert_parallelism", "vocabulary_size"),
        *("wall_clock_breakdown", "weight_quantization"),
    ),
    _CALLERS,
)
TOP_KEYS = (*TOP_READ, *TOP_WARNED, *TOP_NOT_READ)


def check_keys(given: Iterable[Any], known: tuple[str, ...], where: str) -> None:
    """Raise ConfigError for the first key of ``given`` that is not ``known`` in ``where``."""
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
        fix = f"did you mean {near[0]!r}?" if near else f"remove it; known: {', '.join(known)}"
        raise ConfigError(f"{where}: the key {key!r} is not known to DeepSpeed. Fix: {fix}")
