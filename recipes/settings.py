"""A recipe file and its `key=value` overrides -> a validated RunConfig. No torch.

Bad input raises SettingsError, which carries every problem found, one line each.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from trainers.config import CONFIGS, FrozenTeacher, PolicyConfig, RewardModelRef, RunConfig

RECIPES = Path(__file__).parent  # recipes shipped with the package resolve by name from here


class SettingsError(ValueError):
    """Every problem of a recipe, one line each."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


MOST_NESTED = 50  # no recipe comes near; PyYAML's constructor recurses


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads 1e-5 (YAML 1.2) as a number, not as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, name: str) -> Any:
    """YAML without tags and aliases (neither is needed, and both are ways to attack a reader), zero bytes and deep nesting."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            where = f"{name}:{event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise SettingsError(f"{where}: YAML aliases are not read; write the value out")
            if getattr(event, "tag", None) is not None:
                raise SettingsError(f"{where}: YAML tag {event.tag!r} is not read; remove it")
            if "\0" in getattr(event, "value", ""):
                raise SettingsError(f"{where}: text with a zero byte is not read; remove it")
            if depth > MOST_NESTED:
                raise SettingsError(f"{where}: nested more than {MOST_NESTED} deep; no key of a recipe is")
        return _construct(lambda: _Loader(text).get_single_data(), name)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def _construct(value: Callable[[], Any], name: str) -> Any:
    """What YAML resolved to a number or a date need not be one: 2020-13-45, an integer of 5000 digits."""
    try:
        return value()
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{name[:80]}: not a value that YAML has: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises SettingsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise SettingsError(f"{path}: holds {type(raw).__name__} at the top; a recipe is a mapping of keys to values")
    return raw


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """A recipe by path: from the working directory, then beside the recipe that names it, then among those shipped with the
    package (`recipes/opsd/demo.yaml`, `opsd/demo.yaml`). Raises FileNotFoundError naming the nearest."""
    places = [Path(name), *([beside / name] if beside else []), RECIPES / name, RECIPES.parent / name]
    for place in places:
        if place.is_file():
            return place
    shipped = sorted(f"recipes/{path.relative_to(RECIPES)}" for path in RECIPES.glob("*/*.yaml"))
    near = difflib.get_close_matches(name, shipped, 1, 0.4)
    raise FileNotFoundError(
        f"no recipe {name}; {'the nearest shipped one is' if near else 'shipped ones:'} {', '.join(near or shipped)}"
    )


def parse_override(text: str) -> tuple[list[str], Any]:
    """`engine.optimizer.lr=1e-4` -> (path, value). The value is one YAML scalar or a [list] / {mapping}."""
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", path):
        raise SettingsError(f"{text!r}: an override is written section.key=value")
    if value[:1] in ("[", "{", '"', "'", "!", "&", "*"):
        return path.split("."), parse_yaml(value, text)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, value, (True, False))
    node = yaml.ScalarNode(tag, value)
    return path.split("."), _construct(lambda: loader.construct_object(node), text)


def set_key(raw: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of `raw` with `value` at `path`; sections on the way are made. Raises SettingsError where one is a plain value."""
    key, *rest = path
    if not rest:
        return {**raw, key: value}
    section = raw.get(key)
    if section is not None and not isinstance(section, dict):
        raise SettingsError(f"{'.'.join(path)}={value}: {key} is {section!r}, not a section")
    return {**raw, key: set_key(section or {}, rest, value)}


def load_settings(name: str, overrides: Sequence[str] = (), *, fixed: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """The validated config of recipe `name`, its relative paths resolved and its defaults filled in.

    `fixed` holds values by dotted key that are set after the overrides. `output_dir` defaults to runs/NAME, NAME being the
    file's name without .yaml. Raises SettingsError, FileNotFoundError.
    """
    path = find_recipe(name)
    raw = read_yaml(path)
    for text in overrides:
        keys, value = parse_override(text)
        raw = set_key(raw, keys, value)
    for key, value in fixed.items():
        raw = set_key(raw, key.split("."), value)
    return _fill(validate({"output_dir": f"runs/{path.stem}"} | raw, path), path.parent)


def read_config(path: Path) -> RunConfig:
    """The resolved config that a run wrote into its folder. Raises SettingsError, FileNotFoundError."""
    return validate(read_yaml(path), path)


def validate(raw: Mapping[str, Any], path: Path) -> RunConfig:
    """The config of the algorithm that `recipe:` names. Raises SettingsError with a line per problem."""
    kind = raw.get("recipe")
    if not isinstance(kind, str) or kind not in CONFIGS:
        given = "no `recipe:` key" if kind is None else f"recipe: {kind!r}"
        raise SettingsError(f"{path}: {given}; allowed: {', '.join(CONFIGS)}")
    cls = CONFIGS[kind]
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise SettingsError(*(f"{path}: {line}" for line in explain(error, cls))) from None


def _fill(config: RunConfig, folder: Path) -> RunConfig:
    """Resolve relative paths against the working directory, then the recipe's folder; seed a fresh model and a fresh adapter by
    the run's seed where the recipe gives them none."""

    def near(value: str | None) -> str | None:
        if value is None or Path(value).exists() or not (folder / value).exists():
            return value
        return str(folder / value)

    def located(section: Any, *names: str) -> Any:
        """The section with its paths, and the recipe it names, found."""
        given = {name: getattr(section, name) for name in names}
        found: dict[str, Any] = {name: near(value) for name, value in given.items() if value is not None}
        if getattr(section, "recipe", None) is not None:
            found["recipe"] = str(find_recipe(section.recipe, beside=folder))
        return section.model_copy(update=found)

    model = located(config.model, "path", "tokenizer")
    if model.new is not None and "seed" not in model.new.model_fields_set:
        model = model.model_copy(update={"new": model.new.model_copy(update={"seed": config.seed})})
    update: dict[str, Any] = {"data": located(config.data, "train", "eval"), "model": model}
    teacher = getattr(config, "teacher", None)
    if isinstance(teacher, FrozenTeacher):
        update["teacher"] = located(teacher, "path")
    for name, keys in (("reference", ("path",)), ("critic", ("path",)), ("ptx", ("data",))):
        if (section := getattr(config, name, None)) is not None:
            update[name] = located(section, *keys)
    if (lora := config.engine.lora) is not None:
        seed = lora.seed if "seed" in lora.model_fields_set else config.seed
        lora = located(lora, "path").model_copy(update={"seed": seed})
        update["engine"] = config.engine.model_copy(update={"lora": lora})
    rollout = getattr(config, "rollout", None)
    if rollout is not None and rollout.vllm is not None and (program := Path(rollout.vllm.python)).name != str(program):
        python = near(str(program.expanduser()))
        update["rollout"] = rollout.model_copy(update={"vllm": rollout.vllm.model_copy(update={"python": python})})
    if isinstance(config, PolicyConfig):
        update["rewards"] = tuple(located(r, "model") if isinstance(r, RewardModelRef) else r for r in config.rewards)
    return config.model_copy(update=update)


def explain(error: ValidationError, cls: type[BaseModel]) -> Iterator[str]:
    """One line per problem: the path, what was given, what is allowed; for an unknown key the nearest known one."""
    for problem in error.errors(include_url=False):
        keys, owner = _walk(cls, problem["loc"])
        where = ".".join(map(str, keys)) or "recipe"
        if problem["type"] == "default_factory_not_called":
            continue  # a default that depends on a field which has an error of its own
        if problem["type"] == "extra_forbidden":
            yield f"{where}: unknown key; {_nearest(keys, owner, cls)}"
        elif problem["type"] == "missing":
            yield f"{where}: missing, and it has no default"
        elif problem["type"] == "value_error":
            yield f"{where}: {problem['ctx']['error']!s}"
        else:
            given = repr(problem["input"])
            yield f"{where}={given if len(given) <= 80 else given[:77] + '...'}: {problem['msg']}"


def _walk(cls: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str | int], type[BaseModel] | None]:
    """The key path of a pydantic location, without the tags of unions, and the class that should hold its last key."""
    keys: list[str | int] = []
    choices: list[type[BaseModel]] = [cls]
    owner: type[BaseModel] | None = cls
    for part in loc:
        if isinstance(part, int):
            keys.append(part)
            continue  # a place in a list: its items have the classes that were found with the list
        if len(choices) > 1 and part not in {name for c in choices for name in c.model_fields}:
            choices = [c for c in choices if _tag(c) == part] or choices
            continue  # the tag of a union member, not a key
        keys.append(part)
        owner = choices[0] if choices else None
        fields = [c.model_fields[part] for c in choices if part in c.model_fields]
        choices = [m for field in fields for m in _models(field.annotation, items=True)]
        if not fields:
            break  # an unknown key, or a scalar union's branch
    return keys, owner


def _tag(cls: type[BaseModel]) -> str:
    """Of a class in a union: its `kind`, or its name."""
    kind = cls.model_fields.get("kind")
    return typing.get_args(kind.annotation)[0] if kind else cls.__name__


def _models(annotation: Any, *, items: bool = False) -> list[type[BaseModel]]:
    """The model classes inside an annotation; with `items` those of a tuple's items too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inside = (typing.Union, types.UnionType, typing.Annotated, *((tuple,) if items else ()))
    if typing.get_origin(annotation) in inside:
        return [m for part in typing.get_args(annotation) for m in _models(part, items=items)]
    return []


def known_keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key path of a config class."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        for model in _models(field.annotation):
            yield from known_keys(model, f"{prefix}{name}.")


def _nearest(keys: Sequence[str | int], owner: type[BaseModel] | None, cls: type[BaseModel]) -> str:
    """The nearest key of the same section, else of any section."""
    *section, last = map(str, keys)
    prefix = ".".join([*section, ""])
    siblings = list(owner.model_fields) if owner else []
    if near := difflib.get_close_matches(last, siblings, 1, 0.6):
        return f"the nearest known one is {prefix}{near[0]}"
    by_name: Mapping[str, str] = {path.rpartition(".")[2]: path for path in reversed(list(known_keys(cls)))}
    if near := difflib.get_close_matches(last, list(by_name), 1, 0.6):
        return f"the nearest known one is {by_name[near[0]]}"
    return f"known ones here: {', '.join(siblings)}"
