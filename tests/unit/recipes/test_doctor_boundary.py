"""Where prompts end: chat templates and privileged prompts of real tokenizers."""

import json

import pytest
from doctor_cases import complaints, copied, healthy, rows
from tiny import CHAT_TEMPLATE, character_tokenizer, save_tiny
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

THINKING = CHAT_TEMPLATE.replace("A: {% endif %}", "A: <think>{% endif %}")
SWITCHED = CHAT_TEMPLATE.replace("A: {% endif %}", "A: {% if think %}<think>{% endif %}{% endif %}")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    healthy(folder)
    return folder


@pytest.fixture
def chat(tmp_path):
    """Builds student and teacher with these chat templates, and rows of messages."""

    def build(student: str, teacher: str, **row) -> None:
        for name, template in (("student", student), ("teacher", teacher)):
            tokenizer = character_tokenizer()
            tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
            tokenizer.chat_template = template
            save_tiny(tmp_path / name, "qwen3", tokenizer=tokenizer, num_hidden_layers=1)
        row = {"prompt": [{"role": "user", "content": "1+1"}], "privileged": "it is 2", "response": "2"} | row
        (tmp_path / "sums.jsonl").write_text(json.dumps(row))

    return build


def of_template(folder, **changes):
    return [f for f in rows("opsd", folder, **changes) if f.check == "template"]


def test_both_ends_and_the_first_response_token_are_printed_decoded(plain):
    student, teacher = of_template(plain)
    assert "row 0, as plain text: the student's prompt ends in '0' '+' '0' '='" in student.found
    assert "the given response begins with '0'" in student.found
    assert "ends in '\\n' '\\n' '0' '+' '0' '='" in teacher.found
    assert student.level == teacher.level == "ok"


def test_a_privileged_prompt_that_ends_otherwise(plain):
    _, teacher = of_template(plain, **{"data.privileged_template": "{prompt}{answer}"})
    assert teacher.level == "warn"
    assert "ends in '0' '+' '0' '=' '0'; expected: '='" in teacher.found
    assert "data.privileged_template" in teacher.remedy


def test_a_chat_template_ends_both_prompts_alike(chat, tmp_path):
    chat(THINKING, THINKING)
    student, teacher = of_template(tmp_path)
    assert "through the chat template: the student's prompt ends in '1' '\\n' 'A' ':' ' ' '<think>'" in student.found
    assert student.level == teacher.level == "ok"
    assert "its last 4 as the student's" in teacher.found


def test_a_teacher_whose_own_template_ends_in_a_thought(chat, tmp_path):
    chat(CHAT_TEMPLATE, THINKING)
    *_, own = of_template(tmp_path)
    assert own.level == "warn"
    assert "the teacher's own template would end the student's prompt in" in own.found
    assert own.found.index("'<think>'") < own.found.index("the policy's, which it reads")
    chat(SWITCHED, THINKING)
    agreed = of_template(tmp_path, **{"data.chat_template_kwargs": {"think": True}})
    assert not complaints(agreed)
    assert "as the policy's does" in agreed[-1].found


def test_a_privileged_prompt_without_the_thought_that_the_students_ends_in(chat, tmp_path):
    """A template that thinks only where nobody has said anything before."""
    shy = CHAT_TEMPLATE.replace("A: {% endif %}", "A: {% if messages | length == 1 %}<think>{% endif %}{% endif %}")
    chat(shy, shy, privileged=[{"role": "user", "content": "2"}, {"role": "assistant", "content": "yes"}])
    _, teacher = of_template(tmp_path)
    assert teacher.level == "FAIL"
    assert "expected: 'A' ':' ' ' '<think>'" in teacher.found


def test_a_special_token_at_the_end_of_the_prompt_and_again_at_the_start_of_the_response(chat, tmp_path):
    chat(THINKING, THINKING, response="<think>2")
    student, *_ = of_template(tmp_path)
    assert student.level == "warn"
    assert "begins with '<think>'" in student.found


def write_bos(tokenizer, template):
    """Let the tokenizer begin texts with <bos>."""
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    first = (("<bos>", tokenizer.bos_token_id),)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=first)
    tokenizer.chat_template = template


def test_a_chat_template_without_the_bos_that_texts_begin_with_and_one_with_two(plain, tmp_path):
    folder = copied(plain, tmp_path / "bos")
    doubled = "{{ bos_token }}{{ bos_token }}" + CHAT_TEMPLATE
    lacking = "10 prompts do not begin with the bos token '<bos>', first row 0"
    for template, text in ((CHAT_TEMPLATE, lacking), (doubled, "10 prompts begin with two bos tokens, first row 0")):
        for name in ("student", "teacher"):
            tokenizer = character_tokenizer()
            write_bos(tokenizer, template)
            save_tiny(folder / name, "qwen3", tokenizer=tokenizer, num_hidden_layers=1)
        (said,) = [f for f in of_template(folder) if f.level == "warn"]
        assert said.found.startswith(text)
    write_bos(tokenizer, "{{ bos_token }}" + CHAT_TEMPLATE)
    for name in ("student", "teacher"):
        tokenizer.save_pretrained(folder / name)
    assert not complaints(of_template(folder))


def test_prompt_and_response_that_one_text_would_cut_otherwise(plain, tmp_path):
    folder = copied(plain, tmp_path / "merging")
    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", *"0123456789+=?", "=4"))}
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [("=", "4")])), pad_token="<pad>", eos_token="<eos>"
    )
    for name in ("student", "teacher"):
        merging.save_pretrained(folder / name)
    (folder / "sums.jsonl").write_text(json.dumps({"prompt": "2+2=", "response": "4"}))
    student, _ = of_template(folder)
    assert student.level == "warn"
    assert "prompt and response as one text: '+' '2' '=4'" in student.found
    (folder / "sums.jsonl").write_text(json.dumps({"prompt": "2+2=", "response": "5"}))
    assert of_template(folder)[0].level == "ok"
