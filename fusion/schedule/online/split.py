"""Decomposes one value of a fold into terms.

Input: an expression over varying and running values; output: its terms.  Refused are expressions in which no rule
separates the two, and sums that cancel: products of two sums of varying and running values, or of (x - d) and x, which
are raw moments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy
import torch

from fusion.lowering.expr import Cast, Const, Expr, Op, TileRef, const, index_of, make_op, postorder
from fusion.lowering.kernel import Fold
from fusion.lowering.scalar_ops import SCALAR_OPS, ScalarName
from fusion.schedule.online.terms import (
    Kind,
    Part,
    Range,
    Refused,
    Step,
    Term,
    Terms,
    add_all,
    cast_again,
    cores,
    factors_of,
    fits_half,
    is_infinite,
    is_sum,
    is_zero,
    loop_of,
    multiplied,
    negated,
    nonnegative,
    one_of,
    part_of,
    product,
    scaled_by,
    signed_loop,
    step_under,
)


class Splitter:
    """Decomposes expressions; `over` are the axes of the fold, `running` the folds that are not complete."""

    def __init__(self, over: Collection[sympy.Symbol], running: Mapping[str, Fold]) -> None:
        self.over, self.running = frozenset(over), running
        self._kinds: dict[Expr, Kind] = {}

    def kind(self, expr: Expr) -> Kind:
        """Return the dependences of `expr`.  The result of a fold elsewhere may vary along any axis."""
        stack = [expr]
        while stack:
            node = stack[-1]
            missing = [child for child in node.children() if child not in self._kinds]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            kind = Kind.FIXED
            if isinstance(node, TileRef):
                kind = Kind.RUNNING if node.name in self.running else Kind.VARYING
            elif any(index.free_symbols & self.over for index in index_of(node)):
                kind = Kind.VARYING
            for child in node.children():
                kind |= self._kinds[child]
            self._kinds[node] = kind
        return self._kinds[expr]

    def terms(self, root: Expr) -> Terms:
        """Return the terms of `root`.

        Raises:
            Refused: no rule separates varying and running values, or the terms would cancel.
        """
        done: dict[Expr, Terms | Refused] = {}
        stack = [root]
        while stack:
            node = stack[-1]
            mixed = self.kind(node) is Kind.MIXED
            missing = [child for child in node.children() if child not in done] if mixed else []
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            done[node] = self._node(node, done) if mixed else self._undivided(node)
        result = done[root]
        if isinstance(result, Refused):
            raise result
        return result

    def _undivided(self, node: Expr) -> Terms:
        if self.kind(node) is Kind.RUNNING:
            return (Term(None, (Step("mul", node),)),)
        return (Term(node),)

    def _node(self, node: Expr, done: Mapping[Expr, Terms | Refused]) -> Terms | Refused:
        args: list[Terms] = []
        for child in node.children():
            terms = done[child]
            if isinstance(terms, Refused):
                return terms
            args.append(terms)
        try:
            if isinstance(node, Cast):
                return self._cast(node, args[0])
            if isinstance(node, Op):
                return self._operation(node, args)
        except Refused as refused:
            return refused
        return Refused("an address depends on a running value")

    def _operation(self, node: Op, args: list[Terms]) -> Terms:
        if not node.dtype.is_floating_point:
            raise Refused(f"no factor: {node.name} compares a running value with a varying one")
        if node.name in ("add", "sub"):
            left, right = (self._summands(arg, found) for arg, found in zip(node.args, args, strict=True))
            return self._sum(left, negated(right) if node.name == "sub" else right, node.dtype)
        if node.name == "neg":
            return negated(args[0])
        if node.name == "mul":
            left, right = (self._with_shift(a, t, o) for a, t, o in zip(node.args, args, args[::-1], strict=True))
            return product(left, right)
        if node.name == "truediv":
            inverse = (self._inverse(one_of(node.name, args[1]), node.dtype),)
            return product(self._with_shift(node.args[0], args[0], inverse), inverse)
        row = SCALAR_OPS[node.name]
        if row.logarithm is not None:
            return (self._exponential(node, args[0], row.logarithm),)
        if node.name == "where":
            return self._choice(node, args)
        if (row.arity == 1 and row.degree) or node.name in ("pow", "maximum", "minimum"):
            return (self._scaled(node, args),)
        raise Refused(f"no factor: {node.name} of a running value and a varying one")

    # Sums and products

    def is_fixed(self, term: Term) -> bool:
        """Return whether nothing in this term varies."""
        return term.loop is None or self.kind(term.loop) is Kind.FIXED

    def _sum(self, left: Terms, right: Terms, dtype: torch.dtype) -> Terms:
        """Return the terms of both sides; terms with the same factors are merged."""
        merged: list[Term] = []
        for term in (*left, *right):
            same = [t for t in merged if factors_of(t) == factors_of(term) and not t.shift and not term.shift]
            if not same:
                merged.append(term)
                continue
            pair = (same[0], term)
            one = const(1, dtype)
            loop = add_all([(t.loop if t.loop is not None else one, t.negative) for t in pair])
            merged[merged.index(same[0])] = replace(term, loop=loop, negative=False)
        return tuple(merged)

    def _summands(self, node: Expr, terms: Terms) -> Terms:
        """Return the terms of `node`, a sum of running values split into summands if an extreme value is among them."""
        if self.kind(node) is not Kind.RUNNING:
            return terms
        summands: list[Term] = []
        stack = [(node, False)]
        while stack:
            part, negative = stack.pop()
            if isinstance(part, Op) and part.name in ("add", "sub", "neg"):
                last = negative is (part.name == "add")  # the sign of the last operand
                stack.append((part.args[-1], last))
                if len(part.args) == 2:
                    stack.append((part.args[0], negative))
            else:
                summands.extend(replace(term, negative=negative) for term in self._undivided(part))
        return tuple(summands) if any(self._is_extreme(term) for term in summands) else terms

    def _with_shift(self, node: Expr, terms: Terms, factors: Terms) -> Terms:
        """Return the terms of `node`, for multiplication by the one term of the other side.

        In a sum, an extreme value stays with the value that it shifts: x - max(x) is small, x and max(x) are not.
        """
        if not is_sum(terms) or is_sum(factors) or self.is_fixed(factors[0]):
            return terms
        self.check_moments(terms, factors[0])
        kept = [term for term in terms if self._is_extreme(term)]
        varying = [term for term in terms if term not in kept and not self.is_fixed(term)]
        if not kept or len(varying) != 1 or varying[0].steps or varying[0].ranges or varying[0].shift:
            return terms
        parts = tuple(Part(term.steps[0].value, term.negative, term.loop) for term in kept)
        loop = self._without_rest(node)
        if loop is None:
            loop = add_all([(loop_of(varying[0]), varying[0].negative), *((scaled_by(p), p.negative) for p in parts)])
        rest = [term for term in terms if term not in kept and term is not varying[0]]
        return (Term(loop, shift=parts), *rest)

    def _without_rest(self, root: Expr) -> Expr | None:
        """Return a sum without the running summands that are no extreme values; None if it is not a sum."""
        done: dict[Expr, Expr | None] = {}
        for node in postorder(root):
            if not self.kind(node) & Kind.RUNNING or self._extremes_only(node):
                done[node] = node
            elif not isinstance(node, Op) or node.name not in ("add", "sub", "neg"):
                if self.kind(node) is Kind.MIXED:
                    return None
                done[node] = None
            else:
                args = [done[arg] for arg in node.args]
                left, right = args[0], args[-1]
                if left is None or right is None:
                    only = right if left is None else left
                    negative = only is not None and left is None and node.name == "sub"
                    done[node] = make_op("neg", only) if negative and only is not None else only
                else:
                    done[node] = node.rebuild([left, right][: len(args)])
        return done[root]

    def _extremes_only(self, expr: Expr) -> bool:
        """Return whether all running values in `expr` are extremes."""
        refs = (node for node in postorder(expr) if isinstance(node, TileRef) and node.name in self.running)
        return all(self.running[ref.name].op in ("max", "min") for ref in refs)

    def _is_extreme(self, term: Term) -> bool:
        """Return whether this term is an extreme value, up to a fixed factor."""
        if not self.is_fixed(term) or len(term.steps) != 1 or term.steps[0].name != "mul":
            return False
        return self._extremes_only(term.steps[0].value)

    def check_moments(self, terms: Terms, factor: Term) -> None:
        """Refuse (x - d) · x."""
        if factor.loop is None or not is_sum(terms):
            return
        factor_cores = cores(factor.loop)
        for term in terms:
            if term.loop is not None and not self.is_fixed(term) and cores(term.loop) & factor_cores:
                raise Refused("cancels: the difference of a varying and a running value, times that varying value")

    def _inverse(self, term: Term, dtype: torch.dtype) -> Term:
        """Return 1 / term."""
        if any(step.name == "where" for step in term.steps):
            raise Refused("no factor: a division by what a running value switches off")
        steps = tuple(Step("truediv" if step.name == "mul" else "mul", step.value) for step in term.steps)
        loop = None if term.loop is None else make_op("truediv", const(1, dtype), term.loop)
        ranges = tuple(Range(r.function, negated(r.parts)) for r in term.ranges)
        return Term(loop, steps, ranges, term.negative)

    # Functions

    def _exponential(self, node: Op, terms: Terms, logarithm: ScalarName) -> Term:
        """Decompose exp(a(x) + b(d)); a summand log(d) of the exponent is a factor that can be deferred."""
        inside: list[tuple[Expr, bool]] = []
        parts: list[Part] = []
        steps: list[Step] = []
        for term in terms:
            if term.ranges or term.shift or (term.steps and not self.is_fixed(term)):
                raise Refused(f"no factor: {node.name} of a product of a running and a varying value")
            part = part_of(term, node.dtype) if term.steps else None
            if part is None:
                inside.append((loop_of(term), term.negative))
            elif isinstance(part.value, Op) and part.value.name == logarithm and part.scale is None:
                steps.append(Step("truediv" if part.negative else "mul", part.value.args[0]))
            else:
                self._check_bounded(node, part)
                inside.append((scaled_by(part), part.negative))
                parts.append(part)
        loop = make_op(node.name, add_all(inside)) if steps else node
        return Term(loop, tuple(steps), (Range(node.name, tuple(parts)),) if parts else ())

    def _check_bounded(self, node: Op, part: Part) -> None:
        """Refuse an exponent shifted by another running value than an extreme, which bounds it in every block."""
        for ref in postorder(part.value):
            if isinstance(ref, TileRef) and self.running[ref.name].op not in ("max", "min"):
                raise Refused(f"out of range: the exponent of {node.name} is shifted by {ref.name}, no extreme value")

    def _scaled(self, node: Op, args: list[Terms]) -> Term:
        """Decompose functions with f(x · d) = f(x) · d^k, at least for non-negative d: powers, and extremes with 0."""
        if node.name == "pow" and is_sum(args[0]):
            raise Refused("cancels: a power of a sum of varying and running values needs raw moments")
        term = one_of(node.name, args[0] if self.kind(node.args[0]) is Kind.MIXED else args[1])
        if node.name in ("maximum", "minimum"):
            other = node.args[1] if self.kind(node.args[0]) is Kind.MIXED else node.args[0]
            if not isinstance(other, Const) or other.value != 0:
                raise Refused(f"no factor: {node.name} of a product and something that is not 0")
        exponent: Expr | None = None
        if node.name == "pow":
            exponent = node.args[1]
            if not isinstance(exponent, Const):
                raise Refused("no factor: a running value under an exponent that is no constant")
        self._check_signs(node, term)
        signed = signed_loop(term, node.dtype)
        rest = node.args[1:] if node.name == "pow" else ()
        if node.name in ("maximum", "minimum"):
            rest = (const(0, node.dtype),)
        power = exponent.value if isinstance(exponent, Const) else SCALAR_OPS[node.name].degree
        assert power is not None, "what is scaled has a degree"
        steps = tuple(step_under(node.name, step, exponent) for step in term.steps)
        ranges = tuple(Range(r.function, multiplied(r.parts, power, node.dtype)) for r in term.ranges)
        return Term(make_op(node.name, signed, *rest), steps, ranges)

    def _check_signs(self, node: Op, term: Term) -> None:
        is_integer_power = (
            node.name == "pow" and isinstance(node.args[1], Const) and float(node.args[1].value).is_integer()
        )
        for step in term.steps:
            if step.name == "where" and node.name in ("rsqrt", "pow"):
                raise Refused(f"no factor: {node.name} of what a running value switches off")
            if node.name == "abs" or is_integer_power or step.name == "where":
                continue
            if not nonnegative(step.value, self.running):
                raise Refused(f"no factor: {node.name} of a product with a factor of unknown sign")

    def _choice(self, node: Op, args: list[Terms]) -> Terms:
        mask, one, other = node.args
        if self.kind(mask) is Kind.MIXED:
            raise Refused("no factor: a choice by a running value and a varying one")
        if self.kind(mask) is Kind.RUNNING:
            return self._switched(node, args)
        if is_infinite(one) or is_infinite(other):
            return self._masked(node, args[1] if is_infinite(other) else args[2])
        zero = const(0, node.dtype)
        both_arms = (*args[1], *args[2])
        if (
            len(both_arms) == 2
            and factors_of(both_arms[0]) == factors_of(both_arms[1])
            and not both_arms[0].shift
            and not both_arms[1].shift
        ):
            loops = [signed_loop(term, node.dtype) for term in both_arms]
            return (replace(both_arms[0], loop=make_op("where", mask, *loops), negative=False),)
        masked_terms: list[Term] = []
        for terms, arm in ((args[1], 0), (args[2], 1)):
            for term in terms:
                if is_zero(term.loop):
                    continue

                def masked(loop: Expr | None, arm: int = arm) -> Expr:
                    value = const(1, node.dtype) if loop is None else loop
                    return make_op("where", mask, zero, value) if arm else make_op("where", mask, value, zero)

                base = masked(term.base) if term.shift else None
                masked_terms.append(replace(term, loop=masked(term.loop), base=base))
        return tuple(masked_terms)

    def _switched(self, node: Op, args: list[Terms]) -> Terms:
        """Decompose a `where` with a running condition, which may only switch a value off."""
        mask, one, other = node.args
        if not is_zero(one) and not is_zero(other):
            raise Refused("no factor: a running value chooses between two values")
        off = mask if is_zero(one) else make_op("not", mask)
        terms = args[2] if is_zero(one) else args[1]
        return tuple(replace(term, steps=(*term.steps, Step("where", off))) for term in terms)

    def _masked(self, node: Op, terms: Terms) -> Terms:
        """Decompose an infinity under a mask: it is unchanged by summands and positive factors."""
        varying = [term for term in terms if not self.is_fixed(term)]
        if len(varying) != 1 or varying[0].ranges or varying[0].shift:
            raise Refused("no factor: an infinity instead of a sum")
        for step in varying[0].steps:
            if step.name == "where" or not nonnegative(step.value, self.running):
                raise Refused("no factor: an infinity instead of a product with a factor of unknown sign")
        mask, one, other = node.args
        loop = signed_loop(varying[0], node.dtype)
        loop = make_op("where", mask, one, loop) if is_infinite(one) else make_op("where", mask, loop, other)
        return tuple(replace(t, loop=loop, negative=False) if t is varying[0] else t for t in terms)

    def _cast(self, node: Cast, terms: Terms) -> Terms:
        """Decompose a rounding, which commutes with scaling up to rounding; in a sum, it would round what cancels."""
        source = node.arg.dtype
        if not (node.dtype.is_floating_point and source.is_floating_point):
            raise Refused("no factor: a running value is rounded to an integer together with a varying one")
        narrow = node.dtype.itemsize < source.itemsize
        if narrow and is_sum(terms):
            raise Refused("cancels: a sum of varying and running values is rounded")
        for term in terms:
            half = node.dtype is torch.float16 and narrow and term.steps and term.loop is not None
            if half and not fits_half(loop_of(term)):
                raise Refused("out of range: without its running factor, an operand may not fit float16")
        return tuple(
            replace(
                term,
                loop=None if term.loop is None else cast_again(term.loop, node),
                base=None if term.base is None else cast_again(term.base, node),
            )
            for term in terms
        )
