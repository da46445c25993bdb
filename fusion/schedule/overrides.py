"""Imposes decisions on the scheduler, so that alternatives which it priced and rejected can be timed.

A context of scheduling, like a target: it reaches every decision as an argument.  Other decisions are made by
price as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.codegen.tuning import Tuning
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Program
from fusion.schedule.clusters.alternatives import LIBRARY, ONE_KERNEL, OPERANDS_STORED, Alternative, weighed
from fusion.schedule.clusters.legality import Cluster

GROW_CLUSTERS = "clusters/grow_clusters"
"""The growth of clusters, as a pass that can be left out."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Imposes decisions; by default none.

    Attributes:
        products: the name of the alternative that is taken for each cluster around products, where it has one of this
            name: `ONE_KERNEL`, `LIBRARY`, `OPERANDS_STORED`, or the name of a product in parts.  `LIBRARY` also keeps
            products out of loops that consume their results; `ONE_KERNEL` generates products that a target would leave
            to the library unseen.
        attention: whether calls of attention are generated, where they can be, or the library's; None asks the price.
        fused: whether operations share kernels; without it, each node of the program is a kernel.
        without: optional passes that are left out, as "stage/pass" (`stages.OPTIONAL`); without `GROW_CLUSTERS`, each
            node or chain of nodes is a kernel.
        library: whether convolutions, and attention that nothing else generates, are left to the library; without it,
            they are decomposed into products.
        evaluated: whether kernels run in the evaluator, and none is built.

    >>> Overrides(products=LIBRARY).chains, Overrides().chains, Overrides(fused=False).chains
    (False, True, False)
    """

    products: str = ""
    attention: bool | None = None
    fused: bool = True
    without: frozenset[str] = frozenset()
    library: bool = True
    evaluated: bool = False

    @property
    def joins(self) -> bool:
        """Whether clusters grow."""
        return self.fused and GROW_CLUSTERS not in self.without

    @property
    def chains(self) -> bool:
        """Whether a loop may consume the results of products."""
        return self.fused and self.products != LIBRARY

    @property
    def leaves_products(self) -> bool:
        """Whether products that no loop consumes may be left to the library before they are priced."""
        return self.products != ONE_KERNEL

    def choose(self, program: Program, cluster: Cluster, kernel: Kernel, ways: Sequence[Alternative]) -> Tuning:
        """Choose the imposed alternative of a cluster, or the cheapest if it has none of this name; a `Measure`."""
        tuning = weighed(kernel, ways)
        wanted = [number for number, way in enumerate(ways) if way.name == self.products]
        if not wanted:
            return tuning
        trials = (
            trial if number in wanted else replace(trial, refused=f"{self.products} is imposed")
            for number, trial in enumerate(tuning.trials)
        )
        return replace(tuning, trials=tuple(trials), chosen=wanted[0])


PRICED = Overrides()
"""Nothing is imposed."""

__all__ = ["GROW_CLUSTERS", "LIBRARY", "ONE_KERNEL", "OPERANDS_STORED", "PRICED", "Overrides"]
