"""Completions on their way from the rank that computed them to the rank that trains on them: bytes, nothing pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.mesh import Mesh
from hybrid.shares import deal
from inference_v2.types import Completion


def hand_over(
    mesh: Mesh, computed: Mapping[int, Sequence[Completion]], prompts: Sequence[Sequence[int]]
) -> dict[int, list[Completion]]:
    """This rank's prompts, by their place, with their samples. `computed` holds what this rank computed; together the ranks have
    every prompt once. Prompts are dealt by their tokens (prompt and samples): a function of the tokens, not of who computed them.
    Collective."""
    tokens = [0.0] * len(prompts)
    for i, samples in computed.items():
        tokens[i] = float(sum(len(prompts[i]) + len(sample.token_ids) for sample in samples))
    shares = deal(mesh.sum(tokens), mesh.world_size)
    owner = {i: rank for rank, share in enumerate(shares) for i in share}
    parcels: list[list[bytes]] = [[] for _ in shares]
    for i in sorted(computed):
        parcels[owner[i]].append(_pack(i, computed[i]))
    received = _exchange(mesh, [b"".join(parcel) for parcel in parcels])
    found = dict(pair for parcel in received for pair in _unpack(parcel, prompts))
    assert sorted(found) == shares[mesh.rank], f"prompts {sorted(found)} arrived, {shares[mesh.rank]} were due"
    return {i: found[i] for i in shares[mesh.rank]}


def _exchange(mesh: Mesh, parcels: Sequence[bytes]) -> list[bytes]:
    """Parcel r goes to rank r; what each rank sent to this one."""
    sizes = mesh.table([len(parcel) for parcel in parcels])
    incoming = [int(row[mesh.rank]) for row in sizes]
    sent = _bytes_tensor(b"".join(parcels))
    received = torch.empty(sum(incoming), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, incoming, [len(parcel) for parcel in parcels])
    return [part.numpy().tobytes() for part in received.split(incoming)]


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _pack(index: int, samples: Sequence[Completion]) -> bytes:
    """Length of a JSON head, the head, then per sample its ids (int64) and both log-probs (float64)."""
    head = [
        [s.sample_index, s.finish_reason, s.weight_version, s.text, s.error, len(s.token_ids), len(s.logprobs)] for s in samples
    ]
    text = json.dumps([index, head]).encode()
    numbers = [
        np.array(values, dtype=dtype).tobytes()
        for s in samples
        for values, dtype in ((s.token_ids, np.int64), (s.logprobs, np.float64), (s.logprobs_raw, np.float64))
    ]
    return b"".join((len(text).to_bytes(8, "little"), text, *numbers))


def _unpack(data: bytes, prompts: Sequence[Sequence[int]]) -> list[tuple[int, list[Completion]]]:
    """`request_id` is the prompt's place."""
    found: list[tuple[int, list[Completion]]] = []
    at = 0

    def take(count: int, dtype: type) -> tuple:
        nonlocal at
        at += 8 * count
        return tuple(np.frombuffer(data, dtype, count, at - 8 * count).tolist())

    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        index, head = json.loads(data[at + 8 : at + 8 + size])
        at += 8 + size
        samples = []
        for sample_index, reason, version, text, error, num_tokens, num_logprobs in head:
            ids, logprobs, raw = take(num_tokens, np.int64), take(num_logprobs, np.float64), take(num_logprobs, np.float64)
            prompt = tuple(prompts[index])
            samples.append(Completion(index, sample_index, prompt, ids, logprobs, raw, reason, version, text, error))
        found.append((index, samples))
    return found
