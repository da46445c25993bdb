"""Guards floats that belong to a program (a norm's epsilon) as constants, even where all sizes are symbols.

With `dynamic=True` Dynamo makes an input of each Python float: a tensor of one element on the CPU, on which PyTorch
computes what the program computes of the float, and which every kernel would read.  Where an operation wants the number
itself, all is traced a second time.  That is right for an argument or a learning rate.  What a module holds, or the
text of the program names (`math.pi`), hardly ever changes, so it is guarded, as all floats are without `dynamic=True`;
if it does change, it becomes an input after all.

Input: Dynamo's graph, before anything is derived from it; it is changed in place.  What was an input is none any more:
to make a tensor of each number would take longer, at each call, than the launch of a kernel.

Of a tensor that holds one float64 on the CPU PyTorch takes the number for such an input, too, and traces again because
nothing reads it.  Dynamo then drops what is written to that tensor.  So PyTorch is told, while AOTAutograd traces, that
its number is guarded already.
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
        known: the settings that earlier graphs of this program were compiled for; those of this one are added.
            What has another value now is no setting.

    Returns:
        The inputs that are left.
    """
    given = zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
    left, fixed, is_called = [], dict[Source, str](), _is_called_by_dynamo(graph)
    for node, value in given:
        name = _fix(node, known)
        if name is not None:
            fixed[node.meta["grapharg"].source] = name
        if name is not None and is_called:
            graph.graph.erase_node(node)
        else:
            left.append(value)
    if fixed:
        graph.recompile()
        _guard_as_constants(fixed)
    own = {*fixed.values(), *_held_by_tensors()} - TensorifyState.force_specializations
    TensorifyState.force_specializations |= own  # else PyTorch begins anew, for the guards that there are already
    try:
        yield left
    finally:
        TensorifyState.force_specializations -= own


def _fix(node: fx.Node, known: dict[str, float]) -> str | None:
    """Write an input as a number, if it is a setting; returns what PyTorch calls it."""
    given = node.meta.get("grapharg")
    number = getattr(node.meta.get("example_value"), "item_memo", None)  # what `.item()` gives of a float
    if given is None or number is None or not given.pass_arg_as_tensor or not belongs_to_program(given.source):
        return None
    value = given.example.item()
    if any(user.target != "item" for user in node.users) or known.setdefault(str(given.source), value) != value:
        return None
    guarded = guard_scalar(number)
    for user in list(node.users):
        user.replace_all_uses_with(guarded)  # type: ignore[arg-type]  # numbers are arguments, too
        node.graph.erase_node(user)
    return str(number.node._expr)


def _guard_as_constants(sources: Collection[Source]) -> None:
    """Guard the floats at `sources` as Dynamo guards those that it takes for constants.

    That is one comparison in C++.  The guard of a symbol is two in Python, of which one makes a tensor of the float and
    reads it: 15 µs for each float at each call.  A symbol of which nothing is traced any more has no guard.
    """
    shapes = None if (mode := detect_fake_mode()) is None else mode.shape_env
    if shapes is None or shapes.tracked_fakes is None:
        return
    for source in sources:
        install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
    shapes.tracked_fakes[:] = [traced for traced in shapes.tracked_fakes if _float_of(traced.source) not in sources]


def _held_by_tensors() -> Iterator[str]:
    """What PyTorch calls the numbers of tensors that the program gives."""
    mode = detect_fake_mode()
    if mode is not None and mode.shape_env is not None:
        for symbol, sources in mode.shape_env.var_to_sources.items():
            if symbol_is_type(symbol, SymT.FLOAT) and any(isinstance(s, CallMethodItemSource) for s in sources):
                yield str(symbol)


def _float_of(source: Source) -> Source:
    """Where the float is, of what Dynamo makes of a float."""
    while isinstance(source, (CallMethodItemSource, FloatTensorSource)):
        source = source.base
    return source


def _is_called_by_dynamo(graph: fx.GraphModule) -> bool:
    """Does Dynamo call what becomes of `graph` with what this very graph takes?  It may be a copy that another has."""
    try:
        return InstructionTranslator.current_tx().output.graph is graph.graph
    except AttributeError:  # nothing is being traced
        return False


def belongs_to_program(source: object) -> bool:
    """Is what Dynamo found at `source` held by a module, or named by the program's text?

    >>> belongs_to_program(AttrSource(GlobalSource("math"), "pi"))
    True
    """
    by_name = True  # is all on the way a name?
    while isinstance(source, Source):
        if isinstance(source, NNModuleSource) or (by_name and isinstance(source, GlobalSource)):
            return True
        by_name &= isinstance(source, AttrSource)
        source = getattr(source, "base", None)
    return False
