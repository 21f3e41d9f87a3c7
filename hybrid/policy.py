"""The module that is trained: a HF model whose head runs a function of hidden states and head, and how batches enter it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid.attention import packing
from hybrid.batch import Batch
from hybrid.checkpointing import recompute_in_backward
from hybrid.lora import Adapter, named_parameters
from inference_v2.head import Head

R = TypeVar("R")


@dataclass(frozen=True)
class PlainCall:
    """Arguments of the HF model's own forward, on their way through the module that gathers its weights."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


HeadFunction = Callable[[Tensor, Head], R]  # (hidden [N, H], gathered head) -> anything that autograd and FSDP can walk


class PolicyModule(nn.Module):
    """A HF causal LM that gives the hidden states of chosen tokens, or what a function makes of them and of the head.

    The function runs inside the forward of the HF head module, so that the hooks which gather the head fire around it. A scalar
    model (a sequence classifier with one label) is the same with a head of one row, whose "logits" [N, 1] are its scores.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        vocab_limit: int | None = None,
        activation_checkpointing: bool = False,
        adapter: Adapter | None = None,
        value_head: nn.Linear | None = None,
    ) -> None:
        """value_head: a second head of one row, on the same hidden states; no part of the HF model."""
        super().__init__()
        self.hf = hf
        self.value_head = value_head
        self.adapter = adapter
        self.packs = False  # whether the decoder's attention takes packed sequences; else they are padded
        self.vocab_limit = vocab_limit
        self.scalar = hf.get_output_embeddings() is None
        text = hf.config.get_text_config()
        self._scale = float(getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1))
        self._softcap = getattr(text, "final_logit_softcapping", None)
        if self.scalar:
            self._scale, self._softcap = 1.0, None
        _accept_function(self.head_module, self.gathered_head)
        if value_head is not None:
            _accept_function(value_head, lambda: Head(value_head.weight))
        if activation_checkpointing:
            for layer in self.layers:
                recompute_in_backward(layer)

    @property
    def head_module(self) -> nn.Module:
        return cast(nn.Module, self.hf.score) if self.scalar else self.hf.get_output_embeddings()

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
        """Parameters by their name in the HF module (lora.Adapter says what an adapter's are called); a tied weight once."""
        return named_parameters(self.hf, self.adapter)

    def gathered_head(self) -> Head:
        """The head as it is right now: whole only while its group is gathered."""
        module = cast(nn.Linear, self.head_module)
        return Head(module.weight, module.bias, vocab_limit=self.vocab_limit, scale=self._scale, softcap=self._softcap)

    def forward(self, batch: Batch | PlainCall, head_function: HeadFunction[R] | None = None) -> Any:
        """Hidden states [N, H] at the batch's `loss_index`, or what `head_function` makes of them and of the head. A rank without
        tokens runs one that nothing reads, with the same collectives. A PlainCall: what the HF model itself returns for it."""
        if isinstance(batch, PlainCall):
            return self.hf(*batch.args, **batch.kwargs)
        decoder = self.hf.get_decoder()
        if batch.num_tokens == 0:
            batch = one_token(batch)
        if self.packs:
            token_ids, position_ids, rows = batch.token_ids[None], batch.positions[None], batch.loss_index
            options = {"packed": packing(batch.cu_seqlens)}
        else:
            token_ids, position_ids, flat_index = batch.padded()
            rows, options = flat_index[batch.loss_index], {}
        out = decoder(input_ids=token_ids, position_ids=position_ids, use_cache=False, **options)
        hidden = out.last_hidden_state.flatten(0, 1).index_select(0, rows)  # of [B, L, H] or [1, T, H]
        return hidden if head_function is None else self.head_module(hidden, head_function)


def _accept_function(head: nn.Module, gathered_head: Callable[[], Head]) -> None:
    """Let `head(hidden, f)` be `f(hidden, Head)`, and `head(hidden)` what it was."""
    plain = head.forward

    def forward(self: nn.Module, hidden: Tensor, function: HeadFunction[R] | None = None) -> R | Tensor:
        return plain(hidden) if function is None else function(hidden, gathered_head())

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]


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


def one_token(batch: Batch) -> Batch:
    """A batch without tokens, with one that does not count."""
    zero = batch.token_ids.new_zeros(1)
    return replace(batch, token_ids=zero, positions=zero, cu_seqlens=torch.arange(2, device=zero.device))


def empty_batch(device: torch.device | str = "cpu") -> Batch:
    """No sequences at all."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Batch(none, none, torch.zeros(1, dtype=torch.long, device=device), none, none, none)
