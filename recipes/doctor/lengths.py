"""Rows that were dropped, and room for prompts and responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from recipes.doctor.case import Case
from recipes.doctor.finding import Finding
from trainers.config import OPSDConfig, PolicyConfig, RewardRecipe, SelfTeacher, SFTConfig
from trainers.data.prompts import PromptSet
from trainers.reward_model import check_pairs
from trainers.rollout import require_room


def data(case: Case) -> Iterator[Finding]:
    """Every row through the tokenizer: what is dropped, and what is in both sets."""
    for held_out in (False, True) if case.config.data.eval is not None else (False,):
        name = "data.eval" if held_out else "data.train"
        try:
            found = case.load_data(held_out=held_out)
        except (ValueError, OSError) as error:
            yield Finding("data", f"{name}: {' '.join(str(error).split())}", "FAIL")
            continue
        yield _rows(case, name, found)
    if case.config.data.eval is not None:
        held_out_prompts = case.held_out
        assert held_out_prompts is not None
        seen = {p.ids for p in case.prompts.prompts}
        shared = [p.index for p in held_out_prompts.prompts if p.ids in seen]
        if shared:
            found_twice = (
                f"{len(shared)} of {len(held_out_prompts)} held-out prompts are training prompts too, first row {shared[0]}"
            )
            yield Finding("data", found_twice, "warn", "evaluate on prompts that are not trained on")


def _rows(case: Case, name: str, found: PromptSet) -> Finding:
    source = getattr(case.config.data, name.partition(".")[2])
    first = f"the first {found.num_rows} rows: " if found.num_rows == case.max_rows else ""
    text = f"{name}={source}: {first}{found}"
    dropped = found.num_long_prompts + found.num_long_responses
    if not dropped:
        return Finding("data", text)
    remedy = "raise data.max_prompt_tokens or data.max_response_tokens (and engine.rollout.engine.max_model_len) if they matter"
    return Finding("data", text, "warn", remedy)


def lengths(case: Case) -> Iterator[Finding]:
    """The longest prompt with its longest response beside what each model takes, by the checks that a run makes."""
    config, prompts = case.config, case.prompts.prompts
    asked = config.engine.rollout.engine.max_model_len
    room = {role.name: asked or loaded.hf_config.get_text_config().max_position_embeddings for role, loaded in case.models()}
    checks: list[tuple[str, Callable[[], None]]] = []
    if isinstance(config, SFTConfig):
        checks.append(("policy", lambda: require_room(prompts, room["policy"], given=True)))
    if isinstance(config, RewardRecipe):
        checks.append(("policy", lambda: check_pairs(prompts, room["policy"])))
    if isinstance(config, OPSDConfig | PolicyConfig):
        new, given = config.rollout.sampling.max_new_tokens, config.rollout.given_fraction > 0
        checks.append(("policy", lambda: require_room(prompts, room["policy"], max_new_tokens=new, given=given)))
        for name in (n for n in room if n != "policy"):
            as_read = partial(require_room, privileged=name == "teacher", reader=name, max_new_tokens=new, given=given)
            checks.append((name, partial(as_read, prompts, room[name])))
    if (held_out := case.held_out) is not None and isinstance(config, RewardRecipe):
        checks.append(("evaluation", lambda: check_pairs(held_out.prompts, room["policy"])))
    elif held_out is not None:
        most = config.eval.max_new_tokens
        checks.append(("evaluation", lambda: require_room(held_out.prompts, room["policy"], max_new_tokens=most)))
    yield from _missing(case)
    for name, check in checks:
        try:
            check()
        except ValueError as error:
            yield Finding("lengths", f"{name}: {error}", "FAIL")
        else:
            yield Finding("lengths", f"{name}: {_longest(case, name)}; {room.get(name, room['policy'])} fit")
    yield from _beyond(case, asked)


def _longest(case: Case, name: str) -> str:
    """The longest prompt and response of a role."""
    config = case.config
    if name == "evaluation":
        assert case.held_out is not None
        longest = max(len(p.ids) for p in case.held_out.prompts)
        return f"longest held-out prompt {longest} tokens, response up to {config.eval.max_new_tokens}"
    prompts = case.prompts.prompts
    longest = max(len((p.privileged_ids if name == "teacher" else None) or p.ids) for p in prompts)
    rollout = getattr(config, "rollout", None)
    given = max(max(len(p.response_ids or ()), len(p.rejected_ids or ())) for p in prompts)
    response = given if rollout is None else rollout.sampling.max_new_tokens
    return f"longest {'privileged ' if name == 'teacher' else ''}prompt {longest} tokens, response up to {response}"


def _missing(case: Case) -> Iterator[Finding]:
    """Columns that this recipe reads and rows lack."""
    config, prompts = case.config, case.prompts.prompts
    rollout = getattr(config, "rollout", None)
    if isinstance(config, SFTConfig) or (rollout is not None and rollout.given_fraction > 0):
        lacking = [p.index for p in prompts if p.response_ids is None]
        if lacking:
            remedy = f"fill data.response_column ({config.data.response_column!r})"
            yield Finding("lengths", f"{len(lacking)} rows have no response, first row {lacking[0]}", "FAIL", remedy)
    teacher = getattr(config, "teacher", None)
    if isinstance(teacher, SelfTeacher) and (isinstance(config, OPSDConfig) or teacher.weights == "live"):
        lacking = [p.index for p in prompts if p.privileged_ids is None]
        if lacking:
            remedy = f"fill data.privileged_column ({config.data.privileged_column!r}) or write data.privileged_template"
            found = f"{len(lacking)} rows give the self-teacher nothing that the student does not see, first row {lacking[0]}"
            yield Finding("lengths", found, "FAIL", remedy)


def _beyond(case: Case, asked: int | None) -> Iterator[Finding]:
    for role, loaded in case.models():
        limit = loaded.hf_config.get_text_config().max_position_embeddings
        if asked is not None and asked > limit:
            found = f"{role.name}: engine.rollout.engine.max_model_len={asked}, its config says {limit} positions"
            yield Finding("lengths", found, "warn", "positions beyond were never trained: scale its rope_parameters, or lower it")
