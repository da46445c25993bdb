"""Prints the subjects of passes: programs and clusters as text and Graphviz, launches.

Each function yields (file suffix, content) pairs, for dumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusion.codegen.tuning import Tuning
from fusion.lowering.ir.program import Program, reads, writes
from fusion.lowering.printer import format_kernel, format_program
from fusion.schedule import Clustering, Step
from fusion.schedule.kernels import KernelCall


def program_text(
    program: Program, clustering: Clustering | None = None, choices: Sequence[Tuning] = ()
) -> Iterator[tuple[str, str]]:
    """Print a program; with a clustering, its clusters instead, and the edges between them as Graphviz reads them.

    Args:
        choices: alternatives of products, which are printed behind the clusters.
    """
    if clustering is None:
        yield "txt", format_program(program)
        return
    yield "txt", "\n".join([_clusters_text(program, clustering), *map(str, choices)])
    yield "dot", _clusters_dot(program, clustering)


def launches_text(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """Print launches and calls, then the kernel of each launch."""
    kernels = [format_kernel(step.kernel) for step in steps if isinstance(step, KernelCall)]
    yield "txt", "\n\n".join(["\n".join(step_lines(steps)), *kernels])


def step_lines(steps: Sequence[Step]) -> list[str]:
    """Print launches and calls, a line each, with the buffers that they read and write."""
    lines: list[str] = []
    for step in steps:
        if isinstance(step, KernelCall):
            lines.append(f"launch {step.kernel.name}({', '.join(step.buffers)})")
        else:
            results = ", ".join(str(name) for name in writes(step))
            lines.append(f"call {step.name}({', '.join(step.reads)}) → {results}")
    return lines


def _clusters_text(program: Program, clustering: Clustering) -> str:
    lines: list[str] = []
    for number, cluster in enumerate(clustering.clusters):
        kind = "extern" if cluster.extern else "cluster"
        lines.append(f"{kind} {number}: {', '.join(map(str, cluster.space.axes))}")
        for member in cluster.members:
            for name in writes(program.nodes[member]):
                lines.append(f"    {name}  # {program.origins.get(name, '')}")
    lines.append("")
    lines.extend(f"not fused: {refusal}" for refusal in clustering.refusals)
    return "\n".join(lines)


def _clusters_dot(program: Program, clustering: Clustering) -> str:
    lines = ["digraph clusters {", "  rankdir=TB; node [shape=box, fontname=monospace];"]
    for number, cluster in enumerate(clustering.clusters):
        lines.append(f'  subgraph cluster_{number} {{ label="{number}";')
        for member in cluster.members:
            lines.extend(f'    "{name}";' for name in writes(program.nodes[member]))
        lines.append("  }")
    for node in program.nodes:
        lines.extend(f'  "{source}" -> "{out}";' for out in writes(node) for source in reads(node))
    lines.append("}")
    return "\n".join(lines)
