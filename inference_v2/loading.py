"""The door to Hugging Face folders and hub names: config, tokenizer, eos ids, and safetensors as a WeightSource.

Nothing in a folder is executed: only JSON and safetensors are read, file names in an index must be plain names inside the
folder, and a config that asks for remote code is refused unless the caller trusts it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from inference_v2.models import REGISTRY, spec_of
from inference_v2.models.families import exaone4_layer_types
from inference_v2.models.spec import DecoderSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_LAYERS = 10_000  # transformers expands patterns over the layers before it looks at their number
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt", "spiece.model")


class FolderSource:
    """The safetensors of a folder as a WeightSource. Tensors are read when asked for, rows of them if rows are asked for.

    Raises ValueError (one line) for a folder without safetensors, an index that points outside the folder or to files or
    tensors that are not there, and a shard that is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._prefix = ""  # stripped from a name before it is looked up, see `strip_prefix`
        if (self.path / SINGLE).is_file():  # before an index, as transformers does: an old one may have been left behind
            self._file_of = {}
        elif (self.path / INDEX).is_file():
            self._file_of = _read_index(self.path)
        else:
            raise ValueError(_no_safetensors(self.path))
        self._files: dict[str, Any] = {}
        for file in sorted(set(self._file_of.values())) or [SINGLE]:
            self._files[file] = handle = _open(self.path / file)
            stored = set(handle.keys())
            if lacking := sorted(name for name, owner in self._file_of.items() if owner == file and name not in stored):
                raise ValueError(
                    f"{self.path / file} lacks {lacking[0]!r}, which {INDEX} says it holds; fetch the checkpoint again"
                )
            self._file_of = self._file_of or dict.fromkeys(stored, file)

    def strip_prefix(self, prefix: str) -> None:
        """Serve the file's name `x` as `prefix + x`: checkpoints saved from the base model lack the model's own prefix."""
        self._prefix = prefix
        self._file_of = {prefix + name: file for name, file in self._file_of.items()}

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    @contextmanager
    def scope(self, prefix: str) -> Iterator[None]:
        yield

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        file, stored = self._files[self._file_of[name]], name.removeprefix(self._prefix)
        try:
            return file.get_tensor(stored) if rows is None else file.get_slice(stored)[rows]
        except SafetensorError as error:
            raise ValueError(f"{self.path / self._file_of[name]}: cannot read {stored!r} ({_line(error)})") from None


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint, opened but not yet copied: `source` feeds FusedWeights.refresh."""

    hf_config: PreTrainedConfig
    source: FolderSource
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    vocab_limit: int | None  # the tokenizer's size; None without a tokenizer: all rows
    path: Path

    @property
    def spec(self) -> DecoderSpec:
        """Raises ValueError for a model type outside the registry."""
        return spec_of(self.hf_config)


def load_model(path_or_name: str | Path, *, trust_remote_code: bool = False, tokenizer: str | Path | None = None) -> LoadedModel:
    """Open a folder, or a hub name after fetching its JSON, safetensors and tokenizer files. `tokenizer`: a folder of another
    tokenizer. Raises ValueError, one line, for what cannot be used."""
    path = resolve(path_or_name)
    config = load_config(path, trust_remote_code=trust_remote_code)
    source = FolderSource(path)
    if config.model_type in REGISTRY:
        prefix = spec_of(config).names.embed.split(".")[0] + "."
        if not any(name.startswith(prefix) for name in source.names()):
            source.strip_prefix(prefix)
    tokens = load_tokenizer(path if tokenizer is None else tokenizer, trust_remote_code=trust_remote_code)
    if tokens is None and tokenizer is not None:
        raise ValueError(f"{tokenizer}: no tokenizer there; allowed: a folder with tokenizer files")
    generation_config = _read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        raise ValueError(f"{path}: model_type={config.model_type!r} has no vocabulary; allowed: causal language models")
    return LoadedModel(
        hf_config=config,
        source=source,
        tokenizer=tokens,
        eos_token_ids=eos_union(config, generation_config, tokens),
        vocab_limit=None if tokens is None else tokenizer_vocab_limit(tokens, rows),
        path=path,
    )


def resolve(path_or_name: str | Path) -> Path:
    """A local folder as it is; otherwise a hub name, fetched into the hub's cache. Raises ValueError when it is neither."""
    path, name = Path(path_or_name), str(path_or_name)
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return path
    if name.count("/") > 1 or name.startswith(("/", ".", "~")) or os.path.exists(path):
        raise ValueError(f"{name}: no such folder; allowed: a folder with config.json, or a hub name like org/model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ValueError(f"{name}: not a folder here, and the hub did not serve it ({_line(error)})") from None


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The folder's Hugging Face config, with exaone4's layer pattern expanded (transformers fails on some of its forms).

    Raises ValueError for a missing or broken config.json, and for one that names remote code unless it is trusted.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: no config.json; allowed: a Hugging Face model folder")
    raw = _read_json(file)
    _refuse_remote_code(file, raw, trust_remote_code)
    if trust_remote_code and "auto_map" in raw:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    model_type = raw.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f"{file}: no model_type; allowed: {', '.join(REGISTRY)} or another type of transformers")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"{file}: model_type={model_type!r} is unknown to this transformers; registered: {', '.join(REGISTRY)}")
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise ValueError(f"{file}: text_config={text!r}; allowed: a JSON object")
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{file}: the weights are quantised (quantization_config); allowed: float32, bfloat16 or float16 weights"
        )
    for part in (raw, text):
        if isinstance(layers := part.get("num_hidden_layers"), int) and layers > MAX_LAYERS:
            raise ValueError(f"{file}: num_hidden_layers={layers}; allowed: 1 to {MAX_LAYERS}")
    try:
        _expand_pattern(raw if model_type == "exaone4" else text)
        config = CONFIG_MAPPING[model_type].from_dict(raw)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ValueError(f"{file}: {_line(error)}") from None
    if not isinstance(config.get_text_config(), PreTrainedConfig):
        raise ValueError(f"{file}: text_config in a config of model_type={model_type!r}; allowed: none")
    return config


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """None when the folder holds no tokenizer."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        _refuse_remote_code(settings, _read_json(settings), trust_remote_code)
    try:  # our reading of the config, for forms of exaone4's pattern that transformers' own fails on
        config = load_config(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # a folder that is only a tokenizer's need not have one that is a model's
        config = None
    try:
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions, and transformers whatever a malformed file leads to
        raise ValueError(f"{folder}: the tokenizer cannot be read ({_line(error)})") from None


def eos_union(
    hf_config: PreTrainedConfig, generation_config: Any | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> frozenset[int]:
    """Every id that ends a text by any account: the config (and its text config), the generation config (an object or its
    JSON), the tokenizer. Each may hold one id or a list. Raises ValueError for anything else."""
    found: set[int] = set()
    for holder in (hf_config, hf_config.get_text_config(), generation_config, tokenizer):
        ids = holder.get("eos_token_id") if isinstance(holder, dict) else getattr(holder, "eos_token_id", None)
        ids = [] if ids is None else ids if isinstance(ids, (list, tuple)) else [ids]
        if not all(isinstance(i, int) for i in ids):
            where = "generation_config" if holder is generation_config else type(holder).__name__
            raise ValueError(f"{where}: eos_token_id={ids}; allowed: token ids, integers")
        found.update(ids)
    return frozenset(found)


def tokenizer_vocab_limit(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """Largest token id + 1, at most `rows` (a model's embedding is often padded beyond its tokenizer)."""
    return min(max(tokenizer.get_vocab().values()) + 1, rows)


def _read_index(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(f"{index}: no weight_map of tensor names to file names; fetch the checkpoint again")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ValueError(f"{index} names the file {file!r}; allowed: plain names ending in .safetensors, inside the folder")
        if not (folder / file).is_file():
            raise ValueError(f"{index} names {file!r}, which is not in the folder; fetch the checkpoint again")
    return weight_map


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cut short or not a safetensors file ({_line(error)}); fetch it again") from None


def _no_safetensors(folder: Path) -> str:
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in sorted(folder.glob(pattern))]
    if pickles:
        return (f"{folder} holds its weights as pickles ({pickles[0]}), which can run code and are never opened; "
                "convert to safetensors first, e.g. save_pretrained(...) in a sandbox")  # fmt: skip
    return f"{folder}: no {SINGLE} or {INDEX}; allowed: a Hugging Face folder with safetensors weights"


def _refuse_remote_code(file: Path, raw: dict, trusted: bool) -> None:
    if not trusted and "auto_map" in raw:
        raise ValueError(
            f"{file} asks to run code that comes with the checkpoint (auto_map); allowed only with trust_remote_code"
        )


def _expand_pattern(raw: dict) -> None:
    """Fill exaone4's layer_types in place."""
    if raw.get("model_type", "exaone4") not in ("exaone4", "exaone4_5_text") or raw.get("layer_types") is not None:
        return
    if "num_hidden_layers" in raw:
        pattern = raw.get("sliding_window_pattern", 4)
        window = raw.get("sliding_window", 4096)
        raw["layer_types"] = exaone4_layer_types(raw["num_hidden_layers"], window, pattern)
        if pattern is None:
            raw["sliding_window_pattern"] = 0


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not readable as JSON ({_line(error)})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}; allowed: a JSON object")
    return content


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
