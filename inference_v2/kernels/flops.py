"""What the kernels in C++ multiply, told to whoever counts: no torch op runs there that a dispatch mode could see.

A listener hears of calls made in its own context (contextvars), and each call costs one look-up where nobody listens. A product
of [m, k] and [k, n] counts 2 m k n; attention counts, as torch's counter does, the whole rectangle of a sequence's queries and
keys: what a causal mask or a window leaves out is not taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from torch import Tensor

Listener = Callable[[str, int], None]  # (kernel, floating-point operations)

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("kernel_flops_listeners", default=())


def listen(listener: Listener) -> None:
    """Tell `listener` of every kernel of this context from now on."""
    _listeners.set((*_listeners.get(), listener))


def unlisten(listener: Listener) -> None:
    """Undo `listen`; others go on hearing. Nothing happens for one that does not listen."""
    _listeners.set(tuple(other for other in _listeners.get() if other != listener))


def tell_product(rows: int, in_features: int, out_features: int) -> None:
    for listener in _listeners.get():
        listener("cpu_linear", 2 * rows * in_features * out_features)


def tell_attention(
    kernel: str,
    cu_query_lens: Tensor,  # [B + 1]
    key_lens: Tensor | None,  # [B]; None: as many keys as queries
    num_heads: int,
    head_dim: int,
    products: int = 2,
) -> None:
    """`products`: how many [queries, head_dim] by [head_dim, keys] products there are: 2 forward, 5 backward (scores again)."""
    if listeners := _listeners.get():
        query_lens = cu_query_lens.long().diff()
        pairs = int((query_lens * (query_lens if key_lens is None else key_lens)).sum())
        for listener in listeners:
            listener(kernel, 2 * products * num_heads * head_dim * pairs)
