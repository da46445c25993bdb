"""Guards floats that belong to a program (a norm's epsilon) as constants, even where all sizes are symbolic.

With `dynamic=True` Dynamo makes an input of each Python float: a tensor of one element on the CPU, on which PyTorch
evaluates the program's arithmetic on the float, and which every kernel would read.  If an operation needs the number
itself, everything is traced a second time.  That is right for an argument or a learning rate.  A float in a module, or
named in the program's text (`math.pi`), hardly ever changes, so it is guarded, as all floats are without
`dynamic=True`; if it does change, it becomes an input after all.

Input: Dynamo's graph, before anything is derived from it; it is changed in place.  These inputs are removed: creating a
tensor for each number would take longer, at each call, than launching a kernel.

For a tensor with one float64 on the CPU PyTorch creates such an input, too, and retraces because nothing reads it.
Dynamo then drops writes to that tensor.  So, while AOTAutograd traces, its number is marked as guarded already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import fx
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallMethodItemSource, FloatTensorSource, GlobalSource, NNModuleSource
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._guards import Source, detect_fake_mode
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._sympy.symbol import SymT, symbol_is_type


@contextmanager
def settings_fixed(
    graph: fx.GraphModule, inputs: Sequence[object], known: dict[str, float]
) -> Iterator[Sequence[object]]:
    """Guard the settings among the inputs of `graph` and write them as numbers; within, AOTAutograd may trace it.

    Args:
        known: the settings that earlier graphs of this program were compiled for, extended by those of this one.
            A float with another value than before is not a setting.

    Returns:
        The remaining inputs.

    >>> from fusion.inspect.examples import show_captured
    >>> from torch import empty, nn
    >>> class Scaled(nn.Module):
    ...     eps = 0.5
    ...
    ...     def forward(self, x):
    ...         return x * self.eps
    >>> def fix(graph):
    ...     inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    ...     with settings_fixed(graph, inputs, {}):
    ...         pass
    >>> show_captured(fix, Scaled(), empty(3), dynamic=True)
    - item = item(dict_type_l_self_dict_eps_)
    - mul = mul(l_x_, item)
    + mul = mul(l_x_, 0.5)
      return mul
    """
    placeholders_and_inputs = zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
    remaining, fixed, is_called = [], dict[Source, str](), _is_called_by_dynamo(graph)
    for node, value in placeholders_and_inputs:
        name = _fix(node, known)
        if name is not None:
            fixed[node.meta["grapharg"].source] = name
        if name is not None and is_called:
            graph.graph.erase_node(node)
        else:
            remaining.append(value)
    if fixed:
        graph.recompile()
        _guard_as_constants(fixed)
    own = {*fixed.values(), *_held_by_tensors()} - TensorifyState.force_specializations
    TensorifyState.force_specializations |= own  # else PyTorch retraces, for guards that exist already
    try:
        yield remaining
    finally:
        TensorifyState.force_specializations -= own


def _fix(node: fx.Node, known: dict[str, float]) -> str | None:
    """Replace an input by its number, if it is a setting; return PyTorch's name for it."""
    grapharg = node.meta.get("grapharg")
    number = getattr(node.meta.get("example_value"), "item_memo", None)  # the result of `.item()` on a float
    if grapharg is None or number is None or not grapharg.pass_arg_as_tensor or not belongs_to_program(grapharg.source):
        return None
    value = grapharg.example.item()
    if any(user.target != "item" for user in node.users) or known.setdefault(str(grapharg.source), value) != value:
        return None
    guarded = guard_scalar(number)
    for user in list(node.users):
        user.replace_all_uses_with(guarded)  # type: ignore[arg-type]  # numbers are arguments, too
        node.graph.erase_node(user)
    return str(number.node._expr)


def _guard_as_constants(sources: Collection[Source]) -> None:
    """Guard the floats at `sources` as Dynamo guards floats that it takes for constants.

    That is one comparison in C++.  The guard of a symbol is two in Python, one of which converts the float to a tensor
    and back at each call (measured: docs/performance.md, `constant_floats`).  A symbol that is no longer used has no
    guard.
    """
    shapes = None if (mode := detect_fake_mode()) is None else mode.shape_env
    if shapes is None or shapes.tracked_fakes is None:
        return
    for source in sources:
        install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
    shapes.tracked_fakes[:] = [traced for traced in shapes.tracked_fakes if _float_of(traced.source) not in sources]


def _held_by_tensors() -> Iterator[str]:
    """Yield PyTorch's names for the numbers in the program's tensors."""
    mode = detect_fake_mode()
    if mode is not None and mode.shape_env is not None:
        for symbol, sources in mode.shape_env.var_to_sources.items():
            if symbol_is_type(symbol, SymT.FLOAT) and any(isinstance(s, CallMethodItemSource) for s in sources):
                yield str(symbol)


def _float_of(source: Source) -> Source:
    """Return the source of a float, without the conversions that Dynamo adds."""
    while isinstance(source, (CallMethodItemSource, FloatTensorSource)):
        source = source.base
    return source


def _is_called_by_dynamo(graph: fx.GraphModule) -> bool:
    """Return whether Dynamo calls this very graph; it may be a copy that another compiler passes on."""
    try:
        return InstructionTranslator.current_tx().output.graph is graph.graph
    except AttributeError:  # nothing is being traced
        return False


def belongs_to_program(source: object) -> bool:
    """Return whether the value at `source` is held by a module, or named by the program's text.

    >>> belongs_to_program(AttrSource(GlobalSource("math"), "pi"))
    True
    """
    by_name = True  # whether all on the way are names
    while isinstance(source, Source):
        if isinstance(source, NNModuleSource) or (by_name and isinstance(source, GlobalSource)):
            return True
        by_name &= isinstance(source, AttrSource)
        source = getattr(source, "base", None)
    return False
