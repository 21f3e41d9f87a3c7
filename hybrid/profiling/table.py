"""A profile as text: totals, the costliest classes of modules at each depth, and the tree of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Node = Mapping[str, Any]  # of FlopsProfiler.report

LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "u"))
COLUMNS: tuple[tuple[str, Callable[[Node], float]], ...] = (
    ("params", lambda node: node["params"]),
    ("MACs", lambda node: node["macs"]),
    ("latency", lambda node: node["latency_s"] or 0.0),
)


def number_text(number: float, unit: str = "") -> str:
    """`426.52 MMACs`, `61.71 k`, `1.20 ms`: two decimals and the prefix of a thousand that fits."""
    scales = LARGE if abs(number) >= 1e3 else SMALL if 0 < abs(number) < 1 else ((1.0, ""),)
    scale, prefix = next((pair for pair in scales if abs(number) >= pair[0]), scales[-1])
    return f"{number / scale:.2f} {prefix}{unit}".rstrip()


def profile_text(root: Node, *, step: int, module_depth: int, top_modules: int, detailed: bool) -> str:
    """`root` is FlopsProfiler.report's dict. Raises ValueError for a depth below -1 or a negative count of modules."""
    if module_depth < -1 or top_modules < 0:
        raise ValueError(f"module_depth={module_depth}, top_modules={top_modules}; allowed: -1 (all) or more, 0 or more")
    seconds = root["latency_s"] or 0.0
    lines = [
        f"Profile of {root['class']} at step {step}",
        f"  data parallel size: {root['data_parallel_size']}",
        f"  parameters: {number_text(root['params'])}",
        f"  MACs: {number_text(root['macs'], 'MACs')}",
        f"  operations: {number_text(root['flops'], 'FLOPs')}",
        f"    forward: {number_text(root['forward_flops'], 'FLOPs')}",
        f"    backward: {number_text(root['backward_flops'], 'FLOPs')}",
        f"  forward latency: {number_text(seconds, 's')}",
    ]
    if seconds:
        lines.append(f"  forward rate: {number_text(root['forward_flops'] / seconds, 'FLOPS')}")
    lines += ["", f"Top {top_modules} classes of modules at each depth"]
    for depth, level in enumerate(_levels(root)):
        if module_depth < 0 or depth <= module_depth:
            lines += [f"  depth {depth}", *(f"    {line}" for line in _top(level, top_modules))]
    if detailed:
        lines += ["", "Modules (params, share; MACs, share; latency)", *_tree("", root, root, 1)]
    return "\n".join(lines)


def _levels(root: Node) -> Iterator[list[Node]]:
    level = [root]
    while level:
        yield level
        level = [child for node in level for child in node["children"].values()]


def _top(level: list[Node], count: int) -> Iterator[str]:
    for title, value in COLUMNS:
        sums: dict[str, float] = defaultdict(float)
        for node in level:
            sums[node["class"]] += value(node)
        best = sorted(sums.items(), key=lambda item: -item[1])[:count]
        unit = {"params": "", "MACs": "MACs", "latency": "s"}[title]
        yield f"{title}: " + ", ".join(f"{name} {number_text(number, unit)}" for name, number in best)


def _tree(name: str, node: Node, root: Node, indent: int) -> Iterator[str]:
    parts = [
        f"{number_text(node['params'])}, {_share(node['params'], root['params'])}",
        f"{number_text(node['macs'], 'MACs')}, {_share(node['macs'], root['macs'])}",
        "not run" if node["latency_s"] is None else number_text(node["latency_s"], "s"),
    ]
    label = f"({name}): {node['class']}" if name else node["class"]
    yield f"{'  ' * indent}{label} {'; '.join(parts)}"
    for key, child in node["children"].items():
        yield from _tree(key, child, root, indent + 1)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
