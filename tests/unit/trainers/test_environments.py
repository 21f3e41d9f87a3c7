"""What needs no model: the calculator and the verifier, environments by name, and their messages as ids."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from tiny import EOS, character_tokenizer
from tokenizers.processors import TemplateProcessing

from trainers import new_model
from trainers.environments.calculator import MAX_CHARACTERS, Calculator, calculate
from trainers.environments.config import EnvironmentConfig
from trainers.environments.environment import Reply
from trainers.environments.messages import MessageEncoder, turn_markers
from trainers.environments.registry import resolve
from trainers.environments.verifier import Verifier
from trainers.types import Prompt

PROMPT = Prompt(index=7, ids=(4,), text="12*34=", answer="408")


def say(environment, *turns: str) -> list[tuple[str | None, float]]:
    replies = [environment.reply(turn, (), "stop") for turn in turns]
    return [(reply.text, reply.reward) for reply in replies]


# -- the calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" (1 + 2) * -3 ", "-9"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("2/3", "0.666666666667"),
        ("10/4", "2.5"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("10**40", "1" + 40 * "0"),
        ("3.0", "3"),
        ("+5", "5"),
        ("-" * 90 + "1", "1"),
        ("(" * 49 + "1" + ")" * 49, "1"),
    ],
)
def test_the_value_of_an_expression_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "1+", "1 2", "1/0", "0**-1", "2**0.5", "2**65", "9**64", "10**41", "10**40*10", "1/10**40/10", "9**9**9**9"),
        *(
            "()",
            "1(2)",
            "012",
            "..1",
            "__import__('os')",
            "a",
            "1e9",
            "1j",
            "True",
            "1_000",
            "0x10",
            "'1'*9",
            "1<2",
            "[1]",
            "1,2",
        ),
        *("1\n+1", "1+1;2", "٣", "1\0", "1+" * (MAX_CHARACTERS // 2) + "1", "*" * MAX_CHARACTERS, "(" * MAX_CHARACTERS),
    ],
)
def test_anything_else_is_refused_at_once(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_a_call_is_answered_and_an_answer_ends_the_conversation():
    calculator = Calculator(PROMPT)
    assert calculator.stop == ("</calc>",)
    turns = ["so <calc>12*34</calc>", "<calc>1/0</calc>", "1+1</calc>", "<calc>1 <calc>2+2</calc>.", "408", "<calc>12*34", ""]
    assert say(calculator, *turns) == [
        ("408", 0.0), ("error", 0.0), ("error", 0.0), ("4", 0.0), (None, 0.0), (None, 0.0), (None, 0.0)
    ]  # fmt: skip
    other = Calculator(PROMPT, opening="[", closing="]", error="?")
    assert other.stop == ("]",)
    assert say(other, "[2*3]", "[a]", "6") == [("6", 0.0), ("?", 0.0), (None, 0.0)]


@pytest.mark.parametrize("settings", [{"opening": ""}, {"closing": ""}, {"error": 1}, {"closing": 3}])
def test_a_calculator_that_cannot_be_asked_is_refused(settings):
    with pytest.raises(ValueError, match="calculator: "):
        Calculator(PROMPT, **settings)


# -- the verifier


def test_the_verifier_lets_the_policy_try_again_and_gives_the_last_score():
    assert say(Verifier(PROMPT), "408") == [(None, 1.0)]
    assert say(Verifier(PROMPT, wrong="no;"), "40", "408") == [("no;", 0.0), (None, 1.0)]
    assert say(Verifier(PROMPT, wrong="no;"), "40", "41") == [("no;", 0.0), (None, 0.0)]
    assert say(Verifier(PROMPT, retries=0), "40") == [(None, 0.0)]
    replies = say(Verifier(PROMPT, retries=3, retry_cost=0.25, wrong="no;"), "1", "2", "408")
    assert [text for text, _ in replies] == ["no;", "no;", None]
    assert sum(reward for _, reward in replies) == 0.5


def length_in_tenths(completion: str, prompt: Prompt) -> float:
    return len(completion) / 10


def test_whenever_a_conversation_is_cut_its_reward_is_the_last_score():
    verifier = Verifier(PROMPT, reward=f"{__name__}:length_in_tenths", retries=5)
    total = 0.0
    for text in ("12345", "12", "1234"):
        total += verifier.reply(text, (), "length").reward
        assert total == pytest.approx(len(text) / 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"reward": "exact"}, "exact_match"), ({"retries": -1}, "retries=-1"), ({"retries": 1.5}, "1.5"), ({"wrong": 3}, "wrong=3")],
)
def test_a_verifier_with_bad_settings_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Verifier(PROMPT, **settings)


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="row 3 of the data has no answer"):
        Verifier(Prompt(index=3, ids=(4,), text=""))


# -- names, settings, replies


class Silent:
    stop = ()

    def __init__(self, prompt: Prompt, volume: int = 0) -> None:
        pass

    def reply(self, text, ids, finish_reason):
        return Reply(None)


def test_an_environment_is_found_by_name_or_by_module_and_class():
    assert resolve("calculator", {"closing": "]"})(PROMPT).stop == ("]",)
    assert isinstance(resolve(f"{__name__}:Silent", {"volume": 3})(PROMPT), Silent)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("calculater", {}, "did you mean calculator"),
        ("calculator", {"close": "]"}, "'close'; allowed: opening, closing, error"),
        ("no_such_module:Tool", {}, "cannot import 'no_such_module'"),
        (f"{__name__}:Tool", {}, "has no class 'Tool'"),
        (f"{__name__}:Silent", {"prompt": 1}, "multiple values.*allowed: volume"),
    ],
)
def test_what_is_not_there_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": 3},
        {"text": b"x"},
        {"text": None, "reward": float("nan")},
        {"text": "", "reward": "a"},
        {"text": None, "reward": 1e300},
        {"text": "\udcff9"},
    ],
)
def test_a_reply_is_text_or_nothing_and_a_finite_reward(wrong):
    with pytest.raises(ValueError):
        Reply(**wrong)


def test_the_markers_are_the_templates_or_ones_own():
    with pytest.raises(ValidationError, match="role='tool' with prefix or suffix"):
        EnvironmentConfig(name="calculator", role="tool", suffix=";")


def test_environments_are_configured_and_made_without_torch():
    modules = [f"trainers.environments.{m}" for m in ("config", "environment", "registry")]
    code = f"import sys\nfor m in {modules}:\n    __import__(m)\n    assert 'torch' not in sys.modules, m"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# -- messages


def encoder(tokenizer, *, eos=(EOS,), variables=None, **settings) -> MessageEncoder:
    return MessageEncoder(tokenizer, EnvironmentConfig(name="calculator", **settings), eos, variables or {})


def test_a_message_is_encoded_once_between_its_markers():
    tokenizer = character_tokenizer()
    found = encoder(tokenizer, prefix="<eos>(", suffix=")<pad>").encode("408", after=5)
    assert found == (1, *tokenizer("(408)")["input_ids"], 0)
    assert encoder(tokenizer).encode("408", after=5) == tuple(tokenizer("408")["input_ids"])
    assert encoder(tokenizer).encode("", after=5) == ()


def test_a_message_that_spells_a_special_token_ends_no_turn():
    tokenizer = new_model.character_tokenizer("<eos>1")
    ids = encoder(tokenizer).encode("1<eos>", after=5)
    assert EOS not in ids
    assert tokenizer.decode(ids) == "1<eos>"
    assert tokenizer("<eos>", add_special_tokens=False)["input_ids"] == [EOS]  # and nothing has changed for others


def test_no_special_token_is_added_around_a_message():
    tokenizer = character_tokenizer()
    begins = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    tokenizer._tokenizer.post_processor = begins
    assert tokenizer("4")["input_ids"][0] == 0
    assert 0 not in encoder(tokenizer, prefix="(", suffix=")").encode("4", after=5)


def test_an_end_of_sequence_that_the_policy_drew_is_not_doubled():
    tokenizer = character_tokenizer()
    messages = encoder(tokenizer, eos=(EOS, 5), prefix="<eos>\n")
    newline = tokenizer("\n")["input_ids"][0]
    assert messages.encode("", after=EOS) == messages.encode("", after=5) == (newline,)
    assert messages.encode("", after=7) == (EOS, newline)


def test_the_chat_template_gives_the_markers():
    tokenizer = character_tokenizer()
    assert turn_markers(tokenizer, "tool", {}) == ("\nT: ", "\nA: ")
    conversation = [("user", "2*3"), ("assistant", "[2*3]"), ("tool", "6")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in conversation], tokenize=False, add_generation_prompt=True
    )
    ids = encoder(tokenizer, role="tool").encode("6", after=5)
    assert whole == "U: 2*3\nA: [2*3]" + tokenizer.decode(ids)


def test_the_templates_own_variables_are_passed_on():
    tokenizer = character_tokenizer()
    tokenizer.chat_template += "{% if think %}(think){% endif %}"
    assert turn_markers(tokenizer, "user", {"think": True}) == ("\nU: ", "\nA: (think)")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only users') }}", "refuses role='tool': only users"),
        ("{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}", "does not write role='tool'"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "does not write role='tool'"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "does not write role='tool'"),
    ],
)
def test_a_role_that_the_template_cannot_place_is_refused(template, message):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        encoder(tokenizer, role="tool")


def test_text_that_the_tokenizer_cannot_encode_is_named():
    tokenizer = new_model.character_tokenizer("0123")
    with pytest.raises(ValueError, match="cannot encode the environment's '4': "):
        encoder(tokenizer).encode("4", after=5)
    with pytest.raises(ValueError, match="'!'"):
        encoder(tokenizer, suffix="!")
