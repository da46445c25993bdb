"""Allocates scratch arrays on the heap, before a parallel region and for all of its threads.

Each array has a part for each thread, or is common to all of them.  A function that gets no memory for one of them
returns `NO_MEMORY`, before anything was stored; in a parallel region it could not return.  A function of one thread's
share is given memory instead (`placed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.codegen.c.calls import NO_MEMORY
from fusion.codegen.c.text.nest import Namespace


@dataclass(frozen=True, slots=True)
class Scratch:
    """An array of one thread: `count` (C text) elements of C type `held`.

    `common`: it is filled before a parallel region, and all threads read the same elements.
    """

    name: str
    held: str
    count: str
    common: bool = False

    @property
    def size(self) -> str:
        """Its bytes, in whole cache lines."""
        return f"({self.count}*sizeof({self.held}) + 63)/64*64"


@dataclass(frozen=True, slots=True)
class ParallelLines:
    """The lines before a parallel region, the first ones in it, and those after it."""

    before: list[str]
    inside: list[str]
    after: list[str]


def on_heap(arrays: Sequence[Scratch], space: Namespace, *, shared: bool) -> ParallelLines:
    """Return the lines that allocate and free `arrays`; `shared`: in a parallel region each thread has its own."""
    if not arrays:
        return ParallelLines([], [], [])
    before: list[str] = []
    inside: list[str] = []
    names: list[str] = []
    for each in arrays:
        apart = shared and not each.common
        names.append(space.exactly(f"{each.name}_all") if apart else each.name)
        if apart:
            before.append(f"{each.held} *{names[-1]} = aligned_alloc(64, threads*({each.size}));")
            part = f"omp_get_thread_num()*({each.size}/sizeof({each.held}))"
            inside.append(f"{each.held} *restrict {each.name} = {names[-1]} + {part};")
        else:
            before.append(f"{each.held} *restrict {each.name} = aligned_alloc(64, {each.size});")
    free = [f"__builtin_free({name});" for name in names]
    before += [f"if (!({' && '.join(names)})) {{", *(f"    {line}" for line in free), f"    return {NO_MEMORY};", "}"]
    return ParallelLines(before, inside, free)


def placed(arrays: Sequence[Scratch]) -> tuple[list[str], str]:
    """Return the lines that place `arrays` in the memory at `scratch`, and their bytes in all.

    >>> placed([Scratch("x", "float", "8"), Scratch("y", "double", "n")])[0][1]
    'double *restrict y = (double *)(scratch + (8*sizeof(float) + 63)/64*64);'
    """
    lines, sizes = list[str](), list[str]()
    for each in arrays:
        lines.append(f"{each.held} *restrict {each.name} = ({each.held} *)({' + '.join(['scratch', *sizes])});")
        sizes.append(each.size)
    return lines, " + ".join(sizes) or "0"
