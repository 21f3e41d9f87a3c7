"""What this machine has for each rank."""

from __future__ import annotations

import os

import torch

from hybrid.config import HybridConfig
from hybrid.memory import free_bytes
from recipes.doctor.case import Case


def room(case: Case) -> tuple[int | None, str]:
    """(bytes that one rank may take, in words); None: not known here."""
    ranks = case.nproc
    if not on_cuda(case.config.engine):
        free = free_bytes(torch.device("cpu")) // ranks
        return free, f"{amount(free)} free for each of {ranks}"
    if not torch.cuda.is_available():
        return None, "no GPU is here to compare with"
    number = torch.cuda.device_count()
    if ranks > number:
        return 0, f"{ranks} ranks need {ranks} GPUs and {number} are here"
    free = min(free_bytes(torch.device("cuda", i)) for i in range(ranks))
    return free, f"{amount(free)} free on each GPU"


def total_bytes(engine: HybridConfig) -> int | None:
    """All memory of a GPU, or of the machine where ranks run on it; None: not known here."""
    if not on_cuda(engine):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.mem_get_info(0)[1] if torch.cuda.is_available() else None


def on_cuda(engine: HybridConfig) -> bool:
    """Whether ranks will run on a GPU."""
    return engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available())


def amount(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
