"""Describes AOTAutograd's result for a region as data, and rebuilds the result from it.

Input: the result, and the keys of its compiled graphs; output: values that `serialise.py` writes.  PyTorch pickles
these objects; here each type that may occur is listed, and its attributes are written.  Reading makes objects of the
listed types and sets their attributes, and calls the constructors of listed views: no function is called that an entry
names.

Refused is everything else: subclasses of tensors, tokens of effects, wrappers that work at each call, and two kinds of
views (`FunctionalizeFallbackKernel.h`) that hand out their sizes as a reference to a copy which is freed by then.

Data for logs alone is left out.  Compiled autograd gets the backward graph that was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch._C import _functionalization
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.aot_autograd_result import AOTAutogradResult, CompiledBackward, CompiledForward
from torch._functorch._aot_autograd.functional_utils import ViewMetaSequence
from torch._functorch._aot_autograd.runtime_wrappers import AOTDedupeWrapper, AOTSyntheticBaseWrapper
from torch._functorch._aot_autograd.schemas import (
    InputAliasInfo,
    MemoryFormatMeta,
    MutationType,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    ViewAndMutationMeta,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fusion.graph_cache.serialise import Unwritten
from fusion.joint.dependence import Dependence
from fusion.lowering.errors import Origin
from fusion.runtime.rng_replay import Draws

JointFacts: TypeAlias = "tuple[Dependence | None, Draws | None]"
"""The dependence of gradients on inputs, if known, and the random draws, if any."""


@dataclass(frozen=True, slots=True)
class State:
    """An object by its type, and its attributes."""

    kind: str
    attributes: dict[str, object]


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an enumeration."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type."""

    name: str


@dataclass(frozen=True, slots=True)
class Views:
    """A chain of views: the type of each, and its arguments."""

    views: tuple[tuple[str, tuple[object, ...]], ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """The entry of a region.

    Attributes:
        metadata: which inputs are changed, which results are views, which values backward gets.
        saved: the number of results that are saved for backward.
        detached: the positions of inputs that backward gets detached.
        backward: the positions of states that backward gets, and the number of sizes; None without backward.
        guards: on sizes (`size_guards.py`); empty without any.
        took_ns: of forward and backward, to trace and compile.
        graphs: the keys of forward, and of backward if there is one.
    """

    metadata: State
    saved: int | None
    detached: tuple[int, ...]
    backward: tuple[tuple[int, ...], int] | None
    guards: str
    took_ns: tuple[int, int]
    graphs: tuple[str, ...]
    facts: JointFacts = (None, None)


KINDS = {kind.__name__: kind for kind in (Traced, State, Member, TypeName, Views, Dependence, Draws, Origin)}

_STATES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(ViewAndMutationMeta, InputAliasInfo, OutputAliasInfo, PlainTensorMeta, MemoryFormatMeta),
        *(descriptors.TangentAOTInput, descriptors.ParamAOTInput, descriptors.BufferAOTInput),
        *(descriptors.PlainAOTInput, descriptors.ViewBaseAOTInput, descriptors.PlainAOTOutput),
        *(descriptors.InputMutationAOTOutput, descriptors.IntermediateBaseAOTOutput),
    )
}
_MEMBERS: Mapping[str, type[Enum]] = {kind.__name__: kind for kind in (OutputType, MutationType)}
_TYPES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor),
        *(torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, type(None)),
    )
}

_views: Any = _functionalization  # its stub declares less than it has
_UNREADABLE = (_views._unsafe_view_ViewMeta, _views.resize__ViewMeta)
_VIEWS: Mapping[str, Callable[..., _functionalization.ViewMeta]] = {
    name: kind for name, kind in vars(_views).items() if name.endswith("_ViewMeta") and kind not in _UNREADABLE
}
_INVERSE: Mapping[str, object] = _views.InverseReturnMode.__members__

_DROPPED = (
    *("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str", "min_cut_info_str"),
    *("sanitized_aot_config", "serialized_bw_module"),
)
"""The parts of a result for logs, for results that are exported, and for compiled autograd."""

_READ = (
    *("compiled_fw", "compiled_bw", "runtime_metadata", "dispatch_wrappers", "num_fw_outs_saved_for_bw"),
    *("indices_of_inps_to_detach", "forward_time_taken_ns", "backward_time_taken_ns", "guards_expr"),
)


def described(result: AOTAutogradResult, facts: JointFacts = (None, None)) -> Traced:
    """Describe AOTAutograd's result.

    Raises:
        Unwritten: a part of it is of a type that is not listed.
    """
    for part in fields(result):
        if part.name not in (*_READ, *_DROPPED) and getattr(result, part.name) is not None:
            raise Unwritten(f"the {part.name} of AOTAutograd's result")
    for wrapper in result.dispatch_wrappers:
        if type(wrapper) not in (AOTDedupeWrapper, AOTSyntheticBaseWrapper):
            raise Unwritten(f"a {type(wrapper).__name__}")
        assert isinstance(wrapper, (AOTDedupeWrapper, AOTSyntheticBaseWrapper))
        if wrapper.needs_post_compile:  # it depends on how inputs overlap
            raise Unwritten("its inputs share memory")
    backward = result.compiled_bw
    return Traced(
        metadata=cast("State", _described(result.runtime_metadata)),
        saved=result.num_fw_outs_saved_for_bw,
        detached=tuple(result.indices_of_inps_to_detach),
        backward=None
        if backward is None
        else (tuple(backward.backward_state_indices), backward.num_symints_saved_for_bw_),
        guards=result.guards_expr or "",
        took_ns=(result.forward_time_taken_ns, result.backward_time_taken_ns),
        graphs=tuple(half.fx_graph_cache_info[0] for half in (result.compiled_fw, backward) if half is not None),
        facts=facts,
    )


def _described(value: object) -> object:
    kind = type(value)
    if kind in (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout):
        return value
    if kind in (tuple, torch.Size):
        return tuple(map(_described, cast("Sequence[object]", value)))
    if kind is list:
        return list(map(_described, cast("list[object]", value)))
    if kind is set:
        return frozenset(map(_described, cast("set[object]", value)))
    if kind is dict:
        return {_described(key): _described(each) for key, each in cast("dict[object, object]", value).items()}
    if isinstance(value, ViewMetaSequence):
        return Views(tuple((type(view).__name__, _arguments(view)) for view in value.sequence))
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return TypeName(value.__name__)
    if isinstance(value, Enum) and _MEMBERS.get(kind.__name__) is kind:
        return Member(kind.__name__, value.name)
    if _STATES.get(kind.__name__) is kind:
        return State(kind.__name__, {name: _described(each) for name, each in vars(value).items()})
    raise Unwritten(f"a {kind.__name__} in AOTAutograd's result")


def _arguments(view: Any) -> tuple[object, ...]:
    if _VIEWS.get(type(view).__name__) is not type(view):
        raise Unwritten(f"one of its results is a view that PyTorch does not write rightly ({type(view).__name__})")
    inverse = _views.InverseReturnMode
    return tuple(
        Member("InverseReturnMode", each.name) if isinstance(each, inverse) else _described(each)
        for each in view.as_tuple()
    )


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """The compiled halves of a region, and the graph of backward."""

    forward: CompiledForward
    backward: CompiledBackward | None
    graph: Callable[[], fx.GraphModule]

    def deserialize(self) -> fx.GraphModule:
        """Return the graph of backward, under the name by which PyTorch asks for it."""
        return self.graph()


def result_of(traced: Traced, compiled: CompiledRegion) -> AOTAutogradResult:
    """Return AOTAutograd's result, with the compiled graphs; its guards are the caller's.

    Raises:
        Exception: the entry is damaged.
    """
    parts: dict[str, object] = {
        **{part.name: None for part in fields(AOTAutogradResult)},
        "compiled_fw": compiled.forward,
        "compiled_bw": compiled.backward,
        "runtime_metadata": _restored(traced.metadata),
        "dispatch_wrappers": [],
        "num_fw_outs_saved_for_bw": traced.saved,
        "indices_of_inps_to_detach": list(traced.detached),
        "forward_time_taken_ns": traced.took_ns[0],
        "backward_time_taken_ns": traced.took_ns[1],
        "serialized_bw_module": None if compiled.backward is None else compiled,
    }
    result: Callable[..., AOTAutogradResult] = AOTAutogradResult
    return result(**parts)


def _restored(value: object) -> object:
    match value:
        case State(kind, attributes):
            state: object = object.__new__(_STATES[kind])
            vars(state).update({name: _restored(each) for name, each in attributes.items()})
            return state
        case Views(views):
            chain = object.__new__(ViewMetaSequence)
            chain.sequence = [_VIEWS[kind](_restored(arguments)) for kind, arguments in views]
            chain.metadata = None  # type: ignore[assignment]  # compared only while PyTorch traces
            return chain
        case Member("InverseReturnMode", name):
            return _INVERSE[name]
        case Member(kind, name):
            return _MEMBERS[kind][name]
        case TypeName(name):
            return _TYPES[name]
        case tuple():
            return tuple(map(_restored, value))
        case list():
            return list(map(_restored, value))
        case frozenset():
            return set(map(_restored, value))
        case dict():
            return {_restored(key): _restored(each) for key, each in value.items()}
    return value


__all__ = ["KINDS", "CompiledRegion", "JointFacts", "Traced", "described", "result_of"]
