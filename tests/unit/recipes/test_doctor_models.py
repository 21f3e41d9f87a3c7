"""Models that do not go together: folders of a healthy recipe, edited."""

import json

import pytest
from doctor_cases import complaints, copied, edit_json, healthy, of, only_complaint, rows, write_rows
from safetensors.torch import load_file, save_file
from tiny import CHAT_TEMPLATE, character_tokenizer, save_tiny
from trainer_cases import CHARACTERS, tiny_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return healthy(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    """A copy that a test may edit."""
    return copied(whole, tmp_path / "recipe")


# -- tokenizers


def test_a_teacher_with_two_tokens_swapped(folder):
    tiny_folder(folder / "swapped", characters=CHARACTERS.replace("01", "10"))
    said = only_complaint(rows("opsd", folder, **{"teacher.path": str(folder / "swapped")}))
    assert said.startswith("FAIL tokenizer: teacher, beside ")
    assert "differ in 2 ids (2: policy '0', teacher '1'; 3: policy '1', teacher '0')" in said


@pytest.mark.parametrize(
    ("recipe", "changes", "name"),
    [
        ("grpo", {"reference": {"path": "swapped"}}, "reference"),
        ("ppo", {"critic": {"path": "swapped"}}, "critic"),
        ("ppo", {"rewards": [{"model": "judge_swapped"}]}, "reward"),
    ],
)
def test_every_reader_of_the_policys_ids_is_compared(recipe, changes, name, folder, monkeypatch):
    from doctor_cases import scalar_folder

    monkeypatch.chdir(folder)
    tiny_folder(folder / "swapped", characters=CHARACTERS.replace("01", "10"))
    scalar_folder(folder / "judge_swapped", beside=folder / "swapped")
    said = [line for line in complaints(rows(recipe, folder, **changes)) if line.startswith("FAIL")]
    assert len(said) == 1
    assert f"FAIL tokenizer: {name}, beside " in said[0]
    assert f"policy '0', {name} '1'" in said[0]


def test_a_tokenizer_of_another_folder_is_the_policys_own(folder):
    tiny_folder(folder / "swapped", characters=CHARACTERS.replace("01", "10"))
    findings = rows("opsd", folder, **{"model.tokenizer": str(folder / "swapped")})
    assert "(model.tokenizer)" in of(findings, "tokenizer")[0].found
    assert "policy '1', teacher '0'" in only_complaint(findings)


def test_chat_templates_are_compared(folder):
    for name, template in (("student", CHAT_TEMPLATE), ("teacher", CHAT_TEMPLATE.replace("A: ", "Bot: "))):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = template
        save_tiny(folder / name, "qwen3", tokenizer=tokenizer, num_hidden_layers=1)
    said = [line for line in complaints(rows("opsd", folder)) if "tokenizer" in line]
    assert len(said) == 1
    assert f"their chat templates differ from character {CHAT_TEMPLATE.index('A: ')}" in said[0]


# -- rows of the vocabulary


def test_rows_beyond_the_tokenizer_are_cut(folder):
    tiny_folder(folder / "student", vocab_size=24)
    policy, teacher = of(rows("opsd", folder), "vocabulary")
    assert policy.found == "policy: 24 rows, the policy's tokenizer needs 16; the last 8 are cut: never drawn, in no softmax"
    assert "none is cut" in teacher.found
    assert policy.level == "ok"


def test_a_tokenizer_larger_than_the_embedding(folder):
    tiny_folder(folder / "larger", characters=CHARACTERS + "xyz")
    said = complaints(rows("sft", folder, **{"model.tokenizer": str(folder / "larger")}))
    assert any(
        line.startswith("FAIL vocabulary: policy: 16 rows, the policy's tokenizer needs 19: 3 ids have none") for line in said
    )


@pytest.mark.parametrize(
    ("limit", "level", "text"),
    [
        (14, "warn", "2 real tokens are never drawn: 14 '?', 15 '\\n'"),
        (1, "FAIL", "a response could not end"),
        (17, "FAIL", "16 rows"),
    ],
)
def test_a_limit_of_the_vocabulary(limit, level, text, folder):
    found = of(rows("sft", folder, **{"engine.vocab_limit": limit}), "vocabulary")[0]
    assert found.level == level
    assert text in found.found + found.remedy


def test_weights_of_another_shape_than_the_config(folder):
    edit_json(folder / "student" / "config.json", lambda c: c.update(vocab_size=20))
    said = complaints(rows("sft", folder))
    assert "FAIL models: policy" in said[0]
    assert "model.embed_tokens.weight is [16, 32] in the files, [20, 32] by config.json" in said[0]
    edit_json(folder / "student" / "config.json", lambda c: c.update(vocab_size=16, num_hidden_layers=3, layer_types=None))
    assert "model.layers.2" in complaints(rows("sft", folder))[0]


# -- special ids


def test_eos_ids_of_all_accounts_are_one_set(folder):
    edit_json(folder / "student" / "generation_config.json", lambda c: c.update(eos_token_id=[1, 5]))
    findings = of(rows("opsd", folder), "special ids")
    assert "generation_config.json [1, 5], tokenizer [1]" in findings[0].found
    assert "a response ends at 1 '<eos>', 5 '3'" in findings[0].found
    (ordinary,) = [f for f in findings if f.level == "warn"]
    assert ordinary.found == "an ordinary token ends a response: 5 '3'"


def test_no_end_of_sequence_at_all(folder):
    for name, keys in (
        ("config", ["eos_token_id"]),
        ("generation_config", ["eos_token_id"]),
        ("tokenizer_config", ["eos_token"]),
    ):
        edit_json(folder / "student" / f"{name}.json", lambda c, keys=keys: [c.pop(key, None) for key in keys])
    found = of(rows("grpo", folder), "special ids")[0]
    assert (found.level, found.found.endswith("a response ends at no token")) == ("warn", True)
    assert of(rows("sft", folder), "special ids")[0].level == "FAIL"


def test_an_end_beyond_the_rows_that_count(folder):
    for name in ("config", "generation_config", "tokenizer_config"):
        edit_json(folder / "student" / f"{name}.json", lambda c: [c.pop("eos_token_id", None), c.pop("eos_token", None)])
    edit_json(folder / "student" / "config.json", lambda c: c.update(eos_token_id=40))
    (_, beyond, *_) = of(rows("grpo", folder), "special ids")
    assert beyond.level == "FAIL"
    assert "ids [40] end a response and lie beyond the 16 rows" in beyond.found


def test_padding_that_is_an_end_and_padding_that_is_an_ordinary_token(folder):
    edit_json(folder / "student" / "config.json", lambda c: c.update(pad_token_id=1))
    edit_json(folder / "student" / "tokenizer_config.json", lambda c: c.update(pad_token="<eos>"))
    assert any("pad == eos (1 '<eos>')" in f.found and f.level == "ok" for f in of(rows("opsd", folder), "special ids"))
    assert "pad == eos" in only_complaint(of(rows("ppo", folder), "special ids"))
    edit_json(folder / "student" / "config.json", lambda c: c.update(pad_token_id=2))
    assert "config.json pads with an ordinary token: 2 '0'" in only_complaint(of(rows("opsd", folder), "special ids"))
    edit_json(folder / "student" / "config.json", lambda c: c.update(pad_token_id=0))
    assert "pad: config.json 0 '<pad>', tokenizer 1 '<eos>'" in only_complaint(of(rows("opsd", folder), "special ids"))


def test_an_end_of_id_0_and_a_teachers_other_end(folder):
    edit_json(folder / "student" / "generation_config.json", lambda c: c.update(eos_token_id=[0, 1]))
    assert "0 is falsy" in of(rows("opsd", folder), "special ids")[0].found
    edit_json(folder / "student" / "generation_config.json", lambda c: c.update(eos_token_id=1))
    edit_json(folder / "teacher" / "generation_config.json", lambda c: c.update(eos_token_id=[1, 4]))
    assert "the teacher ends responses at 4 '2' too" in only_complaint(rows("opsd", folder))


def test_what_given_responses_end_in(folder):
    found = of(rows("sft", folder), "responses")[0]
    assert found.found == "10 given responses end in 1 '<eos>', of which 10 had no end token and were given one"
    write_rows(folder / "sums.jsonl", [{"prompt": "1+1=", "response": "2<eos>3"}, {"prompt": "1+2=", "response": "3<eos>"}])
    cut = of(rows("sft", folder), "responses")[0]
    assert cut.level == "warn"
    assert "2 given responses end in 1 '<eos>', of which 0 had no end token and were given one; 1 are cut" in cut.found


def test_a_chat_template_that_ends_turns_otherwise_than_responses(folder):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("\n{% endfor %}", "<end>\n{% endfor %}")
    save_tiny(folder / "student", "qwen3", tokenizer=tokenizer, num_hidden_layers=1)
    _, closing = of(rows("sft", folder), "responses")
    assert closing.level == "warn"
    assert "ends a turn in 79 '<end>', given responses in 1 '<eos>'" in closing.found


# -- who is the same as whom


def no_context(folder):
    rows_ = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    for row in rows_:
        del row["privileged"]
    return write_rows(folder / "bare.jsonl", rows_)


def test_a_teacher_that_is_the_student_under_another_name(folder):
    copied(folder / "student", folder / "same")
    told = rows("opsd", folder, **{"teacher.path": str(folder / "same")})
    assert "the same weights as the student; 10 of 10 rows" in of(told, "weights")[0].found
    assert not complaints(told)
    said = only_complaint(rows("opsd", folder, **{"teacher.path": str(folder / "same"), "data.train": no_context(folder)}))
    assert said.startswith("FAIL weights: teacher: the same weights as the student; 0 of 10 rows have a privileged prompt")
    weights = load_file(folder / "same" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "same" / "model.safetensors", metadata={"format": "pt"})
    assert not complaints(rows("opsd", folder, **{"teacher.path": str(folder / "same"), "data.train": no_context(folder)}))


def test_a_self_teacher_without_context(folder):
    changes = {"teacher": {"kind": "self"}, "data.train": no_context(folder)}
    said = complaints(rows("opsd", folder, **changes))
    assert any(line.startswith("FAIL weights") and "nothing to learn" in line for line in said)
    assert any(line.startswith("FAIL lengths: 10 rows give the self-teacher nothing") for line in said)
    pulled = complaints(rows("grpo", folder, **changes))
    assert any(line.startswith("warn weights") and "as a reference does" in line for line in pulled)
    live = complaints(rows("grpo", folder, **changes | {"teacher": {"kind": "self", "weights": "live"}}))
    assert any(line.startswith("FAIL weights") for line in live)


def test_a_reward_model_that_is_the_policy(folder):
    said = complaints(rows("grpo", folder, rewards=[{"model": str(folder / "student")}]))
    assert any(line.startswith("FAIL models: reward") and "score.weight is missing" in line for line in said)
    assert any(line.startswith("FAIL weights: reward: the same weights as the policy") for line in said)


# -- dropout


def test_dropout_is_kept_where_it_may_be(folder):
    edit_json(folder / "student" / "config.json", lambda c: c.update(attention_dropout=0.25))
    (off,) = of(rows("opsd", folder), "dropout")
    assert off.found == "policy: attention_dropout=0.25; engine.dropout=false: it is off in every forward"
    (kept,) = of(rows("sft", folder, **{"engine.dropout": True}), "dropout")
    assert (kept.level, "kept in training" in kept.found) == ("ok", True)
    for recipe in ("opsd", "ppo", "grpo"):
        stopped = of(rows(recipe, folder, **{"engine.dropout": True}), "dropout")[0]
        assert stopped.level == "FAIL"
        assert "the certificate stops the run" in stopped.found
    noted = of(rows("opsd", folder, **{"engine.dropout": True, "certificate.action": "warn"}), "dropout")[0]
    assert noted.level == "warn"
