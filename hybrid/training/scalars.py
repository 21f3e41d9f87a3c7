"""Scalars of a run for TensorBoard, Weights & Biases and CSV files, under DeepSpeed's names. Only rank 0 writes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from hybrid.monitor import Logger, TensorBoard, WandB
from hybrid.training.config.top import TrainingConfig


class CsvFiles:
    """One file per scalar, `step,value` a line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            path = self._folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(["step", name])
                writer.writerow([step, value])

    def close(self) -> None:
        pass


def open_scalars(settings: TrainingConfig, rank: int) -> list[Logger | CsvFiles]:
    """Those that the config enables, on rank 0. Raises ImportError for a package that is not installed."""
    if rank != 0:
        return []
    found: list[Logger | CsvFiles] = []
    if settings.tensorboard.enabled:
        section = settings.tensorboard
        found.append(TensorBoard(Path(section.output_path or "runs") / section.job_name, None, {}, 0))
    if settings.wandb.enabled:
        folder = Path("wandb")
        folder.mkdir(exist_ok=True)
        found.append(WandB(folder, settings.wandb.project, settings.model_dump(), 0))
    if settings.csv_monitor.enabled:
        found.append(CsvFiles(Path(settings.csv_monitor.output_path or "csv_monitor") / settings.csv_monitor.job_name))
    return found
