"""Rollouts by transformers' `generate`: slow and not ours, so what the other backends are compared with.

Every rank holds a full copy of the weights while it generates. transformers runs the model, its cache and its truncation
(temperature, top-k, top-p); what is drawn is f(seed, request key, sample index, position), as the engine's: u by `uniforms`, then
the inverse CDF in the order of token ids. So samples can be compared token by token too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid.engine import HybridEngine
from hybrid.exchange import hand_over
from hybrid.models import build_on_meta
from hybrid.shares import deal
from inference_v2.models.fallback import fix_rope
from inference_v2.rope import force_table
from inference_v2.sampler import Draw, uniforms
from inference_v2.types import Completion, SamplingParams
from trainers.backends.config import check_sampling
from trainers.backends.requests import Answers, raise_on_all
from trainers.backends.weights import for_each_layer


class HFGenerator:
    """Nothing is kept between calls; the trained module is read and otherwise left alone. All verbs are collective."""

    def __init__(self, engine: HybridEngine) -> None:
        self._engine, self.max_model_len = engine, engine.max_model_len

    def generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> dict[int, list[Completion]]:
        """As ClosableGenerator's. Prompts of one length run as one batch, so that nothing is padded. Raises BackendError on every
        rank where the model failed on any."""
        check_sampling("hf", sampling)
        engine, mesh = self._engine, self._engine.mesh
        keys = range(len(prompts)) if keys is None else keys
        engine.weight_version += 1  # as at every entry to generation
        answers = Answers(engine, sampling, max_model_len=self.max_model_len, vocab_size=engine.model.num_rows)
        work = [len(prompt) + sampling.num_samples * sampling.max_new_tokens for prompt in prompts]
        mine = deal(work, mesh.world_size)[mesh.rank]
        found: dict[int, list[Completion]] = {}
        module = self._copy()
        error: Exception | None = None
        try:
            for i in mine:
                if (refused := answers.without_generating(i, prompts[i])) is not None:
                    found[i] = refused
            for batch in self._batches({i: prompts[i] for i in mine if i not in found}, sampling.num_samples):
                for completion in _generate(module, batch, keys, answers, self._num_drawable):
                    found.setdefault(completion.request_id, []).append(completion)
        except Exception as caught:  # whatever it is: the other ranks must hear of it
            error = caught
        raise_on_all(error)
        found = {i: found[i] for i in mine}
        return found if mesh.world_size == 1 else hand_over(mesh, found, prompts)

    def close(self) -> None:
        pass

    @property
    def _num_drawable(self) -> int:
        model = self._engine.model
        return min(model.vocab_limit or model.num_rows, model.num_rows)

    def _copy(self) -> PreTrainedModel:
        """The HF module with the current weights, whole, in the compute dtype. Collective."""
        model = self._engine.model
        device = model.mesh.device
        hf = build_on_meta(model.hf_config, model.config, getattr(torch, model.config.compute_dtype))
        hf._apply(lambda t: torch.zeros_like(t, device=device) if t.is_meta else t.to(device))
        hf.tie_weights()
        if model.spec is not None:  # the rotary table that the trained module has
            force_table(hf, model.spec.rope, model.max_positions)
        else:
            fix_rope(hf, model.config.rollout.engine.max_model_len)
        tensors: dict[str, Tensor] = {**dict(hf.named_parameters()), **dict(hf.named_buffers())}

        def fill(layer: Mapping[str, Tensor]) -> None:
            with torch.no_grad():
                for name, weight in layer.items():
                    tensors[name].copy_(weight)

        for_each_layer(model, fill)
        hf.generation_config = GenerationConfig()  # nothing of the checkpoint's
        return hf.eval().requires_grad_(False)

    def _batches(self, prompts: Mapping[int, Sequence[int]], num_samples: int) -> Iterator[_Rows]:
        """Samples of prompts of one length, at most rollout.engine.max_running at once."""
        size = self._engine.config.rollout.engine.max_running
        for length in sorted({len(prompt) for prompt in prompts.values()}):
            rows = [(i, s) for i, prompt in prompts.items() if len(prompt) == length for s in range(num_samples)]
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                yield _Rows(part, [tuple(prompts[i]) for i, _ in part])


@dataclass(frozen=True)
class _Rows:
    """A batch: (place of the prompt, sample index) and the prompt, row by row."""

    places: list[tuple[int, int]]
    prompts: list[tuple[int, ...]]


def _generate(
    module: PreTrainedModel, batch: _Rows, keys: Sequence[int], answers: Answers, num_drawable: int
) -> Iterator[Completion]:
    sampling, stop = answers.sampling, sorted(answers.stop_ids)
    ids = torch.tensor(batch.prompts, device=next(module.parameters()).device)  # [R, L]
    draws = [Draw(sampling, keys[i], s, prompt, len(prompt)) for (i, s), prompt in zip(batch.places, batch.prompts, strict=True)]
    sampler = _Sampler(sampling, stop, draws, num_drawable, ids.device)
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,  # the sampler leaves one token
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,  # what rows that have ended go on with
        use_cache=True,
    )
    module.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), generation_config=settings, logits_processor=LogitsProcessorList([sampler])
    )
    columns = (torch.stack(column, 1).tolist() for column in (sampler.ids, sampler.logprobs, sampler.raw))  # [R, T] each
    for (i, s), prompt, *drawn in zip(batch.places, batch.prompts, *columns, strict=True):
        yield answers.completion(i, s, prompt, *drawn)


@dataclass
class _Sampler(LogitsProcessor):
    """Draws, and leaves `generate` only the drawn token to choose. Keeps per step what was drawn, [R], with its log-probs."""

    sampling: SamplingParams
    stop: list[int]
    draws: list[Draw]
    num_drawable: int
    device: torch.device
    ids: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    raw: list[Tensor] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        z = scores[:, : self.num_drawable].float()  # [R, V]
        temperature = self.sampling.temperature or 1.0
        q = self._warpers(input_ids, z.clone()).log_softmax(-1)  # type: ignore[arg-type]
        if self.sampling.temperature == 0:
            ids = q.argmax(-1, keepdim=True)
            logprobs = torch.zeros_like(ids, dtype=torch.float32)
        else:
            ids = _inverse_cdf(q.double().exp(), self._uniforms(input_ids.shape[1]))
            logprobs = q.gather(-1, ids)
        raw = (z / temperature).log_softmax(-1).gather(-1, ids)
        if not self.sampling.temperature:
            logprobs = logprobs + 0.0 * raw  # 0, and not finite where the logits are not
        for column, values in ((self.ids, ids), (self.logprobs, logprobs), (self.raw, raw)):
            column.append(values.squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter_(-1, ids, 0.0)

    @property
    def _warpers(self) -> LogitsProcessorList:
        """transformers' own, in its order."""
        p, num_prompt = self.sampling, self.draws[0].num_prompt
        chosen = LogitsProcessorList()
        if p.min_new_tokens > 0 and self.stop:
            chosen.append(MinNewTokensLengthLogitsProcessor(num_prompt, p.min_new_tokens, self.stop, device=str(self.device)))
        if p.temperature not in (0.0, 1.0):
            chosen.append(TemperatureLogitsWarper(p.temperature))
        if p.temperature and p.top_k:
            chosen.append(TopKLogitsWarper(min(p.top_k, self.num_drawable)))
        if p.temperature and p.top_p < 1.0:
            chosen.append(TopPLogitsWarper(p.top_p))
        return chosen

    def _uniforms(self, position: int) -> Tensor:
        """[R, 1] fp64, as the engine draws them: of (seed, key, sample, position)."""
        draws = [Draw(d.sampling, d.key, d.sample_index, range(position), d.num_prompt) for d in self.draws]
        return torch.from_numpy(uniforms(draws)).to(self.device)[:, None]


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """weights [R, V] fp64, u [R, 1] in [0, 1): [R, 1], the first token whose cumulative weight exceeds u of the whole. One of no
    weight is never drawn."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    u = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, u, right=True).clamp(max=weights.shape[-1] - 1)
