"""Model types outside the registry: served by their own module on the paged cache, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_tiny

from inference_v2 import InferenceEngine, SamplingParams
from inference_v2.config import EngineConfig
from inference_v2.kernels import get_kernels
from inference_v2.loading import load_model
from inference_v2.models import fallback

SERVED = {
    "gpt2": {},
    "smollm3": {},
    "olmo2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 8},  # both soft-caps, a window on every other layer
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4},  # sinks
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "mixtral": {"num_local_experts": 4},  # the checkpoint's names are not the module's
}
CONFIG = EngineConfig(max_model_len=64, debug_poison=True, max_step_tokens=16)


def engine_of(path: Path, config: EngineConfig = CONFIG) -> InferenceEngine:
    with pytest.warns(UserWarning, match="is not registered: its Hugging Face module runs"):
        return InferenceEngine.from_pretrained(path, config=config)


@pytest.mark.parametrize("model_type", SERVED)
def test_greedy_ids_equal_the_module(tmp_path: Path, model_type: str) -> None:
    model = save_tiny(tmp_path, model_type, tokenizer=None, num_hidden_layers=2, **SERVED[model_type])
    prompts = [[5, 6, 7, 8], [9] * 21, [11]]
    results = engine_of(tmp_path).generate(prompts, SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True))
    for prompt, (completion,) in zip(prompts, results):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        assert logits.argmax(-1).tolist() == list(completion.token_ids)
        want = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs_raw), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mamba"])
def test_what_paged_attention_cannot_serve_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    save_tiny(tmp_path, model_type, tokenizer=None, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"allowed:.*a registered family"):
        InferenceEngine.from_pretrained(tmp_path, config=CONFIG)


def test_strict_refuses_with_the_nearest_names(tmp_path: Path) -> None:
    save_tiny(tmp_path, "smollm3", tokenizer=None, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"model_type='smollm3' is not registered.*allowed: llama, qwen2"):
        InferenceEngine.from_pretrained(tmp_path, config=EngineConfig(strict=True))


def test_a_feature_that_is_lost_fails_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paged function that forgets the sinks is what the probe is there for."""
    save_tiny(tmp_path, "gpt_oss", tokenizer=None, num_hidden_layers=2, **SERVED["gpt_oss"])
    whole = fallback._paged_attention
    fallback.AttentionInterface.register(fallback.PAGED, lambda *args, s_aux=None, **kwargs: whole(*args, **kwargs))
    try:
        with pytest.raises(ValueError, match="a feature that paged attention does not know"):
            fallback.open_module(tmp_path, get_kernels(), dtype=torch.float32)
    finally:
        fallback.AttentionInterface.register(fallback.PAGED, whole)


def test_the_opened_config_is_untouched_and_the_modules_own_stays_paged(tmp_path: Path) -> None:
    save_tiny(tmp_path, "olmo2", tokenizer=None, num_hidden_layers=2)
    before = load_model(tmp_path).hf_config.to_dict()
    engine = engine_of(tmp_path)
    module = engine._weights.module
    inside = module.config.to_dict()
    engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=4))
    assert module.config.to_dict() == inside
    assert module.config._attn_implementation == fallback.PAGED
    assert load_model(tmp_path).hf_config.to_dict() == before


def test_a_longrope_table_does_not_switch_with_the_batch(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 16, "factor": 4.0}  # fmt: skip
    save_tiny(tmp_path, "phi3", tokenizer=None, num_hidden_layers=2, rope_parameters=rope, original_max_position_embeddings=16)
    greedy = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    alone = engine_of(tmp_path).generate([[5, 6, 7]], greedy)[0][0]
    mixed = engine_of(tmp_path).generate([[5, 6, 7], [9] * 40], greedy)[0][0]
    assert alone.token_ids == mixed.token_ids
    torch.testing.assert_close(torch.tensor(alone.logprobs_raw), torch.tensor(mixed.logprobs_raw), rtol=0, atol=1e-5)


def test_settings_only_a_registered_family_honours_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "olmo2", tokenizer=None, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"batch_invariant with model_type='olmo2'"):
        InferenceEngine.from_pretrained(tmp_path, config=EngineConfig(batch_invariant=True))
    with (
        pytest.warns(UserWarning, match="is not registered"),
        pytest.raises(ValueError, match=r"max_model_len=999 .*allowed: <= 256"),
    ):
        InferenceEngine.from_pretrained(tmp_path, config=EngineConfig(max_model_len=999))


def test_a_learned_table_of_few_positions_is_probed_within_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2", tokenizer=None, num_hidden_layers=2, max_position_embeddings=16)
    (samples,) = engine_of(tmp_path, EngineConfig()).generate([[5] * 12], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(samples[0].token_ids) == 4
