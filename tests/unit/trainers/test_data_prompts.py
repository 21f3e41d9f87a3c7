"""Rows to prompts: templates applied once, privileged contexts, given responses, what is dropped and what is refused."""

from __future__ import annotations

import json

import pytest
from tiny import EOS, character_tokenizer

from trainers.config import DataConfig
from trainers.data.prompts import load_prompts
from trainers.data.templates import PromptEncoder, encode_text

USER = {"role": "user", "content": "2+2?"}


THINKING = "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}-{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template += THINKING
    return tokenizer


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*rows: dict, **settings: object):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return load_prompts(DataConfig(train=str(path), **settings), tokenizer)

    return load


class WithSpecials:
    """A tokenizer that puts bos before and eos behind every text by default, and has no template."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        ids = [ord(c) for c in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_text_gets_default_special_tokens_but_no_end(tokenizer):
    assert encode_text(WithSpecials(), "ab") == (1, 97, 98)
    assert encode_text(tokenizer, "ab") == tuple(tokenizer("ab")["input_ids"])


def test_an_end_written_in_the_text_stays():
    assert encode_text(WithSpecials(), "ab\x02")[-2:] == (2, 2)


def test_a_text_that_begins_with_bos_gets_no_second_one():
    assert encode_text(WithSpecials(), "\x01ab") == (1, 97, 98)
    assert encode_text(WithSpecials(), "\x01\x01ab") == (1, 1, 1, 97, 98)  # two are what the text wants


def test_messages_go_through_the_template_once_without_a_second_bos(tokenizer):
    class Doubling(type(tokenizer)):
        """Adds bos in __call__, as llama's does; the template writes its own."""

        def __call__(self, *args, add_special_tokens=True, **kwargs):
            encoded = super().__call__(*args, add_special_tokens=add_special_tokens, **kwargs)
            if add_special_tokens:
                encoded["input_ids"] = [0, *encoded["input_ids"]]
            return encoded

    doubling = Doubling(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    doubling.chat_template = "<pad>" + tokenizer.chat_template
    ids = PromptEncoder(doubling, DataConfig(train="x")).prompt([USER])
    assert ids[0] == 0
    assert 0 not in ids[1:]
    assert isinstance(ids, tuple)
    assert all(isinstance(i, int) for i in ids)


def test_chat_auto_always_never(load, tokenizer):
    templated = tuple(tokenizer("U: 1+1\nA: ")["input_ids"])
    assert load({"prompt": "1+1"}).prompts[0].ids == templated
    assert load({"prompt": "1+1"}, chat="always").prompts[0].ids == templated
    assert load({"prompt": "1+1"}, chat="never").prompts[0].ids == tuple(tokenizer("1+1")["input_ids"])


def test_system_message_is_put_before_prompts_that_have_none(load, tokenizer):
    given = load({"prompt": "1"}, {"prompt": [{"role": "system", "content": "x"}, USER]}, system="be brief")
    assert [tokenizer.decode(p.ids) for p in given.prompts] == ["S: be brief\nU: 1\nA: ", "S: x\nU: 2+2?\nA: "]


def test_privileged_text_messages_and_template(load, tokenizer):
    """The student's and the teacher's prompt end alike: only what comes before differs."""
    shots = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Answer: 2"}]
    rows = load(
        {"prompt": "2+2?", "privileged": "Think."},
        {"prompt": "2+2?", "privileged": shots},
        {"prompt": [{"role": "system", "content": "s"}, USER], "privileged": shots},
    ).prompts
    assert [tokenizer.decode(p.privileged_ids) for p in rows] == [
        "U: Think.\n\n2+2?\nA: ",
        "U: 1+1?\nA: Answer: 2\nU: 2+2?\nA: ",
        "S: s\nU: 1+1?\nA: Answer: 2\nU: 2+2?\nA: ",
    ]
    assert tokenizer.decode(rows[0].ids) == "U: 2+2?\nA: "
    (row,) = load({"prompt": "2+2?", "answer": 4}, privileged_template="{prompt} It is {answer}.").prompts
    assert tokenizer.decode(row.privileged_ids) == "U: 2+2? It is 4.\nA: "
    assert load({"prompt": "2+2?"}).prompts[0].privileged_ids is None


@pytest.mark.parametrize(
    ("settings", "row", "expected"),
    [
        ({"privileged_template": "{prompt.__class__}"}, {"prompt": "a"}, "allowed: prompt, privileged, answer"),
        ({"privileged_template": "{0}"}, {"prompt": "a"}, "allowed: prompt, privileged, answer"),
        ({"privileged_template": "{prompt"}, {"prompt": "a"}, "a literal brace is written twice"),
        ({"privileged_template": "{prompt!r} {answer}"}, {"prompt": "a"}, "allowed: the bare name in braces"),
        ({"privileged_template": "{answer:{x}}"}, {"prompt": "a"}, "allowed: the bare name in braces"),
        ({"privileged_template": ""}, {"prompt": "a"}, "adds nothing"),
        ({"privileged_template": "again: {prompt}"}, {"prompt": "a"}, "adds nothing"),
        ({"privileged_template": "{prompt}{answer}"}, {"prompt": "a"}, "row 0 .*which this row does not have"),
        ({"chat": "never"}, {"prompt": [USER]}, "row 0 .*messages need a chat template, but data.chat=never"),
        ({"chat": "never", "system": "s"}, {"prompt": "a"}, "data.system needs prompts"),
        ({}, {"question": "a"}, r"row 0 .*no column 'prompt'; given: question; did you mean data.prompt_column=question\?"),
        ({}, {"prompt": ""}, "row 0 .*column prompt is empty"),
        ({}, {"prompt": []}, "row 0 .*column prompt is empty"),
        ({}, {"prompt": 3}, "row 0 .*column prompt holds int; allowed: text, or a list of messages"),
        ({}, {"prompt": ["a"]}, "row 0 .*messages {role: text, content: text}"),
        ({}, {"prompt": "a", "response": ["b"]}, "row 0 .*column response holds list; allowed: text"),
        ({}, {"prompt": "a", "answer": {"b": 1}}, "row 0 .*column answer holds dict; allowed: text or a number"),
        ({}, {"prompt": "a", "answer": True}, "row 0 .*column answer holds bool; allowed: text or a number"),
        ({}, {"prompt": "a", "answer": float("nan")}, "row 0 .*column answer holds nan; allowed: text or a finite number"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, {"prompt": "a"}, "did you mean enable_thinking"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, {"prompt": "a"}, "add_generation_prompt is no variable"),
        ({"chat": "never", "chat_template_kwargs": {"enable_thinking": False}}, {"prompt": "a"}, "needs a chat template"),
    ],
)
def test_what_does_not_fit_is_one_line_naming_the_row(load, settings, row, expected):
    with pytest.raises(ValueError, match=expected) as error:
        load(row, **settings)
    assert "\n" not in str(error.value)


def test_a_template_has_its_own_variables(load, tokenizer):
    """In the student's prompt and in the teacher's."""
    shots = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = ({"prompt": "a", "privileged": "b"}, {"prompt": "a", "privileged": shots})
    for thinking, end in ((False, "A: <no>"), (True, "A: ")):
        for prompt in load(*rows, chat_template_kwargs={"enable_thinking": thinking}).prompts:
            assert tokenizer.decode(prompt.ids) == f"U: a\n{end}".replace("<no>", "-")
            assert tokenizer.decode(prompt.privileged_ids).endswith(end.replace("<no>", "-"))


def test_a_conversation_that_ends_with_the_assistant_is_continued(load, tokenizer):
    start = [USER, {"role": "assistant", "content": "It is "}]
    (row,) = load({"prompt": start, "privileged": "4."}).prompts
    assert tokenizer.decode(row.ids) == "U: 2+2?\nA: It is "
    assert tokenizer.decode(row.privileged_ids) == "U: 4.\n\n2+2?\nA: It is "


def test_messages_that_a_template_refuses_name_the_row(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(ValueError, match=r"row 0 .*the chat template refuses these messages: roles must alternate"):
        load({"prompt": "a"})


def test_braces_in_a_row_are_text(load, tokenizer):
    row = {"prompt": "f(x)", "privileged": "{0} {answer}"}
    (found,) = load(row, privileged_template="{{{privileged}}} {prompt}", chat="never").prompts
    assert found.privileged_ids == tuple(tokenizer("{{0} {answer}} f(x)")["input_ids"])


def test_an_empty_privileged_cell_gives_nothing(load):
    assert [p.privileged_ids for p in load({"prompt": "a", "privileged": ""}, {"prompt": "a", "privileged": []}).prompts] == [
        None,
        None,
    ]


def test_numbers_become_the_text_that_a_person_would_write(load):
    rows = load(*({"prompt": "a", "answer": n} for n in (7, 0.00001, 1e20, -2.5))).prompts
    assert [p.answer for p in rows] == ["7", "0.00001", "100000000000000000000", "-2.5"]


def test_any_end_of_sequence_id_ends_a_given_response_and_what_follows_is_out(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a", "response": r}) for r in ("b;", "b;c", "b<eos>\n", "b")))
    end = tokenizer.convert_tokens_to_ids(";")
    b = tokenizer.convert_tokens_to_ids("b")
    found = load_prompts(DataConfig(train=str(path)), tokenizer, eos_token_ids={end, EOS})
    assert [p.response_ids for p in found.prompts] == [(b, end), (b, end), (b, EOS), (b, EOS)]


def test_held_out_rows_need_neither_room_for_a_response_nor_a_privileged_prompt(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "ab", "privileged": "c" * 99, "response": "d" * 99}))
    config = DataConfig(train=str(path), eval=str(path), chat="never", max_prompt_tokens=9, max_response_tokens=9)
    (prompt,) = load_prompts(config, tokenizer, held_out=True).prompts
    assert (prompt.privileged_ids, prompt.response_ids) == (None, None)
    with pytest.raises(ValueError, match="nothing is left"):
        load_prompts(config, tokenizer)


def test_an_empty_prompt_is_an_error_with_its_row_number(load):
    with pytest.raises(ValueError, match="row 2"):
        load({"prompt": "a"}, {"prompt": "b"}, {"prompt": ""})


def test_given_responses_end_with_eos_once(load, tokenizer):
    rows = load(
        {"prompt": "a", "response": "bc"}, {"prompt": "a", "response": "bc<eos>"}, {"prompt": "a", "response": ""}
    ).prompts
    body = tuple(tokenizer("bc")["input_ids"])
    assert [p.response_ids for p in rows] == [(*body, EOS), (*body, EOS), (EOS,)]


def test_long_prompts_and_responses_are_dropped_with_a_count_and_never_cut(load):
    found = load(
        {"prompt": "aaa"},
        {"prompt": "a" * 9},
        {"prompt": "b", "privileged": "c" * 9},
        {"prompt": "b", "response": "d" * 5},
        {"prompt": "b", "response": "d" * 4},
        chat="never",
        max_prompt_tokens=8,
        max_response_tokens=5,
    )
    assert [p.index for p in found.prompts] == [0, 4]
    assert (found.num_rows, found.num_long_prompts, found.num_long_responses) == (5, 2, 1)
    assert "dropped: 2 prompts" in str(found)
    with pytest.raises(ValueError, match="nothing is left: 0 of 1 rows"):
        load({"prompt": "aaa"}, chat="never", max_prompt_tokens=2)


def test_a_character_outside_the_vocabulary_is_an_error(tmp_path):
    from trainers.new_model import character_tokenizer as strict

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1"}\n{"prompt": "1-1"}')
    with pytest.raises(ValueError, match="row 1"):
        load_prompts(DataConfig(train=str(path)), strict("0123456789+"))


def test_held_out_rows_come_from_the_eval_file(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n{"prompt": "c"}')
    config = DataConfig(train=str(tmp_path / "a.jsonl"), eval=str(tmp_path / "b.jsonl"), max_eval=1)
    assert [p.text for p in load_prompts(config, tokenizer, held_out=True).prompts] == ["b"]
