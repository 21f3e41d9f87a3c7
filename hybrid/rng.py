"""The random generators of one rank as tensors (torch, CUDA, Python's `random`, NumPy's global one), on disk as safetensors."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def capture() -> dict[str, Tensor]:
    """The state of every global generator, by name."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert (version, name) == (3, "MT19937")
    state = {
        "torch.cpu": torch.get_rng_state(),  # uint8
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["torch.cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Tensor]) -> None:
    """Undoes every draw since `capture`. A CUDA state is left out where there is no CUDA device, and the reverse."""
    torch.set_rng_state(state["torch.cpu"])
    gauss = state["python.gauss"].tolist()
    random.setstate((3, tuple(state["python.words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy.position"].tolist()
    keys = state["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy.gauss"].item()))
    if "torch.cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["torch.cuda"])


def seed_all(*entropy: int) -> None:
    """Seeds every global generator from a hash of `entropy` (say: seed, step, rank)."""
    words = np.random.SeedSequence(entropy).generate_state(4, np.uint64).tolist()
    torch.manual_seed(words[0] >> 1)  # CUDA's too
    random.seed(words[1])
    np.random.seed(words[2] & 0xFFFFFFFF)


def save(path: str | os.PathLike[str], state: dict[str, Tensor] | None = None) -> None:
    """A captured state, or the present one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(capture() if state is None else state, path)


def load(path: str | os.PathLike[str]) -> None:
    restore(load_file(path))
