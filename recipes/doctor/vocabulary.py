"""Tokenizers, rows of the vocabulary, and special ids."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_v2.loading import LoadedModel
from recipes.doctor.case import Case, Role
from recipes.doctor.finding import Finding, Level, NotExamined
from recipes.doctor.tokens import is_special, shown
from trainers.config import RewardRecipe
from trainers.scoring import check_same_vocabulary

LISTED = 3  # ids of a list


def tokenizers(case: Case) -> Iterator[Finding]:
    """Every model reads ids that the policy's tokenizer made, and prompts in its chat template."""
    (policy, own), *others = case.models()
    if own.tokenizer is None:
        yield Finding("tokenizer", f"{policy}: none", "FAIL", "put its files beside the weights, or set model.tokenizer")
        return
    vocabulary, template = own.tokenizer.get_vocab(), chat_template(own.tokenizer)
    same = [role.name for role, _ in others if role.starts_as(policy)]
    also = f"; the same folder is the start of: {', '.join(same)}" if same else ""
    origin = f"of {policy.tokenizer} (model.tokenizer)" if policy.tokenizer else f"beside {policy} ({policy.key})"
    has = "no chat template" if template is None else f"a chat template of {len(template)} characters"
    yield Finding("tokenizer", f"policy: {len(vocabulary)} tokens and {has}, {origin}{also}")
    for role, loaded in others:
        if role.name not in same:
            yield _compared(role, loaded.tokenizer, vocabulary, template)


def _compared(role: Role, other: Any, vocabulary: Mapping[str, int], template: str | None) -> Finding:
    where = f"{role.name}, beside {role} ({role.key})"
    try:
        check_same_vocabulary(
            vocabulary, None if other is None else other.get_vocab(), str(role), show=LISTED, roles=("policy", role.name)
        )
    except ValueError as error:
        return Finding(
            "tokenizer", f"{where}: {error}", "FAIL", f"it reads the policy's ids: use a {role.name} of its vocabulary"
        )
    found = f"{where}: the policy's {len(vocabulary)} tokens under the same ids"
    theirs = chat_template(other)
    if theirs == template:
        return Finding("tokenizer", f"{found}, and the same chat template" if template else f"{found}; no chat template either")
    if template is None or theirs is None:
        differ = f"{'the policy' if template is None else role.name} has no chat template, the other one has"
    else:
        place = next((i for i, (a, b) in enumerate(zip(template, theirs)) if a != b), min(len(template), len(theirs)))
        cut = slice(max(0, place - 20), place + 20)
        differ = f"their chat templates differ from character {place}: policy {template[cut]!r}, {role.name} {theirs[cut]!r}"
    remedy = f"the {role.name} reads prompts in the policy's template; rows `template` show where they end"
    return Finding("tokenizer", f"{found}; {differ}", "warn", remedy)


def chat_template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return template if template is None or isinstance(template, str) else json.dumps(template, sort_keys=True)


def vocabulary_rows(case: Case) -> Iterator[Finding]:
    """Rows of each embedding beside the ids that the policy's tokenizer makes."""
    tokenizer = case.tokenizer
    needed = max(tokenizer.get_vocab().values()) + 1
    limit = case.config.engine.vocab_limit
    for names, role in case.shared():
        try:
            loaded = case.model(role)
        except NotExamined:
            continue
        rows = loaded.hf_config.get_text_config().vocab_size
        found = f"{names}: {rows} rows, the policy's tokenizer needs {needed}"
        if rows < needed:
            remedy = "use the tokenizer it was trained with, or resize its embedding; ids from there on cannot be read"
            yield Finding("vocabulary", f"{found}: {needed - rows} ids have none, the first {needed - 1}", "FAIL", remedy)
            continue
        if role.name == "policy" and limit is not None:
            yield _limited(found, limit, rows, needed, tokenizer, loaded.eos_token_ids)
            continue
        counted = limit if limit is not None and not role.scalar else needed
        if rows < counted:
            remedy = f"the {role.name} has no logits there: use one with as many rows, or lower engine.vocab_limit"
            yield Finding("vocabulary", f"{found} and engine.vocab_limit={limit}", "FAIL", remedy)
        elif role.scalar:
            yield Finding("vocabulary", f"{found}; its head has one row")
        else:
            cut = f"; the last {rows - counted} are cut: never drawn, in no softmax" if rows > counted else "; none is cut"
            yield Finding("vocabulary", found + cut)


def _limited(found: str, limit: int, rows: int, needed: int, tokenizer: Any, eos: Collection[int]) -> Finding:
    """The policy's rows where engine.vocab_limit is given."""
    found = f"{found}; engine.vocab_limit={limit} counts"
    if limit > rows:
        return Finding("vocabulary", found, "FAIL", f"allowed: up to the model's {rows} rows")
    if limit >= needed:
        return Finding("vocabulary", found)
    lost = range(limit, needed)
    ends = [i for i in eos if i in lost]
    what = f"{len(lost)} real tokens are never drawn: {shown(tokenizer, lost[:LISTED])}"
    level: Level = "FAIL" if ends else "warn"
    remedy = f"{'a response could not end; ' if ends else ''}leave engine.vocab_limit out, or set it to {needed}"
    return Finding("vocabulary", f"{found}; {what}", level, remedy)


def special_ids(case: Case) -> Iterator[Finding]:
    """Which ids end, pad and begin a text, by every account."""
    (_, loaded), *others = case.models()
    tokenizer, accounts = case.tokenizer, _accounts(loaded)
    said = {
        kind: [f"{name} {ids}" for name, account in accounts.items() if (ids := account[kind])] for kind in ("eos", "pad", "bos")
    }
    ends = sorted(loaded.eos_token_ids)
    text = "; ".join(f"{kind}: {', '.join(said[kind]) or 'none'}" for kind in said)
    found = f"policy: {text}; a response ends at {shown(tokenizer, ends) if ends else 'no token'}"
    if not ends:
        level: Level = "FAIL" if reads_responses(case.config) else "warn"
        yield Finding("special ids", found, level, "give the tokenizer an eos_token: responses end by their length alone")
        return
    yield Finding("special ids", found + ("; 0 is falsy: `if eos_token_id` takes it for none (not here)" if 0 in ends else ""))
    limit = case.config.engine.vocab_limit or loaded.vocab_limit or 0
    if beyond := [i for i in ends if i >= limit]:
        none_left: Level = "FAIL" if len(beyond) == len(ends) else "warn"
        yield Finding("special ids", f"ids {beyond} end a response and lie beyond the {limit} rows that count", none_left,
                      "name the tokenizer's own end-of-sequence ids in config.json and generation_config.json")  # fmt: skip
    if ordinary := [i for i in ends if i < limit and not is_special(tokenizer, i)]:
        remedy = "responses are cut wherever it is drawn: correct eos_token_id in config.json and generation_config.json"
        yield Finding("special ids", f"an ordinary token ends a response: {shown(tokenizer, ordinary)}", "warn", remedy)
    yield from _padding(case, accounts, ends)
    for role, other in others:
        if role.name == "teacher" and (strange := sorted(other.eos_token_ids - loaded.eos_token_ids)):
            found = f"the teacher ends responses at {shown(tokenizer, strange)} too, which ends none of the policy's"
            yield Finding("special ids", found, "warn", "add it to rollout.sampling.stop_token_ids, or to eos_token_id")


def _padding(case: Case, accounts: Mapping[str, Mapping[str, list[int]]], ends: Sequence[int]) -> Iterator[Finding]:
    tokenizer = case.tokenizer
    of_config, of_tokenizer = accounts["config.json"]["pad"], accounts["tokenizer"]["pad"]
    if ordinary := [i for i in of_config if not is_special(tokenizer, i)]:
        remedy = (
            "its embedding gets no gradient (padding_idx of transformers): set pad_token_id in config.json to the tokenizer's"
        )
        yield Finding("special ids", f"config.json pads with an ordinary token: {shown(tokenizer, ordinary)}", "warn", remedy)
    elif of_config and of_tokenizer and of_config != of_tokenizer:
        found = f"pad: config.json {shown(tokenizer, of_config)}, tokenizer {shown(tokenizer, of_tokenizer)}"
        yield Finding("special ids", found, "warn", "set pad_token_id in config.json to the tokenizer's")
    if both := sorted({*of_config, *of_tokenizer} & {*ends}):
        scalar = isinstance(case.config, RewardRecipe) or case.role("critic") is not None
        found = f"pad == eos ({shown(tokenizer, both)}): no matter here, masks are recorded spans and not ids"
        if scalar:
            remedy = "the scalar model is saved without a padding id, and takes one row at a time: give the tokenizer a pad token"
            yield Finding("special ids", found, "warn", remedy)
        else:
            yield Finding("special ids", found + "; a tool that masks by padding id would lose the ends of responses")


def _accounts(loaded: LoadedModel) -> dict[str, dict[str, list[int]]]:
    """Per file the ids that it names for eos, pad and bos."""
    file = Path(loaded.path, "generation_config.json")
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text, tokenizer = loaded.hf_config.get_text_config(), loaded.tokenizer

    def ids(value: Any) -> list[int]:
        return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]

    return {
        "config.json": {kind: ids(getattr(text, f"{kind}_token_id", None)) for kind in ("eos", "pad", "bos")},
        "generation_config.json": {kind: ids(generation.get(f"{kind}_token_id")) for kind in ("eos", "pad", "bos")},
        "tokenizer": {kind: ids(getattr(tokenizer, f"{kind}_token_id", None)) for kind in ("eos", "pad", "bos")},
    }


def given_responses(case: Case) -> Iterator[Finding]:
    """What the ends of given responses are, where the recipe reads them."""
    if not reads_responses(case.config):
        return
    tokenizer, prompts = case.tokenizer, case.prompts.prompts
    given = [p for p in prompts if p.response_ids is not None]
    if not given:
        raise NotExamined("no row has a response, see row `lengths`")
    ends = sorted({p.response_ids[-1] for p in given if p.response_ids})
    bare = {p.index: list(tokenizer(p.response, add_special_tokens=False)["input_ids"]) for p in given if p.response}
    cut = [p.index for p in given if p.index in bare and len(p.response_ids or ()) < len(bare[p.index])]
    added = sum(len(p.response_ids or ()) > len(bare.get(p.index, ())) for p in given)
    found = f"{len(given)} given responses end in {shown(tokenizer, ends)}, of which {added} had no end token and were given one"
    if cut:
        remedy = "remove the end token from inside the text, or what follows it"
        yield Finding("responses", f"{found}; {len(cut)} are cut at an end token inside, first row {cut[0]}", "warn", remedy)
    else:
        yield Finding("responses", found)
    closing = turn_end(tokenizer)
    if closing and not {*closing} & {*ends}:
        remedy = "let tokenizer.eos_token be the token with which the chat template ends a turn, as chat models are sampled"
        found = f"the chat template ends a turn in {shown(tokenizer, closing)}, given responses in {shown(tokenizer, ends)}"
        yield Finding("responses", found, "warn", remedy)


def turn_end(tokenizer: Any) -> list[int]:
    """The special tokens that the chat template writes after an assistant's message; none without a template."""
    if chat_template(tokenizer) is None:
        return []
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    ids = list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    content = tokenizer("2", add_special_tokens=False)["input_ids"][-1:]
    last = max((place for place, i in enumerate(ids) if [i] == content), default=len(ids))
    return [i for i in ids[last + 1 :] if is_special(tokenizer, i)]


def reads_responses(config: Any) -> bool:
    """Whether the recipe trains on given responses."""
    rollout = getattr(config, "rollout", None)
    return config.recipe in ("sft", "reward") or (rollout is not None and rollout.given_fraction > 0)
