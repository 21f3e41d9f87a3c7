"""Teachers: what they read, that they stand still, and that student and teacher share one vocabulary."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hybrid_cases import full_gradients, relative_error
from safetensors.torch import load_file, save_file
from tiny import character_tokenizer, save_tiny
from trainer_cases import CHARACTERS, tiny_folder
from transformers import AutoModelForCausalLM

from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from inference_v2.types import SamplingParams
from trainers.config import DistillLoss, FrozenTeacher, SelfTeacher
from trainers.data.batching import counted_positions, make_batches
from trainers.data.order import DrawnPrompt
from trainers.losses import cross_entropy_token_loss, divergence_token_loss
from trainers.losses.reductions import denominator, target_weights
from trainers.rollout import sample_rollouts
from trainers.scoring import check_same_vocabulary, open_teacher
from trainers.types import Prompt

CONFIG = HybridConfig(optimizer={"name": "sgd", "lr": 0.5, "max_grad_norm": None})
LOSS = DistillLoss(divergence="forward_kl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_folder(folder / "student", seed=0)
    tiny_folder(folder / "teacher", seed=1)
    return folder


@pytest.fixture
def engine(folder):
    engine = HybridEngine.from_pretrained(str(folder / "student"), CONFIG)
    yield engine
    engine.close()


def prompts(privileged: bool = False) -> list[DrawnPrompt]:
    ids = [(3, 4, 5), (6,), (7, 8)]
    more = (9, 10, 11, 12)
    return [
        DrawnPrompt(Prompt(index=i, ids=p, text="", privileged_ids=(*more[: i + 2], *p) if privileged else None), epoch=0)
        for i, p in enumerate(ids)
    ]


def rollouts_of(engine, privileged: bool = False):
    return sample_rollouts(engine, prompts(privileged), SamplingParams(max_new_tokens=6, num_samples=2))


def teacher_of(engine, folder, teacher, micro_batch_tokens: int = 20):
    start = str(folder / "student") if (folder / "student").exists() else str(folder)
    return open_teacher(teacher, engine, CONFIG, start=start, micro_batch_tokens=micro_batch_tokens)


def hf_hidden(path: Path, ids) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0]


def step(engine, teacher, rollouts) -> float:
    batches = make_batches(rollouts, 20, fields={teacher.field: teacher.score(rollouts)})
    with teacher.head() as head:
        loss = engine.forward_backward(batches, divergence_token_loss(LOSS, head, 1.0))["loss"]
    engine.optim_step()
    teacher.after_step()
    return loss


@pytest.mark.parametrize(("scoring", "micro_batch_tokens"), [("engine", 1), ("module", 1), ("module", 20), ("module", 1000)])
def test_the_teacher_reads_the_privileged_prompt_and_the_same_response(engine, folder, scoring, micro_batch_tokens):
    rollouts = rollouts_of(engine, privileged=True)
    teacher = teacher_of(engine, folder, FrozenTeacher(path=str(folder / "teacher"), scoring=scoring), micro_batch_tokens)
    for rollout, hidden in zip(rollouts, teacher.score(rollouts), strict=True):
        given = rollout.prompt.privileged_ids
        whole = hf_hidden(folder / "teacher", (*given, *rollout.response_ids))
        expected = whole[len(given) - 1 : len(given) - 1 + len(rollout.response_ids)]
        torch.testing.assert_close(hidden, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scoring", ["engine", "module"])
@pytest.mark.parametrize("weights", ["start", "live", "ema"])
def test_a_teacher_equal_to_the_student_gives_no_loss_and_a_shifted_one_does(engine, folder, weights, scoring):
    """The loss is 0 only where both predict the same token."""
    rollouts = rollouts_of(engine)
    teacher = teacher_of(engine, folder, SelfTeacher(kind="self", weights=weights, scoring=scoring))
    hidden = teacher.score(rollouts)
    shifted = [torch.roll(h, 1, dims=0) for h in hidden]
    losses = []
    for field in (hidden, shifted):
        with teacher.head() as head:
            batches = make_batches(rollouts, 20, fields={"teacher_hidden": field})
            losses.append(engine.forward_backward(batches, divergence_token_loss(LOSS, head, 1.0))["loss"])
        engine.optimizer.zero_grad()
    assert abs(losses[0]) <= 1e-6
    assert losses[1] > 1e-3


def test_a_shift_by_one_token_has_the_loss_of_a_loop(engine, folder):
    """Teacher and student are one model: 0 where aligned, and with the teacher's rows a token late (a response's first reads its
    last) the KL between rows of HF's own forward, each taken at the token before the one it predicts."""
    rollouts = rollouts_of(engine)
    teacher = teacher_of(engine, folder, SelfTeacher(kind="self", weights="start"))
    hidden = teacher.score(rollouts)
    model, count = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float64), 0
    expected = [0.0, 0.0]
    for rollout in rollouts:
        places = torch.tensor(counted_positions(rollout)) - 1
        assert places.tolist() == list(range(rollout.num_prompt - 1, len(rollout.ids) - 1))
        with torch.no_grad():
            log_s = model(torch.tensor([rollout.ids])).logits[0, places].log_softmax(-1)
        log_t = log_s.roll(1, 0)
        expected[1] += float((log_t.exp() * (log_t - log_s)).sum())
        count += len(places)
    for shift, total in enumerate(expected):
        batches = make_batches(rollouts, 20, fields={"teacher_hidden": [h.roll(shift, 0) for h in hidden]})
        with teacher.head() as head:
            loss = engine.forward_backward(batches, divergence_token_loss(LOSS, head, 1.0))["loss"]
        engine.optimizer.zero_grad()
        assert loss == pytest.approx(total / count, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_four_responses_have_the_gradient_of_four_micro_batches_of_one(engine, folder, reduction):
    """Of 1, 2, 5 and 8 tokens: a mean per micro-batch would weigh the short ones like the long ones."""
    drawn = prompts(privileged=True)
    rollouts = []
    for i, length in enumerate((8, 1, 5, 2)):
        sampling = SamplingParams(max_new_tokens=length, ignore_eos=True, seed=i)
        rollouts += sample_rollouts(engine, drawn[i % 3 : i % 3 + 1], sampling)
    assert [len(r.response_ids) for r in rollouts] == [8, 1, 5, 2]
    teacher = teacher_of(engine, folder, FrozenTeacher(path=str(folder / "teacher")))
    hidden, found = teacher.score(rollouts), []
    for tokens, count in ((1000, 1), (1, 4)):
        batches = make_batches(rollouts, tokens, fields={"teacher_hidden": hidden})
        assert len(batches) == count
        weights = [target_weights(batch, reduction) for batch in batches]
        divisor = sum(denominator(batch, reduction) for batch in batches)
        with teacher.head() as head:
            token_loss = divergence_token_loss(LOSS, head, 1.0)
            loss = engine.forward_backward(batches, token_loss, weights=weights, denominator=divisor)["loss"]
        found.append((loss, full_gradients(engine)))
        engine.optimizer.zero_grad()
    (one_loss, one), (four_loss, four) = found
    assert four_loss == pytest.approx(one_loss, rel=1e-6)
    assert max(relative_error(four[name], one[name]) for name in one) < 1e-5


@pytest.mark.parametrize("kind", ["frozen", "start", "live", "ema"])
def test_frozen_teachers_stand_still_and_the_others_follow(engine, folder, kind):
    """Over steps: frozen and start bit-equal; live equals the student; ema is the average of the student's weights."""
    config = (
        FrozenTeacher(path=str(folder / "teacher"), scoring="module")
        if kind == "frozen"
        else SelfTeacher(kind="self", weights=kind, ema_decay=0.9, scoring="module" if kind == "start" else "auto")
    )
    teacher = teacher_of(engine, folder, config)
    before = {n: t.clone() for n, t in teacher.model.local_shards().items()}
    average = dict(before)
    for _ in range(2):
        step(engine, teacher, rollouts_of(engine, privileged=True))
        average = {n: average[n].lerp(t, 0.1) for n, t in engine.model.local_shards().items()}
    after, student = teacher.model.local_shards(), engine.model.local_shards()
    assert not all(torch.equal(student[n], before[n]) for n in before)
    if kind in ("frozen", "start"):
        assert all(torch.equal(after[n], before[n]) for n in before)
        assert not any(p.requires_grad for p in teacher.model.parameters().values())
        assert teacher.averages() == {}
    if kind == "live":
        assert teacher.model is engine.model
    if kind == "ema":
        assert all(torch.equal(after[n], average[n]) for n in before)
        assert teacher.averages().keys() == before.keys()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["frozen", "live"])
def test_a_gathered_head_outlives_the_students_passes(folder, kind, stage):
    """A live teacher's head is the student's own, which its forward and backward free and gather again."""
    engine = HybridEngine.from_pretrained(str(folder / "student"), CONFIG.model_copy(update={"zero_stage": stage}))
    teacher = teacher_of(
        engine,
        folder,
        FrozenTeacher(path=str(folder / "teacher")) if kind == "frozen" else SelfTeacher(kind="self", weights="live"),
    )
    with teacher.head() as head:
        expected = head.weight.clone()
    batches = make_batches(rollouts_of(engine), 20)
    assert len(batches) > 1
    with teacher.head() as head:
        engine.forward_backward(batches, cross_entropy_token_loss())
        held = head.weight.untyped_storage().nbytes()
        assert held > 0  # not `assert head.weight...`: pytest would print freed memory
        assert torch.equal(head.weight, expected)
    engine.close()


@pytest.mark.parametrize("scoring", ["engine", "module"])
def test_scoring_leaves_mode_and_generators_alone(engine, folder, scoring):
    teacher = teacher_of(engine, folder, SelfTeacher(kind="self", weights="live", scoring=scoring))
    rollouts = rollouts_of(engine)
    engine.model.module.train()
    state = torch.get_rng_state()
    teacher.score(rollouts)
    assert engine.model.module.training
    assert torch.equal(state, torch.get_rng_state())
    engine.model.module.eval()


# -- copies and shards


def gathered_by(generation) -> list[int]:
    """Weights gathered by each stay from now on."""
    found, record = [], generation._record

    def recorded(version, source, *rest):
        found.append(source.bytes_gathered)
        record(version, source, *rest)

    generation._record = recorded
    return found


def test_a_frozen_teacher_has_a_copy_and_no_shards(engine, folder):
    """Its copy is read from the folder once, and its head is the copy's: nothing is gathered in any step."""
    teacher = teacher_of(engine, folder, FrozenTeacher(path=str(folder / "teacher")))
    assert all(p.is_meta for p in teacher.model.module.parameters())
    copy = teacher.generation._copy
    stays, scoped = gathered_by(teacher.generation), []
    teacher.model.files.scope = lambda prefix: scoped.append(prefix) or nullcontext()
    rollouts = rollouts_of(engine, privileged=True)
    first = teacher.score(rollouts)
    for _ in range(2):
        step(engine, teacher, rollouts)
    assert all(torch.equal(a, b) for a, b in zip(first, teacher.score(rollouts), strict=True))
    assert teacher.generation._copy is copy
    assert (stays, scoped) == ([0] * 4, [])
    teacher.close()
    assert copy.nbytes == 0


def test_a_frozen_teacher_whose_copy_does_not_fit_is_streamed_from_shards(folder):
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"max_copy_bytes": 1000})})
    engine = HybridEngine.from_pretrained(str(folder / "student"), config)
    rollouts = rollouts_of(engine, privileged=True)
    start = str(folder / "student")
    streamed, full = (
        open_teacher(FrozenTeacher(path=str(folder / "teacher")), engine, c, start=start, micro_batch_tokens=20)
        for c in (config, CONFIG)
    )
    assert (streamed.generation.gather, full.generation.gather) == ("stream", "full")
    assert not any(p.is_meta for p in streamed.model.module.parameters())
    for a, b in zip(streamed.score(rollouts), full.score(rollouts), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    with streamed.head() as one, full.head() as other:
        assert torch.equal(one.weight[: one.vocab_size], other.weight[: one.vocab_size])
    engine.close()


@pytest.mark.parametrize("on_leave", ["free", "keep"])
def test_an_averaged_teachers_copy_follows_its_weights(folder, on_leave):
    """Gathered once a version, also after a checkpoint may have been loaded into it."""
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"on_leave": on_leave})})
    engine = HybridEngine.from_pretrained(str(folder / "student"), config)
    rollouts = rollouts_of(engine, privileged=True)
    teacher, module = (
        open_teacher(
            SelfTeacher(kind="self", weights="ema", ema_decay=0.5, scoring=scoring), engine, config,
            start=str(folder / "student"), micro_batch_tokens=20,
        )
        for scoring in ("engine", "module")
    )  # fmt: skip
    for _ in range(2):
        step(engine, teacher, rollouts)
        module.after_step()
        for a, b in zip(teacher.score(rollouts), module.score(rollouts), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    stays = gathered_by(teacher.generation)
    teacher.score(rollouts)
    assert (stays[0] == 0) == (on_leave == "keep")
    before = teacher.score(rollouts)
    for tensor in teacher.averages().values():
        torch.nn.init.normal_(tensor.to_local(), std=0.2)  # what a load does
    assert not all(torch.equal(a, b) for a, b in zip(before, teacher.score(rollouts), strict=True))
    engine.close()


def test_a_live_teacher_scores_with_the_copy_of_the_rollout(engine, folder):
    teacher = teacher_of(engine, folder, SelfTeacher(kind="self", weights="live"))
    stays = gathered_by(engine._generation)
    for expected in ([True, False], [True, False, True, False]):
        with engine.holding():
            rollouts = rollouts_of(engine, privileged=True)
            teacher.score(rollouts)
            assert engine._generation._copy.nbytes > 0
        assert [size > 0 for size in stays] == expected
        assert engine._generation._copy.nbytes == 0  # rollout.on_leave=free
        engine.weight_version += 1
    with engine.holding():  # given responses: nothing was gathered before
        teacher.score(rollouts)
    assert stays[-1] > 0


def test_a_live_teacher_sees_an_edit_outside_a_hold(folder):
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"on_leave": "keep"})})
    engine = HybridEngine.from_pretrained(str(folder / "student"), config)
    teacher, rollouts = teacher_of(engine, folder, SelfTeacher(kind="self", weights="live")), rollouts_of(engine)
    before = teacher.score(rollouts)
    with torch.no_grad():
        for shard in engine.model.local_shards().values():
            shard.mul_(0.5)
    assert not torch.allclose(before[0], teacher.score(rollouts)[0])
    engine.close()


def test_an_unregistered_family_is_scored_by_its_module(tmp_path):
    tokenizer = character_tokenizer()
    save_tiny(tmp_path, "granite", tokenizer=tokenizer, max_position_embeddings=64)
    engine = HybridEngine.from_pretrained(str(tmp_path), CONFIG)
    for weights in ("live", "start"):
        options = {"kind": "self", "weights": weights}
        assert teacher_of(engine, tmp_path, SelfTeacher(**options), 20).scoring == "module"
        with pytest.raises(ValueError, match=r"teacher\.scoring=engine with model_type='granite'.*allowed: module, auto"):
            teacher_of(engine, tmp_path, SelfTeacher(scoring="engine", **options))
    engine.close()


def test_a_folder_that_lacks_weights_is_refused_at_the_start(engine, folder, tmp_path):
    tiny_folder(tmp_path / "teacher", seed=1)
    path = tmp_path / "teacher" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \[model\.norm\.weight\]"):
        teacher_of(engine, folder, FrozenTeacher(path=str(tmp_path / "teacher")))


# -- vocabularies


def test_a_teachers_padded_vocabulary_does_not_count(tmp_path):
    """Student of 40 rows, teacher of 48, tokenizer of 37 ids: the loss is that of the first 37."""
    tokenizer = character_tokenizer("".join(chr(97 + i) for i in range(26)) + "01234567")
    assert len(tokenizer) == 37
    for name, rows, seed in (("student", 40, 0), ("teacher", 48, 1)):
        save_tiny(tmp_path / name, "qwen3", tokenizer=tokenizer, vocab_size=rows, seed=seed, max_position_embeddings=64)
    engine = HybridEngine.from_pretrained(str(tmp_path / "student"), CONFIG)
    teacher = teacher_of(engine, tmp_path, FrozenTeacher(path=str(tmp_path / "teacher")))
    rollouts = rollouts_of(engine)
    batches = make_batches(rollouts, 1000, fields={"teacher_hidden": teacher.score(rollouts)})
    with teacher.head() as head:
        means = engine.forward_backward(batches, divergence_token_loss(LOSS, head, 1.0))
    total, count = 0.0, 0
    for rollout in rollouts:
        places = torch.tensor(counted_positions(rollout)) - 1
        log_p = []
        for name in ("teacher", "student"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            with torch.no_grad():
                log_p.append(model(torch.tensor([rollout.ids])).logits[0, places, :37].float().log_softmax(-1))
        total += float((log_p[0].exp() * (log_p[0] - log_p[1])).sum())
        count += len(places)
        assert max(rollout.response_ids) < 37
    assert means["loss"] == pytest.approx(total / count, rel=1e-5)
    engine.close()


def test_tokenizers_that_differ_are_refused_with_the_first_ids():
    student = {"a": 0, "b": 1, "c": 2, "d": 3}
    check_same_vocabulary(student, dict(student), "t")
    with pytest.raises(
        ValueError,
        match=r"differ in 3 ids .1: student 'b', teacher 'c'; 2: student 'c', teacher 'b'; 3: student 'd', teacher None",
    ):
        check_same_vocabulary(student, {"a": 0, "c": 1, "b": 2}, "t")
    with pytest.raises(ValueError, match="has no tokenizer to compare"):
        check_same_vocabulary(student, None, "t")


def test_a_teacher_of_another_tokenizer_or_too_few_rows_is_refused_at_the_start(engine, folder, tmp_path):
    tiny_folder(tmp_path / "other")
    vocab = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    ids = vocab["model"]["vocab"]
    ids["0"], ids["1"] = ids["1"], ids["0"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(ValueError, match=r"differ in 2 ids .2: student '0', teacher '1'"):
        teacher_of(engine, folder, FrozenTeacher(path=str(tmp_path / "other")))
    assert len(CHARACTERS) + 2 == engine.model.vocab_limit
