"""Transformers models enter here: built on meta, sharded, and streamed from safetensors into the shards.

`ShardedModel` is a policy module with its shards, config and tokenizer. A frozen teacher is just this; a trained model adds an
optimizer (engine.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybrid import attention, fused, in_flight, lora, sharding
from hybrid.batch import Batch
from hybrid.config import HybridConfig
from hybrid.loss_head import head_logits, pack_head, tokens_per_chunk
from hybrid.mesh import Mesh, from_rank_0, raise_together
from hybrid.policy import HeadFunction, PolicyModule, mode
from hybrid.sharding import ShardedSource, outside_inference_mode
from inference_v2.head import Head
from inference_v2.kernels import get_kernels
from inference_v2.loading import LoadedModel, eos_union, load_model, tokenizer_vocab_limit
from inference_v2.models import REGISTRY, spec_of
from inference_v2.models.fallback import fix_rope
from inference_v2.models.spec import DecoderSpec
from inference_v2.rope import force_table
from inference_v2.weights import WeightSource

AUTO_CLASSES = {"exaone4_5": AutoModelForImageTextToText}  # by model_type; all others: AutoModelForCausalLM
SCALAR_HEAD = "score.weight"  # of transformers' sequence classifiers that are decoders
VALUE_HEAD = "value_head.weight"  # of a causal LM that is its own critic; no part of the HF model


class ShardedModel:
    """A model whose weights are spread over ranks. `module` holds DTensor parameters between phases.

    Frozen parameters (all of them with trainable=False) have requires_grad off and, where the whole model or all but an adapter
    is frozen, live in the compute dtype.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        config: HybridConfig,
        mesh: Mesh,
        *,
        hf_config: PreTrainedConfig,
        trainable: bool,
        tokenizer: Any = None,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_limit: int | None = None,
        path: str | None = None,
        frozen: frozenset[str] = frozenset(),
        adapter: lora.Adapter | None = None,
        value_head: bool = False,
    ) -> None:
        self.config, self.mesh, self.hf_config, self.path = config, mesh, hf_config, path
        self.spec: DecoderSpec | None = spec_of(hf_config) if hf_config.model_type in REGISTRY else None
        self.kernels = get_kernels(config.rollout.engine.kernels, mesh.device, getattr(torch, config.compute_dtype))
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.vocab_limit = vocab_limit
        # What text never runs (a vision tower): frozen, in groups of its own that nothing gathers.
        ignored = self.spec.ignored_prefixes if self.spec else ()
        self.towers = tuple(prefix for prefix in ignored if any(n.startswith(prefix) for n, _ in hf.named_parameters()))
        if self.spec is not None:
            force_table(hf, self.spec.rope, self.max_positions)
        else:  # the same for what its rollouts run
            fix_rope(hf, config.rollout.engine.max_model_len)
        self.adapter = adapter
        self._adapter_values: lora.Values | None = None  # what it starts from, until it is filled
        named = dict(lora.named_parameters(hf, adapter))
        if trainable:
            self._check_settings(list(named))
        for name, parameter in named.items():
            trained = trainable and (adapter is None or name in adapter.tensors)
            parameter.requires_grad_(trained and name not in frozen and not self._is_frozen(name))
        self.module = PolicyModule(
            hf,
            vocab_limit=vocab_limit,
            activation_checkpointing=trainable and config.activation_checkpointing,
            adapter=adapter,
            value_head=_value_head(hf, config) if value_head else None,
        ).eval()
        head = self.module.head_module
        tied = any(head.weight is p for m in hf.modules() if m is not head for p in m.parameters(recurse=False))
        sharding.shard(
            self.module,
            layers=self.module.layers,
            apart=[hf.get_submodule(prefix.rstrip(".")) for prefix in self.towers],
            head=None if tied else head,
            mesh=mesh,
            layout=sharding.Layout.of(config),
        )
        if self.spec is not None and config.fused_layers:
            fused.fuse(hf.get_decoder(), self.module.layers, self.kernels)
        self.files: WeightSource | None = None  # the folder's own weights, mapped and not read; None: from memory
        self.name: str | None = None  # the folder or hub name, as it was given
        self._offloaded = False
        self._base_fingerprint: str | None = None

    # -- ways in

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        config: HybridConfig,
        mesh: Mesh,
        *,
        trainable: bool = True,
        masters: bool | None = None,
        tokenizer: str | None = None,
        load: bool = True,
        scalar: bool = False,
        value_head: bool = False,
    ) -> ShardedModel:
        """A HF folder or hub name, streamed into shards: no rank ever holds more than its shards and one tensor.

        scalar: the backbone with a head of one row (a value or reward model); that of a folder without one starts at 0.
        value_head: a second head of one row that starts at 0, on the same hidden states.
        config.lora: a trained model gets adapters, and the base is held in the compute dtype.
        masters: keep shards in config.master_dtype (None: if trainable); False: in the compute dtype, enough for a frozen
        teacher. load: False leaves the shards on meta until `load`: who only generates may read `files` instead.
        Raises ValueError for what `load_model` refuses and for missing or surplus weights, with both lists.
        """
        loaded = load_model(path, trust_remote_code=config.trust_remote_code, tokenizer=tokenizer)
        keep = trainable if masters is None else masters
        adapted = trainable and config.lora is not None
        dtype = getattr(torch, config.master_dtype if keep and not adapted else config.compute_dtype)
        hf_config = scalar_config(loaded.hf_config, loaded.tokenizer, loaded.eos_token_ids) if scalar else loaded.hf_config
        hf = build_on_meta(hf_config, config, dtype, scalar=scalar)
        adapter, values = None, None
        if adapted and config.lora is not None:
            adapter, values = lora.inject(hf, config.lora, getattr(torch, config.master_dtype))
        model = cls(
            hf,
            config,
            mesh,
            hf_config=hf_config,
            trainable=trainable,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            vocab_limit=None if scalar else config.vocab_limit or loaded.vocab_limit,
            path=str(loaded.path),
            adapter=adapter,
            value_head=value_head,
        )
        model.files, model._adapter_values, model.name = loaded.source, values, path
        if load:
            model.load()
        return model

    @classmethod
    def from_module(cls, module: nn.Module, config: HybridConfig, mesh: Mesh, *, tokenizer: Any = None) -> ShardedModel:
        """A HF module in memory, or a PeftModel (LoRA), sharded in place. All ranks get rank 0's weights; trainable ones become
        config.master_dtype, frozen ones keep their dtype, below an adapter they become config.compute_dtype. The module must not
        be used on its own afterwards."""
        hf, adapter = lora.unwrap(module)
        hf_config = copy.deepcopy(hf.config)
        master, compute = getattr(torch, config.master_dtype), getattr(torch, config.compute_dtype)
        frozen = frozenset(name for name, p in lora.named_parameters(hf, adapter) if not p.requires_grad)
        if config.lora is not None:
            if adapter is not None:
                raise ValueError("engine.lora is set and the module has an adapter; hand over its base model, or leave lora out")
            adapter, values = lora.inject(hf, config.lora, master)
            adapter.allocate()
            adapter.fill(dict(lora.named_parameters(hf, adapter)), values, mesh)
        hf.to(mesh.device)
        with torch.no_grad():
            for name, parameter in lora.named_parameters(hf, adapter):
                if adapter is not None and name not in adapter.tensors:
                    parameter.data = parameter.data.to(compute)
                elif name not in frozen:
                    parameter.data = parameter.data.to(master)
            for tensor in (*hf.parameters(), *hf.buffers()):
                tensor.data = from_rank_0(tensor.data)
        model = cls(
            hf,
            config,
            mesh,
            hf_config=hf_config,
            trainable=True,
            tokenizer=tokenizer,
            eos_token_ids=eos_union(hf_config, getattr(hf, "generation_config", None), tokenizer),
            vocab_limit=config.vocab_limit or _tokenizer_size(tokenizer, hf_config),
            frozen=frozen,
            adapter=adapter,
        )
        model._open_attention()
        return model

    def _check_settings(self, names: Sequence[str]) -> None:
        """Raises ValueError for settings of a trained model that do not fit it."""
        for pattern in self.config.freeze:
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(f"freeze: {pattern!r} is found in no parameter's name, such as {names[0]} or {names[-1]} "
                                 "(a tied weight has one name, the embedding's)")  # fmt: skip
        if (self.vocab_limit or 0) > self.num_rows:
            raise ValueError(f"vocab_limit={self.vocab_limit}; allowed: up to the model's {self.num_rows} rows")
        limit = getattr(self.hf_config.get_text_config(), "max_position_embeddings", None)
        wanted = self.config.rollout.engine.max_model_len
        if self.spec is None and wanted is not None and limit is not None and wanted > limit:  # they may be a learned table
            raise ValueError(f"max_model_len={wanted} with model_type={self.hf_config.model_type!r}; allowed: up to {limit}, "
                             "the positions it has")  # fmt: skip

    def _is_frozen(self, name: str) -> bool:
        return name.startswith(self.towers) or any(re.search(p, name) for p in self.config.freeze)

    def load(self) -> None:
        """Fill the shards from the folder. Collective."""
        assert self.files is not None, "only what came from a folder is loaded later"
        self._allocate()
        self._fill(self.files)
        if self.adapter is not None and self._adapter_values is not None:
            self.adapter.fill(self.parameters(), self._adapter_values, self.mesh)
        self._open_attention()

    def _allocate(self) -> None:
        """Real memory for the shards; buffers were made real before."""
        device = self.mesh.device
        self.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)

    @torch.no_grad()
    def _fill(self, source: WeightSource) -> None:
        """Copy this rank's rows of every weight from `source`; a value head starts at 0."""
        if self.module.value_head is not None:
            sharding.local(self.module.value_head.weight).zero_()
        wanted = _filled_by(source, self.module, self.spec, self.path)
        if self.module.scalar and SCALAR_HEAD not in wanted:
            sharding.local(cast(nn.Linear, self.module.head_module).weight).zero_()
        shards, rank = sharding.shard_count(self.mesh), self.mesh.shard_rank
        for name, tensor in wanted.items():
            if tensor.ndim == 0:  # a buffer: parameters have dimensions
                tensor.copy_(source.get(name))
                continue
            total = tensor.shape[0]
            cut = sharding.local_rows(total, shards, rank) if isinstance(tensor, nn.Parameter) else slice(0, total)
            rows, target = source.get(name, cut), sharding.local(tensor)
            last = source.get(name, slice(total - 1, total + 1))  # every rank looks, so that every rank raises
            if rows.shape != target.shape or last.shape[0] != 1:
                raise ValueError(
                    f"{name}: config.json says {list(tensor.shape)}, the checkpoint has another shape; fetch both from one place"
                )
            target.copy_(rows)
            del rows  # before the next is read

    def _open_attention(self) -> None:
        """Choose what the training and scoring forwards run. Collective. Raises ValueError as `attention.choose`."""

        def hidden_states(name: str, batch: Batch) -> Tensor:
            self._set_attention(name)
            return self.hidden_states(batch)

        name = attention.choose(self.module.hf, self.spec, self.config, self.mesh, hidden_states)
        self._set_attention(name)

    def _set_attention(self, name: str) -> None:
        attention.use(self.module.hf, name)
        self.module.packs = name == attention.PACKED

    # -- verbs without gradients

    def hidden_states(self, batch: Batch, *, adapter: bool = True) -> Tensor:
        """[N, H] in the compute dtype: what the head sees at each counted position. adapter: False for the base model below an
        adapter. Collective. Raises ValueError for adapter=False without one."""
        with self._using(adapter):
            return self._evaluate(batch, None)

    def token_logprobs(self, batch: Batch, temperature: float = 1.0, *, adapter: bool = True) -> Tensor:
        """[N] fp32: log_softmax(z / temperature) of each counted target (temperature 0: of z). `adapter` as in `hidden_states`.
        Collective."""

        def logprobs(hidden: Tensor, head: Head) -> Tensor:
            head = pack_head(head, self.kernels)
            size = tokens_per_chunk(head, self.config.loss_chunk_tokens)
            parts = []
            for start in range(0, batch.num_targets, size):
                logits = head_logits(head, hidden[start : start + size]) / (temperature or 1.0)
                targets = batch.targets[start : start + size, None]
                parts.append(logits.gather(1, targets).squeeze(1) - logits.logsumexp(1))
            return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)

        with self._using(adapter):
            return self._evaluate(batch, logprobs)

    def _using(self, adapter: bool) -> AbstractContextManager[None]:
        return nullcontext() if adapter else self.require_adapter().off()

    def require_adapter(self) -> lora.Adapter:
        if self.adapter is None:
            raise ValueError("the model has no adapter; allowed with one only: adapter=False, save_adapter; set engine.lora")
        return self.adapter

    def _evaluate(self, batch: Batch, head_function: HeadFunction[Tensor] | None) -> Tensor:
        raise_together(self.misfit(batch))
        batch = batch.to(self.mesh.device)
        with outside_inference_mode(), torch.no_grad(), mode(self.module, train=False):
            try:
                return self.module(batch, head_function)
            except BaseException:
                in_flight.abandon(self.module)
                raise
            finally:
                sharding.reshard(self.module)

    def scores(self, batch: Batch) -> Tensor:
        """[N] fp32: what a scalar model says at each of `batch.loss_index`. Collective."""
        assert self.module.scalar, "a causal LM has no scores"
        return self._evaluate(batch, _scores)

    def values(self, batch: Batch) -> Tensor:
        """[N] fp32: what the value head says at each of `batch.loss_index`. Collective."""
        value_head = self.module.value_head
        assert value_head is not None, "made with value_head=True"
        return self._evaluate(batch, lambda hidden, _: value_head(hidden, _scores))

    @contextmanager
    def head(self) -> Iterator[Head]:
        """The head, gathered and detached: a teacher's during the student's loss. Collective."""
        source = self.source()
        with source.scope(""):
            head = self.module.gathered_head()
            bias = None if head.bias is None else head.bias.detach()
            yield pack_head(replace(head, weight=head.weight.detach(), bias=bias), self.kernels)

    @property
    def packs(self) -> bool:
        """Whether a batch runs unpadded, so that its size is its number of tokens."""
        return self.module.packs

    @property
    def num_rows(self) -> int:
        """Of the embedding: token ids lie below. The head's may be cut at `vocab_limit`."""
        return self.hf_config.get_text_config().vocab_size

    def misfit(self, batch: Batch) -> ValueError | None:
        """Why this batch cannot be used, if it holds ids that the model does not have."""
        return batch.misfit(rows=self.num_rows, counted=min(self.vocab_limit or self.num_rows, self.num_rows))

    @property
    def is_scalar(self) -> bool:
        """Whether its head has one row, so that "logits" are scores [N, 1]."""
        return self.module.scalar

    # -- weights

    def source(self, *, adapter: bool = True) -> ShardedSource:
        """The weights by module name for the generator, gathered layer by layer in the compute dtype. adapter: False for those
        of the base model below an adapter."""
        layers = set(self.module.layers)
        prefixes = {name: module for name, module in self.module.hf.named_modules() if module in layers}
        if not adapter or self.adapter is not None:
            given = (self.module, self.module.hf, prefixes)
            return lora.AdaptedSource(self.require_adapter(), *given, on=adapter, skipped=self.towers)
        return ShardedSource(self.module, self.module.hf, prefixes, skipped=self.towers)

    @property
    def max_positions(self) -> int:
        """Prompt and new tokens of one request, at most; also what a rotary table that depends on a length is made for."""
        return self.config.rollout.engine.max_model_len or self.hf_config.get_text_config().max_position_embeddings

    def parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters (DTensors) by HF name; frees what is gathered, which would hide them."""
        sharding.reshard(self.module)
        parameters: dict[str, Any] = dict(self.module.named_hf_parameters())
        if self.module.value_head is not None:
            parameters[VALUE_HEAD] = self.module.value_head.weight
        return parameters

    def local_shards(self) -> dict[str, Tensor]:
        """This rank's rows of every parameter by HF name, sharing memory with the model."""
        return {name: sharding.local(p.detach()) for name, p in self.parameters().items()}

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """What a checkpoint must hold: all parameters, or those of the adapter, since the base below it never changes."""
        parameters = self.parameters()
        if self.adapter is None:
            return parameters
        return {n: p for n, p in parameters.items() if n in self.adapter.tensors or n == VALUE_HEAD}

    def base_fingerprint(self) -> str | None:
        """Of what `stored_parameters` leaves out, the same at any rank count; None: nothing. Collective the first time."""
        if self.adapter is not None and self._base_fingerprint is None:
            stored = self.stored_parameters()
            base = {n: p.detach() for n, p in self.parameters().items() if n not in stored}
            self._base_fingerprint = lora.fingerprint(base, self.mesh)
        return self._base_fingerprint

    def effective_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor cut like the parameter), one at a time: the parameters, those below an adapter as W + s B A in fp32.
        Collective where there is one. An average of the model is one of these, since the mean of products is no product of
        means. Without a value head."""
        for name, parameter in self.parameters().items():
            if name == VALUE_HEAD:
                continue
            if self.adapter is None:
                yield name, parameter.detach()
            elif name not in self.adapter.low_rank:
                yield name, self.adapter.effective(name, parameter)

    @torch.no_grad()
    def lerp_(self, other: ShardedModel, weight: float) -> None:
        """self += weight * (other - self), shard by shard; an EMA teacher moves so. Both have the same shapes and ranks; `other`
        may have an adapter, which counts as part of its weights."""
        mine = self.local_shards()
        skipped = frozenset() if other.adapter is None else other.adapter.low_rank
        if mine.keys() != other.parameters().keys() - skipped - {VALUE_HEAD}:
            raise ValueError("lerp_: the models have different parameters; use two of one checkpoint")
        for name, tensor in other.effective_shards():
            mine[name].lerp_(sharding.local(tensor).to(mine[name]), weight)

    def offload(self) -> None:
        """Move the shards to host memory until `onload`; nothing to do on CPU."""
        if not self._offloaded and self.mesh.device.type != "cpu":
            self.module.to("cpu")
            self._offloaded = True

    def onload(self) -> None:
        if self._offloaded:
            self.module.to(self.mesh.device)
            self._offloaded = False


def _value_head(hf: PreTrainedModel, config: HybridConfig) -> nn.Linear:
    """On meta, in the dtype of masters."""
    hidden_size = hf.config.get_text_config().hidden_size
    return nn.Linear(hidden_size, 1, bias=False, device="meta", dtype=getattr(torch, config.master_dtype))


def _scores(hidden: Tensor, head: Head) -> Tensor:
    return head_logits(head, hidden).squeeze(1)


def _tokenizer_size(tokenizer: Any, hf_config: PreTrainedConfig) -> int | None:
    return None if tokenizer is None else tokenizer_vocab_limit(tokenizer, hf_config.get_text_config().vocab_size)


def scalar_config(hf_config: PreTrainedConfig, tokenizer: Any, eos_token_ids: Collection[int]) -> PreTrainedConfig:
    """The config of a sequence classifier with one label over this model. transformers reads a row's score at its last token that
    is not padding, so a padding id that also ends responses is left out: it then takes one row at a time, and says so.

    Raises ValueError for a model type that transformers has no sequence classifier of.
    """
    if type(hf_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"model_type={hf_config.model_type!r} has no sequence classifier in transformers; use the text model's "
                         "folder, or another type for value and reward models")  # fmt: skip
    config = copy.deepcopy(hf_config)
    config.num_labels = 1
    config.architectures = [cast(type, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(hf_config)]).__name__]
    pad = config.pad_token_id if tokenizer is None else tokenizer.pad_token_id
    config.pad_token_id = None if pad in eos_token_ids else pad
    return config


def build_on_meta(
    hf_config: PreTrainedConfig, config: HybridConfig, dtype: torch.dtype, *, scalar: bool = False
) -> PreTrainedModel:
    """The HF module without weights: parameters on meta in `dtype`, buffers real (they are computed, not loaded)."""
    auto = AutoModelForSequenceClassification if scalar else AUTO_CLASSES.get(hf_config.model_type, AutoModelForCausalLM)
    with torch.device("meta"):
        hf = auto.from_config(
            copy.deepcopy(hf_config),
            dtype=dtype,
            attn_implementation=None if config.attn_implementation in ("auto", "packed") else config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    for module in hf.modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in lost:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if lost:
            with torch.random.fork_rng(devices=[]):
                hf._init_weights(module)
    return hf


def check_weights(loaded: LoadedModel, config: HybridConfig, *, scalar: bool = False) -> None:
    """Raises ValueError, with both lists, where a folder's weights are not those that its config names; their values are not
    read. Needs no process group."""
    hf_config = scalar_config(loaded.hf_config, loaded.tokenizer, loaded.eos_token_ids) if scalar else loaded.hf_config
    module = PolicyModule(build_on_meta(hf_config, config, torch.float32, scalar=scalar))
    _filled_by(loaded.source, module, spec_of(hf_config) if hf_config.model_type in REGISTRY else None, str(loaded.path))


def _filled_by(source: WeightSource, module: PolicyModule, spec: DecoderSpec | None, path: str | None) -> dict[str, Tensor]:
    """What a folder's weights go into, by name; a scalar model's head only if it has one. Raises ValueError where they are
    others than the module's."""
    hf = module.hf
    persistent = {n: b for n, b in hf.named_buffers() if n in hf.state_dict()}
    adapters = module.adapter.low_rank if module.adapter is not None else ()
    wanted = {n: p for n, p in module.named_hf_parameters() if n not in adapters} | persistent
    ignored = spec.ignored_prefixes if spec else ()
    if module.scalar:
        ignored = (*ignored, "lm_head.")
        if SCALAR_HEAD not in source.names():
            del wanted[SCALAR_HEAD]
        elif (labels := source.get(SCALAR_HEAD).shape[0]) != 1:
            raise ValueError(f"{path} is a classifier and has {labels} labels; allowed: 1, whose logit is the score")
    given = set(source.names())
    known = set(wanted) | set(hf._tied_weights_keys or ())
    unused = [*(hf._keys_to_ignore_on_load_unexpected or ())]
    missing = sorted(set(wanted) - given)
    surplus = sorted(n for n in given - known if not n.startswith(ignored) and not any(re.search(p, n) for p in unused))
    if missing or surplus:
        raise ValueError(f"checkpoint and config.json disagree; missing: {missing or 'none'}; surplus: {surplus or 'none'}")
    return wanted
