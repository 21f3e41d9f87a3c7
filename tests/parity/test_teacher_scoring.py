"""A teacher scored by the inference engine against the same teacher's training module: every registered family, both dtypes,
attention windows, samples that share a prompt, one and two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, save_tiny

from hybrid import HybridEngine
from hybrid.sharding import gathered
from trainers.config import FrozenTeacher, SelfTeacher
from trainers.scoring import TeacherScorer, open_teacher
from trainers.types import Prompt, Rollout, Span

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"kind": "frozen"},
    "start": {"kind": "self", "weights": "start"},
    "live": {"kind": "self", "weights": "live"},
    "ema": {"kind": "self", "weights": "ema", "ema_decay": 0.5},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(family, dtype) -> folder, made when first asked for. In bf16 the weights are smaller: HF's own noise grows with them."""
    made: dict[tuple[str, str], str] = {}

    def folder(family: str, dtype: str = "float32") -> str:
        if (family, dtype) not in made:
            made[family, dtype] = str(tmp_path_factory.mktemp(f"{family}-{dtype}"))
            settings = {
                "initializer_range": 0.15 if dtype == "float32" else 0.06,
                "tie_word_embeddings": family in ("qwen2", "exaone4_5"),
            }
            save_tiny(made[family, dtype], family, dtype=getattr(torch, dtype), **settings)
        return made[family, dtype]

    return folder


def rollouts() -> list[Rollout]:
    """Prompts of 1 to 30 tokens, some of them privileged; one to three samples; one without a token."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 79, (count,), generator=generator).tolist())

    made = []
    for row, (num_prompt, lengths) in enumerate(((30, (9, 1, 20)), (1, (3, 5)), (17, (0, 4)), (4, (25,)))):
        prompt = Prompt(index=row, ids=ids(num_prompt), text="", privileged_ids=ids(num_prompt + 9) if row % 2 == 0 else None)
        for sample, length in enumerate(lengths):
            spans = (Span(num_prompt, num_prompt + length, "policy"),)
            zeros = (0.0,) * length
            made.append(Rollout(prompt, sample, (*prompt.ids, *ids(length)), spans, zeros, zeros, "length", 0, ""))
    return made


def scored(folder: str, dtype: str, kind: str, gather: str, empty: bool = False) -> dict[str, Any]:
    """Largest differences between the two ways, before and after a change of the student's weights; what is held afterwards."""
    engine = HybridEngine.from_pretrained(folder, {"compute_dtype": dtype, "rollout": {"gather": gather}})
    mine = rollouts()[engine.rank :: engine.world_size] if not (empty and engine.rank == 1) else []
    teachers = [teacher_of(engine, folder, kind, scoring) for scoring in ("engine", "module")]
    found: dict[str, Any] = {"rows": [], "logits": 0.0, "logprobs": 0.0, "largest": 0.0}
    for _ in range(2):
        by_engine, by_module = ([(h.dtype, logits) for h, logits in logits_of(teacher, mine)] for teacher in teachers)
        for rollout, (dtype_e, given), (dtype_m, expected) in zip(mine, by_engine, by_module, strict=True):
            found["rows"].append((dtype_e == dtype_m, given.shape == expected.shape == (len(rollout.response_ids), 79)))
            if len(given):
                difference = (given.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
                found["logprobs"] = max(found["logprobs"], difference)
                found["logits"] = max(found["logits"], (given - expected).abs().max().item())
                found["largest"] = max(found["largest"], expected.abs().max().item())
        with torch.no_grad():
            for shard in engine.model.local_shards().values():
                shard.mul_(0.9)
        for teacher in teachers:
            teacher.after_step()
    found["left"] = gathered(engine.model.module)
    for teacher in teachers:
        teacher.close()
    engine.close()
    return found


def logits_of(teacher: TeacherScorer, mine: list[Rollout]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    hidden = teacher.score(mine)
    with teacher.head() as head:
        return [(h, head.logits(h)) for h in hidden]


def teacher_of(engine: HybridEngine, folder: str, kind: str, scoring: str) -> TeacherScorer:
    path = {"path": folder} if kind == "frozen" else {}
    config = (FrozenTeacher if kind == "frozen" else SelfTeacher).model_validate(KINDS[kind] | path | {"scoring": scoring})
    return open_teacher(config, engine, engine.config, start=folder, micro_batch_tokens=60)


def check(ranks: list[dict[str, Any]], dtype: str) -> None:
    """Differences against the largest logit of all ranks."""
    assert all(same == (True, True) for found in ranks for same in found["rows"])
    assert all(found["left"] == [] for found in ranks)
    worst = {key: max(found[key] for found in ranks) for key in ("logits", "logprobs", "largest")}
    if dtype == "float32":
        assert worst["logprobs"] <= 1e-5
    else:
        assert worst["logits"] <= 3e-2 * worst["largest"]


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_as_its_training_module_does(folders, family, dtype):
    found = scored(folders(family, dtype), dtype, "frozen", "full")
    assert len(found["rows"]) == 2 * len(rollouts())
    check([found], dtype)


@DTYPES
@pytest.mark.parametrize("gather", ["full", "stream"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_teacher_does_on_one_rank(folders, kind, gather, dtype):
    check([scored(folders("exaone4", dtype), dtype, kind, gather)], dtype)


@pytest.mark.parametrize(
    ("kind", "gather", "dtype", "empty"),
    [
        ("frozen", "full", "float32", True),
        ("frozen", "stream", "float32", False),
        ("start", "full", "bfloat16", False),
        ("live", "full", "float32", False),
        ("live", "stream", "float32", True),
        ("ema", "full", "bfloat16", True),
        ("ema", "stream", "float32", True),
    ],
)
def test_every_kind_of_teacher_does_on_two_ranks(pool2, folders, kind, gather, dtype, empty):
    """With unequal shares, and (empty) with a rank that has nothing to score."""
    results = pool2.run(scored, folders("exaone4", dtype), dtype, kind, gather, empty)
    assert len(results[1]["rows"]) == (0 if empty else 2 * len(rollouts()[1::2]))
    check(results, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_does_on_two_ranks(pool2, folders, family):
    for dtype in ("float32", "bfloat16"):
        check(pool2.run(scored, folders(family, dtype), dtype, "ema", "full"), dtype)
