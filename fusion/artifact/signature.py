"""Describes the arguments and results of a program, as JSON.

Input: the captured program, and AOTAutograd's record of its results; output: the entries of the manifest about
arguments, sizes, inequalities and results.  Sizes are named as PyTorch names them; each is read off a dimension, or a
stride, that is the size itself, or a multiple of it plus a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy
import torch
from torch._functorch._aot_autograd.schemas import OutputType

from fusion.artifact.ahead import CompiledGraph
from fusion.artifact.capture import CapturedProgram
from fusion.artifact.manifest import (
    ArgumentsEntry,
    Extent,
    Json,
    LeafEntry,
    RegisterResult,
    ResultEntry,
    ResultsEntry,
    SizeEntry,
    SizePlace,
    TensorLayout,
)
from fusion.artifact.record import expression_text
from fusion.artifact.trees import described
from fusion.artifact.values import written
from fusion.dynamo.writes import memory_of
from fusion.lowering.errors import Unsupported

ALIASES = (OutputType.alias_of_input, OutputType.is_input)


class ProgramSignature:
    """The arguments and results of a program.

    Args:
        results: the results of the recorded steps, as JSON.
    """

    def __init__(self, program: CapturedProgram, compiled: CompiledGraph, results: Sequence[Json]) -> None:
        self.program, self.compiled = program, compiled
        self.returned = results[: len(program.results)]
        self.first = len(program.weights) + len(program.sizes)
        self.sizes = [*self._sizes()]
        self.names = [size["name"] for size in self.sizes]
        self.info = compiled.metadata.output_info[: len(program.results)]
        mutated = [k for k, info in enumerate(compiled.metadata.input_info) if info.mutates_data]
        self.changed_weights = [k for k in mutated if k < len(program.weights)]
        self.changed = {k - self.first for k in mutated if k >= self.first}
        self._refuse()

    def _refuse(self) -> None:
        metadata = self.compiled.metadata
        if metadata.mutated_inp_runtime_indices or metadata.num_mutated_inp_runtime_indices:
            raise Unsupported("a program that changes the shape or the memory of its inputs is not saved")
        if len(metadata.input_info) != len(self.program.inputs):
            raise Unsupported("a program whose inputs share memory, and are changed in place, is not saved")

    def arguments(self) -> ArgumentsEntry:
        """Return the manifest's entry about arguments."""
        spec = self.program.exported.call_spec.in_spec
        assert spec is not None
        positions = {leaf: k for k, leaf in enumerate(self._inputs_of_leaves()) if leaf is not None}
        return {
            "structure": described(spec),
            "positional": self.program.positional,
            "first": len(self.program.weights),
            "leaves": [self._leaf(k) for k in range(len(self.program.leaves))],
            "sizes": self.sizes,
            "passed": [self._text(size) for size in self.program.sizes],
            "inequalities": self._inequalities(),
            "changed": sorted(positions[k] for k in self.changed),
        }

    def _inputs_of_leaves(self) -> Iterator[int | None]:
        """Yield for each leaf its number among the program's inputs; None for constants."""
        number = 0
        for leaf in self.program.leaves:
            yield number if leaf.is_input else None
            number += leaf.is_input

    def _leaf(self, position: int) -> LeafEntry:
        leaf = self.program.leaves[position]
        if isinstance(leaf.value, torch.Tensor):
            number = [*self._inputs_of_leaves()][position]
            bases = {info.base_idx for info in self.info if info.output_type in ALIASES}
            kept = number in self.changed or (number is not None and number + self.first in bases)
            return {"tensor": {"name": leaf.name, "kept": kept, **self._layout(leaf.value)}}
        if leaf.is_input:
            return {"size": leaf.name}
        try:
            return {"name": leaf.name, "constant": written(leaf.value, lambda value: None)}
        except ValueError as error:
            raise Unsupported(f"the argument {leaf.name} is not saved: it is {error}") from error

    def _layout(self, tensor: torch.Tensor) -> TensorLayout:
        return {
            "dtype": {"torch": str(tensor.dtype)},
            "device": {"device": str(tensor.device)},
            "shape": [self._text(size) for size in tensor.shape],
            "strides": [self._text(size) for size in tensor.stride()],
        }

    def _text(self, size: int | torch.SymInt) -> Extent:
        expression = _expression(size)
        return int(expression) if expression.is_Integer else expression_text(expression, self.names)

    def _sizes(self) -> Iterator[SizeEntry]:
        """Yield the simplest place at which each size is read; a stride only if there is no other place."""
        places: dict[str, SizeEntry] = {}
        for size, place in sorted(self._places(), key=lambda pair: pair[1]["of"] == "stride"):
            for name, times, plus in _solved(_expression(size)):
                entry: SizeEntry = {"name": name, **place, "times": times, "plus": plus}
                known = places.setdefault(name, entry)
                if abs(known["times"]) > abs(times):
                    places[name] = entry
        yield from places.values()

    def _places(self) -> Iterator[tuple[torch.SymInt, SizePlace]]:
        """Yield each number of an argument that varies, with where it is."""
        for position, leaf in enumerate(self.program.leaves):
            if isinstance(leaf.value, torch.SymInt):
                yield leaf.value, {"leaf": position, "of": "value", "dimension": None}
            elif isinstance(leaf.value, torch.Tensor):
                for dimension, number in enumerate(leaf.value.shape):
                    if isinstance(number, torch.SymInt):
                        yield number, {"leaf": position, "of": "size", "dimension": dimension}
                for dimension, number in enumerate(leaf.value.stride()):
                    if isinstance(number, torch.SymInt):
                        yield number, {"leaf": position, "of": "stride", "dimension": dimension}

    def _inequalities(self) -> list[str]:
        """Return everything that was assumed about sizes, as text."""
        shapes = self.program.mode.shape_env
        if shapes is None or not self.names:
            return []
        symbols = [sympy.Symbol(name) for name in self.names]
        texts = []
        for name in self.names:
            symbol = next((known for known in shapes.var_to_range if str(known) == name), None)
            if symbol is not None:
                bounds = shapes.var_to_range[symbol]
                texts += [f"{max(1, int(bounds.lower))} <= {name}"] if bounds.lower.is_Integer else []  # and not empty
                texts += [f"{name} <= {int(bounds.upper)}"] if _is_a_limit(bounds.upper) else []
        for guard in shapes.guards:
            expression = shapes.replace(guard.expr)
            if expression is not sympy.true and {str(s) for s in expression.free_symbols} <= {*map(str, symbols)}:
                texts.append(expression_text(expression, self.names))
        return list(dict.fromkeys(texts))

    def results(self) -> ResultsEntry:
        """Return the manifest's entry about results."""
        spec = self.program.exported.call_spec.out_spec
        assert spec is not None
        computed = iter(range(len(self.returned)))
        leaves: list[ResultEntry] = [
            self._result(next(computed)) if constant is None else {"constant": constant.text}
            for constant in self.program.constants
        ]
        return {"structure": described(spec), "leaves": leaves}

    def _result(self, number: int) -> ResultEntry:
        alias, returned = self.alias(number), self.returned[number]
        if alias is not None:
            return alias
        if isinstance(returned, dict) and isinstance(register := returned.get("register"), int):
            return {"register": register}
        return {"constant": returned}

    def alias(self, number: int) -> RegisterResult | None:
        """Return the input that a result is, or is a view of; None for a computed result.

        Raises:
            Unsupported: the view is not known.
        """
        info = self.info[number]
        if info.output_type not in ALIASES:
            return None
        assert info.base_idx is not None
        if info.output_type is OutputType.is_input:
            return {"register": info.base_idx}
        base, view = self.program.inputs[info.base_idx], self._view(number, info.base_idx)
        assert isinstance(base, torch.Tensor)
        if base.dtype is not view.dtype or view.is_conj() or view.is_neg():
            raise Unsupported("a result that is a view of an input with another dtype is not saved")
        shape, strides = [self._text(size) for size in view.shape], [self._text(size) for size in view.stride()]
        offset = self._text(view.storage_offset() - base.storage_offset())
        return {"register": info.base_idx, "view": {"shape": shape, "strides": strides, "offset": offset}}

    def _view(self, number: int, base: int) -> torch.Tensor:
        """Return the value of a result that is a view of an input.

        Raises:
            Unsupported: it is not known.
        """
        traced, compiled, source = (
            self.program.results[number],
            self.compiled.results[number],
            self.program.inputs[base],
        )
        assert (
            isinstance(traced, torch.Tensor) and isinstance(compiled, torch.Tensor) and isinstance(source, torch.Tensor)
        )
        if memory_of(traced) == memory_of(source):
            return traced
        if self.compiled.metadata.input_info[base].mutates_data:  # the graph returns a view of the new value
            raise Unsupported(
                "a result that is a view of a changed input is not saved for a program that was decomposed",
                hint="save what torch.export.export returned",
            )
        return compiled


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def _is_a_limit(bound: sympy.Expr) -> bool:
    return bool(bound.is_Integer) and int(bound) < 2**62


def _solved(expression: sympy.Expr) -> Iterator[tuple[str, int, int]]:
    """Solve `expression == times·size + plus` for its only symbol; yield (size, times, plus), or nothing.

    >>> s = sympy.Symbol("s", integer=True)
    >>> list(_solved(2 * s + 1)), list(_solved(s * s))
    ([('s', 2, 1)], [])
    """
    if len(expression.free_symbols) != 1:
        return
    (symbol,) = expression.free_symbols
    plus, one = expression.subs({symbol: 0}), expression.subs({symbol: 1})
    times = one - plus
    if plus.is_Integer and times.is_Integer and times != 0 and expression == times * symbol + plus:
        yield str(symbol), int(times), int(plus)


__all__ = ["ProgramSignature"]
