"""The tolerances that need the whole engine, for every registered family: the rollout against the training forward, the chunked
loss against the plain one, two ranks against one, and a resumed run against one that never stopped."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import cross_entropy, full_gradients, full_weights, make_engine, pack, ragged_sequences, relative_error
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny
from torch import Tensor, nn

from inference_v2 import SamplingParams
from inference_v2.head import Head

SEQUENCES = ragged_sequences(6)
PROMPTS = [[5, 6, 7], [9] * 11, [11], [20, 21, 22, 23]]
TIED = ("qwen2", "exaone4_5")
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """dtype -> (HF module, its folder). In bf16 the weights are smaller, since there HF's own noise grows with them."""
    made = {}
    for dtype, spread in (("float32", 0.15), ("bfloat16", 0.06)):
        path = tmp_path_factory.mktemp(request.param)
        settings = {"initializer_range": spread, "tie_word_embeddings": request.param in TIED}
        made[dtype] = save_tiny(path, request.param, dtype=getattr(torch, dtype), **settings), str(path)
    return made


def sampled(engine, temperature: float = 0.7) -> tuple[list[list[int]], Tensor]:
    """(whole sequences, raw log-probs of their 16 sampled tokens, one after the other)."""
    sampling = SamplingParams(max_new_tokens=16, temperature=temperature, ignore_eos=True, seed=2)
    samples = [sample for group in engine.generate(PROMPTS, sampling) for sample in group]
    return [[*s.prompt_ids, *s.token_ids] for s in samples], torch.tensor([x for s in samples for x in s.logprobs_raw])


def trained(engine, sequences: list[list[int]], temperature: float = 0.7) -> Tensor:
    """What the forward that trains gives the same tokens."""
    seen = []

    def recorded(logits, chunk):
        loss, metrics = cross_entropy(logits / temperature, chunk)
        seen.append(-loss.detach())
        return loss, metrics

    for sequence in sequences:
        engine.forward_backward([pack([sequence], counted_from=len(sequence) - 16)], recorded)
    return torch.cat(seen)


@torch.no_grad()
def module_logprobs(module: nn.Module, sequences: list[list[int]], temperature: float = 0.7, *, by_token: bool) -> Tensor:
    """The same of the HF module, all at once or a token at a time over its cache; the head in fp32 as everywhere."""
    decoder, head, found = module.get_decoder(), module.get_output_embeddings().weight[:79].float(), []
    for sequence in sequences:
        ids, cache, parts = torch.tensor([sequence]), None, []
        for part in ids.split(1 if by_token else len(sequence), dim=1):
            out = decoder(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.last_hidden_state[0])
        logits = torch.cat(parts)[-17:-1].float() @ head.T / temperature
        found.append(logits.log_softmax(-1).gather(1, ids[0, -16:, None]).squeeze(1))
    return torch.cat(found)


def test_rollout_and_training_log_probs_agree_in_fp32(models):
    engine = make_engine(models["float32"][1])
    sequences, logprobs = sampled(engine)
    assert (trained(engine, sequences) - logprobs).abs().max() <= 1e-4


def test_rollout_and_training_log_probs_agree_in_bf16_as_hf_with_itself(models):
    """HF's own noise: its two attentions, one of them over the cache."""
    module, folder = models["bfloat16"]
    engine = make_engine(folder, compute_dtype="bfloat16")
    sequences, logprobs = sampled(engine)
    at_once = module_logprobs(module, sequences, by_token=False)
    module.set_attn_implementation("eager")
    noise = (module_logprobs(module, sequences, by_token=True) - at_once).abs().mean()
    module.set_attn_implementation("sdpa")
    assert (trained(engine, sequences) - logprobs).abs().mean() <= 1.5 * noise


@DTYPES
def test_the_chunked_loss_gives_the_gradients_of_the_plain_one(models, dtype):
    """Both over one forward: HF's own modules and attention, whose bf16 noise would hide the loss's."""
    module, folder = models[dtype]
    plain = {"attn_implementation": "sdpa", "fused_layers": False}
    engine, batch = make_engine(folder, compute_dtype=dtype, loss_chunk_tokens=3, **plain), pack(SEQUENCES)
    given_loss = engine.forward_backward([batch], cross_entropy)["loss"]
    token_ids, position_ids, flat_index = batch.padded()
    out = module.get_decoder()(input_ids=token_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    hidden = out.flatten(0, 1)[flat_index[batch.loss_index]]
    logits = Head(module.get_output_embeddings().weight, vocab_limit=79).logits(hidden)
    loss = nn.functional.cross_entropy(logits, batch.targets)
    given, parameters = full_gradients(engine), dict(module.named_parameters())
    expected = torch.autograd.grad(loss, [parameters[n] for n in given])
    tolerance = 2e-6 if dtype == "float32" else 1e-2
    assert given_loss == pytest.approx(loss.item(), rel=tolerance)
    assert max(relative_error(g, e.float()) for g, e in zip(given.values(), expected, strict=True)) <= tolerance


def three_steps(folder: str, dtype: str, path: str) -> float:
    """SGD on fixed completions. One rank writes its weights, more compare theirs with them."""
    engine = make_engine(folder, compute_dtype=dtype)
    for _ in range(3):
        engine.forward_backward([pack(SEQUENCES[engine.rank :: engine.world_size])], cross_entropy)
        engine.optim_step()
    weights = full_weights(engine)
    if engine.world_size == 1:
        save_file(weights, path)
    reference = load_file(path)
    return max((weights[n] - reference[n]).abs().max().item() for n in reference)


@DTYPES
def test_two_ranks_reach_the_weights_of_one(pool2, models, tmp_path, dtype):
    folder, path = models[dtype][1], str(tmp_path / "weights.safetensors")
    three_steps(folder, dtype, path)
    assert max(pool2.run(three_steps, folder, dtype, path)) <= (1e-5 if dtype == "float32" else 1e-2)


@DTYPES
def test_a_resumed_run_is_bit_equal(models, tmp_path, dtype):
    settings = {"compute_dtype": dtype, "optimizer": {"name": "adamw", "lr": 1e-2, "warmup_steps": 3}}
    whole, resumed = (make_engine(models[dtype][1], **settings) for _ in range(2))
    for step in range(4):
        if step == 2:
            whole.save(tmp_path / "checkpoint")
            resumed.load(tmp_path / "checkpoint")
        for engine in (whole, resumed)[: 1 + (step >= 2)]:
            engine.forward_backward([pack(SEQUENCES[step : step + 3])], cross_entropy)
            engine.optim_step()
    expected = full_weights(whole)
    assert all(torch.equal(w, expected[n]) for n, w in full_weights(resumed).items())
