"""The training data's loader: each rank its own share, in an order that all ranks draw alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from hybrid.mesh import Mesh


class TrainingLoader:
    """Batches of this rank, an epoch per iteration; each epoch has an order of its own, shuffled from the seed."""

    def __init__(
        self,
        dataset: Dataset[Any],
        mesh: Mesh,
        *,
        batch_size: int,
        drop_last: bool,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Raises ValueError for a data set without a length or with fewer samples than ranks."""
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(f"training_data is a {type(dataset).__name__}; allowed: a data set with __len__ and __getitem__")
        if len(dataset) < mesh.world_size:
            raise ValueError(f"training_data has {len(dataset)} samples for {mesh.world_size} ranks; give at least one each")
        self.epoch = 0
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, mesh.world_size, mesh.rank, shuffle=True, seed=seed, drop_last=drop_last
        )
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=batch_size, sampler=self.sampler, drop_last=drop_last, collate_fn=collate
        )

    @property
    def dataset(self) -> Dataset[Any]:
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)
