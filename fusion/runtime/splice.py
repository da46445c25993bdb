"""Turns a schedule into an fx GraphModule that allocates, launches, calls and frees.

The module runs as generated Python that is meant to be read: one line per allocation, launch and extern call,
and names taken from the user's graph.  fx drops every tensor after its last use, so memory is freed as early as it
can be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import cast

import sympy
import torch
from torch import fx
from typing_extensions import assert_never

from fusion.codegen.build import Built
from fusion.codegen.c.calls import Entry, entry_of
from fusion.codegen.target import LateLauncher, Launcher
from fusion.inspect.watch import Watch
from fusion.lowering.checks.checked import has_checks
from fusion.lowering.errors import BuildError
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.arguments import map_leaves
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Buffer, BufferRef, Call, Extern, ExternArg, Program
from fusion.operations.attention import cudnn_attention_backward
from fusion.runtime.chunks import InChunks
from fusion.runtime.located import failing, located
from fusion.runtime.memory import LARGE, allocator, empty_hidden, empty_large, in_memory_of
from fusion.runtime.names import identifier, named
from fusion.runtime.results import as_traced
from fusion.runtime.sequence_calls import NativeLaunch
from fusion.runtime.sequences import IN_C
from fusion.runtime.sizes import Sizes
from fusion.runtime.stacks import RESULT
from fusion.runtime.views import only_reads, seen_by_caller, starts, unaliased_results
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

aten = torch.ops.aten

UNCHECKED_CALLS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
"""Calls whose results need no check at each run: PyTorch allocates them with the function that it traces them with."""


ATTENTION: Mapping[object, Callable[..., object]] = {
    getattr(aten, name).default: getattr(torch, name)
    for name in (
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
    if hasattr(torch, name)
}
"""Attention operations → functions of the same arguments that are cheaper to call
(measured: docs/performance.md, `ATTENTION`)."""


def with_effects(token: object, operation: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call `operation` as PyTorch's `with_effects` does, bypassing its dispatcher, which is written in Python."""
    result = operation(*args, **kwargs)
    return (token, *result) if isinstance(result, tuple) else (token, result)


CHEAPER: dict[object, Callable[..., object]] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.convolution.default: torch.convolution,
    torch.ops.higher_order.with_effects: with_effects,
    **ATTENTION,
}
"""Operations → functions of the same arguments that are cheaper to call
(measured: docs/performance.md, `CHEAPER`)."""

CORRECTED: dict[object, Callable[..., object]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_attention_backward,
}
"""Operations → functions of the same arguments without a fault of theirs."""

WRITING: Set[Callable[..., object]] = frozenset({torch.mm, torch.bmm, torch.addmm, torch.baddbmm})
"""Functions that write their result to a given tensor, `out`, as fast as to one of their own."""

CALLED: Mapping[object, Callable[..., object]] = CHEAPER | CORRECTED
"""Operations → the functions that a module calls for them."""


LAUNCH = "fusion_launch"
"""The key of the metadata of a node that launches a kernel: the call of the schedule."""


class _Boxed(fx.graph.CodeGen):
    """Generates a `forward` that empties its list of inputs, so that an input is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: object) -> str:
        names = [name.split(":")[0].strip() for name in free_vars if name.split(":")[0].strip() != "self"]
        lines = f"def forward(self, args){maybe_return_annotation}:"
        if names:
            lines += f"\n    {', '.join(names)}{',' if len(names) == 1 else ''} = args\n    args.clear()"
        return lines


def splice(
    schedule: Schedule,
    built: Mapping[Kernel, Built],
    main: torch.device | None = None,
    refused: Callable[[BuildError], object] | None = None,
    kept: Collection[int] = (),
    watch: Watch | None = None,
) -> fx.GraphModule:
    """Return the callable module of a schedule.

    Args:
        built: kernel → its launcher.
        main: the device that is certain to be the current one whenever the module runs, if any.
        refused: is called with the reason why a kernel cannot be launched, which then runs in the reference evaluator;
            without it, the error is raised.
        kept: the positions of results that only backward gets.
        watch: returns replacements for the launchers of kernels and for library calls.

    Returns:
        A module whose `forward(args: list) -> tuple` empties `args` and returns the outputs of the program.  Its
        children are the modules of chunked calls.
    """
    built = {k: replace(each, launch=or_evaluated(each.launch, k, refused)) for k, each in built.items()}
    modules: dict[str, fx.GraphModule] = {}
    calls: dict[Chunked[Program], Callable[..., object]] = {}
    for number, (chunks, bodies) in enumerate(schedule.bodies.items()):
        children = {f"chunks_{number}_{k}": splice(body, built, main, watch=watch) for k, body in enumerate(bodies)}
        results = [schedule.program.buffers[name] for name in chunks.outs]
        calls[chunks] = named(InChunks(chunks, results, [module.forward for module in children.values()]), chunks.name)
        modules.update(children)
    result = _Splicer(schedule.program, calls, main, watch).run(schedule.steps, built, kept)
    for name, module in modules.items():
        result.add_module(name, module)
    return result


class _Splicer:
    """The graph under construction, with the fx node of each buffer and size."""

    def __init__(
        self,
        program: Program,
        calls: Mapping[Chunked[Program], Callable[..., object]],
        main: torch.device | None,
        watch: Watch | None,
    ) -> None:
        self.program, self.calls, self.main, self.watch = program, calls, main, watch
        self.graph = fx.Graph()
        self.tensors: dict[str, fx.Node] = {}
        self.views: dict[str, tuple[str, int]] = {}  # views that are created on use → base and offset
        self.deferred: dict[str, Extern] = {}  # views that are created on use → their calls
        self.read_only: dict[str, fx.Node] = {}  # views for readers, without autograd's view tracking
        self.by_layout: dict[tuple[object, ...], fx.Node] = {}  # the same, by base, offset and layout
        self.unchecked: dict[str, str] = {}  # results of calls that no kernel has read yet → the names of the calls
        self.sizes = Sizes(self.graph, program, self.tensors)
        self.unaliased: frozenset[str] = frozenset()  # results that could as well own their memory
        self.backward_only: frozenset[str] = frozenset()  # the same for results that only backward gets
        self.visible: frozenset[str] = frozenset()  # all other results
        self.seen: frozenset[str] = frozenset()  # buffers whose memory the caller gets
        self.root = torch.nn.Module()

    def run(
        self, steps: Sequence[KernelCall | Call], built: Mapping[Kernel, Built], kept: Collection[int]
    ) -> fx.GraphModule:
        for position, name in enumerate(self.program.inputs):
            node = self.graph.placeholder(identifier(str(name)) if name is not None else f"unused_{position}")
            if isinstance(name, str):
                self.tensors[name] = node
            elif name is not None:
                self.sizes.nodes[name] = node
        for name, tensor in self.program.constants.items():
            attribute = f"constant_{identifier(name)}"
            self.root.register_buffer(attribute, tensor, persistent=False)
            self.tensors[name] = self.graph.get_attr(attribute)
        self.unaliased, self.backward_only = unaliased_results(
            self.program, steps, UNCHECKED_CALLS | ATTENTION.keys(), kept
        )
        self.visible = self.program.output_names() - self.unaliased - self.backward_only
        self.seen = seen_by_caller(self.program, steps, kept)
        for step in steps:
            match step:
                case Extern():
                    self._extern(step)
                case Chunked():
                    self._chunked(step)
                case KernelCall():
                    native = entry_of(built[step.kernel].launch) if self.watch is None else None
                    self._launch(step, self._launcher(step, built[step.kernel].launch), native)
                case _:
                    assert_never(step)
        self.graph.output(tuple(self._output(out) for out in self.program.outputs))
        self.graph.set_codegen(_Boxed())
        return fx.GraphModule(self.root, self.graph)

    def _launcher(self, call: KernelCall, launch: Launcher) -> Callable[..., object]:
        """Return the launcher of a call's kernel, under the kernel's name."""
        run: Callable[..., object] = launch if self.watch is None else self.watch(call, launch)
        launched = named(located(run, lines_of(call)) if has_checks(call.kernel) else run, call.kernel.name)
        launched.kernel = call.kernel  # type: ignore[attr-defined]  # for dumps, which launch it from its file
        return launched

    def _launch(self, call: KernelCall, launch: Callable[..., object], entry: Entry | None) -> None:
        for name in call.written:
            buffer, layout = self.program.buffers[name], self._layout(name)
            empty = allocator(buffer.device, self.main, self._allocated(buffer), hidden=name not in self.seen)
            if empty is not None:
                node = self.graph.call_function(empty, (*layout, buffer.dtype))
            else:
                node = self.graph.call_function(
                    torch.empty_strided, layout, {"dtype": buffer.dtype, "device": buffer.device}
                )
            node._rename(identifier(name))
            key = node, 0, *layout
            self.tensors[name] = self.by_layout[key] = node
        sizes = tuple(self.sizes.of(symbol) for symbol in call.kernel.sizes)
        node = self.graph.call_function(launch, (*(self._for_kernel(name) for name in call.buffers), *sizes))
        node.meta[LAUNCH] = call
        if entry is not None:
            node.meta[IN_C] = NativeLaunch(entry, failing(entry, lines_of(call)))
        self.tensors.update({name: self._tensor(operand) for name, operand in call.over.items()})

    def _chunked(self, call: Chunked[Program]) -> None:
        tensors = tuple(self._tensor(name) for name, _ in call.sliced)
        sizes = [self.sizes.of(call.length), [self.sizes.of(size) for size in call.symbols]]
        layouts = [
            [[self.sizes.of(size) for size in of] for of in (b.shape, b.strides)] for b in self._results_of(call)
        ]
        node = self.graph.call_function(self.calls[call], (*tensors, [*sizes, *layouts]))
        for position, name in enumerate(call.outs):
            self.tensors[name] = self.graph.call_function(operator.getitem, (node, position))
            self.unchecked[name] = call.name

    def _results_of(self, call: Chunked[Program]) -> list[Buffer]:
        return [self.program.buffers[name] for name in call.outs]

    def _extern(self, call: Extern) -> None:
        begins = starts(call, self.program.buffers)
        if begins and self._can_defer(call):
            root, offset = self.views.get(call.reads[0], (call.reads[0], 0))
            for out, begin in zip(call.outs, begins, strict=True):
                if out is not None:
                    self.views[out] = root, offset + begin
                    self.deferred[out] = call
            return
        self._call(call)

    def _call(self, call: Extern) -> None:
        held = self._read if only_reads(call) else self._tensor
        argument = partial(self._argument, held=held)
        call_function: Callable[..., fx.Node] = self.graph.call_function
        function, keywords = self._library(call), map_leaves(call.kwargs, argument)
        if self._writes_large(call):
            (out,) = cast("tuple[str]", call.outs)
            keywords = {
                **keywords,
                "out": call_function(
                    empty_large if out in self.seen else empty_hidden,
                    (*self._layout(out), self.program.buffers[out].dtype),
                ),
            }
        node = call_function(function, map_leaves(call.args, argument), keywords)
        for symbol, place, dim in call.sizes:
            result = self.graph.call_function(operator.getitem, (node, place)) if call.multiple else node
            self.sizes.nodes[symbol] = result if dim is None else self.graph.call_method("size", (result, dim))
        if not call.multiple:
            if call.outs and call.outs[0] is not None:
                self.tensors[call.outs[0]] = node
                node.meta[RESULT] = self.program.buffers[call.outs[0]]
        else:
            for position, name in enumerate(call.outs):
                if name is not None:
                    self.tensors[name] = self.graph.call_function(operator.getitem, (node, position))
        if call.target not in UNCHECKED_CALLS:
            self.unchecked.update((name, call.name) for name in call.outs if name is not None)

    def _library(self, call: Extern) -> Callable[..., object]:
        """Return the function that computes a call."""
        function = CALLED.get(call.target, call.target)
        watched = function if self.watch is None or call.is_view else self.watch(call, function)
        return function if watched is function else named(watched, identifier(call.name))

    def _writes_large(self, call: Extern) -> bool:
        """Return whether the result of a call is large, on a CPU, and may be written to a tensor of this module."""
        if CALLED.get(call.target) not in WRITING or call.outs[0] is None:
            return False
        buffer = self.program.buffers[call.outs[0]]
        return buffer.device.type == "cpu" and (self._allocated(buffer) or 0) >= LARGE

    @staticmethod
    def _allocated(buffer: Buffer) -> int | None:
        """Return the bytes that a buffer spans; None if they depend on symbolic sizes."""
        extent = buffer.extent
        return int(extent) * buffer.dtype.itemsize if extent.is_Integer else None

    def _can_defer(self, call: Extern) -> bool:
        """Return whether the views can be created on use, from shape, strides and offset.

        Results that are distinguishable from tensors that own their memory are created by the original call.
        """
        outs = [out for out in call.outs if out is not None]
        if call.reads[0] in self.unchecked or not self.visible.isdisjoint(outs):
            return False
        buffers = [self.program.buffers[out] for out in outs]
        return all(self.sizes.known(size) is not None for each in buffers for size in (*each.shape, *each.strides))

    def _tensor(self, name: str) -> fx.Node:
        """Return the node that holds a buffer; a deferred view is created now."""
        if name in self.backward_only and name not in self.tensors:
            return self._read(name)
        ones = name not in self.tensors and any(size == 1 for size in self.program.buffers[name].shape)
        if ones:  # only the original calls give eager's strides along dimensions of size 1
            self._call(self.deferred[name])
        if name in self.unaliased and name not in self.tensors:
            return self._read(name)
        if name not in self.tensors:
            root, offset = self._root(name)
            begin = (operator.add, (self.graph.call_method("storage_offset", (root,)), offset)) if offset else None
            begins = () if begin is None else (self.graph.call_function(*begin),)
            self.tensors[name] = self._view(name, torch.as_strided, root, *begins)
        return self.tensors[name]

    def _read(self, name: str) -> fx.Node:
        """Return the node of a buffer for a reader that does not care whether it is a view."""
        if name in self.tensors:
            return self.tensors[name]
        if name not in self.read_only:
            root, offset = self._root(name)
            key = root, offset, *self._layout(name)
            if key not in self.by_layout:
                self.by_layout[key] = self._view(name, in_memory_of, root, *((offset,) if offset else ()))
            self.read_only[name] = self.by_layout[key]
        return self.read_only[name]

    def _root(self, name: str) -> tuple[fx.Node, int]:
        """Return the base of a deferred view, and its offset in the base."""
        root, offset = self.views[name]
        return self._tensor(root), offset

    def _view(self, name: str, function: Callable[..., object], root: fx.Node, *begins: fx.Node | int) -> fx.Node:
        node = self.graph.call_function(function, (root, *self._layout(name), *begins))
        node._rename(identifier(name))
        return node

    def _layout(self, name: str) -> tuple[tuple[fx.Node | int, ...], tuple[fx.Node | int, ...]]:
        """Return the shape and the strides of a buffer."""
        buffer = self.program.buffers[name]
        return tuple(map(self.sizes.of, buffer.shape)), tuple(map(self.sizes.of, buffer.strides))

    def _for_kernel(self, name: str) -> fx.Node:
        """Return a buffer for a kernel, after a check of its layout if a call returned it."""
        if name in self.unchecked:
            buffer = self.program.buffers[name]
            shape, strides = (tuple(map(self.sizes.known, of)) for of in (buffer.shape, buffer.strides))
            layout = shape, None if None in strides else strides
            self.tensors[name] = self.graph.call_function(
                as_traced, (self._tensor(name), self.unchecked.pop(name), *layout)
            )
        return self._read(name)

    def _argument(self, arg: ExternArg, held: Callable[[str], fx.Node]) -> object:
        """Return the object that is passed for a leaf of an argument."""
        if isinstance(arg, BufferRef):
            return held(arg.name)
        if isinstance(arg, sympy.Expr):
            return self.sizes.of(arg)
        if isinstance(arg, fx.GraphModule):
            children = dict(self.root.named_children())
            name = next((name for name, child in children.items() if child is arg), f"called_{len(children)}")
            self.root.add_module(name, arg)
            return self.graph.get_attr(name)
        return arg

    def _output(self, out: BufferRef | sympy.Expr | None) -> fx.node.Argument:
        if isinstance(out, BufferRef):
            return self._tensor(out.name)
        return None if out is None else self.sizes.of(out)


def lines_of(step: KernelCall) -> tuple[str, ...]:
    """Return the user's lines that a launch computes, each once."""
    return tuple(dict.fromkeys(origin.line for origin in step.origins if origin.line))


def or_evaluated(launch: Launcher, kernel: Kernel, refused: Callable[[BuildError], object] | None) -> Launcher:
    """Return `launch`, with the evaluator as fallback after `refused` was called; successful launches cost no more.

    Some targets build a binary when the sizes, alignments or the device of a call first require it, and load each when
    it is first launched.  Either may fail: a compiler error, a device with less shared memory than others of its kind.
    By then earlier kernels have run, and may have changed inputs, so that the graph cannot be restarted.  Without
    `refused` the refusal is raised.
    """
    if not isinstance(launch, LateLauncher):
        return launch
    if refused is None:
        return launch.or_else(None)
    count, tell = len(kernel.params), refused

    def evaluate(refusal: BuildError, args: Sequence[object]) -> None:
        tell(refusal)
        tensors, sizes = cast("Sequence[torch.Tensor]", args[:count]), cast("Sequence[int]", args[count:])
        run_kernel(kernel, tensors, sizes)

    return launch.or_else(evaluate)
