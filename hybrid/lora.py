"""Low-rank adapters (LoRA, arXiv:2106.09685): a linear layer computes W x + s B A x, with W frozen.

peft puts the layers in and runs them. Here is what a sharded model needs beside that: Hugging Face's names for what peft renames,
A and B that do not depend on the number of ranks, the product W + s B A for rollouts and exports, and the model without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid.config import LoraConfig
from hybrid.folders import others, write_folder
from hybrid.mesh import get_rank, raise_together
from hybrid.safetensors_stream import TensorInfo, write_safetensors
from hybrid.sharding import ShardedSource, local, local_rows

if TYPE_CHECKING:
    from hybrid.mesh import Mesh

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # of peft's folders
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, "README.md")
PREFIX = "base_model.model."  # of every name in peft's files
# What may differ from peft's defaults: all that leaves W x + s B A x. Every other setting makes it another method.
PLAIN_SETTINGS = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "init_lora_weights", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "inference_mode", "base_model_name_or_path",
    "revision", "task_type", "peft_version", "auto_mapping", "runtime_config",
}  # fmt: skip
PLACES = 65521  # a prime: bits are weighted by their place modulo it

Values = Callable[[str, tuple[int, ...]], Tensor | None]  # name, shape -> the whole tensor, or None: as it is


class Adapter:
    """The adapter of one model. `tensors` names what is trained: A and B of every adapted weight (`low_rank`), and the head of a
    scalar model (`whole`), which has nothing to be low-rank beside.

    Names are Hugging Face's, as if nothing were adapted, and `MODULE.lora_A.weight`, `MODULE.lora_B.weight`.
    """

    def __init__(self, hf: PreTrainedModel, config: Any, name: str) -> None:
        """`config` is peft's. Raises ValueError for layers that are not W x + s B A x over a linear layer of the decoder."""
        from peft.tuners.lora import LoraLayer

        self.config, self.name = config, name
        self.layers: dict[str, Any] = {}  # name of an adapted weight -> peft's layer
        self._renamed: dict[str, str] = {}
        self._on = True
        possible = _linear_layers(hf)
        for path, layer in hf.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            _require_linear(path, layer, possible, name)
            self.layers[f"{path}.weight"] = layer
            self._renamed |= {f"{path}.base_layer.{part}": f"{path}.{part}" for part in ("weight", "bias")}
            self._renamed |= {f"{path}.{part}.{name}.weight": f"{path}.{part}.weight" for part in ("lora_A", "lora_B")}
            self._let_switch(layer)
        self.low_rank = frozenset(
            f"{path.removesuffix('weight')}{part}.weight" for path in self.layers for part in ("lora_A", "lora_B")
        )
        self.whole = frozenset({"score.weight"} if hf.get_output_embeddings() is None else ())
        self.tensors = self.low_rank | self.whole

    def hf_name(self, name: str) -> str:
        return self._renamed.get(name, name)

    def _let_switch(self, layer: Any) -> None:
        """peft's own switch turns requires_grad off too, by which FSDP settles at the first forward how it reduces gradients."""
        plain = layer.forward

        def forward(module: Any, x: Tensor) -> Tensor:
            return plain(x) if self._on else module.base_layer(x)

        layer.forward = MethodType(forward, layer)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Forwards inside are the base model's."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def matrices(self, layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
        """A [r, in] and B [out, r]."""
        return layer.lora_A[self.name].weight, layer.lora_B[self.name].weight

    def product(self, weight: Tensor, name: str, a: Tensor, b: Tensor, rows: slice | None) -> Tensor:
        """fp32: `weight`, which is rows `rows` of the adapted weight `name`, plus the same rows of s B A."""
        layer = self.layers[name]
        left, right = (a.t(), b.t()) if layer.fan_in_fan_out else (b, a)  # GPT-2 stores its weights as [in, out]
        left = left if rows is None else left[rows]
        return torch.addmm(weight.float(), left.float(), right.float(), alpha=layer.scaling[self.name])

    @torch.no_grad()
    def effective(self, name: str, weight: Tensor) -> Tensor:
        """fp32: all of W + s B A as a DTensor that is cut like `weight`, from the shards; of a weight without adapter, itself.
        Collective: A and B are gathered."""
        weight = weight.detach()
        if name not in self.layers:
            return weight
        a, b = (p.detach() for p in self.matrices(self.layers[name]))
        if not isinstance(weight, DTensor):
            return self.product(weight, name, a, b, None)
        mesh = weight.device_mesh
        shards, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        rows = local_rows(weight.shape[0], shards, rank)
        own = self.product(local(weight), name, _gathered(a), _gathered(b), rows)
        return DTensor.from_local(own, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride())

    @torch.no_grad()
    def fill(self, parameters: Mapping[str, Tensor], values: Values, mesh: Mesh) -> None:
        """Give every tensor its `values`, or this rank's rows of them."""
        for name in sorted(self.tensors):
            tensor = parameters[name]
            whole = values(name, tuple(tensor.shape))
            if whole is not None:
                rows = local_rows(tensor.shape[0], mesh.device_mesh.size(1), mesh.shard_rank)
                local(tensor).copy_(whole[rows] if isinstance(tensor, DTensor) else whole)

    def allocate(self) -> None:
        """Real memory for A and B, on the CPU, before the model is sharded."""
        for layer in self.layers.values():
            for part in (layer.lora_A, layer.lora_B):
                part[self.name].to_empty(device="cpu")


def inject(hf: PreTrainedModel, config: LoraConfig, dtype: torch.dtype) -> tuple[Adapter, Values]:
    """Put adapters into `hf`: A and B on meta, with the values they start from. They and the head of a scalar model become
    `dtype`; all else is frozen.

    Raises ValueError for a missing peft, a folder that is none of peft's, and targets that cannot be adapted.
    """
    peft = _peft()
    if config.path is None:
        settings = peft.LoraConfig(
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=_targets(hf, config),
            use_rslora=config.rslora,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in hf.modules()),
            init_lora_weights={"default": True, "gaussian": "gaussian"}[config.init],
        )
    else:
        settings = _folder_settings(Path(config.path))
        settings.lora_dropout = config.dropout
    settings.inference_mode = False
    try:
        with torch.device("meta"):
            peft.inject_adapter_in_model(settings, hf)
    except ValueError as error:
        raise ValueError(f"lora: {' '.join(str(error).split())}") from None
    adapter = Adapter(hf, settings, "default")
    for layer in adapter.layers.values():
        for part in (layer.lora_A, layer.lora_B):
            part[adapter.name].to(dtype)
    for name in adapter.whole:
        hf.get_submodule(name.removesuffix(".weight")).to(dtype)
    return adapter, _initial(config) if config.path is None else _folder_values(Path(config.path), adapter)


def unwrap(module: nn.Module) -> tuple[Any, Adapter | None]:
    """The HF module of a PeftModel, or of a module with an adapter in it, and that adapter; other modules as they are.

    Raises ValueError for another method than plain LoRA, and for several adapters.
    """
    if not hasattr(module, "peft_config"):
        return module, None
    peft = _peft()
    base: Any = module.get_base_model() if isinstance(module, peft.PeftModel) else module
    if len(module.peft_config) != 1:  # type: ignore[arg-type]
        raise ValueError(f"the module has adapters {sorted(module.peft_config)}; allowed: one")  # type: ignore[arg-type]
    ((name, settings),) = module.peft_config.items()  # type: ignore[union-attr, operator]
    _require_plain(settings, "the PeftModel")
    return base, Adapter(base, settings, name)


def named_parameters(hf: PreTrainedModel, adapter: Adapter | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by HF name; those of an adapter as `Adapter` names them. A tied weight once."""
    for name, parameter in hf.named_parameters():
        yield name if adapter is None else adapter.hf_name(name), parameter


class AdaptedSource(ShardedSource):
    """The weights by HF name: W + s B A in the compute dtype, or with `on` False W alone. No shard is written."""

    def __init__(self, adapter: Adapter, *given: Any, on: bool, **options: Any) -> None:
        super().__init__(*given, **options)
        self._adapter, self._on = adapter, on
        self._owners = {adapter.hf_name(name): owner for name, owner in self._owners.items()}
        self._names = [name for name in map(adapter.hf_name, self._names) if name not in adapter.low_rank]

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        weight = super().get(name, rows)
        if not self._on or name not in self._adapter.layers:
            return weight
        a, b = (p.detach() for p in self._adapter.matrices(self._adapter.layers[name]))
        return self._adapter.product(weight, name, a, b, rows).to(weight.dtype)


# -- what is adapted


def _linear_layers(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """Linear layers of the text decoder by name, adapted ones included; not the head, nor what text never runs."""
    from peft.tuners.lora import LoraLayer

    inside = {id(module) for module in hf.get_decoder().modules()}
    found: dict[str, Any] = {
        name: m for name, m in hf.named_modules() if id(m) in inside and isinstance(m, nn.Linear | Conv1D | LoraLayer)
    }
    return {
        name: m for name, m in found.items() if not any(f".{part}." in f".{name}" for part in ("lora_A", "lora_B", "base_layer"))
    }


def _targets(hf: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names for peft that mean exactly the wanted layers. Raises ValueError for those that mean none."""
    possible = _linear_layers(hf)
    allowed = ", ".join(dict.fromkeys(_last(name) for name in possible))
    wanted = set(possible)
    if config.target_modules == "all-linear":
        experts = [n for n, p in hf.get_decoder().named_parameters() if p.ndim > 2]
        if experts:
            raise ValueError(f"lora.target_modules=all-linear: {experts[0]} is no linear layer (fused experts, say), and peft's "
                             f"product is for those; name the layers to adapt, among {allowed}")  # fmt: skip
    else:
        wanted = set()
        for target in config.target_modules:
            wanted |= _matching(target, possible, "target_modules", allowed)
    for target in config.exclude:
        wanted -= _matching(target, possible, "exclude", allowed)
    if not wanted:
        raise ValueError(f"lora.exclude={list(config.exclude)} leaves nothing to adapt; allowed: fewer of {allowed}")
    short = {_last(name) for name in wanted}
    same = {name for name, _ in hf.named_modules() if _last(name) in short} == wanted
    return sorted(short if same else wanted)


def _matching(target: str, possible: Mapping[str, nn.Module], key: str, allowed: str) -> set[str]:
    found = {name for name in possible if name == target or name.endswith(f".{target}")}
    if not found:
        raise ValueError(f"lora.{key}: {target!r} is no linear layer of the decoder (embeddings, head and fused experts are "
                         f"not adapted); allowed: all-linear, or the end of a module's name, such as {allowed}")  # fmt: skip
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _require_linear(path: str, layer: Any, possible: Mapping[str, nn.Module], name: str) -> None:
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or not isinstance(layer.base_layer, nn.Linear | Conv1D) or path not in possible:
        raise ValueError(f"{path} ({type(layer).__name__}) is adapted; allowed: linear layers of the text decoder, without the "
                         "head; choose other target_modules")  # fmt: skip
    if name not in layer.lora_A or layer.lora_variant or layer.merged or layer.disable_adapters:
        raise ValueError(f"{path}: its adapter is merged, turned off, or no plain LoRA; hand over the adapter as it trains")


def _require_plain(settings: Any, what: str) -> None:
    """Raises ValueError for peft settings that change more than W x + s B A x."""
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    if kind != "LORA":
        raise ValueError(f"{what} is of peft_type={kind}; allowed: LORA")
    plain = type(settings)()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in PLAIN_SETTINGS and value and value != getattr(plain, field.name):
            raise ValueError(f"{what} has {field.name}={value!r}; allowed: plain LoRA over linear layers, without it")
    if settings.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(f"{what} has init_lora_weights={settings.init_lora_weights!r}, which changes the base model; allowed: "
                         "true, false, gaussian; convert it to plain LoRA with peft first")  # fmt: skip


# -- values


def _initial(config: LoraConfig) -> Values:
    """B = 0; A uniform within 1 / sqrt(in) ("default") or normal with std 1 / r ("gaussian"), as in peft. A tensor depends on the
    seed and its name alone."""

    def values(name: str, shape: tuple[int, ...]) -> Tensor | None:
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shape)
        if not name.endswith(".lora_A.weight"):
            return None
        digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.empty(shape)
        if config.init == "gaussian":
            return nn.init.normal_(whole, std=1 / config.r, generator=generator)
        return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)

    return values


def _folder_settings(path: Path) -> Any:
    """peft's config of an adapter folder. Raises ValueError."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise ValueError(
                f"lora.path={path}: no {name}; allowed: a folder that peft (or save_adapter) wrote, with safetensors"
            )
    try:
        settings = _peft().PeftConfig.from_pretrained(str(path))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / CONFIG_FILE}: {' '.join(str(error).split())}") from None
    if {"score"} <= set(settings.modules_to_save or ()) <= {"score", "classifier"}:  # all names that peft knows such a head by
        settings.modules_to_save = None  # a scalar model's head is `Adapter.tensors`' own
    _require_plain(settings, str(path / CONFIG_FILE))
    return settings


def _folder_values(path: Path, adapter: Adapter) -> Values:
    """The tensors of an adapter folder. Raises ValueError where they are not the adapter's."""
    file = path / WEIGHTS_FILE
    try:
        stored = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cut short or not a safetensors file ({' '.join(str(error).split())})") from None
    given = {name.removeprefix(PREFIX) for name in stored.keys()}  # noqa: SIM118 (it is no dict)
    missing = adapter.low_rank - given
    if missing or given - adapter.tensors:
        raise ValueError(f"{file} does not fit the model; missing: {sorted(missing)[:3] or 'none'}; "
                         f"surplus: {sorted(given - adapter.tensors)[:3] or 'none'}")  # fmt: skip

    def values(name: str, shape: tuple[int, ...]) -> Tensor | None:
        if name not in given:
            return None
        tensor = stored.get_tensor(PREFIX + name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{file}: {name} is {list(tensor.shape)}; the model needs {list(shape)}")
        return tensor

    return values


def save_adapter(path: Path, adapter: Adapter, parameters: Mapping[str, Tensor], *, base: str | None) -> None:
    """Collective: peft's folder, `adapter_config.json` and `adapter_model.safetensors`, whole or not at all.

    Raises ValueError when `path` holds something else, FolderError on every rank if it cannot be written.
    """
    error = None
    if get_rank() == 0 and (found := others(path, marker=CONFIG_FILE, owns=lambda entry: entry.name in ADAPTER_FILES)):
        error = ValueError(f"{path} exists and holds more than an adapter ({', '.join(found[:3])}); save to a new folder")
    raise_together(error)
    names = sorted(adapter.tensors)
    infos = [TensorInfo(PREFIX + name, parameters[name].dtype, tuple(parameters[name].shape)) for name in names]
    settings = dataclasses.replace(adapter.config)
    settings.target_modules = _plain_list(settings.target_modules)
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.task_type = "SEQ_CLS" if adapter.whole else "CAUSAL_LM"
    settings.modules_to_save = ["score"] if adapter.whole else None

    def write(folder: Path) -> None:
        whole = (_gathered(parameters[name]) for name in names)
        if get_rank() == 0:
            write_safetensors(folder / WEIGHTS_FILE, infos, whole)
        for _ in whole:  # ranks that do not write take part in every gather
            pass

    write_folder(path, write, finish=lambda folder: settings.save_pretrained(str(folder)))


def _gathered(tensor: Tensor) -> Tensor:
    """All of it. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain_list(names: Any) -> Any:
    return sorted(names) if isinstance(names, set | list) else names


# -- the base model


@torch.no_grad()
def fingerprint(parameters: Mapping[str, Tensor], mesh: Mesh) -> str:
    """Of the bits of all `parameters`, the same at any number of ranks. Collective."""
    sums = []
    for tensor in parameters.values():
        rows = local(tensor)
        row_size = math.prod(tensor.shape[1:])
        start = local_rows(tensor.shape[0], mesh.device_mesh.size(1), mesh.shard_rank).start if isinstance(tensor, DTensor) else 0
        sums.append(_weighted_bits(rows, start * row_size))
    total = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
    dist.all_reduce(total, group=mesh.shard_group)  # modulo 2^64
    described = [
        [name, str(tensor.dtype), list(tensor.shape), value]
        for (name, tensor), value in zip(parameters.items(), total.tolist(), strict=True)
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _weighted_bits(tensor: Tensor, first_place: int) -> Tensor:
    """int64, modulo 2^64: the sum of every element's bits times its place, the first one's being `first_place`."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(tensor.contiguous().flatten().view(integer).split(2**20)):
        places = torch.arange(chunk.numel(), device=chunk.device) + (first_place + number * 2**20)
        total += (chunk.to(torch.int64) * (places % PLACES + 1)).sum()
    return total.cpu()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora needs the package peft, which is not installed: pip install peft") from error
    return peft
