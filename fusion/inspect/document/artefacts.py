"""Produces the artefacts of kernels: the output of the target's tools for each source, with the lines it comes from.

Input: kernels of reports; output: their stages as text, or the message of the tool that failed.  Binaries are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fusion.codegen.build import is_idle
from fusion.codegen.target import Target
from fusion.codegen.targets import TARGETS
from fusion.inspect.document.lines import located
from fusion.inspect.document.structure import Artefact
from fusion.inspect.report import KernelReport
from fusion.lowering.errors import FusionError

WORKERS = 4
"""Kernels that the target's tools compile at once."""


def artefacts_of(
    kernels: Iterable[KernelReport], target: Target | None = None
) -> Mapping[tuple[str, str], tuple[list[Artefact], str]]:
    """Return, for the target's name and the source of each kernel, its artefacts and why others are missing.

    Args:
        target: compiles them; without it, the target of this name on this machine.
    """
    distinct = {(kernel.target, kernel.source): kernel for kernel in kernels}
    with ThreadPoolExecutor(WORKERS, "fusion-artefacts") as workers:
        results = workers.map(partial(_artefacts, target), distinct.values())
        return dict(zip(distinct, results, strict=True))


def _artefacts(target: Target | None, kernel: KernelReport) -> tuple[list[Artefact], str]:
    artefacts: list[Artefact] = []
    if kernel.kernel is None or is_idle(kernel.kernel):
        return artefacts, ""
    try:
        maker = TARGETS[kernel.target]() if target is None else target
        for stage, content in maker.stages(kernel.kernel, kernel.source):
            if isinstance(content, str):
                place = located(stage, content)
                artefacts.append(Artefact(stage=stage, text=place.text, lines=list(place.lines)))
    except FusionError as error:
        return artefacts, str(error)
    return artefacts, ""


__all__ = ["artefacts_of"]
