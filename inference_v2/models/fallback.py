"""Model types outside the registry: the Hugging Face module itself, its attention replaced by the paged one.

Continuous batching and the cache survive; the fused layout and the packed products do not. A module is used only after a parity
probe: its paged logits must equal its own eager ones, so an attention feature that the paged function does not know (a bias by
position, a state outside attention) is refused by name and never silently wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from inference_v2.batch import Batch, GroupMeta
from inference_v2.cache import KVCache
from inference_v2.head import Head
from inference_v2.kernels import Kernels
from inference_v2.models.families import rope_spec
from inference_v2.models.spec import DecoderSpec, LayerSpec, RopeSpec
from inference_v2.rope import force_table
from inference_v2.weights import FinalWeights, LayerWeights, ModelWeights

PAGED = "hybrid_paged"  # name of our entry among transformers' attention functions
UNKNOWN_FEATURES = ("position_bias", "alibi", "head_mask", "block_mask")
PROBE_TOKENS = 24


@dataclass
class _Step:
    """What the paged attention function needs; travels through the module's forward as a keyword."""

    batch: Batch
    cache: KVCache
    kernels: Kernels
    spec: DecoderSpec


@dataclass
class _Recorder:
    """Takes the place of `_Step` in the dry run that reads a module's geometry."""

    calls: dict[int, tuple[int, int, int, int | None]]  # layer -> q heads, kv heads, head_dim, window


@dataclass
class ModuleWeights:
    """A loaded module as ModelWeights. There are no layers to hand out: the module runs them itself."""

    module: PreTrainedModel
    head: Head
    version: int = 0
    stack: None = None

    def embed(self) -> AbstractContextManager[Tensor]:
        return nullcontext(_embedding(self.module))

    def layer(self, i: int) -> AbstractContextManager[LayerWeights]:
        raise NotImplementedError("the layers of an unregistered model type are run by its own module")

    def final(self) -> AbstractContextManager[FinalWeights]:
        raise NotImplementedError("the final norm of an unregistered model type is run by its own module")

    @property
    def nbytes(self) -> int:
        tensors = {t.data_ptr(): t.nbytes for t in (*self.module.parameters(), *self.module.buffers(), self.head.weight)}
        return sum(tensors.values())


class ModuleDecoder:
    """Decoder's forward over a Hugging Face module."""

    def __init__(self, spec: DecoderSpec, kernels: Kernels) -> None:
        self.spec = spec
        self.kernels = kernels

    @torch.no_grad()
    def forward(self, batch: Batch, cache: KVCache, weights: ModelWeights, read: Any = None) -> Any:
        """As models.decoder.Decoder.forward; with no tokens the module is not run."""
        assert isinstance(weights, ModuleWeights), "a module's decoder runs with that module's weights only"
        step = _Step(batch, cache, self.kernels, self.spec)
        if batch.num_tokens:
            hidden = _hidden(weights.module, batch.token_ids, batch.positions, paged=step)[batch.logit_rows]
        else:
            hidden = weights.head.weight.new_empty(0, self.spec.hidden_size)
        return hidden if read is None else read(hidden, weights.head)


def open_module(
    path: str | Path,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    vocab_limit: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[ModuleDecoder, ModuleWeights]:
    """Load the folder's module (transformers renames the checkpoint's weights as the module needs), read its geometry, and
    probe it. A rotary table that depends on a length is fixed for `max_positions` (None: the config's limit). Warns once a
    call that this is the slow path. Raises ValueError for a module that cannot be served."""
    if PAGED not in AttentionInterface().valid_keys():
        AttentionInterface.register(PAGED, _paged_attention)
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=PAGED, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    except KeyError as error:
        raise ValueError(
            f"{path}: its attention is not replaceable in transformers ({error}); allowed: a registered family"
        ) from None
    except (ValueError, ImportError, OSError) as error:
        raise ValueError(f"{path}: transformers cannot load it ({' '.join(str(error).split())[:300]})") from None
    module = module.to(device).eval().requires_grad_(False)
    fix_rope(module, max_positions)
    decoder = ModuleDecoder(_read_spec(module), kernels)
    weights = ModuleWeights(module, _read_head(module, vocab_limit))
    probe(decoder, weights)
    warnings.warn(
        f"model_type={module.config.model_type!r} is not registered: its Hugging Face module runs with paged attention, "
        "correct but slower than a registered family",
        stacklevel=2,
    )
    return decoder, weights


@torch.no_grad()
def probe(decoder: ModuleDecoder, weights: ModuleWeights) -> None:
    """Compare paged logits (a prefill, a chunk, then one decode) with the module's own eager ones on random ids.

    Raises ValueError when the root mean square of the difference exceeds 1e-4 (fp32) or 5e-2 of that of the logits: a bf16
    module differs from itself by about a third of that between two attention implementations.
    """
    spec, module = decoder.spec, weights.module
    length = max([PROBE_TOKENS, *(w + 3 for w in spec.windows if w is not None and w < 256)])
    length = min(length, spec.max_position_embeddings)  # a learned table of positions ends there
    generator = torch.Generator().manual_seed(0)
    device = weights.head.weight.device
    ids = torch.randint(weights.head.vocab_size, (length,), generator=generator).to(device)
    with _eager(module):
        want = module(input_ids=ids[None], use_cache=False).logits[0].float()
    cache = KVCache(spec, [2] * len(spec.windows), length, next(module.parameters()).dtype, device, poison=True)
    got = []
    for start, stop in ((0, length // 2), (length // 2, length - 1), (length - 1, length)):
        batch = _one_sequence(ids, start, stop, len(spec.windows), length)
        got.append(decoder.forward(batch, cache, weights, lambda hidden, head: head.logits(hidden)))
    want = want[:, : weights.head.vocab_size]
    allowed = 1e-4 if next(module.parameters()).dtype == torch.float32 else 5e-2
    difference = float((torch.cat(got) - want).norm() / want.norm())
    if not difference <= allowed:  # NaN too
        raise ValueError(
            f"model_type={spec.model_type!r}: its paged logits differ from its own by {difference:.1e} (allowed {allowed:.0e}), "
            "so it has a feature that paged attention does not know; allowed: a registered family"
        )


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: _Step | _Recorder | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    layer = getattr(module, "layer_idx", None)
    unknown = [name for name in UNKNOWN_FEATURES if kwargs.get(name) is not None]
    if paged is None or layer is None or unknown or value.shape[-1] != key.shape[-1]:
        why = f"it passes {unknown[0]}" if unknown else "it does not hand on what the paged function needs"
        raise ValueError(f"{type(module).__name__} cannot run on the paged cache: {why}; allowed: a registered family")
    if isinstance(paged, _Recorder):
        paged.calls[layer] = (query.shape[1], key.shape[1], key.shape[3], sliding_window)
        return torch.zeros_like(query).transpose(1, 2), None
    batch, spec = paged.batch, paged.spec.layers[layer]
    group = batch.groups[spec.cache_group]
    k_pool, v_pool = paged.cache.layer(layer)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q = paged.kernels.enter_attention(q, k, v, k_pool, v_pool, group.slots, batch.positions)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    lens, tables = (batch.cu_query_lens, batch.context_lens), group.block_tables
    return paged.kernels.paged_attention(q, k_pool, v_pool, *lens, tables, scale, spec.window, softcap, s_aux)[None], None


def _hidden(module: PreTrainedModel, ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
    """[T] ids of any number of requests -> final hidden states [T, H]."""
    out = module.get_decoder()(input_ids=ids[None], position_ids=positions[None], use_cache=False, **kwargs)
    return out.last_hidden_state[0]


@torch.no_grad()
def _read_spec(module: PreTrainedModel) -> DecoderSpec:
    """The cache's geometry, from what the module hands to its attention function in a dry run."""
    config = module.config.get_text_config()
    recorder = _Recorder({})
    device = next(module.parameters()).device
    _hidden(
        module, torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long, device=device), paged=recorder
    )
    calls = [recorder.calls[i] for i in sorted(recorder.calls)]
    shapes = {call[:3] for call in calls}
    if sorted(recorder.calls) != list(range(config.num_hidden_layers)) or len(shapes) != 1:
        raise ValueError(
            f"model_type={config.model_type!r}: {len(recorder.calls)} of {config.num_hidden_layers} layers use attention, in "
            f"{len(shapes)} shapes; allowed: attention of one shape in every layer, or a registered family"
        )
    if not isinstance(getattr(config, "max_position_embeddings", None), int) or config.max_position_embeddings < 2:
        raise ValueError(f"model_type={config.model_type!r}: no max_position_embeddings >= 2; allowed: a config that has it")
    num_heads, num_kv_heads, head_dim = shapes.pop()
    windows = [call[3] for call in calls]
    groups = list(dict.fromkeys(windows))
    vocab_size, hidden_size = _embedding(module).shape
    return DecoderSpec(
        model_type=config.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=0.0,  # the module's own business, as are its positions
        layers=tuple(LayerSpec(window, cache_group=groups.index(window)) for window in windows),
        rope=RopeSpec("default", 1.0, head_dim),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
    )


def _embedding(module: PreTrainedModel) -> Tensor:
    table: Any = module.get_input_embeddings()
    return table.weight


def fix_rope(module: PreTrainedModel, max_positions: int | None) -> None:
    """Stop dynamic and longrope tables from switching with the longest position of whatever is in the batch."""
    config = module.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    if not {table.get("rope_type") for table in tables} & {"dynamic", "longrope"}:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = rope_spec(config, int(head_dim * parameters.get("partial_rotary_factor", 1.0)))
    force_table(module, spec, max_positions or config.max_position_embeddings)


def _read_head(module: PreTrainedModel, vocab_limit: int | None) -> Head:
    config, head = module.config.get_text_config(), module.get_output_embeddings()
    divisor = getattr(config, "logits_scaling", None)
    scale = 1.0 / divisor if divisor else getattr(config, "logit_scale", None) or 1.0
    bias = None if head.bias is None else head.bias.float()
    return Head(head.weight.float(), bias, vocab_limit, scale, getattr(config, "final_logit_softcapping", None))


def _one_sequence(ids: Tensor, start: int, stop: int, num_groups: int, block_size: int) -> Batch:
    """Tokens start : stop of one sequence whose keys all lie in block 1 (block 0 stays poisoned)."""
    positions = torch.arange(start, stop, device=ids.device)
    lens = torch.tensor([0, stop - start], dtype=torch.int32, device=ids.device)
    context = torch.tensor([stop], dtype=torch.int32, device=ids.device)
    group = GroupMeta(torch.ones(1, 1, dtype=torch.int32, device=ids.device), block_size + positions)
    return Batch(ids[start:stop], positions, lens, context, (group,) * num_groups, torch.arange(stop - start, device=ids.device))


@contextmanager
def _eager(module: PreTrainedModel) -> Iterator[None]:
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(PAGED)
