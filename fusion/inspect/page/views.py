"""Draws the graphs of a report: as operations before fusion, and as launches and calls after it.

Input: the document of a report; output: for each graph two trees of views.  A view has at most `MOST_BOXES` boxes:
parts of a large graph are collapsed by module, and long lists of operations without modules by their position.  A
collapsed part has a separate view.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import TypedDict

from fusion.inspect.document.structure import GraphEntry
from fusion.inspect.page.layout import layered

MOST_BOXES = 120
"""The most boxes of a view, without those at its border."""
FEW_BOXES = 40
"""The boxes up to which a view shows parts of parts."""
BORDER = 12
"""The most boxes for neighbours outside a view, in either direction."""
LETTER, PADDING, WIDEST = 7.0, 20.0, 34
"""The width of a letter, the space around a label, and the most letters of a label."""


class ViewBox(TypedDict):
    """A box of a view: an operation or a step (`item`), a part with a separate view (`view`), or the outside."""

    label: str
    item: int | None
    view: str | None
    count: int
    x: int
    y: int
    width: float


class Line(TypedDict):
    """An edge between two boxes, as points; `tensors` are the first tensors that pass."""

    start: int
    end: int
    points: list[list[int]]
    tensors: list[str]


class GraphView(TypedDict):
    """A view, with its title and the view that it is a part of."""

    title: str
    parent: str | None
    boxes: list[ViewBox]
    lines: list[Line]
    width: float
    height: float


class GraphViews(TypedDict):
    """The views of a graph, before and after fusion, by key; the first one shows all."""

    before: dict[str, GraphView]
    after: dict[str, GraphView]


@dataclass(frozen=True, slots=True)
class Item:
    """Holds a drawn item: an operation or a step, with its operands and results."""

    label: str
    module: tuple[str, ...]
    reads: Sequence[str]
    writes: Sequence[str]


@dataclass(slots=True)
class ItemGroup:
    """Items that one box may stand for."""

    title: str
    items: list[int]
    parts: list[ItemGroup | int] = field(default_factory=list)


def views_of(graph: GraphEntry) -> GraphViews:
    """Return the views of a graph."""
    operations = [
        Item(each["name"], _components(each["place"]["module"]), each["reads"], each["writes"])
        for each in graph["operations"]
    ]
    steps = [
        Item(each["name"], _most(operations[k].module for k in each["operations"]), each["reads"], each["writes"])
        for each in graph["steps"]
    ]
    return GraphViews(before=_views(operations), after=_views(steps))


def _components(module: str) -> tuple[str, ...]:
    """Return the parts of a module's path; the number of a layer belongs to the list that it is in.

    >>> _components("transformer.h.0.attn")
    ('transformer', 'h.0', 'attn')
    """
    return tuple(re.split(r"\.(?!\d)", module)) if module else ()


def _most(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the module that most operations of a step are of, the first of several."""
    counted = Counter(path for path in paths if path)
    return counted.most_common(1)[0][0] if counted else ()


def _views(given: Sequence[Item]) -> dict[str, GraphView]:
    edges = _edges(given)
    items = _with_modules(given, edges)
    root = _collapsed("all", [*range(len(items))], items, 0)
    views: dict[str, GraphView] = {}
    todo: list[tuple[str, str | None, ItemGroup]] = [("0", None, root)]
    while todo:
        key, parent, part = todo.pop()
        inner = {f"{key}.{k}": each for k, each in enumerate(part.parts) if isinstance(each, ItemGroup)}
        views[key] = _view(part, parent, key, items, edges)
        todo.extend((name, key, each) for name, each in inner.items())
    return views


def _with_modules(items: Sequence[Item], edges: Sequence[tuple[int, int, str]]) -> list[Item]:
    """Return items; an item without a module gets the module of its first reader, or else of a producer."""
    modules = [item.module for item in items]
    readers = sorted(((start, end) for start, end, _ in edges), key=lambda edge: (-edge[0], edge[1]))
    for start, end in [*readers, *((end, start) for start, end, _ in edges)]:
        modules[start] = modules[start] or modules[end]
    return [replace(item, module=module) for item, module in zip(items, modules, strict=True)]


def _edges(items: Sequence[Item]) -> list[tuple[int, int, str]]:
    """Return (producer, reader, tensor): of a tensor that is written several times the last value before the reader."""
    writers: dict[str, int] = {}
    edges: list[tuple[int, int, str]] = []
    for number, item in enumerate(items):
        edges += [(writers[name], number, name) for name in dict.fromkeys(item.reads) if name in writers]
        writers.update(dict.fromkeys(item.writes, number))
    return edges


def _collapsed(title: str, numbers: list[int], items: Sequence[Item], depth: int) -> ItemGroup:
    """Return a part, in which modules are parts of their own if it has too many items."""
    part = ItemGroup(title, numbers)
    if len(numbers) <= MOST_BOXES:
        part.parts = [*numbers]
        return part
    groups: dict[str, list[int]] = {}
    for number in numbers:
        path = items[number].module
        groups.setdefault(path[depth] if depth < len(path) else "", []).append(number)
    loose = groups.pop("", [])
    alone = [inner[0] for inner in groups.values() if len(inner) == 1]
    parts = [_collapsed(name, inner, items, depth + 1) for name, inner in groups.items() if len(inner) > 1]
    part.parts = [*loose, *alone, *parts]
    part.parts = _bundled(sorted(_opened(part.parts), key=_first), items)
    return part


def _opened(parts: list[ItemGroup | int]) -> list[ItemGroup | int]:
    """Replace parts by their contents, the largest first, until there would be more than `FEW_BOXES` boxes."""
    while True:
        largest = max(
            (each for each in parts if isinstance(each, ItemGroup)), key=lambda each: len(each.items), default=None
        )
        if largest is None or len(parts) + len(largest.parts) - 1 > FEW_BOXES:
            return parts
        inner = [_named_within(largest, each) for each in largest.parts]
        parts = [each for each in parts if each is not largest] + inner


def _named_within(outer: ItemGroup, part: ItemGroup | int) -> ItemGroup | int:
    """Return a part under the name that it has outside of the part that holds it."""
    return part if isinstance(part, int) else ItemGroup(f"{outer.title}.{part.title}", part.items, part.parts)


def _bundled(parts: list[ItemGroup | int], items: Sequence[Item]) -> list[ItemGroup | int]:
    """Return at most `MOST_BOXES` parts, in which consecutive ones are bundled if there are more."""
    if len(parts) <= MOST_BOXES:
        return parts
    size = math.ceil(len(parts) / math.ceil(math.sqrt(len(parts))))
    bundles: list[ItemGroup | int] = []
    for start in range(0, len(parts), size):
        own = parts[start : start + size]
        numbers = [number for each in own for number in ([each] if isinstance(each, int) else each.items)]
        bundles.append(ItemGroup(f"{_title(own[0], items)} … {_title(own[-1], items)}", numbers, own))
    return _bundled(bundles, items)


def _first(part: ItemGroup | int) -> int:
    return part if isinstance(part, int) else part.items[0]


def _title(part: ItemGroup | int, items: Sequence[Item]) -> str:
    return items[part].label if isinstance(part, int) else part.title


def _view(
    part: ItemGroup, parent: str | None, key: str, items: Sequence[Item], edges: Sequence[tuple[int, int, str]]
) -> GraphView:
    """Lay out the boxes of a part and of its neighbours outside."""
    owner = {n: k for k, each in enumerate(part.parts) for n in ([each] if isinstance(each, int) else each.items)}
    boxes = [_box(each, f"{key}.{k}", items) for k, each in enumerate(part.parts)]
    passed: dict[tuple[int, int], list[str]] = {}
    for start, end, tensor in edges:
        a, b = owner.get(start), owner.get(end)
        if a is not None and b is not None and a != b:
            passed.setdefault((a, b), []).append(tensor)
    for a, b, tensor in _border(boxes, owner, edges, items):
        passed.setdefault((a, b), []).append(tensor)
    return _laid_out(part.title, parent, boxes, passed, len(part.parts))


def _border(
    boxes: list[ViewBox], owner: Mapping[int, int], edges: Sequence[tuple[int, int, str]], items: Sequence[Item]
) -> Iterator[tuple[int, int, str]]:
    """Add boxes for the nearest items outside, and yield the edges to and from them."""
    for into in (True, False):
        known: dict[int, int] = {}
        for start, end, tensor in edges:
            inside, outside = (owner.get(end), start) if into else (owner.get(start), end)
            if inside is None or outside in owner or (outside not in known and len(known) == BORDER):
                continue
            if outside not in known:
                known[outside] = len(boxes)
                boxes.append(ViewBox(label=items[outside].label, item=outside, view=None, count=0, x=0, y=0, width=0))
            yield (known[outside], inside, tensor) if into else (inside, known[outside], tensor)


def _box(part: ItemGroup | int, view: str, items: Sequence[Item]) -> ViewBox:
    if isinstance(part, int):
        return ViewBox(label=items[part].label, item=part, view=None, count=1, x=0, y=0, width=0)
    return ViewBox(label=part.title, item=None, view=view, count=len(part.items), x=0, y=0, width=0)


def _laid_out(
    title: str, parent: str | None, boxes: list[ViewBox], passed: Mapping[tuple[int, int], list[str]], own: int
) -> GraphView:
    """Place boxes; an edge against the order of the boxes (a part that another one interrupts) is laid out reversed."""
    for box in boxes:
        if len(box["label"]) > WIDEST:
            box["label"] = f"{box['label'][: WIDEST - 1]}…"
        suffix = f" ({box['count']})" if box["count"] > 1 else ""
        box["width"] = LETTER * len(box["label"] + suffix) + PADDING
    rank = [(k, 0) if k < own else (-1, k) for k in range(len(boxes))]
    for _, end in passed:
        if end >= own:
            rank[end] = (own, end)
    down = [(pair if rank[pair[0]] < rank[pair[1]] else pair[::-1]) for pair in passed]
    layout = layered([box["width"] for box in boxes], down)
    for box, (x, y) in zip(boxes, layout.centres, strict=True):
        box["x"], box["y"] = round(x), round(y)
    lines = [
        Line(
            start=pair[0],
            end=pair[1],
            points=[[round(x), round(y)] for x, y in (points if pair == way else points[::-1])],
            tensors=names[:3],
        )
        for (pair, names), way, points in zip(passed.items(), down, layout.edges, strict=True)
    ]
    return GraphView(title=title, parent=parent, boxes=boxes, lines=lines, width=layout.width, height=layout.height)


__all__ = ["GraphView", "GraphViews", "views_of"]
