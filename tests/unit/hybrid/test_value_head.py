"""A causal LM that is its own critic: a second head of one row on the same hidden states."""

import pytest
import torch
from tiny import save_tiny
from trainer_cases import tiny_folder
from transformers import AutoModelForCausalLM

from hybrid import HybridEngine
from hybrid.batch import Batch
from hybrid.loss_head import cross_entropy
from hybrid.models import VALUE_HEAD
from hybrid.sharding import local

SGD = {"optimizer": {"name": "sgd", "lr": 0.02, "max_grad_norm": None}}


def batch_of(sequences: list[list[int]]) -> Batch:
    """Every token but the first of each sequence counts; the returns are 1, 2, 3, ..."""
    tokens = torch.tensor([t for ids in sequences for t in ids])
    starts = torch.tensor([0, *[len(ids) for ids in sequences]]).cumsum(0)
    index = torch.tensor([int(s) + k for s, ids in zip(starts, sequences) for k in range(len(ids) - 1)])
    number = torch.tensor([n for n, ids in enumerate(sequences) for _ in ids[1:]])
    positions = torch.tensor([k for ids in sequences for k in range(len(ids))])
    returns = torch.arange(1.0, len(index) + 1)
    return Batch(tokens, positions, starts, index, tokens[index + 1], number, returns=returns)


def squared(scores, chunk):
    error = (scores.squeeze(1) - chunk.returns).square() / 2
    return error, {"error": error.detach()}


def nothing(logits, chunk):
    return logits.sum(1) * 0.0, {}


BATCH = batch_of([[2, 5, 7, 3], [4, 6, 2]])


def open_engine(folder, **changes):
    return HybridEngine.from_pretrained(folder, SGD | changes, value_head=True)


def gradients(engine):
    return {name: local(p.grad).clone() for name, p in engine.model.parameters().items() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_gradient_is_that_of_both_losses(tmp_path, family):
    """Against transformers: the value is hidden @ w, and hidden states get both gradients."""
    save_tiny(tmp_path / "m", family)
    engine = open_engine(str(tmp_path / "m"))
    with torch.no_grad():
        local(engine.model.parameters()[VALUE_HEAD]).copy_(torch.linspace(-1, 1, engine.model.hf_config.hidden_size))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    weight = torch.linspace(-1, 1, hf.config.hidden_size)[None].requires_grad_()
    total, values = 0.0, []
    for start, stop in ((0, 4), (4, 7)):
        ids = BATCH.token_ids[start:stop]
        out = hf(ids[None], output_hidden_states=True)
        values.append((out.hidden_states[-1][0, :-1] @ weight.T).squeeze(1))
        logits = out.logits[0, :-1, : engine.model.vocab_limit]
        total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    values = torch.cat(values)
    torch.testing.assert_close(engine.model.values(BATCH), values.detach(), atol=1e-5, rtol=1e-5)
    of_values = (values - BATCH.returns).square().sum() / 2
    ((total + 0.3 * of_values) / 5).backward()
    means = engine.forward_backward([BATCH], cross_entropy, value_loss=squared, value_weight=0.3)
    assert means["critic/error"] == pytest.approx(of_values.item() / 5, rel=1e-5)
    assert means["loss"] == pytest.approx((total + 0.3 * of_values).item() / 5, rel=1e-5)
    found, wanted = gradients(engine), dict(hf.named_parameters()) | {VALUE_HEAD: weight}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name].grad, atol=2e-5, rtol=1e-4, msg=name)
    assert VALUE_HEAD in found


def test_it_starts_at_0_learns_and_is_in_checkpoints_but_in_no_export(tmp_path):
    folder = tiny_folder(tmp_path / "m")
    engine = open_engine(folder)
    assert engine.model.values(BATCH).tolist() == [0.0] * 5
    for _ in range(3):
        engine.forward_backward([BATCH], nothing, value_loss=squared)
        engine.optim_step()
    values = engine.model.values(BATCH)
    assert values.abs().min() > 0.01
    engine.save(tmp_path / "c" / "step_1")
    other = open_engine(folder)
    other.load(tmp_path / "c" / "step_1")
    assert torch.equal(other.model.values(BATCH), values)
    engine.save_pretrained(tmp_path / "out")
    plain = HybridEngine.from_pretrained(tmp_path / "out", SGD)
    assert torch.equal(plain.score(BATCH), engine.score(BATCH))
    with pytest.raises(ValueError, match="value_head"):
        plain.load(tmp_path / "c" / "step_1")


def test_with_an_adapter_the_head_is_trained_and_stored(tmp_path):
    pytest.importorskip("peft")
    folder = tiny_folder(tmp_path / "m")
    lora = {"lora": {"r": 2, "alpha": 4}, "compute_dtype": "bfloat16"}
    engine = open_engine(folder, **lora)
    base = engine.model.base_fingerprint()
    engine.forward_backward([BATCH], cross_entropy, value_loss=squared)
    engine.optim_step()
    engine.save(tmp_path / "c" / "step_1")
    other = open_engine(folder, **lora)
    other.load(tmp_path / "c" / "step_1")
    assert torch.equal(other.model.values(BATCH), engine.model.values(BATCH))
    assert engine.model.values(BATCH).abs().min() > 0
    assert other.model.base_fingerprint() == base


def failing_value_loss(scores, chunk):
    raise KeyError("returns")


def two_ranks(folder, own: list[list[list[int]]]):
    """A step on this rank's sequences; then a value loss that fails on rank 0 alone."""
    rank = torch.distributed.get_rank()
    engine = open_engine(folder)
    batches = [batch_of(own[rank])] if own[rank] else []
    engine.forward_backward(batches, cross_entropy, value_loss=squared, value_weight=0.3)
    engine.optim_step()
    whole = {n: p.full_tensor().tolist() for n, p in engine.model.parameters().items() if n in (VALUE_HEAD, "model.norm.weight")}
    try:
        engine.forward_backward(batches, cross_entropy, value_loss=failing_value_loss if rank == 0 else squared)
    except (KeyError, RuntimeError) as error:
        return whole, type(error).__name__, engine.score(batch_of([[2, 3]])).item()
    return whole, None, None


def test_ranks_without_sequences_take_part_and_an_error_is_raised_on_all(tmp_path, pool2):
    folder = tiny_folder(tmp_path / "m")
    found = pool2.run(two_ranks, folder, [[[2, 5, 7, 3], [4, 6, 2]], []])
    assert [error for _, error, _ in found] == ["KeyError", "RuntimeError"]
    engine = open_engine(folder)
    engine.forward_backward([BATCH], cross_entropy, value_loss=squared, value_weight=0.3)
    engine.optim_step()
    for name, values in found[0][0].items():
        expected = engine.model.parameters()[name].full_tensor().detach()
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-5, rtol=1e-5)
