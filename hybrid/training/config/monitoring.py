"""What is measured while training: `flops_profiler`, `comms_logger`. No torch."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from hybrid.config import Strict
from hybrid.training.config.fields import nearest

# The functions of torch.distributed that a CommsLogger tells apart
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)


class FlopsProfilerConfig(Strict):
    """Operations, parameters and time by module at one step (hybrid/profiling/flops.py)."""

    enabled: bool = Field(False, description="operations, parameters and time by module")
    profile_step: int = Field(1, ge=1, description="the one step that is profiled, from 1")
    module_depth: int = Field(-1, ge=-1, description="how deep the summary goes; -1: to the end")
    top_modules: int = Field(1, ge=0, description="classes of modules named at each depth")
    detailed: bool = Field(True, description="also the tree of modules")
    output_file: str | None = Field(None, description="None: the console")
    recompute_fwd_factor: float = Field(
        0.0, ge=0, description="taken for DeepSpeed's files and without effect: what is recomputed is counted as it runs"
    )


class CommsLoggerConfig(Strict):
    """Count, bytes and time of collectives (hybrid/profiling/comms.py). Nothing is recorded unless `enabled`."""

    enabled: bool = Field(False, description="count, bytes and time of collectives, by size: engine.comms_logger.log_summary()")
    prof_all: bool = Field(True, description="every collective; give prof_ops instead for some")
    prof_ops: tuple[str, ...] = Field(
        (), strict=False, description="functions of torch.distributed, e.g. all_reduce; (): see prof_all"
    )
    verbose: bool = Field(False, description="a log line for each collective")
    debug: bool = Field(False, description="and in it the line of code that asked for the collective")

    @field_validator("prof_ops")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in COLLECTIVES:
                raise ValueError(f"prof_ops has {name!r}, which is unknown; {nearest(name, COLLECTIVES)}")
        return names

    @model_validator(mode="after")
    def _check_choice(self) -> CommsLoggerConfig:
        if self.enabled and self.prof_ops and self.prof_all and "prof_all" in self.model_fields_set:
            raise ValueError(f"prof_all=true with prof_ops={list(self.prof_ops)}; allowed: one of them")
        if self.enabled and not self.prof_all and not self.prof_ops:
            raise ValueError("prof_all=false with prof_ops=[] records nothing; name operations, or set enabled=false")
        return self

    def records(self, name: str) -> bool:
        """Whether the collective of this name is recorded."""
        return self.enabled and (name in self.prof_ops if self.prof_ops else self.prof_all)
