"""`hybrid_engine`: rollouts of the module that is trained, with the call of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.config import HybridConfig, RolloutConfig
from hybrid.mesh import raise_together
from hybrid.models import ShardedModel
from hybrid.modes import Generation
from hybrid.training.config.fields import nearest
from hybrid.training.config.top import TrainingConfig
from inference_v2.config import EngineConfig
from inference_v2.types import Completion, SamplingParams

# Arguments of transformers' generate, and what becomes of each that is no field of SamplingParams.
_SAMPLING = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_OWN = ("max_length", "do_sample", "temperature", "num_return_sequences", "eos_token_id", "pad_token_id")
_IGNORED = ("synced_gpus", "use_cache", "return_dict_in_generate", "output_scores")


def hybrid_config(settings: TrainingConfig) -> HybridConfig:
    """The same engine in the words of HybridConfig. Raises ValueError for what its module cannot do while it generates too."""
    zero, section = settings.zero_optimization, settings.hybrid_engine
    given = {
        "torch_autocast": settings.torch_autocast.enabled,
        "module_precision": bool(settings.module_precision),
        "data_types.buffer_dtype": settings.data_types.buffer_dtype is not None,
        "data_types.optimizer_dtype": settings.data_types.optimizer_dtype != "fp32",
        "bf16.bf16_master_weights_and_grads": settings.bf16.bf16_master_weights_and_grads,
        "zero_optimization.offload_param": zero.offload_param.on,
        "zero_optimization.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "communication_data_type": settings.communication_data_type not in (None, "fp32"),
    }
    if refused := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"{refused[0]} with hybrid_engine, whose model computes in one dtype and holds fp32 masters on its device; leave one "
            "of them out"
        )
    return HybridConfig(
        zero_stage=zero.stage,
        shard_ranks=zero.mics_shard_size if zero.mics_shard_size > 0 else None,
        compute_dtype="bfloat16" if settings.bf16.enabled else "float32",
        attn_implementation="sdpa",  # the caller's forwards have masks and padding
        activation_checkpointing=settings.activation_checkpointing.layers,
        dropout=True,  # module.train() and module.eval() are the caller's
        device=settings.device,
        timeout_s=settings.timeout_s,
        rollout=RolloutConfig(
            gather="full" if section.pin_parameters else "stream",
            on_leave="free" if section.release_inference_cache else "keep",
            engine=EngineConfig(max_model_len=section.max_out_tokens),
        ),
    )


def check_generates(model: nn.Module) -> None:
    """Raises ValueError for what is no causal LM of transformers (or a PeftModel of one)."""
    if not hasattr(getattr(model, "config", None), "model_type") or not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"hybrid_engine with a {type(model).__name__}; allowed: a causal LM of transformers, or a PeftModel of one"
        )
    if without := [name for name, p in model.named_parameters() if p.ndim == 0]:
        raise ValueError(f"hybrid_engine: {without[0]} has no dimension; allowed: parameters that can be cut")


class Rollouts:
    """The generating side of a training engine's model."""

    def __init__(self, model: ShardedModel) -> None:
        self.model = model
        self._generation = Generation(model)
        self._version = 0
        self._calls = 0

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        """transformers' call, but nothing is read from a generation_config: greedy to hybrid_engine.max_out_tokens unless told
        otherwise, and do_sample=True draws from all tokens unless top_k or top_p is given. `seed` (ours) makes draws repeatable.

        Returns [B * n, L]: each row of `input_ids` [B, P] (padding on either side, where the mask is 0) and what follows
        it, filled up with the pad id. Collective; each rank has its own rows. Raises ValueError, the same on every rank,
        for an unknown option, a mask that does not fit, and prompts longer than hybrid_engine.max_out_tokens."""
        error, prompts, sampling, pad = None, [], None, 0
        try:
            prompts = _prompts(input_ids, attention_mask)
            sampling, pad = self._options(options, prompts, input_ids.shape[1])
        except ValueError as caught:
            error = caught
        raise_together(error)
        assert sampling is not None
        self._version += 1  # the caller may have touched weights
        self._calls += 1
        keys = [(self._calls * self.model.mesh.world_size + self.model.mesh.rank) * 2**20 + i for i in range(len(prompts))]
        with self._generation.open(self._version) as runner:
            completions = runner.generate(prompts, sampling, keys)
        raise_together(_refused(completions))
        rows = [(i, one.token_ids) for i, samples in enumerate(completions) for one in samples]
        longest = max((len(tokens) for _, tokens in rows), default=0)
        out = input_ids.new_full((len(rows), input_ids.shape[1] + longest), pad)
        for place, (i, tokens) in enumerate(rows):
            out[place, : input_ids.shape[1]] = input_ids[i]
            out[place, input_ids.shape[1] : input_ids.shape[1] + len(tokens)] = torch.tensor(tokens, dtype=out.dtype)
        return out

    def _options(self, given: Mapping[str, Any], prompts: Sequence[Sequence[int]], width: int) -> tuple[SamplingParams, int]:
        """What to draw, and the pad id."""
        for name in given:
            if name not in (*_SAMPLING, *_OWN, *_IGNORED):
                raise ValueError(f"generate: {name} is unknown; {nearest(name, [*_SAMPLING, *_OWN])}")
        options = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
        if given.get("max_length") is not None:
            if "max_new_tokens" in options:
                raise ValueError("generate: max_length and max_new_tokens are both given; allowed: one of them")
            options["max_new_tokens"] = max(int(given["max_length"]) - width, 0)
        limit = self.model.max_positions
        options.setdefault("max_new_tokens", limit - max((len(p) for p in prompts), default=0))
        options["temperature"] = given.get("temperature") or 1.0 if given.get("do_sample") else 0.0
        options["num_samples"] = given.get("num_return_sequences") or 1
        eos = given.get("eos_token_id")
        if eos is not None:
            options["stop_token_ids"] = tuple(eos) if isinstance(eos, Sequence) else (eos,)
            options["ignore_eos"] = True
        pad = given.get("pad_token_id")
        if pad is None:
            pad = getattr(self.model.hf_config.get_text_config(), "pad_token_id", None)
        return SamplingParams(**options), min(self.model.eos_token_ids, default=0) if pad is None else pad

    def close(self) -> None:
        self._generation.close()


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The real ids of each row."""
    if input_ids.ndim != 2:
        raise ValueError(f"generate: input_ids of shape {list(input_ids.shape)}; allowed: [batch, length]")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(f"generate: attention_mask of shape {list(mask.shape)} for input_ids {list(input_ids.shape)}")
    if not mask.bool().any(1).all():
        raise ValueError("generate: a prompt has no token; allowed: at least one where attention_mask is 1")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask.bool(), strict=True)]


def _refused(completions: Sequence[Sequence[Completion]]) -> ValueError | None:
    lines = [one.error for samples in completions for one in samples if one.error is not None]
    return ValueError(f"generate: {lines[0]}") if lines else None
