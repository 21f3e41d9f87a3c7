"""What a finished run has to show: scores before and after, the teacher's, and where everything is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from recipes.commands.plot import plot, read_metrics
from trainers.config import RunConfig


def summary(config: RunConfig) -> Iterator[str]:
    """The lines; draws the plots where matplotlib is installed."""
    run_dir = Path(config.output_dir)
    scores = evaluations(run_dir)
    reward = config.eval.reward
    teacher = run_dir / "teacher"
    if (teacher / "metrics.jsonl").is_file() and (of_teacher := evaluations(teacher)):
        yield f"teacher   {of_teacher[-1]:.1%} {reward} on held-out prompts   {teacher / 'model'}"
    if scores:
        shown = [f"{score:.1%}" if config.eval.is_share else f"{score:.4g}" for score in scores]
        before = f"{shown[0]} -> " if len(shown) > 1 else ""
        distilled = getattr(config, "teacher", None) is not None
        yield f"{'student' if distilled else 'score':<10}{before}{shown[-1]} {reward} on held-out prompts"
    if ranked := evaluations(run_dir, "eval_accuracy"):
        before = f"{ranked[0]:.1%} -> " if len(ranked) > 1 else ""
        yield f"{'score':<10}{before}{ranked[-1]:.1%} of held-out pairs ranked right"
    yield f"model     {run_dir / 'model'} (a Hugging Face folder)"
    yield f"metrics   {run_dir / 'metrics.jsonl'}"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        yield "plots     need matplotlib: pip install matplotlib, then hybrid plot " + str(run_dir)
    else:
        yield f"plots     {', '.join(str(path) for path in plot(run_dir))}"


def evaluations(run_dir: Path, name: str = "eval_reward") -> list[float]:
    """One figure of every evaluation of a run, in order."""
    return [r[name] for r in read_metrics(run_dir) if r.get(name) is not None]
