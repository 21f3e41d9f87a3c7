"""Transformers models enter here: built on meta, sharded, and streamed from safetensors into the shards.

`PolicyModule` is the root around a HF causal LM; `ShardedModel` is that module with its shards, config and tokenizer. A frozen
teacher is just this; a trained model adds an optimizer (engine.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from hybrid import sharding
from hybrid.batch import Batch
from hybrid.config import HybridConfig
from hybrid.loss_head import head_logits
from hybrid.mesh import Mesh
from hybrid.sharding import ShardedSource
from inference_v2.head import Head
from inference_v2.loading import eos_union, load_model
from inference_v2.models import spec_of
from inference_v2.models.spec import DecoderSpec
from inference_v2.rope import force_table
from inference_v2.weights import WeightSource

R = TypeVar("R")
HeadFunction = Callable[[Tensor, Head], R]  # (hidden [N, H], gathered head) -> anything that autograd and FSDP can walk
AUTO_CLASSES = {"exaone4_5": AutoModelForImageTextToText}  # by model_type; all others: AutoModelForCausalLM


class PolicyModule(nn.Module):
    """A HF causal LM that gives the hidden states of chosen tokens, or what a function makes of them and of the head.

    The function runs inside the forward of the HF head module, so that the hooks which gather the head fire around it.
    """

    def __init__(self, hf: PreTrainedModel, *, vocab_limit: int | None = None, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.hf = hf
        self.vocab_limit = vocab_limit
        text = hf.config.get_text_config()
        self._scale = float(getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1))
        self._softcap = getattr(text, "final_logit_softcapping", None)
        _accept_function(self.head_module, self.gathered_head)
        if activation_checkpointing:
            for layer in self.layers:
                _recompute_in_backward(layer)

    @property
    def head_module(self) -> nn.Module:
        return self.hf.get_output_embeddings()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, found by class."""
        decoder = self.hf.get_decoder()
        names = set(self.hf._no_split_modules or ())
        found = [m for m in decoder.modules() if type(m).__name__.removeprefix("FSDP") in names]
        if not found:
            stacks = [m for m in decoder.children() if isinstance(m, nn.ModuleList)]
            found = list(max(stacks, key=len, default=()))
        if not found:
            raise ValueError(
                f"{type(self.hf).__name__}: no decoder layers found; it names none and its decoder has no module list"
            )
        return found

    def named_hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their name in the HF module; a tied weight once."""
        return self.hf.named_parameters()

    def gathered_head(self) -> Head:
        """The head as it is right now: whole only while its group is gathered."""
        module = self.head_module
        return Head(module.weight, module.bias, vocab_limit=self.vocab_limit, scale=self._scale, softcap=self._softcap)

    def forward(
        self,
        token_ids: Tensor,  # [B, L]
        position_ids: Tensor,  # [B, L]
        flat_index: Tensor,  # [T]: places of the packed tokens in the [B * L] view
        hidden_index: Tensor | None = None,  # [N] into T; None: all of them
        head_function: HeadFunction[R] | None = None,
    ) -> R | Tensor:
        decoder = self.hf.get_decoder()
        states = decoder(input_ids=token_ids, position_ids=position_ids, use_cache=False).last_hidden_state  # [B, L, H]
        rows = flat_index if hidden_index is None else flat_index[hidden_index]
        hidden = states.flatten(0, 1).index_select(0, rows)
        return hidden if head_function is None else self.head_module(hidden, head_function)


def _accept_function(head: nn.Module, gathered_head: Callable[[], Head]) -> None:
    """Let `head(hidden, f)` be `f(hidden, Head)`, and `head(hidden)` what it was."""
    plain = head.forward

    def forward(self: nn.Module, hidden: Tensor, function: HeadFunction[R] | None = None) -> R | Tensor:
        return plain(hidden) if function is None else function(hidden, gathered_head())

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]


def _recompute_in_backward(layer: nn.Module) -> None:
    """Keep only the layer's input for backward. Works in train and eval mode alike, and renames no parameter."""
    plain = layer.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


class ShardedModel:
    """A model whose weights are spread over ranks. `module` holds DTensor parameters between phases.

    Frozen parameters (all of them with trainable=False) have requires_grad off and, where the whole model is frozen, live in
    the compute dtype.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        config: HybridConfig,
        mesh: Mesh,
        *,
        spec: DecoderSpec,
        hf_config: PreTrainedConfig,
        trainable: bool,
        tokenizer: Any = None,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_limit: int | None = None,
        path: str | None = None,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self.config, self.mesh, self.spec, self.hf_config, self.path = config, mesh, spec, hf_config, path
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.vocab_limit = vocab_limit
        force_table(hf, spec.rope, config.rollout.engine.max_model_len or spec.max_position_embeddings)
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(trainable and name not in frozen and not self._is_frozen(name))
        self.module = PolicyModule(
            hf, vocab_limit=vocab_limit, activation_checkpointing=trainable and config.activation_checkpointing
        ).eval()
        head = self.module.head_module
        tied = any(head.weight is p for m in hf.modules() if m is not head for p in m.parameters(recurse=False))
        sharding.shard(
            self.module,
            layers=self.module.layers,
            apart=[hf.get_submodule(p.rstrip(".")) for p in self._towers(hf)],
            head=None if tied else head,
            mesh=mesh,
            config=config,
        )
        self._offloaded = False

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
    ) -> ShardedModel:
        """A HF folder or hub name, streamed into shards: no rank ever holds more than its shards and one tensor.

        masters: keep shards in config.master_dtype (None: if trainable); False: in the compute dtype, enough for a frozen
        teacher. Raises ValueError for what `load_model` refuses and for missing or surplus weights, with both lists.
        """
        loaded = load_model(path, trust_remote_code=config.trust_remote_code, tokenizer=tokenizer)
        keep = trainable if masters is None else masters
        dtype = getattr(torch, config.master_dtype if keep else config.compute_dtype)
        hf = build_on_meta(loaded.hf_config, config, dtype)
        model = cls(
            hf,
            config,
            mesh,
            spec=loaded.spec,
            hf_config=loaded.hf_config,
            trainable=trainable,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            vocab_limit=config.vocab_limit or loaded.vocab_limit,
            path=str(loaded.path),
        )
        model._allocate()
        model._fill(loaded.source)
        return model

    @classmethod
    def from_module(cls, hf: PreTrainedModel, config: HybridConfig, mesh: Mesh, *, tokenizer: Any = None) -> ShardedModel:
        """A HF module in memory, sharded in place. All ranks get rank 0's weights; trainable ones become config.master_dtype,
        frozen ones keep their dtype. The module must not be used on its own afterwards."""
        hf_config = copy.deepcopy(hf.config)
        hf.to(mesh.device)
        master = getattr(torch, config.master_dtype)
        with torch.no_grad():
            for parameter in hf.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(master)
            for tensor in (*hf.parameters(), *hf.buffers()):
                dist.broadcast(tensor.data, 0)
        return cls(
            hf,
            config,
            mesh,
            spec=spec_of(hf_config),
            hf_config=hf_config,
            trainable=True,
            tokenizer=tokenizer,
            eos_token_ids=eos_union(hf_config, getattr(hf, "generation_config", None), tokenizer),
            vocab_limit=config.vocab_limit,
            frozen=frozenset(name for name, p in hf.named_parameters() if not p.requires_grad),
        )

    def _towers(self, hf: PreTrainedModel) -> list[str]:
        """Prefixes of what text never runs (a vision tower): frozen, in groups of their own that nothing gathers."""
        names = [name for name, _ in hf.named_parameters()]
        return [prefix for prefix in self.spec.ignored_prefixes if any(n.startswith(prefix) for n in names)]

    def _is_frozen(self, name: str) -> bool:
        return name.startswith(self.spec.ignored_prefixes) or any(re.search(p, name) for p in self.config.freeze)

    def _allocate(self) -> None:
        """Real memory for the shards; buffers were made real before."""
        device = self.mesh.device
        self.module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)

    @torch.no_grad()
    def _fill(self, source: WeightSource) -> None:
        """Copy this rank's rows of every weight from `source`."""
        hf = self.module.hf
        persistent = {n: b for n, b in hf.named_buffers() if n in hf.state_dict()}
        wanted = dict(self.module.named_hf_parameters()) | persistent
        _check_names(source, hf, wanted, self.spec.ignored_prefixes)
        shards, rank = sharding.shard_count(self.mesh), self.mesh.shard_rank
        for name, tensor in wanted.items():
            if isinstance(tensor, nn.Parameter):
                rows = source.get(name, sharding.local_rows(tensor.shape[0], shards, rank))
            else:
                rows = source.get(name)
            target = sharding.local(tensor)
            if rows.shape != target.shape:
                raise ValueError(
                    f"{name}: rows of shape {tuple(rows.shape)} in the checkpoint, {tuple(target.shape)} by config.json"
                )
            target.copy_(rows)

    # -- verbs without gradients

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> Tensor:
        """[N, H] in the compute dtype: what the head sees at each counted position. Collective."""
        return self._evaluate(batch, None)

    def token_logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """[N] fp32: log_softmax(z / temperature) of each counted target (temperature 0: of z). Collective."""
        size = self.config.loss_chunk_tokens

        def logprobs(hidden: Tensor, head: Head) -> Tensor:
            parts = []
            for start in range(0, batch.num_targets, size):
                logits = head_logits(head, hidden[start : start + size]) / (temperature or 1.0)
                targets = batch.targets[start : start + size, None]
                parts.append(logits.gather(1, targets).squeeze(1) - logits.logsumexp(1))
            return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)

        with torch.no_grad():
            return self._evaluate(batch, logprobs)

    def _evaluate(self, batch: Batch, head_function: HeadFunction[Tensor] | None) -> Tensor:
        batch = batch.to(self.mesh.device)
        with mode(self.module, train=False):
            try:
                return self.module(*inputs(batch), batch.loss_index, head_function)
            except BaseException:
                self.module.reset_iter_state()
                raise
            finally:
                sharding.reshard(self.module)

    @contextmanager
    def head(self) -> Iterator[Head]:
        """The head, gathered and detached: a teacher's during the student's loss. Collective."""
        source = self.source()
        with source.scope(""):
            head = self.module.gathered_head()
            yield Head(head.weight.detach(), None if head.bias is None else head.bias.detach(), head.vocab_limit, head.scale,
                       head.softcap)  # fmt: skip

    # -- weights

    def source(self) -> ShardedSource:
        """The weights by module name for the generator, gathered layer by layer in the compute dtype."""
        return ShardedSource(
            self.module,
            self.module.hf,
            {self.spec.names.layer.format(i=i): layer for i, layer in enumerate(self.module.layers)},
            skipped=self.spec.ignored_prefixes,
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters (DTensors) by HF name; frees what is gathered, which would hide them."""
        sharding.reshard(self.module)
        return dict(self.module.named_hf_parameters())

    def local_shards(self) -> dict[str, Tensor]:
        """This rank's rows of every parameter by HF name, sharing memory with the model."""
        return {name: sharding.local(p.detach()) for name, p in self.parameters().items()}

    @torch.no_grad()
    def lerp_(self, other: ShardedModel, weight: float) -> None:
        """self += weight * (other - self), shard by shard; an EMA teacher moves so. Both have the same shapes and ranks."""
        mine, theirs = self.local_shards(), other.local_shards()
        if mine.keys() != theirs.keys():
            raise ValueError("lerp_: the models have different parameters; use two of one checkpoint")
        for name, tensor in mine.items():
            tensor.lerp_(theirs[name].to(tensor), weight)

    def offload(self) -> None:
        """Move the shards to host memory until `onload`; nothing to do on CPU."""
        if not self._offloaded and self.mesh.device.type != "cpu":
            self.module.to("cpu")
            self._offloaded = True

    def onload(self) -> None:
        if self._offloaded:
            self.module.to(self.mesh.device)
            self._offloaded = False


def build_on_meta(hf_config: PreTrainedConfig, config: HybridConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The HF module without weights: parameters on meta in `dtype`, buffers real (they are computed, not loaded)."""
    auto = AUTO_CLASSES.get(hf_config.model_type, AutoModelForCausalLM)
    with torch.device("meta"):
        hf = auto.from_config(
            copy.deepcopy(hf_config),
            dtype=dtype,
            attn_implementation=config.attn_implementation,
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


def _check_names(source: WeightSource, hf: PreTrainedModel, wanted: dict[str, Tensor], ignored: tuple[str, ...]) -> None:
    given = set(source.names())
    known = set(wanted) | set(hf._tied_weights_keys or ())
    unused = [*(hf._keys_to_ignore_on_load_unexpected or ())]
    missing = sorted(set(wanted) - given)
    surplus = sorted(n for n in given - known if not n.startswith(ignored) and not any(re.search(p, n) for p in unused))
    if missing or surplus:
        raise ValueError(f"checkpoint and config.json disagree; missing: {missing or 'none'}; surplus: {surplus or 'none'}")


@contextmanager
def mode(module: nn.Module, *, train: bool) -> Iterator[None]:
    """Train or eval mode for a while; every submodule's own flag comes back, also after an exception."""
    flags = [(m, m.training) for m in module.modules()]
    module.train(train)
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


def inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """`batch.padded()`, at least one token wide: a rank without tokens runs one that nothing reads, with the same collectives."""
    if batch.num_tokens:
        return batch.padded()
    one = torch.zeros(1, 1, dtype=torch.long, device=batch.token_ids.device)
    return one, one, one[0, :0]


def empty_batch(device: torch.device | str = "cpu") -> Batch:
    """No sequences at all."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Batch(none, none, torch.zeros(1, dtype=torch.long, device=device), none, none, none)
