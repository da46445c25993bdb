"""Joins products of the same rows into one alternating product over the blocks of all their columns.

The queries, keys and values of a layer: a block of columns belongs to one product, which determines its descriptors and
the pointers of its epilogue (`products/selection.py`).  One after another (`side_by_side`), each product would end in
an epilogue that no sum hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import Self

from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.expressions.code import Code
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.forms.alternating_product import AlternatingProduct, speed
from fusion.codegen.triton.forms.alternating_product.config import AlternatingConfig
from fusion.codegen.triton.forms.alternating_product.program import functions
from fusion.codegen.triton.forms.alternating_product.rule import common
from fusion.codegen.triton.forms.form import Refused, Task
from fusion.codegen.triton.forms.side_by_side.joined import JoinedProducts, products_of, single_products
from fusion.codegen.triton.writer import Writer
from fusion.lowering.ir.kernel import Kernel


@dataclass(frozen=True)
class JoinedAlternatingProducts(JoinedProducts):
    """The plan for products that groups of warps compute in turn."""

    name = "joined alternating products"
    takes = (AlternatingConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept kernels whose products `joined` accepts."""
        products = joined(task, task.kernel.parts) if task.kernel.beside else ()
        return cls(task, products) if products else Refused("it is not several alternating products of the same rows")

    def layouts(self, writer: Writer) -> list[Layout]:
        """Return the layout of each product; all have the same configuration."""
        plans = [AlternatingProduct(replace(self.task, kernel=product)) for product in self.products]
        best = speed.ranked([plan.blocked for plan in plans])[0]
        fitted = [plan.fit(best) for plan in plans]
        assert all(config == fitted[0] for config in fitted), "they have results of one type"
        return [plan.lay_out(fitted[0], writer) for plan in plans if fitted[0] is not None]

    def functions_of(self, layouts: Sequence[Layout], writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return the functions of the loading warp and of a group, and the kernel that starts them."""
        return functions(self.task.kernel, layouts, writer, hosted)

    def per_multiprocessor(self, config: Config) -> int:
        """Return 1: the groups of a program fill the multiprocessor."""
        return 1


def joined(task: Task, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return the products of several kernels, each as a kernel, if groups in turn compute them best; else none.

    They do where one group cannot compute them in one loop (`side_by_side/joined.py`).
    """
    alone = [replace(task, kernel=replace(kernel, beside=())) for kernel in kernels]
    if not all(each.blocked.contraction and len(each.blocked.dots) > 0 for each in alone):
        return ()
    products = tuple(product for each in alone for product in single_products(each.kernel))
    tasks = [replace(task, kernel=product) for product in products]
    plans = [AlternatingProduct.applies(each) for each in tasks]
    if any(isinstance(plan, Refused) or plan.fit(plan.configs()[0]) is None for plan in plans):
        return ()
    blocked = [each.blocked for each in tasks]
    shared = {common(each) for each in blocked}
    if len(shared) != 1 or None in shared:
        return ()
    if not speed.hides_epilogues(blocked) or (products_of(task, kernels) and not speed.is_fastest(blocked)):
        return ()
    return products
