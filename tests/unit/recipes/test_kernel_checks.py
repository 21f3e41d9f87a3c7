"""The comparison that gpu_check makes: it passes the reference, and it tells when a kernel is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inference_v2.kernels import REFERENCE
from recipes.bench.kernel_checks import CASES, Setting, compare

WRONG = {
    "norms": {"rms_norm": lambda x, weight, eps: REFERENCE.rms_norm(x, weight, eps) * 1.05},
    "activation": {"silu_and_mul": lambda x: REFERENCE.silu_and_mul(x.roll(1, -1))},
    "cache_entry": {"enter_attention": lambda *a: REFERENCE.enter_attention(*a[:6], a[6] - a[6], *a[7:])},
    "attention": {"paged_attention": lambda *a, **k: REFERENCE.paged_attention(*a, **k | {"window": 5})},
    "attention_alone_and_together": {
        "paged_attention": lambda q, *a: REFERENCE.paged_attention(q, *a) + (1e-6 if len(q) < 9 else 0.0)
    },
    "sampling": {"sample": lambda z, edited, *a: REFERENCE.sample(z, None, *a)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_itself_and_a_wrong_kernel_is_seen(case: str, dtype: torch.dtype) -> None:
    setting = Setting(REFERENCE, torch.device("cpu"), dtype, small=True)
    assert compare(case, setting) == {"ok": True, "largest": 0.0, "equal": 1.0}
    if dtype == torch.float32:
        assert not compare(case, replace(setting, kernels=replace(REFERENCE, **WRONG[case])))["ok"]
