"""Describes a compiled program for a target that makes a library of it.

Input: the captured program, and its schedule, in which every operation is generated; output: a `Standalone`.  Features
that a library cannot have are refused, all of them in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard
from zlib import crc32

import sympy
import torch

from fusion.artifact.ahead import CompiledGraph
from fusion.artifact.capture import CapturedProgram
from fusion.artifact.manifest import RegisterResult, SizeEntry, ViewLayout
from fusion.artifact.signature import ProgramSignature
from fusion.artifact.standalone.products import CalledProduct, product_of
from fusion.artifact.standalone.sizes import size_text
from fusion.artifact.state import identity, refuse_shared_memory
from fusion.artifact.trees import described, result_names
from fusion.artifact.weights import bytes_of
from fusion.codegen.binary import Callee
from fusion.codegen.standalone import (
    BlasProduct,
    Copy,
    InterfaceTensor,
    KernelSource,
    Memory,
    MemoryPlace,
    Seed,
    Size,
    Standalone,
    StandaloneLaunch,
    StoredWeight,
)
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.division import ZERO
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Buffer, BufferRef, Extern
from fusion.lowering.random.seeded import LIMITS
from fusion.runtime.views import starts
from fusion.runtime.workspaces import Alive, planned
from fusion.schedule.kernels import KernelCall

aten = torch.ops.aten

COPIES = (aten.copy_.default, aten._foreach_copy_.default)
"""Calls that a library does by itself."""


@dataclass(frozen=True, slots=True)
class _Start:
    """Locates the start of a buffer: an offset in elements, in the memory of a root."""

    root: str
    offset: sympy.Expr = ZERO


@dataclass(frozen=True, slots=True)
class _View:
    """A view of an input: the input's memory, and the view's strides and offset as text."""

    base: MemoryPlace
    strides: tuple[str, ...]
    offset: str


def standalone(
    program: CapturedProgram,
    compilation: CompiledGraph,
    callees: Mapping[Kernel, Callee],
    weights_file: str,
    *,
    has_blas: bool = False,
) -> tuple[Standalone, dict[str, torch.Tensor]]:
    """Return the description of a program, and the weights that it reads from a file.

    Args:
        callees: kernel → how its function is called, for all kernels that launch something.
        weights_file: the name of that file.
        has_blas: whether products may be calls of BLAS.

    Raises:
        Unsupported: it has a step, a result or a size that a library cannot do; the message lists them.
    """
    return _Describer(program, compilation, callees, has_blas=has_blas).described(weights_file)


class _Describer:
    """The description under construction: `starts` has the root of each buffer, `places` the memory of each root."""

    def __init__(
        self, program: CapturedProgram, compilation: CompiledGraph, callees: Mapping[Kernel, Callee], *, has_blas: bool
    ) -> None:
        self.program, self.compilation, self.lowered = program, compilation, compilation.schedule.program
        self.signature = ProgramSignature(program, compilation, ())
        self.names = self.signature.names
        self.kernels = {kernel: number for number, kernel in enumerate(callees)}
        self.sources = tuple(KernelSource(callee, compilation.sources[kernel]) for kernel, callee in callees.items())
        self.constants: list[bytes] = []
        self.state: dict[str, torch.Tensor] = {}
        self.weights: list[StoredWeight] = []
        self.starts: dict[str, _Start] = {}
        self.places: dict[str, MemoryPlace] = {}
        self.inputs: dict[int, MemoryPlace] = {}
        calls = [step for step in compilation.schedule.steps if has_blas and isinstance(step, Extern)]
        products = ((call, product_of(call, self.lowered.buffers)) for call in calls)
        self.products = {id(call): product for call, product in products if product is not None}
        self.seeds = {id(step): step.outs[0] for step in compilation.schedule.steps if _is_seed(step)}

    def described(self, weights_file: str) -> tuple[Standalone, dict[str, torch.Tensor]]:
        self._refuse_calls()
        self._place_inputs()
        self._follow_views()
        outputs = [*self._outputs()]
        slots = self._plan_workspace()
        steps = [done for step in self.compilation.schedule.steps for done in self._step(step)]
        results = [copy for number, output in enumerate(outputs) for copy in self._copied(number, output)]
        arguments = self.signature.arguments()
        return Standalone(
            weights_file=weights_file,
            inputs=tuple(self._inputs()),
            outputs=tuple(tensor for tensor, _ in outputs),
            weights=tuple(self.weights),
            sizes=tuple(self._sizes(arguments["sizes"])),
            conditions=tuple(arguments["inequalities"]),
            slots=slots,
            constants=tuple(self.constants),
            sources=self.sources,
            steps=(*steps, *results),
        ), self.state

    def _refuse_calls(self) -> None:
        """Refuse library calls."""
        calls = [step for step in self.compilation.schedule.steps if isinstance(step, (Extern, Chunked))]
        refused = {
            f"{call.name} ({call.reason})" if isinstance(call, Extern) and call.reason else call.name: None
            for call in calls
            if isinstance(call, Chunked) or not (call.is_view or call.target in COPIES or self._written_by(call))
        }
        if refused:
            raise Unsupported(
                f"no kernels are generated for these operations, which a library cannot call: {', '.join(refused)}",
                hint="fusion.save keeps them as calls of PyTorch",
            )

    # Tensors that exist before the first step ------------------------------------------------------------------------

    def _place_inputs(self) -> None:
        weights, first = self.program.weights, self.signature.first
        first_names: dict[tuple[object, ...], str] = {}
        for number, weight in enumerate(weights):
            stored = first_names.setdefault(identity(weight.tensor), weight.name)
            changed = number in self.signature.changed_weights
            if weight.kind == "constant" and not changed:
                place = self._constant(weight.tensor)
            else:
                place = MemoryPlace(Memory.WEIGHT, len(self.weights))
                self.state.setdefault(stored, weight.tensor)
                layout = tuple(weight.tensor.shape), tuple(weight.tensor.stride())
                written = self.state[stored].contiguous()
                check = crc32(bytes_of(written)) if written.nbytes else 0
                self.weights.append(StoredWeight(stored, weight.tensor.dtype, *layout, check, changed))
            self.inputs[number] = place
        for number in range(first, len(self.lowered.inputs)):
            self.inputs[number] = MemoryPlace(Memory.INPUT, number - first)
        for number, place in self.inputs.items():
            self._root(self.lowered.inputs[number], place)
        for name, tensor in self.lowered.constants.items():
            self._root(name, self._constant(tensor))
        held = [(weight.name, number, weight.tensor) for number, weight in enumerate(weights)]
        refuse_shared_memory(held, self.signature.changed_weights)

    def _root(self, name: object, place: MemoryPlace) -> None:
        if isinstance(name, str):
            self.starts[name], self.places[name] = _Start(name), place

    def _constant(self, tensor: torch.Tensor) -> MemoryPlace:
        """Save the memory of a constant tensor, from its first to its last element, and return its position."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,)).cpu().clone()
        self.constants.append(bytes(bytes_of(flat)) if flat.numel() else b"")
        return MemoryPlace(Memory.CONSTANT, len(self.constants) - 1)

    def _inputs(self) -> Iterator[InterfaceTensor]:
        number = 0
        for leaf in self.program.leaves:
            if not leaf.is_input:
                continue
            if isinstance(leaf.value, torch.Tensor):
                shape, strides = (tuple(map(self._of_torch, of)) for of in (leaf.value.shape, leaf.value.stride()))
                yield InterfaceTensor(leaf.name, leaf.value.dtype, shape, strides, number in self.signature.changed)
            else:
                yield InterfaceTensor(leaf.name, torch.int64, (), ())
            number += 1

    def _sizes(self, sizes: Sequence[SizeEntry]) -> Iterator[Size]:
        numbers = {leaf: k for k, leaf in enumerate(k for k, leaf in enumerate(self.program.leaves) if leaf.is_input)}
        for size in sizes:
            place = numbers[size["leaf"]], size["of"], size["dimension"] or 0
            yield Size(size["name"], *place, size["times"], size["plus"])

    # Views, results and memory ---------------------------------------------------------------------------------------

    def _follow_views(self) -> None:
        """Find the root of each buffer."""
        refused: dict[str, None] = {}
        for step in self.compilation.schedule.steps:
            if isinstance(step, KernelCall):
                self.starts.update((name, _Start(name)) for name in step.written)
                self.starts.update((name, self.starts[operand]) for name, operand in step.over.items())
            elif isinstance(step, Extern) and step.is_view:
                begins = starts(step, self.lowered.buffers)
                if not begins:
                    refused[step.name] = None
                    continue
                base = self.starts[step.reads[0]]
                self.starts.update(
                    (out, _Start(base.root, base.offset + begin))
                    for out, begin in zip(step.outs, begins, strict=True)
                    if out is not None
                )
            elif (out := self._written_by(step)) is not None:
                self.starts[out] = _Start(out)
            elif isinstance(step, Extern):
                targets = step.overwrites
                self.starts.update(
                    (out, self.starts[target]) for out, target in zip(step.outs, targets, strict=False) if out
                )
        if refused:
            raise Unsupported(
                f"where a view begins is not known for these operations: {', '.join(refused)}",
                hint="return a copy (clone) of the view",
            )

    def _outputs(self) -> Iterator[tuple[InterfaceTensor, Buffer | _View]]:
        """Yield each result, with its buffer, or the view of an input that it is."""
        spec = self.program.exported.call_spec.out_spec
        assert spec is not None
        names = zip(result_names(described(spec)), self.program.constants, strict=True)
        computed = [name for name, constant in names if constant is None]
        for number, name in enumerate(computed):
            if (alias := self.signature.alias(number)) is not None:
                yield self._aliased(name, alias)
                continue
            out = self.lowered.outputs[number]
            if not isinstance(out, BufferRef):
                raise Unsupported(f"{name} is no tensor: it is not returned by a library")
            buffer = self.lowered.buffers[out.name]
            shape, strides = (tuple(map(self._text, of)) for of in (buffer.shape, buffer.strides))
            start, numel = self.starts[out.name], sympy.expand(buffer.numel)
            root = self.lowered.buffers[start.root]
            whole = all(sympy.expand(each) == numel for each in (buffer.extent, root.numel, root.extent))
            if start.root not in self.places and start.offset == 0 and whole and root.dtype is buffer.dtype:
                self.places[start.root] = MemoryPlace(Memory.OUTPUT, number)
            yield InterfaceTensor(name, buffer.dtype, shape, strides), buffer

    def _aliased(self, name: str, alias: RegisterResult) -> tuple[InterfaceTensor, _View]:
        value = self.program.inputs[alias["register"]]
        assert isinstance(value, torch.Tensor)
        whole: ViewLayout = {"shape": value.shape, "strides": value.stride(), "offset": 0}
        view = alias.get("view", whole)
        shape, strides = (tuple(map(self._of_torch, each)) for each in (view["shape"], view["strides"]))
        source = _View(self.inputs[alias["register"]], strides, self._of_torch(view["offset"]))
        return InterfaceTensor(name, value.dtype, shape, _packed(shape)), source

    def _copied(self, number: int, output: tuple[InterfaceTensor, Buffer | _View]) -> Iterator[Copy]:
        """Yield the copy into an output's memory; nothing where steps have written the result there."""
        tensor, source = output
        to, item = MemoryPlace(Memory.OUTPUT, number), tensor.dtype.itemsize
        if isinstance(source, Buffer):
            start = self.starts[source.name]
            if self.places[start.root] == to:
                return
            place, strides = self._place(source.name), tensor.strides
        else:
            base, strides = source.base, source.strides
            place = MemoryPlace(base.memory, base.number, source.offset, item)
        yield Copy(place, strides, to, tensor.strides, tensor.shape, item)

    def _plan_workspace(self) -> tuple[tuple[str, ...], ...]:
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for number, step in enumerate(self.compilation.schedule.steps):
            if isinstance(step, KernelCall):
                first.update((name, number) for name in step.written)
            elif (out := self._written_by(step)) is not None:
                first[out] = number
            names = step.buffers if isinstance(step, KernelCall) else step.reads
            last.update((self.starts[name].root, number) for name in names)
        returned = (self.starts[out.name].root for out in self.lowered.outputs if isinstance(out, BufferRef))
        last.update(dict.fromkeys(returned, len(self.compilation.schedule.steps)))
        alive = []
        for name, begin in first.items():
            if name not in self.places:
                buffer = self.lowered.buffers[name]
                alive.append(Alive(name, buffer.extent * buffer.dtype.itemsize, begin, last.get(name, begin)))
        plan = planned(alive, self.compilation.hints)
        self.places.update((name, MemoryPlace(Memory.SLOT, slot)) for name, slot in plan.slots.items())
        return tuple(tuple(map(self._text, sizes)) for sizes in plan.sizes)

    # Steps -----------------------------------------------------------------------------------------------------------

    def _written_by(self, step: object) -> str | None:
        """Return the tensor that a product or a seed writes."""
        return self.products[id(step)].out if id(step) in self.products else self.seeds.get(id(step))

    def _step(self, step: object) -> Iterator[StandaloneLaunch | Copy | BlasProduct | Seed]:
        if isinstance(step, KernelCall) and step.kernel in self.kernels:
            lines = [*dict.fromkeys(origin.line for origin in step.origins if origin.line)]
            where = f"{step.kernel.name} ({', '.join(lines)})" if lines else step.kernel.name
            operands = tuple(self._place(name) for name in step.buffers)
            yield StandaloneLaunch(
                self.kernels[step.kernel], operands, tuple(map(self._text, step.kernel.sizes)), where
            )
        elif id(step) in self.products:
            yield from self._product(self.products[id(step)])
        elif (seed := self.seeds.get(id(step))) is not None:
            yield Seed(self._place(seed))
        elif isinstance(step, Extern) and step.target in COPIES:
            ends = (arg if isinstance(arg, (list, tuple)) else [arg] for arg in step.args[:2])
            for target, source in zip(*ends, strict=True):
                yield self._copy(target, source)

    def _product(self, product: CalledProduct) -> Iterator[Copy | BlasProduct]:
        """Yield a product by BLAS, after the copy of its summand."""
        left, right, out = (self.lowered.buffers[name] for name in (product.left, product.right, product.out))
        if product.added is not None:
            added = self.lowered.buffers[product.added]
            missing = len(out.shape) - len(added.shape)
            steps = (0 if size == 1 else step for size, step in zip(added.shape, added.strides, strict=True))
            strides = (*["0"] * missing, *(self._text(sympy.sympify(step)) for step in steps))
            layout = tuple(map(self._text, out.strides)), tuple(map(self._text, out.shape))
            yield Copy(self._place(product.added), strides, self._place(product.out), *layout, out.dtype.itemsize)
        batch = [self._text(size) for size in out.shape[:-2]] or ["1"]
        (rows, columns), inner = map(self._text, out.shape[-2:]), self._text(left.shape[-1])
        whole = (["0"] * (3 - len(each.strides)) + [*map(self._text, each.strides)] for each in (left, right, out))
        places = self._place(product.left), self._place(product.right), self._place(product.out)
        sizes, strides_of = (batch[0], rows, columns, inner), tuple(step for each in whole for step in each)
        yield BlasProduct(*places, sizes, strides_of, out.dtype.itemsize, product.added is not None)

    def _copy(self, target: object, source: object) -> Copy:
        assert isinstance(target, BufferRef) and isinstance(source, BufferRef)
        new, old = self.lowered.buffers[source.name], self.lowered.buffers[target.name]
        if new.dtype is not old.dtype or new.shape != old.shape:
            raise Unsupported("a copy into a tensor of another shape or dtype is not done by a library")
        layouts = (tuple(map(self._text, of)) for of in (new.strides, old.strides, old.shape))
        source_strides, to_strides, shape = layouts
        places = self._place(source.name), self._place(target.name)
        return Copy(places[0], source_strides, places[1], to_strides, shape, old.dtype.itemsize)

    def _place(self, name: str) -> MemoryPlace:
        start, item = self.starts[name], self.lowered.buffers[name].dtype.itemsize
        place = self.places[start.root]
        return MemoryPlace(place.memory, place.number, self._text(start.offset), item)

    def _text(self, size: sympy.Expr) -> str:
        return size_text(size, self.names)

    def _of_torch(self, size: object) -> str:
        if isinstance(size, torch.SymInt):
            return self._text(size.node.expr)
        return str(size)


def _is_seed(step: object) -> TypeGuard[Extern]:
    """Return whether a call draws the seed of a kernel's random numbers."""
    return isinstance(step, Extern) and step.target is aten.randint.low and step.args == (*LIMITS, [])


def _packed(shape: Sequence[str]) -> tuple[str, ...]:
    """Return the strides of a contiguous tensor.

    >>> _packed(("n", "4", "3"))
    ('(4)*(3)', '(3)', '1')
    """
    return tuple("*".join(f"({size})" for size in shape[k + 1 :]) or "1" for k in range(len(shape)))


__all__ = ["standalone"]
