"""What tests of policy optimisation share: models, rows, scripted responses, and what a run hands to its losses."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import CHARACTERS, run, settings, tiny_folder, write_sums
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid.engine import HybridEngine
from trainers.data.order import DrawnPrompt
from trainers.on_policy import OnPolicy
from trainers.sampler import Sampler
from trainers.types import Prompt, Rollout, Span

EOS = 1
SGD = {"name": "sgd", "lr": 0.05, "max_grad_norm": None}
WATCHED = ("kl", "mismatch", "ratio", "clipped", "approx", "entropy", "logprob", "loss", "critic/", "reward", "explained",
           "no_signal", "tokens", "grad_norm", "dynamic")  # fmt: skip


def score(completion: str, prompt: Prompt) -> float:
    """Depends on every character and its place."""
    return sum((i + 2) * CHARACTERS.index(c) for i, c in enumerate(completion)) % 7 - 3.0


def starts_low(completion: str, prompt: Prompt) -> float:
    """1 for a response that begins with a character of the first half, else 0: many groups agree."""
    return float(completion[:1] in CHARACTERS[:11])


def nothing(completion: str, prompt: Prompt) -> float:
    return 0.0


def models(folder: Path) -> Path:
    """`student`, `other` (another causal LM), `scorer` (a sequence classifier with one label), and rows."""
    tiny_folder(folder / "student", seed=0)
    tiny_folder(folder / "other", seed=1)
    scorer_folder(folder / "scorer", folder / "other")
    write_sums(folder / "sums.jsonl")
    write_pairs(folder / "pairs.jsonl")
    return folder


def scorer_folder(path: Path, start: Path, *, seed: int = 5, deviation: float = 0.5) -> str:
    """A sequence classifier with one label on the backbone of `start`, its head random, with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
        torch.nn.init.normal_(model.score.weight, std=deviation)
    model.save_pretrained(path)
    for file in Path(start).glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    return str(path)


def write_pairs(path: Path, count: int = 10) -> str:
    """Rows of prompt, chosen, rejected and margin; the right sum is preferred to a wrong and longer one."""
    sums = [(a, (7 * a) % 13) for a in range(count)]
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 1}?" + "1" * (a % 3), "margin": 0.25 * (a % 4)}
        for a, b in sums
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def policy_settings(recipe: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of one step on `folder`, 3 prompts x 2 samples at temperature 0.7."""
    defaults: dict[str, Any] = {
        "max_steps": 1,
        "rewards": [{"name": "rl_cases:score"}],
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "sampling": {"max_new_tokens": 6, "temperature": 0.7}},
        "engine.optimizer": dict(SGD),
        "data.shuffle": False,
    }
    if recipe == "ppo":
        defaults["critic.optimizer"] = dict(SGD)
    return settings(recipe, folder, **defaults | changes)


# -- scripted responses


@dataclass(frozen=True)
class Turn:
    source: str
    ids: tuple[int, ...]


# One with an end, one without, one that is only its end, an empty one, and two of several turns.
RESPONSES: tuple[tuple[tuple[Turn, ...], str], ...] = (
    ((Turn("policy", (5, 6, 7, EOS)),), "stop"),
    ((Turn("policy", (8, 2, 10, 11, 3)),), "length"),
    ((Turn("policy", (EOS,)),), "stop"),
    ((), "stop"),
    ((Turn("policy", (5, 9)), Turn("environment", (14, 2, 15)), Turn("policy", (7, EOS))), "stop"),
    ((Turn("policy", (4,)), Turn("environment", (14, 3)), Turn("policy", (3, 8))), "length"),
)


def text_of(ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[i - 2] for i in ids if i >= 2)


def scripted_rollout(
    drawn: DrawnPrompt, sample: int, response: tuple[tuple[Turn, ...], str], model: Any, temperature: float, shift: float = 0.0
) -> Rollout:
    """The response as if `model` had drawn it. `shift`: what its log-probs are off by, with alternating sign."""
    turns, finish_reason = response
    ids, spans = list(drawn.prompt.ids), []
    for turn in turns:
        spans.append(Span(len(ids), len(ids) + len(turn.ids), turn.source))
        ids += turn.ids
    start = len(drawn.prompt.ids)
    logprobs = [math.nan] * (len(ids) - start)  # an environment's tokens have none that anyone may read
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, -1)
    for span in spans:
        for place in range(span.start, span.stop):
            if span.source == "policy":
                logprobs[place - start] = rows[place - 1, ids[place]].item() + (shift if place % 2 else -shift)
    return Rollout(
        prompt=drawn.prompt, sample_index=sample, ids=tuple(ids), spans=tuple(spans), logprobs=tuple(logprobs),
        logprobs_raw=tuple(logprobs), finish_reason=finish_reason, weight_version=0, text=text_of(ids[start:]), group=drawn.key,
    )  # fmt: skip


@contextmanager
def scripted(
    folder: str | Path, responses: Sequence[tuple[tuple[Turn, ...], str]] = RESPONSES, *, shift: float = 0.0
) -> Iterator[None]:
    """Runs inside get `responses`, in turn, instead of sampling; of two ranks each has every other one, so that groups are split.
    The model of `folder`, which the run starts from, says their log-probs: it is good for one step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def draw(self: Sampler, prompts: Sequence[DrawnPrompt]) -> tuple[list[Rollout], dict[str, float]]:
        samples, temperature = self.sampling.num_samples, self.sampling.temperature
        everyone = [(prompt, k) for prompt in prompts for k in range(samples)]
        mine = range(self.engine.rank, len(everyone), self.engine.world_size)
        rollouts = [scripted_rollout(*everyone[n], responses[n % len(responses)], model, temperature, shift) for n in mine]
        return rollouts, {}

    with patch.object(Sampler, "draw", draw):
        yield


# -- what a run hands to its losses


@dataclass
class Recorded:
    """Of each step what `experience` made; of each forward_backward which engine, loss, and per token, by a sequence's ids, what
    the loss gave."""

    rollouts: list[list[Rollout]] = field(default_factory=list)
    fields: list[dict[str, list[Tensor]]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def of(self, *, scalar: bool) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["scalar"] is scalar]


@contextmanager
def recording() -> Iterator[Recorded]:
    found = Recorded()
    experience, forward_backward = OnPolicy.experience, HybridEngine.forward_backward

    def experience_and_note(self: OnPolicy, step: int, rollouts: Sequence[Rollout], fields: Any) -> Any:
        made, record = experience(self, step, rollouts, fields)
        found.rollouts.append(list(rollouts))
        found.fields.append({name: [v.clone() for v in values] for name, values in made.items()})
        return made, record

    def forward_backward_and_note(self: HybridEngine, batches: Any, token_loss: Any, **options: Any) -> Any:
        tokens: dict[tuple[int, ...], dict[str, list[float]]] = {}

        def noting(logits: Tensor, chunk: Any) -> Any:
            per_token, metrics = token_loss(logits, chunk)
            bounds = chunk.cu_seqlens.tolist()
            for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
                mine = (chunk.sequence_index == i).nonzero().squeeze(1)
                row = tokens.setdefault(tuple(chunk.token_ids[start:stop].tolist()), {})
                for name, value in {"per_token": per_token, **metrics}.items():
                    row.setdefault(name, []).extend(value.detach()[mine].tolist())
            return per_token, metrics

        means = forward_backward(self, batches, noting, **options)
        found.calls.append({"scalar": self.model.is_scalar, "tokens": tokens, "means": means, "batches": list(batches)})
        return means

    with (
        patch.object(OnPolicy, "experience", experience_and_note),
        patch.object(HybridEngine, "forward_backward", forward_backward_and_note),
    ):
        yield found


# -- what a run leaves


def parts(tree: dict[str, Any], *names: str) -> dict[str, dict[str, Tensor]]:
    """The weights of the run's folders by name, `model` where none is given."""
    return {name: load_file(Path(tree["output_dir"]) / name / "model.safetensors") for name in names or ("model",)}


def assert_same_weights(first: dict[str, Any], second: dict[str, Any], *names: str) -> None:
    """Of two runs, to 1e-5."""
    one, two = parts(first, *names), parts(second, *names)
    for name in one:
        assert one[name].keys() == two[name].keys()
        for key, tensor in one[name].items():
            torch.testing.assert_close(two[name][key], tensor, rtol=0, atol=1e-5, msg=lambda m, k=key, n=name: f"{n} {k}: {m}")


def watched(record: dict[str, Any]) -> dict[str, float]:
    """What a record says of losses, rewards and KLs: neither times nor bytes."""
    return {name: value for name, value in record.items() if name.startswith(WATCHED)}


def run_and_watch(
    tree: dict[str, Any], *, script: str | None = None, order: Sequence[int] = tuple(range(len(RESPONSES))), **how: Any
) -> dict[int, dict[str, float]]:
    """`watched` of each step; crosses a process border. `script`: the folder whose model draws RESPONSES, in this order."""
    with nullcontext() if script is None else scripted(script, [RESPONSES[i] for i in order]):
        return {step: watched(record) for step, record in run(tree, **how)[1].items()}


def places_of(rollout: Rollout) -> list[int]:
    """Of the policy's tokens in `ids`; written out again, since what does so in a run is tested."""
    return [place for span in rollout.spans if span.source == "policy" for place in range(span.start, span.stop)]
