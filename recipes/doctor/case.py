"""A recipe with its models and data, opened as a run would open them: configs, tokenizers, headers of weight files, rows. No
weights are read and nothing is trained."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid.config import HybridConfig
from inference_v2.loading import LoadedModel, load_model
from recipes.data import make_all
from recipes.doctor.finding import NotExamined
from recipes.doctor.memory import ModelShape, read_shape
from recipes.parts import sub_recipes
from trainers.config import DataConfig, FrozenTeacher, ModelConfig, NewModel, RewardModelRef, RewardRecipe, RunConfig
from trainers.critic import critic_settings
from trainers.data.prompts import PromptSet, load_prompts
from trainers.new_model import write_new_model


@dataclass(frozen=True)
class Role:
    """A model of the run. `path` is a folder or hub name."""

    name: str  # policy, teacher, reference, critic, reward
    key: str  # where the recipe names it
    path: str
    tokenizer: str | None = None  # a folder of another tokenizer
    stands_for: str | None = None  # the recipe that is still to train this model; `path` is what that one starts from
    scalar: bool = False  # read with a head of one row
    fresh: str | None = None  # of a random new model, its architecture

    def __str__(self) -> str:
        origin = self.path if self.fresh is None else f"a fresh {self.fresh}"
        return f"{origin}, from which {self.stands_for} trains it first" if self.stands_for else str(origin)

    def starts_as(self, other: Role) -> bool:
        """Whether both have the same weights and tokenizer."""
        return (self.path, self.tokenizer, self.stands_for) == (other.path, other.tokenizer, other.stands_for)


class Case:
    """Models and rows are opened once. What cannot be opened raises as it would in a run from `load` and `load_data`, each with
    its own row of the table, and NotExamined for all others that would read it."""

    def __init__(self, config: RunConfig, folder: Path, *, nproc: int = 1, max_rows: int | None = None) -> None:
        """`folder` takes fresh models and made data. `max_rows` of each data set are read."""
        self.config, self.folder, self.nproc, self.max_rows = config, folder, nproc, max_rows
        self._opened: dict[object, Any] = {}  # or the error that opening gave
        self._fresh: list[NewModel] = []

    @classmethod
    @contextmanager
    def opened(cls, config: RunConfig, *, nproc: int = 1, max_rows: int | None = None) -> Iterator[Case]:
        """In a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="hybrid-doctor-") as folder:
            yield cls(config, Path(folder), nproc=nproc, max_rows=max_rows)

    # -- models

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Every model of the run, the policy first. Raises ValueError for a part's recipe that cannot be read."""
        config, out = self.config, Path(self.config.output_dir)
        policy = replace(self._start(config.model, out / "start"), scalar=isinstance(config, RewardRecipe))
        roles = [policy]
        teacher = getattr(config, "teacher", None)
        if isinstance(teacher, FrozenTeacher):
            roles.append(self._part("teacher", "teacher", teacher.path, teacher.recipe, out / "teacher"))
        elif teacher is not None:
            roles.append(replace(policy, name="teacher", key="teacher.kind=self", scalar=False))
        for name in ("reference", "critic"):
            section = getattr(config, name, None)
            on_the_policy = getattr(section, "shared_weight", None) is not None  # a critic that is one more row of its head
            if section is not None and not on_the_policy:
                scalar = name == "critic"
                own = section.path is not None
                role = Role(name, f"{name}.path", section.path) if own else replace(policy, name=name, key=f"{name}.path=null")
                roles.append(replace(role, scalar=scalar))
        refs = [ref for ref in getattr(config, "rewards", ()) if isinstance(ref, RewardModelRef)]
        trained = iter(part for part in map(Path, self.parts) if part.parent == out and part.name.startswith("reward"))
        for number, ref in enumerate(refs, 1):
            name = "reward" if len(refs) == 1 else f"reward_{number}"
            part = out if ref.recipe is None else next(trained)
            roles.append(replace(self._part(name, "rewards", ref.model, ref.recipe, part), scalar=True))
        return tuple(roles)

    @cached_property
    def parts(self) -> dict[str, RunConfig]:
        """The runs that come before this one, by folder (recipes.parts)."""
        return sub_recipes(self.config)

    @property
    def policy(self) -> Role:
        return self.roles[0]

    def role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)

    def load(self, role: Role) -> LoadedModel:
        """Its config, tokenizer, end-of-sequence ids and opened weight files. Raises ValueError as a run would."""
        trusted = self.config.engine.trust_remote_code
        return self._once(
            (role.path, role.tokenizer), lambda: load_model(role.path, trust_remote_code=trusted, tokenizer=role.tokenizer)
        )

    def model(self, role: Role) -> LoadedModel:
        """Raises NotExamined where `load` raises."""
        try:
            return self.load(role)
        except (ValueError, OSError) as error:
            raise NotExamined(f"the {role.name} cannot be opened, see row `models`") from error

    def models(self) -> list[tuple[Role, LoadedModel]]:
        """Those that can be opened, the policy first. Raises NotExamined without the policy."""
        found = [(self.policy, self.model(self.policy))]
        for role in self.roles[1:]:
            with suppress(NotExamined):
                found.append((role, self.model(role)))
        return found

    def shared(self) -> Iterator[tuple[str, Role]]:
        """Roles by what they start from, under the names of all that do."""
        left = list(self.roles)
        while left:
            same = [role for role in left if role.starts_as(left[0]) and role.scalar == left[0].scalar]
            yield ", ".join(role.name for role in same), same[0]
            left = [role for role in left if role not in same]

    def shape(self, role: Role) -> ModelShape:
        """The shapes of its parameters as the run will hold them. Raises NotExamined, and ValueError as a run would."""
        loaded, settings = self.model(role), self.settings(role)
        trained, scalar = role.name in ("policy", "critic"), role.scalar
        return self._once(("shape", role), lambda: read_shape(loaded, settings, scalar=scalar, is_trained=trained))

    def settings(self, role: Role) -> HybridConfig:
        """Its engine's, as the run will have them. Raises NotExamined."""
        settings = self.config.engine
        if role.scalar:  # as trainers.critic and trainers.reward_scoring do
            settings = critic_settings(settings)
        elif role.name != "policy":
            settings = settings.model_copy(update={"vocab_limit": settings.vocab_limit or self.model(self.policy).vocab_limit})
        return settings

    @property
    def tokenizer(self) -> Any:
        """The policy's, which encodes every prompt. Raises NotExamined."""
        tokenizer = self.model(self.policy).tokenizer
        if tokenizer is None:
            raise NotExamined("the policy has no tokenizer, see row `models`")
        return tokenizer

    def _start(self, model: ModelConfig, part: Path) -> Role:
        """What a run starts from; `part` is where its recipe trains that."""
        if model.new is not None:
            role = Role("policy", "model.new", self._write(model.new), fresh=model.new.architecture)
        else:
            role = self._part("policy", "model", model.path, model.recipe, part)
        return role if model.tokenizer is None else replace(role, tokenizer=model.tokenizer)

    def _part(self, name: str, section: str, path: str | None, recipe: str | None, part: Path) -> Role:
        """A model that is given, or that another recipe trains into `part`/model first."""
        if recipe is None:
            assert path is not None, "the config has one of them"
            return Role(name, f"{section}.{'model' if section == 'rewards' else 'path'}", path)
        if (part / "model" / "config.json").is_file():
            return Role(name, f"{section}.recipe", str(part / "model"))
        sub = self.parts[str(part)]
        return replace(self._start(sub.model, part / "start"), name=name, key=f"{section}.recipe", stands_for=recipe)

    def _write(self, new: NewModel) -> str:
        """Its folder. Equal settings share one."""
        if new not in self._fresh:
            write_new_model(new, self.folder / f"new_{len(self._fresh)}")
            self._fresh.append(new)
        return str(self.folder / f"new_{self._fresh.index(new)}")

    # -- data

    @cached_property
    def data(self) -> DataConfig:
        """With made data as files, and with `max_rows` as a limit. Raises ValueError."""
        data = make_all(self.config.data, self.folder)
        if self.max_rows is None:
            return data
        limits = {key: min(getattr(data, key) or self.max_rows, self.max_rows) for key in ("max_train", "max_eval")}
        return data.model_copy(update=limits)

    def load_data(self, *, held_out: bool = False) -> PromptSet:
        """Every row through the policy's tokenizer. Raises ValueError as a run would, and NotExamined."""
        loaded, tokenizer = self.model(self.policy), self.tokenizer
        return self._once(
            ("data", held_out),
            lambda: load_prompts(self.data, tokenizer, held_out=held_out, eos_token_ids=loaded.eos_token_ids),
        )

    @property
    def prompts(self) -> PromptSet:
        """The training rows. Raises NotExamined where they cannot be read."""
        return self._rows(held_out=False)

    @property
    def held_out(self) -> PromptSet | None:
        """The same of data.eval."""
        return None if self.config.data.eval is None else self._rows(held_out=True)

    def _rows(self, *, held_out: bool) -> PromptSet:
        try:
            return self.load_data(held_out=held_out)
        except (ValueError, OSError) as error:
            raise NotExamined(f"{'data.eval' if held_out else 'data.train'} cannot be read, see row `data`") from error

    def _once(self, key: object, open_it: Callable[[], Any]) -> Any:
        if key not in self._opened:
            try:
                self._opened[key] = open_it()
            except (ValueError, OSError) as error:
                self._opened[key] = error
        if isinstance(found := self._opened[key], Exception):
            raise found
        return found
