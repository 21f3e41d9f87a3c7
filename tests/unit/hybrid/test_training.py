"""One optimizer step equals one big batch, whatever the ranks, micro-batches, masks and stages."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import (
    cross_entropy,
    full_gradients,
    full_weights,
    make_engine,
    pack,
    ragged_sequences,
    relative_error,
)
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from torch import Tensor

SEQUENCES = ragged_sequences(8)
TOKENS = sum(len(s) - 1 for s in SEQUENCES)
# (ranks, accumulation) -> per rank the micro-batches, as slices of SEQUENCES; "uneven" and "empty" leave ranks with less
SPLITS = {
    "1x1": [[(0, 8)]],
    "1x2": [[(0, 3), (3, 8)]],
    "1x8": [[(i, i + 1) for i in range(8)]],
    "2x1": [[(0, 5)], [(5, 8)]],
    "2x2": [[(0, 1), (1, 3)], [(3, 6), (6, 8)]],
    "uneven": [[(0, 2)], [(2, 4), (4, 5), (5, 8)]],
    "empty": [[(0, 4), (4, 8)], []],
}


@pytest.fixture(scope="module", params=["llama", "tied qwen2"])
def folder(request, tmp_path_factory):
    """A model, and what plain autograd on the HF module makes of all sequences at once."""
    path = tmp_path_factory.mktemp("model")
    family = request.param.split()[-1]
    hf = save_tiny(path, family, num_hidden_layers=2, tie_word_embeddings="tied" in request.param, attention_dropout=0.5)
    loss = _hf_loss(hf) / TOKENS
    loss.backward()
    save_file({n: p.grad for n, p in hf.named_parameters()} | {"loss": loss.detach()}, path / "reference.safetensors")
    return str(path)


def _hf_loss(hf: torch.nn.Module) -> Tensor:
    """Summed cross-entropy, sequence by sequence: no padding to get wrong. The character tokenizer knows 79 ids."""
    total = torch.zeros(())
    for sequence in SEQUENCES:
        ids = torch.tensor([sequence])
        logits = hf(ids).logits[0, :-1, :79]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total


def gradient_errors(folder: str, split: list, config: dict) -> dict:
    engine = make_engine(folder, **config)
    engine.model.module.train()
    result = engine.forward_backward([pack(SEQUENCES[a:b]) for a, b in split[engine.rank]], cross_entropy)
    reference = load_file(f"{folder}/reference.safetensors")
    loss = reference.pop("loss").item()
    gradients = full_gradients(engine)
    assert gradients.keys() == reference.keys()
    return {
        "gradient": max(relative_error(gradients[n], reference[n]) for n in reference),
        "loss": abs(result["loss"] - loss),
        "tokens": result["tokens"],
        "mode kept": engine.model.module.training,
    }


def _check(result: dict) -> None:
    assert result["gradient"] < 1e-5
    assert result["loss"] < 1e-5
    assert result["tokens"] == TOKENS
    assert result["mode kept"]


@pytest.mark.parametrize("split", ["1x1", "1x2", "1x8"])
def test_one_rank_gives_the_gradient_of_one_big_batch(folder, split):
    _check(gradient_errors(folder, SPLITS[split], {}))


@pytest.mark.parametrize("split", ["2x1", "2x2", "uneven", "empty"])
def test_two_ranks_give_the_gradient_of_one_big_batch(pool2, folder, split):
    for result in pool2.run(gradient_errors, folder, SPLITS[split], {}):
        _check(result)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("split", ["2x2", "uneven"])
def test_every_stage_gives_the_gradient_of_one_big_batch(pool2, folder, stage, split):
    for result in pool2.run(gradient_errors, folder, SPLITS[split], {"zero_stage": stage}):
        _check(result)


def test_recomputed_activations_give_the_same_gradient(pool2, folder):
    for result in pool2.run(gradient_errors, folder, SPLITS["2x2"], {"activation_checkpointing": True}):
        _check(result)


def masked_rank(folder: str) -> float:
    """Rank 1's sequences count nowhere; the gradient is that of rank 0's alone."""
    engine = make_engine(folder)
    batches = [pack(SEQUENCES[:4])] if engine.rank == 0 else [pack(SEQUENCES[4:], counted_from=1000)]
    engine.forward_backward(batches, cross_entropy)
    with_masked = full_gradients(engine)
    engine.optimizer.zero_grad()
    engine.forward_backward(batches if engine.rank == 0 else [], cross_entropy)
    alone = full_gradients(engine)
    return max(relative_error(with_masked[n], alone[n]) for n in alone)


def test_masked_positions_and_absent_ones_are_the_same(pool2, folder):
    assert max(pool2.run(masked_rank, folder)) < 1e-6


def nothing_counts(folder: str) -> tuple:
    engine = make_engine(folder)
    before = full_weights(engine)
    result = engine.forward_backward([pack(SEQUENCES[:2], counted_from=1000)], cross_entropy)
    norm = engine.optim_step()["grad_norm"]
    after = full_weights(engine)
    return result["loss"], result["tokens"], norm, all(torch.equal(before[n], after[n]) for n in before)


def test_a_step_in_which_nothing_counts_changes_nothing(pool2, folder):
    assert pool2.run(nothing_counts, folder) == [(0.0, 0.0, 0.0, True)] * 2


def sequence_mean_error(folder: str) -> float:
    """Weights 1 / length with the number of sequences as denominator, against HF's mean of means."""
    engine = make_engine(folder)
    mine = SEQUENCES[:5] if engine.rank == 0 else SEQUENCES[5:]
    weights = torch.tensor([1 / (len(s) - 1) for s in mine for _ in s[1:]])
    result = engine.forward_backward([pack(mine)], cross_entropy, weights=[weights], denominator=len(mine))
    losses = []
    for sequence in SEQUENCES:
        losses.append(engine.score(pack([sequence])).mean().neg())
    return abs(result["loss"] - torch.stack(losses).mean().item())


def test_weights_and_a_denominator_make_another_mean(pool2, folder):
    assert max(pool2.run(sequence_mean_error, folder)) < 1e-5


def three_steps(folder: str, split: list, path: str | None) -> float:
    """SGD on fixed data. Rank count 1 writes the weights, others compare."""
    engine = make_engine(folder)
    for _ in range(3):
        engine.forward_backward([pack(SEQUENCES[a:b]) for a, b in split[engine.rank]], cross_entropy)
        engine.optim_step()
    weights = full_weights(engine)
    if engine.world_size == 1:
        save_file(weights, path)
        return 0.0
    reference = load_file(path)
    return max((weights[n] - reference[n]).abs().max().item() for n in reference)


def test_two_ranks_reach_the_weights_of_one(pool2, folder, tmp_path):
    path = str(tmp_path / "weights.safetensors")
    three_steps(folder, SPLITS["1x1"], path)
    assert max(pool2.run(three_steps, folder, SPLITS["2x2"], path)) < 1e-5


def nan_loss(logits: Tensor, chunk) -> tuple:
    loss, _ = cross_entropy(logits, chunk)
    return loss * float("nan"), {}


def nan_gradient(logits: Tensor, chunk) -> tuple:
    return (logits[:, 0] * 0).sqrt(), {}  # 0, with gradient 0 * inf


def survive_not_finite(folder: str) -> dict:
    engine = make_engine(folder)
    before = full_weights(engine)
    batches = [pack(SEQUENCES[:4])]
    messages = []
    try:
        engine.forward_backward(batches, nan_loss if engine.rank == 1 else cross_entropy)
    except FloatingPointError as error:
        messages.append(str(error))
    engine.forward_backward(batches, nan_gradient if engine.rank == 1 else cross_entropy)
    try:
        engine.optim_step()
    except FloatingPointError as error:
        messages.append(str(error))
    same = all(torch.equal(w, before[n]) for n, w in full_weights(engine).items())
    engine.forward_backward(batches, cross_entropy)
    return {"messages": messages, "same": same, "norm": engine.optim_step()["grad_norm"], "version": engine.weight_version}


def test_a_loss_or_gradient_that_is_not_finite_stops_every_rank_before_a_weight_moves(pool2, folder):
    for result in pool2.run(survive_not_finite, folder):
        of_loss, of_gradient = result["messages"]
        assert "step 1: the loss is nan" in of_loss
        assert "step 1: gradient of" in of_gradient
        assert "model.layers.0" in of_gradient or "embed_tokens" in of_gradient
        assert result["same"]
        assert 0 < result["norm"] < float("inf")
        assert result["version"] == 1


def broken_in_between(folder: str, stage: int) -> float:
    """A layer raises on every rank in the second of two micro-batches; then the step is taken anew."""
    engine = make_engine(folder, zero_stage=stage)
    batches = [pack(SEQUENCES[engine.rank :: 4]), pack(SEQUENCES[engine.rank + 2 :: 4])]
    calls = iter(range(10))

    def fail(*_: object) -> None:
        if next(calls) == 1:
            raise ArithmeticError("no")

    handle = engine.model.module.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        engine.forward_backward(batches, cross_entropy)
    handle.remove()
    engine.forward_backward(batches, cross_entropy)
    reference = load_file(f"{folder}/reference.safetensors")
    return max(relative_error(g, reference[n]) for n, g in full_gradients(engine).items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_half_a_step_that_failed_leaves_nothing_in_the_next(pool2, folder, stage):
    assert max(pool2.run(broken_in_between, folder, stage)) < 1e-5


def test_dropout_is_off_unless_asked_for(folder):
    batch = pack(SEQUENCES)
    losses = {}
    for dropout in (False, True):
        torch.manual_seed(0)
        engine = make_engine(folder, dropout=dropout)
        losses[dropout] = engine.forward_backward([batch], cross_entropy)["loss"]
    scored = -engine.score(batch).mean().item()
    assert losses[False] == pytest.approx(scored, abs=1e-5)
    assert abs(losses[True] - scored) > 1e-2
