"""Ctrl-C passes the places that answer for any other error: each is met here with an error, which it answers, and with an
interrupt, which it lets through. That no other place can stop one is what test_broad_excepts reads in the sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import pytest
from hybrid_cases import full_gradients, make_engine, pack, ragged_sequences
from tiny import character_tokenizer, save_tiny

from hybrid import HybridEngine
from hybrid.folders import FolderError, write_folder
from hybrid.loss_head import cross_entropy
from inference_v2 import loading
from inference_v2.kernels.cpu import BuildError, build
from recipes.doctor.examine import _rows
from trainers.backends.requests import BackendError
from trainers.backends.vllm_worker import Service, serve
from trainers.backends.weights import for_each_layer
from trainers.environments.config import EnvironmentConfig
from trainers.environments.messages import MessageEncoder
from trainers.environments.registry import resolve
from trainers.rewards.functions import load
from trainers.rewards.rewards import _finite

Site = Callable[[BaseException], object]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HybridEngine:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama", num_hidden_layers=1)
    return make_engine(str(path))


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def met(site: Site, error: BaseException, answer: type[Exception], words: str) -> None:
    with pytest.raises(answer, match=words):
        site(error)
    with pytest.raises(KeyboardInterrupt):
        site(KeyboardInterrupt())


@pytest.mark.parametrize("what", ["run", "CDLL"])
def test_the_build_of_the_kernels(what, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda compiler, flags, sources, path: path.touch())
    owner = build.subprocess if what == "run" else build.ctypes

    def probe(error: BaseException) -> None:
        monkeypatch.setattr(owner, what, raising(error))
        build.library.__wrapped__("native")

    met(probe, OSError("no more processes"), BuildError, "no more processes")


@pytest.mark.parametrize(("use", "name"), [(lambda name: resolve(name, {}), "an_environment"), (load, "a_reward")])
def test_the_import_of_a_users_module(use, name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def imported(error: BaseException) -> None:
        (tmp_path / f"{name}_{type(error).__name__}.py").write_text(f"raise {type(error).__name__}('told to')")
        use(f"{name}_{type(error).__name__}:made")

    met(imported, ArithmeticError(), ValueError, "cannot import .*: ArithmeticError: told to")


def test_a_tokenizer(tmp_path, monkeypatch):
    character_tokenizer().save_pretrained(tmp_path)

    def read(error: BaseException) -> None:
        monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", raising(error))
        loading.load_tokenizer(tmp_path)

    met(read, Exception("a bad merge"), ValueError, "cannot be read .*a bad merge")


def test_a_message_of_an_environment(monkeypatch):
    encoder = MessageEncoder(character_tokenizer(), EnvironmentConfig(name="calculator"), (), {})

    def encoded(error: BaseException) -> None:
        monkeypatch.setattr(encoder, "_tokenizer", raising(error))
        encoder.encode("12", after=5)

    met(encoded, Exception("an unknown character"), ValueError, "an unknown character")


def test_the_number_that_a_users_reward_gives():
    met(
        lambda error: _finite(type("Mine", (), {"__float__": raising(error)})()), ArithmeticError(), ValueError, "a Mine; allowed"
    )


def test_a_folder_that_is_written(engine, tmp_path):
    met(
        lambda error: write_folder(tmp_path / "step_1", raising(error)), ArithmeticError("no"), FolderError, "ArithmeticError: no"
    )
    write_folder(tmp_path / "step_1", lambda folder: (folder / "whole").touch())
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"], "what the interrupt left is swept by the next"


def test_a_copy_of_the_weights(engine):
    met(lambda error: for_each_layer(engine.model, raising(error)), ArithmeticError("no"), BackendError, "ArithmeticError: no")


def test_a_loss_after_one_that_left_a_gradient(engine):
    batch = pack(ragged_sequences(2))
    engine.forward_backward([batch], cross_entropy)
    once = full_gradients(engine)

    def step(error: BaseException) -> None:
        losses = iter([cross_entropy, raising(error)])
        engine.forward_backward([batch, batch], lambda logits, chunk: next(losses)(logits, chunk))

    met(step, ArithmeticError("no loss"), ArithmeticError, "no loss")
    engine.forward_backward([batch], cross_entropy)
    gradients = full_gradients(engine)
    assert gradients.keys() == once.keys()
    assert all(gradient.equal(once[name]) for name, gradient in gradients.items()), "the interrupted step left a part of its own"


def test_a_check_of_the_doctor():
    def examined(error: BaseException) -> list[str]:
        return [finding.found for finding in _rows("a check", raising(error), None)]

    assert examined(ArithmeticError("no")) == ["the check itself failed: ArithmeticError: no"]
    with pytest.raises(KeyboardInterrupt):
        examined(KeyboardInterrupt())


def test_the_worker_of_vllm(monkeypatch, capsys):
    def answered(error: BaseException) -> list[dict]:
        monkeypatch.setattr(Service, "start", raising(error))
        answers: list[dict] = []
        serve([json.dumps({"number": 1, "verb": "start"}).encode()], answers.append)
        return answers

    assert answered(ArithmeticError("no")) == [{"number": 1, "error": "ArithmeticError: no"}]
    with pytest.raises(KeyboardInterrupt):
        answered(KeyboardInterrupt())
