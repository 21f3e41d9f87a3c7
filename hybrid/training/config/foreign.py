"""Keys of DeepSpeed's that change nothing here, and those that are refused: each with the reason a user reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BUCKETS = "a layer's weights, and its gradients, already travel in one collective"
_SMALL = "small parameters travel with their layer's one gather"

# By path. Taken, with this line in TrainingEngine.describe() and in the log.
KNOBS: dict[str, str] = {
    "zero_optimization.allgather_bucket_size": _BUCKETS,
    "zero_optimization.allgather_partitions": _BUCKETS,
    "zero_optimization.contiguous_gradients": "a layer's gradients are always copied into one buffer before they are sent",
    "zero_optimization.legacy_stage1": "there is one implementation",
    "zero_optimization.load_from_fp32_weights": "masters are always loaded as they were saved",
    "zero_optimization.max_live_parameters": "a layer is freed as soon as it has been used",
    "zero_optimization.memory_efficient_linear": "linear layers keep no gathered weight for backward",
    "zero_optimization.overlap_comm": "on CUDA collectives always run beside the computation",
    "zero_optimization.param_persistence_threshold": _SMALL,
    "zero_optimization.reduce_bucket_size": _BUCKETS,
    "zero_optimization.reduce_scatter": "gradients are always reduced and scattered in one collective",
    "zero_optimization.round_robin_gradients": "every rank has an equal share of every gradient",
    "zero_optimization.stage3_max_live_parameters": "a layer is freed as soon as it has been used",
    "zero_optimization.stage3_max_reuse_distance": "a layer is freed as soon as it has been used",
    "zero_optimization.stage3_model_persistence_threshold": _SMALL,
    "zero_optimization.stage3_param_persistence_threshold": _SMALL,
    "zero_optimization.stage3_prefetch_bucket_size": "one layer ahead is gathered, whatever its size",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "weights are gathered by all-gather",
    "zero_optimization.sub_group_size": "the optimizer steps over all shards of a rank at once",
    "zero_optimization.use_multi_rank_bucket_allreduce": _BUCKETS,
    "zero_optimization.module_granularity_threshold": _SMALL,
    "zero_optimization.stage3_module_granularity_threshold": _SMALL,
    "zero_optimization.model_persistence_threshold": _SMALL,
    "zero_optimization.stage3_allgather_sequential": _BUCKETS,
    "zero_optimization.enable_sanity_checks": "checks are always on",
    "zero_optimization.override_module_apply": "modules are not patched",
    "zero_optimization.pipeline_loading_checkpoint": "a checkpoint is read file by file",
    "zero_optimization.cpu_offload_use_pin_memory": "use offload_optimizer.pin_memory",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache",
    "zero_optimization.offload_optimizer.buffer_count": "all of a rank's shards are copied at once",
    "zero_optimization.offload_optimizer.fast_init": "state is made at the first step",
    "zero_optimization.offload_optimizer.pipeline": "copies overlap backward already",
    "zero_optimization.offload_optimizer.pipeline_read": "only of use with NVMe",
    "zero_optimization.offload_optimizer.pipeline_write": "only of use with NVMe",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "torch's threads are used",
    "zero_optimization.offload_param.buffer_count": "a layer is copied when it is gathered",
    "zero_optimization.offload_param.buffer_size": "a layer is copied when it is gathered",
    "zero_optimization.offload_param.max_in_cpu": "only of use with NVMe",
    "optimizer.params.bias_correction": "always on",
    "optimizer.params.torch_adam": "torch's Adam is the only one",
    "optimizer.params.fused": "the fused kernel is taken where there is one",
    "optimizer.params.foreach": "the fused kernel is taken where there is one",
    "optimizer.params.freeze_step": "of the 1-bit optimizers",
    "optimizer.params.ns_method": "orthogonalised by the quintic iteration in fp32",
    "optimizer.legacy_fusion": "there is one implementation",
    "fp16.fp16_opt_level": "of apex",
    "activation_checkpointing.profile": "engine.throughput and the flops profiler have the times",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing here needs a device-wide wait",
    "aio": "only of use with NVMe",
    "disable_allgather": _BUCKETS,
    "sparse_gradients": "embedding gradients are dense and sharded",
    "zero_allow_untested_optimizer": "any elementwise torch optimizer is taken",
    "zero_force_ds_cpu_optimizer": "the optimizer that steps in host memory is torch's",
    "use_node_local_storage": "checkpoints are written once, by all ranks together",
    "dump_state": "TrainingEngine.describe() says what every key does",
    "memory_breakdown": "the memory of each phase is in the metrics",
    "nebula": "checkpoints go to a folder",
    "vocabulary_size": "no use was found for it",
    "seq_parallel_comm_data_type": "there is no sequence parallelism",
    "use_data_before_expert_parallelism": "there is no expert parallelism",
}

# Old names, by path: what the key is called now, and its value there.
RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bfloat16": ("bf16", lambda value: value),
    "zero_optimization.cpu_offload": ("offload_optimizer", lambda on: {"device": "cpu"} if on is True else on),
    "zero_optimization.cpu_offload_params": ("offload_param", lambda on: {"device": "cpu"} if on is True else on),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save",
        lambda value: value,
    ),
}

_ONE_MODEL = "one model is trained whole on each rank's share of the data"

# Refused while they ask for something: absent, false, {} and {"enabled": false} pass.
REFUSED: dict[str, str] = {
    "amp": "apex is not supported; use bf16, fp16 or torch_autocast",
    "autotuning": "there is no autotuner; `hybrid doctor` plans memory",
    "compression_training": "there is no compression; train, then compress the exported folder",
    "curriculum_learning": "order the data before it is given",
    "data_efficiency": "order the data before it is given",
    "elasticity": "a checkpoint loads at any number of ranks; restart with the new number",
    "expert_parallel": _ONE_MODEL,
    "pipeline": _ONE_MODEL,
    "progressive_layer_drop": "not supported",
    "quantize_training": "there is no compression; train, then compress the exported folder",
    "sparse_attention": "not supported; use the model's own attention",
    "tensor_parallel": _ONE_MODEL,
    "weight_quantization": "there is no quantised training",
    "compile": "not supported; compile the module before it is given",
    "graph_harvesting": "not supported",
    "zero_optimization.elastic_checkpoint": "a checkpoint loads at any number of ranks already: remove the key",
    "zero_optimization.zero_quantized_gradients": "gradients are sent in communication_data_type; use gradient_compression",
    "zero_optimization.zero_quantized_nontrainable_weights": "weights are sent in the dtype that computes",
    "zero_optimization.zero_quantized_weights": "weights are sent in the dtype that computes",
    "zero_optimization.zeropp_loco_param": "gradients are sent in communication_data_type; use gradient_compression",
    "zero_optimization.mics_hierarchical_params_gather": "weights are gathered in one collective; remove the key",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the momentum is in optimizer state; remove the key",
    "zero_optimization.zenflow": "not supported; offload_optimizer steps in host memory",
    "zero_optimization.offload_optimizer.nvme_path": "there is no off-load to NVMe; use device cpu",
    "zero_optimization.offload_param.nvme_path": "there is no off-load to NVMe; use device cpu",
    "zero_optimization.offload_optimizer.super_offload": "not supported; remove the key",
    "comet": "use tensorboard, wandb or csv_monitor",
}

# Taken with one value only, which is what happens here.
ONLY: dict[str, tuple[object, str]] = {
    "zero_optimization.offload_optimizer.ratio": (1.0, "all of the optimizer's state is moved"),
}
