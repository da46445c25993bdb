"""Writes expressions as C text, each at the outermost loop level where its operands exist.

A value used once, where it is computed, is inlined; any other gets a name.  Loop invariants are computed outside of the
loop, index arithmetic included: the part of an offset that is known further out is named there.  Values of the
outermost level stay valid for the sweeps that follow.  Checked indices are checked where they are first known; after a
failed check the loops go on with another index, and the function returns the failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
import torch
from typing_extensions import assert_never

from fusion.codegen.c.text.code import BITS, CHOICE, COMPARE, SUM, Code, element_of
from fusion.codegen.c.text.indices import affine, index_code
from fusion.codegen.c.text.nest import NONE, WRONG, YES, Level, Namespace
from fusion.codegen.c.text.operations import operation_code
from fusion.codegen.c.text.storage import VALUE_TYPES, constant, converted, loaded
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, concrete, const, postorder
from fusion.lowering.ir.kernel import Spans
from fusion.lowering.ir.scalar_ops import CHECKED

FARTHEST_UNROLLED = 64
"""The largest stride of a loop whose loads GCC may group once inner loops are unrolled."""

MOST_APART = 4
"""The largest stride between lanes whose neighbours are loaded together, as whole vectors, and sorted."""

CHOICES = frozenset(("where", "minimum", "maximum", "sign"))
"""Operations that C computes by a condition."""

LONGEST, LONGEST_ROOT = 64, 96
"""The longest value, in characters, that is inlined; the longest that is a whole statement."""


class ValueWriter:
    """Writes the values of one kernel.  `open` starts a sweep; `write` puts lines on its levels and returns texts."""

    def __init__(
        self,
        where: Spans,
        space: Namespace,
        axes: Mapping[sympy.Symbol, str],
        params: Mapping[str, str],
        written: frozenset[str],
    ) -> None:
        """Take `written`, the parameters that are mutated; they are read once, before the stores."""
        self._where, self._space, self._axes, self._params, self._written = where, space, axes, params, written
        self._known: dict[Expr, Code] = {}  # valid everywhere in the grid point
        self._local: dict[Expr, Code] = {}  # valid in the open sweep
        self._known_offsets: dict[sympy.Expr, str] = {}
        self._local_offsets: dict[sympy.Expr, str] = {}
        self._local_bases: dict[tuple[str, str], str] = {}  # base, condition → the base where it holds, else 0
        self._levels: Sequence[Level] = ()
        self._depth: Mapping[sympy.Symbol, int] = {}
        self._unmasked: frozenset[Load] = frozenset()
        self._chosen: frozenset[Expr] = frozenset()
        self._places: dict[str, Code] = {}  # the name of a checked index → the index before its check

    def open(
        self, levels: Sequence[Level], depth: Mapping[sympy.Symbol, int], unmasked: frozenset[Load] = frozenset()
    ) -> None:
        """Start a nest in which the loop over axis `a` is `levels[depth[a]]`; other axes are bound at level 0.

        Args:
            unmasked: loads that read the start of their tensor where their mask is false.
        """
        self._levels, self._depth, self._unmasked = levels, depth, unmasked
        self._local, self._local_offsets, self._local_bases = {}, {}, {}
        self._chosen = chosen_positions(self._where)

    def learn(self, value: Expr, code: Code) -> None:
        """Record `code` for `value`, at every point of the axes it spans."""
        self._known[value] = code

    def learn_here(self, value: Expr, code: Code) -> None:
        """Record `code` for `value` in the open nest."""
        self._local[value] = code

    def write(self, roots: Sequence[Expr], *, named: frozenset[Expr] = frozenset()) -> list[Code]:
        """Return code of `roots`, valid in the innermost loop; those in `named` are names, literals or elements.

        Raises:
            BuildError: an operation, dtype or index that has no C text.
        """
        order = list(self._unknown(roots))
        uses = Counter(child for node in order for child in node.children())
        uses.update(roots)
        reader_depth = {child: self._depth_of(node) for node in order for child in node.children()}
        # C reads only the selected side of a `?:`; if both are named before, lanes need no masks.
        arms = {arm for node in order if isinstance(node, Op) and node.name == "where" for arm in node.args[1:]}
        inside: list[Expr] = []  # inlined: without a name for other uses
        for node in order:
            depth = self._depth_of(node)
            if isinstance(node, Op) and node.name == CHECKED:
                (self._local if depth else self._known)[node] = self._checked(node, depth)
                continue
            code = self._code(node)
            if any(self._get(child).unconditional for child in node.children()):
                code = replace(code, unconditional=True)
            here = reader_depth.get(node, len(self._levels) - 1) == depth
            longest = LONGEST if node in reader_depth else LONGEST_ROOT
            once = uses[node] == 1 and here and len(code.text) <= longest and node not in named
            once = once and not (node in arms and code.unconditional) and not self._is_updated(node)
            if not (once or _is_literal(node)):
                code = self._named(node, code, depth)
            (self._local if depth or once else self._known)[node] = code
            inside += [node] if once else []
        codes = [self._get(root) for root in roots]
        for node in inside:
            del self._local[node]
        return codes

    def position(self, offset: sympy.Expr) -> Code:
        """Return an offset in a flat buffer, valid in the innermost loop."""
        return self._index(offset)

    # Levels ------------------------------------------------------------------------------------------------------

    def _depth_of(self, node: Expr) -> int:
        return max((self._depth.get(symbol, 0) for symbol in self._where[node]), default=0)

    def _is_updated(self, node: Expr) -> bool:
        """Return whether this loads from a tensor that the kernel writes, and so has to precede the stores."""
        return isinstance(node, Load) and node.buffer in self._written

    def _named(self, node: Expr, code: Code, depth: int) -> Code:
        """Declare a name for a value at its level, and return it."""
        name = self._space.fresh(f"{self._params[node.buffer]}_" if isinstance(node, Load) else "t")
        self._levels[depth].before.append(f"const {VALUE_TYPES[node.dtype]} {name} = {code};")
        return Code(name)

    def _get(self, node: Expr) -> Code:
        return self._local[node] if node in self._local else self._known[node]

    def _unknown(self, roots: Sequence[Expr]) -> Iterator[Expr]:
        """Yield sub-expressions without a text, operands first."""
        seen: set[Expr] = set()
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, expanded = stack.pop()
            if expanded:
                yield node
            elif node not in seen and node not in self._local and node not in self._known:
                seen.add(node)
                stack.append((node, True))
                stack.extend((child, False) for child in reversed(node.children()))

    # Texts -------------------------------------------------------------------------------------------------------

    def _code(self, node: Expr) -> Code:
        match concrete(node):
            case Const(value, dtype):
                return constant(value, dtype)
            case IndexValue(index, dtype):
                return converted(torch.int64, dtype, self._index(index))
            case Load() as load:
                return self._element(load)
            case Op(name, args, dtype):
                codes = [self._get(arg) for arg in args]
                if name == "eq" and isinstance(args[1], IndexValue | Const):  # a refused index is equal to no position
                    codes[0] = self._places.get(codes[0].text, codes[0])
                code = operation_code(name, args[-1].dtype, dtype, codes)
                return self._hidden(code, dtype) if node in self._chosen else code
            case Cast(arg, dtype):
                code = converted(arg.dtype, dtype, self._get(arg))
                return self._hidden(code, dtype) if node in self._chosen else code
            case Random(kind, seed, offset):
                return Code(f"random_{kind}({self._get(seed)}, {self._index(offset)})")
            case TileRef(name):
                raise AssertionError(f"{name} is read before its fold is complete")
            case unknown:
                assert_never(unknown)

    def _element(self, load: Load) -> Code:
        """Return the element that a load reads; 0 if its mask is false."""
        index = load.index[0]
        if load in self._unmasked and load.mask is not None and not isinstance(index, Expr):
            return self._chosen_after(load, index, load.mask)
        position = self._get(index) if isinstance(index, Expr) else self._index(index)
        if load.mask is not None and self._may_be_grouped(load, load.mask):
            position = self._hidden(position)
        element = loaded(load.dtype, element_of(self._params[load.buffer], position))
        if load.mask is None:
            return element
        mask = self._get(load.mask).at(COMPARE)
        if self._depth_of(load.mask) == len(self._levels) - 1:
            mask = f"({mask} & {self._space.unknown(YES)})"
        return Code(f"{mask} ? {element} : 0", CHOICE, unconditional=True)

    def _chosen_after(self, load: Load, index: sympy.Expr, mask: Expr) -> Code:
        """Load an element whatever its mask says, at the start of the tensor where that is false; then choose."""
        base, rest = self._base_and_rest(index)
        condition, innermost = self._get(mask).at(COMPARE), len(self._levels) - 1
        if base:
            at = self._local_bases.get((base, condition))
            if at is None:
                at = self._local_bases[base, condition] = self._space.fresh("at")
                outside = next(each for each in reversed(self._levels[:innermost]) if not each.turns)
                outside.before.append(f"const int64_t {at} = {condition} ? {base} : 0;")
            rest = Code(f"{at} + {rest}", SUM)
        element = loaded(load.dtype, element_of(self._params[load.buffer], rest))
        return Code(f"{condition} ? {self._named(load, element, innermost)} : 0", CHOICE)

    def _may_be_grouped(self, node: Load, mask: Expr) -> bool:
        """Return whether lanes may read neighbours of this element under the same mask, with a stride between lanes.

        GCC 12 loads such a group as whole vectors, all under the mask of the first of them.
        """
        index = affine(node.index[0]) if isinstance(node.index[0], Expr) else node.index[0]
        if index is None:
            return False
        innermost = len(self._levels) - 1
        for axis in self._where[mask]:
            stride = coefficient(index, axis)
            if stride is None or not stride.is_Integer or abs(stride) < 2:
                continue
            in_lanes = bool(self._levels[innermost].pragma)  # a loop that GCC does not unroll before it makes lanes
            if self._depth.get(axis, 0) == innermost if in_lanes else abs(stride) <= FARTHEST_UNROLLED:
                return True
        return False

    def _checked(self, node: Op, depth: int) -> Code:
        """Return an index, checked where it is known; if the check fails, `wrong` is set and a valid index used.

        Lanes do not branch: they keep the farthest of their indices, negative ones being the farthest of all.
        """
        index, wrap, last = (self._get(arg).at() for arg in node.args[:3])
        level, place, inside = self._levels[depth], self._space.fresh("place"), self._space.fresh("inside")
        if node.args[1] is not const(0, torch.int64):
            if not index.isidentifier():
                held = self._space.fresh("t")
                level.before.append(f"const int64_t {held} = {index};")
                index = held
            index = f"{index} < 0 ? {index} + {wrap} : {index}"
        level.before.append(f"const uint64_t {place} = {index};")
        if level.pragma:
            outside = next(each for each in reversed(self._levels[:depth]) if not each.turns)
            farthest = self._space.fresh("farthest")
            outside.before.append(f"uint64_t {farthest} = 0;")
            level.before.append(f"{farthest} = {farthest} > {place} ? {farthest} : {place};")
            level.clauses.append(f"reduction(max:{farthest})")
            outside.after.insert(0, f"if ({farthest} > {last}) {WRONG} = 1;")
        else:
            level.before.append(f"if ({place} > {last}) {WRONG} = 1;")
        # Named: inlined into a subscript, the select would need masks in lanes.
        code = Code(f"{place} < {last} ? {place} : {last}", CHOICE)
        code = self._hidden(code) if node.args[2] is const(1, torch.int64) else code
        level.before.append(f"const int64_t {inside} = {code};")
        self._places[inside] = Code(place)
        return Code(inside)

    def _hidden(self, code: Code, dtype: torch.dtype = torch.int64) -> Code:
        """Return an integer whose origin is hidden from the compiler."""
        code = Code(f"{code.at()} | {self._space.unknown(NONE)}", BITS)
        return code if dtype is torch.int64 else Code(f"({VALUE_TYPES[dtype]})({code})")

    def _index(self, expr: sympy.Expr) -> Code:
        """Return `expr`, with its loop-invariant parts named outside of the inner loops."""
        base, rest = self._base_and_rest(expr)
        return Code(f"{base} + {rest}", SUM) if base else rest

    def _base_and_rest(self, expr: sympy.Expr) -> tuple[str, Code]:
        """Return the name of the loop-invariant part of `expr`, "" for none, and the rest.

        Neighbours that the innermost loop reads with a stride differ in the rest: compilers then see that they are.
        """
        groups: dict[int, list[sympy.Expr]] = {}
        for term in sympy.Add.make_args(sympy.expand_mul(expr)):
            depth = max((self._depth.get(symbol, 0) for symbol in term.free_symbols), default=0)
            groups.setdefault(depth, []).append(term)
        *outer, inner = sorted(groups)
        if outer and outer[0] == 0 and inner == len(self._levels) - 1:
            groups[0], near = _without_nearest(groups[0], groups[inner])
            groups[inner].append(near)
            outer = outer if groups[0] else outer[1:]
        named: sympy.Expr = sympy.Integer(0)
        base = ""
        for depth in outer:
            named += sympy.Add(*groups[depth])
            base = self._named_offset(named, sympy.Add(*groups[depth]), base, depth)
        return base, index_code(sympy.Add(*groups[inner]), self._axes)

    def _named_offset(self, total: sympy.Expr, part: sympy.Expr, base: str, depth: int) -> str:
        text = self._local_offsets.get(total) or self._known_offsets.get(total)
        if text is None:
            text = index_code(part, self._axes).text
            if base or not _is_word(part):
                text = f"{base} + {text}" if base else text
                name = self._space.fresh("at")
                self._levels[depth].before.append(f"const int64_t {name} = {text};")
                text = name
            (self._local_offsets if depth else self._known_offsets)[total] = text
        return text


def chosen_positions(values: Iterable[Expr]) -> frozenset[Expr]:
    """Return the integer subexpressions of load indices that a condition selects.

    They are computed separately, because GCC 12 otherwise folds the condition into the index and emits masked loads.
    """
    roots = [value.index[0] for value in values if isinstance(value, Load) and isinstance(value.index[0], Expr)]
    return frozenset(
        node
        for node in postorder(*roots)
        if not node.dtype.is_floating_point
        and node.dtype is not torch.bool
        and (node.arg.dtype is torch.bool if isinstance(node, Cast) else isinstance(node, Op) and node.name in CHOICES)
    )


def _without_nearest(terms: Sequence[sympy.Expr], inner: Sequence[sympy.Expr]) -> tuple[list[sympy.Expr], sympy.Expr]:
    """Return invariant terms without the part of their constant that distinguishes neighbours, and that part.

    `inner`: the terms of the innermost loop.  The part is 0 unless they step by 2 to `MOST_APART` elements.

    >>> i, r = sympy.symbols("i r", integer=True)
    >>> _without_nearest([3 * i, sympy.Integer(-63)], [2 * r]), _without_nearest([3 * i, sympy.Integer(-63)], [r])
    (([3*i, -64], 1), ([3*i, -63], 0))
    """
    number, step = sum(int(term) for term in terms if term.is_Integer), inner[0].as_coeff_Mul()[0]
    if len(inner) != 1 or not step.is_Integer or not 1 < int(step) <= MOST_APART:
        return list(terms), sympy.Integer(0)
    near = number % int(step)
    far = [sympy.Integer(number - near)] if number != near else []
    return [*(term for term in terms if not term.is_Integer), *far], sympy.Integer(near)


def _is_literal(node: Expr) -> bool:
    """Return whether the code of `node` is a literal or the name of an axis."""
    return isinstance(node, Const) or (
        isinstance(node, IndexValue) and node.dtype is torch.int64 and _is_word(node.index)
    )


def _is_word(index: sympy.Expr) -> bool:
    return index.is_Symbol or (index.is_Integer and bool(index >= 0))
