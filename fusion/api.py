"""Defines the main entry points: `fuse`, `explain`, `report` and `accuracy`."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch._dynamo import trace_rules
from torch.utils import _pytree as pytree

from fusion.backend import Backend, backend_of
from fusion.calls.callers import calls_of
from fusion.calls.uncaptured import unwatched, watch_forward, watch_steps, watched
from fusion.compilation.region import compile_anew
from fusion.diagnosis.certifying import certify
from fusion.inspect.accuracy import Accuracy, LaunchError, watching
from fusion.inspect.agreement import cotangent
from fusion.inspect.breaks import codes_of, other_breaks
from fusion.inspect.explanation import Explanation
from fusion.inspect.measurement import Measurement
from fusion.inspect.report import Report
from fusion.options import Options, options_of, torch_settings

Params = ParamSpec("Params")
Result = TypeVar("Result")
Module = TypeVar("Module", bound=torch.nn.Module)


@overload
def fuse(
    program: Module,
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, object] | None = None,
    require: Mapping[str, int] | None = None,
) -> Module: ...
@overload
def fuse(
    program: Callable[Params, Result],
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, object] | None = None,
    require: Mapping[str, int] | None = None,
) -> Callable[Params, Result]: ...
@overload
def fuse(
    program: None = None,
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, object] | None = None,
    require: Mapping[str, int] | None = None,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]: ...
def fuse(
    program: object = None,
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, object] | None = None,
    require: Mapping[str, int] | None = None,
) -> object:
    """Compile a module or function, so that it runs on generated kernels.

    Compilation happens at the first call, and again where a later call breaks an assumption (dtypes, devices, sizes
    unless they are dynamic, gradients or none).  Results have the shapes, dtypes, strides and devices of eager.

    Args:
        program: an `nn.Module`, a function of tensors, or the result of `torch.export.export`.  Without it, `fuse`
            returns a decorator.
        mode: "default"; "reduce-overhead" records the launches of each graph as a CUDA graph; "max-autotune" times
            several configurations of each kernel on the device and keeps the fastest.
        dynamic: True compiles once for all sizes, and for the floats among the arguments; False once for each size;
            None lets sizes become dynamic once they change.
        fullgraph: raise where Dynamo breaks the graph; otherwise Python goes on between the parts.
        options: names and values as in `fusion.Options`, but for `mode`.
        require: the most kernels and library calls (`externs`) that each compiled graph may have, for tests:
            `{"kernels": 1, "externs": 0}`.  Forward and backward are a graph each.

    Returns:
        For a module, a module of the same type that shares parameters, buffers and submodules with `program`, which
            itself is not changed.  Its training mode and plain attributes are its own: call `train` and `eval` on it.
            For an exported program, the same of its module.  For a function, a function of the same signature.

    Raises:
        TypeError: `program` is neither a module nor a function, or is a class or TorchScript; `dynamic`, `fullgraph`
            or an option has the wrong type.
        ValueError: unknown mode, option or value of an option.

    The function that is returned raises a `FusionError` under `options={"strict": True}` where a region cannot be
    compiled, and otherwise warns (`FusionWarning`) and runs that region eagerly.  Under `require` it raises a
    `NotAsRequired` in the call that compiles a graph with more kernels or calls, with the reasons.

    >>> import torch
    >>> double = fuse(lambda x: x * 2 + 1)
    >>> double(torch.tensor([1.0, 2.0]))
    tensor([3., 5.])
    """
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"dynamic must be True, False or None, got {dynamic!r}")
    if not isinstance(fullgraph, bool):
        raise TypeError(f"fullgraph must be True or False, got {fullgraph!r}")
    read = Options.read(mode, options if require is None else {**(options or {}), "require": require})
    if program is None:
        settings = {"mode": mode, "dynamic": dynamic, "fullgraph": fullgraph, "options": options, "require": require}
        return functools.partial(fuse, **settings)
    if isinstance(program, type):
        raise TypeError(f"fuse takes an instance or a function, not the class {program.__name__}; fuse its instance")
    if isinstance(program, torch.export.ExportedProgram):
        program = program.module()
    if isinstance(program, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError("fuse takes no TorchScript, which is compiled already; fuse the Python code that it comes from")
    if isinstance(program, torch.nn.Module):
        return _fuse_module(program, read, dynamic, fullgraph)
    if not callable(program):
        raise TypeError(f"fuse takes an nn.Module or a function, got {type(program).__name__}")
    backend = Backend.shared(_code_of(program), read, fullgraph)
    compiled = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    calls_of(compiled)  # they begin now
    name = getattr(program, "__qualname__", type(program).__qualname__)
    compiled = watched(compiled, backend, inspect.unwrap(program), name.rpartition("<locals>.")[2])
    compiled._fusion_backend = backend  # type: ignore[attr-defined]  # for `report`
    return compiled


def _code_of(function: Callable[..., object]) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


@dataclass(frozen=True, slots=True)
class _Duplicate:
    """`copy.deepcopy` of a fused module: a deep copy of the module, fused in the same way."""

    module: torch.nn.Module
    options: Options
    dynamic: bool | None
    fullgraph: bool

    def __call__(self, memo: dict[int, object]) -> torch.nn.Module:
        copied = copy.deepcopy(_plain(self.module), memo)
        duplicate = _fuse_module(copied, self.options, self.dynamic, self.fullgraph)
        memo[id(self.module)] = duplicate
        return duplicate


@dataclass(frozen=True, slots=True)
class _Saved:
    """Pickles a fused module as its module and settings; it is fused in the same way where it is loaded."""

    module: torch.nn.Module
    options: Options
    dynamic: bool | None
    fullgraph: bool

    def __call__(self, protocol: int) -> tuple[Callable[..., torch.nn.Module], tuple[object, ...]]:
        return _fuse_module, (_plain(self.module), self.options, self.dynamic, self.fullgraph)


def _plain(module: Module) -> Module:
    """Return the module as it was before it was fused."""
    marks = ("__deepcopy__", "__reduce_ex__", "_fusion_backend", "_compiled_call_impl")
    plain: Module = object.__new__(type(module))  # a graph module's own `__new__` makes another class each time
    kept = {name: value for name, value in vars(module).items() if name not in marks}
    plain.__dict__.update(unwatched(kept))
    return plain


def unfused(program: Callable[..., object]) -> Callable[..., object]:
    """Return the program that `fuse` was called with, for its result; anything else as it is.

    A module shares its parameters, buffers and submodules with `program`.
    """
    if not hasattr(program, "_fusion_backend"):
        return program
    return _plain(program) if isinstance(program, torch.nn.Module) else inspect.unwrap(program)


def options_for(program: object, options: Mapping[str, object] | None) -> Options:
    """Return `options`, as for `fuse`; by default the options that a program was compiled with."""
    backend = backend_of(program) if options is None else None
    return Options.read(None, options) if backend is None else backend.options


def _fuse_module(module: Module, options: Options, dynamic: bool | None, fullgraph: bool = False) -> Module:
    fused = _plain(module)  # parameters, buffers, submodules and hooks are shared; only the call differs
    fused.__dict__["__deepcopy__"] = _Duplicate(fused, options, dynamic, fullgraph)
    fused.__dict__["__reduce_ex__"] = _Saved(fused, options, dynamic, fullgraph)
    forward, others = fused.forward, trace_rules.check(fused.forward)
    alone = others or _has_hooks(module)
    backend = Backend(options) if alone else Backend.shared(_code_of(forward), options, fullgraph)
    fused.__dict__["_fusion_backend"] = backend
    if others or inspect.unwrap(forward) is not forward:
        call = _frame_of(fused, None if others else type(module))
        fused._compiled_call_impl = torch.compile(call, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    else:
        fused.compile(backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    compiled = fused._compiled_call_impl
    assert callable(compiled)
    calls_of(compiled)  # they begin now
    fused._compiled_call_impl = watched(compiled, backend, fused, type(module).__name__)
    watch_steps(fused)
    watch_forward(fused)
    return fused


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks anywhere: Dynamo ignores hooks that are added after the first call."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(each, kind) for each in module.modules() for kind in kinds)


_FRAMES: WeakKeyDictionary[type, CodeType] = WeakKeyDictionary()
"""Class of modules → the code of their calls."""


def _frame_of(module: torch.nn.Module, kind: type | None) -> Callable[..., object]:
    """Return a call of `module` for Dynamo to begin at.

    Dynamo skips frames of PyTorch's own modules, and a decorated `forward` has the code object of its decorator, as
    everything else that is decorated with it.  Dynamo stores compilations by code object, a limited number for each:
    modules of one `kind` share the code object; without a kind it is new each time.
    """

    def call(*args: object, **kwargs: object) -> object:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # not annotated in PyTorch

    code = call.__code__.replace(co_name=type(module).__qualname__)
    place = None if kind is None else _code_of(module.forward)
    if place is not None:  # where a report says that something was left to eager
        code = code.replace(co_filename=place.co_filename, co_firstlineno=place.co_firstlineno)
    call.__code__ = code if kind is None else _FRAMES.setdefault(kind, code)
    return call


def report(fused: Callable[..., object]) -> Explanation:
    """Report the compilations so far of a compiled program, without running anything.

    Kernels have their predicted times; `explain(program, measure=True)` measures them.

    Args:
        fused: the result of `fuse` or of `torch.compile(…, backend="fusion")`, or a module on which
            `compile(backend="fusion")` was called; whether it has been called or not.

    Returns:
        Every graph that this program has run so far, forward and backward, in the order of its first calls, and the
            places at which the program leaves its graphs (`graph_breaks`).  Equal programs, such as two modules of a
            class, share compiled graphs; each reports the graphs that its own calls run.

    Raises:
        TypeError: `fused` was not compiled by this compiler.

    >>> import torch
    >>> square = fuse(lambda x: x * x)
    >>> report(square).kernels
    ()
    >>> _ = square(torch.ones(3))
    >>> [kernel.name for kernel in report(square).kernels]
    ['mul']
    """
    backend = backend_of(fused)
    if backend is None:
        raise TypeError(
            f'report takes what fuse or torch.compile(…, backend="fusion") returned, got {type(fused).__name__};'
            " for another program call fusion.explain(program)(*args)"
        )
    calls = calls_of(fused)
    if calls is None:  # of Dynamo's `aot_compile`: its backend compiled this program alone
        return replace(_explanation(tuple(backend.reports), _program_of(fused), backend.since), called=False)
    since = min(backend.since, calls.since) if calls.reports else calls.since
    return replace(_explanation(calls.reports, _program_of(fused), since), called=False)


def _program_of(compiled: Callable[..., object]) -> Callable[..., object]:
    """Return the program that `fuse` or PyTorch has compiled."""
    program: Callable[..., object] = getattr(compiled, "_orig_mod", compiled)
    return inspect.unwrap(program)  # type: ignore[no-any-return]  # `inspect` has no type for it


def explain(
    program: Callable[..., object],
    /,
    *,
    measure: bool = False,
    backward: bool = False,
    verify: bool = False,
    **settings: object,
) -> Callable[..., Explanation]:
    """Run a program once on generated kernels and report how it was compiled: `explain(model)(*args, **kwargs)`.

    Args:
        program: an `nn.Module` or a function.
        measure: also measure each kernel and library call on the tensors it gets, and name in the report the kernels
            whose time is off by more than a factor of two from the predicted one.  If results require gradients,
            backward runs too; the `.grad` of parameters and inputs is left alone.  Launches are not recorded as CUDA
            graphs, and no graph is kept in the cache.
        backward: run backward too if results require gradients, without measuring.
        verify: also certify the compiled program (`Explanation.certificate`): the error of each kernel against float64
            on these inputs and its contribution to the error of the results, and each rewrite and each kernel on inputs
            on which derivations break.  Backward is included if results require gradients.  The program runs once for
            each launch, on copies.
        settings: `mode`, `dynamic`, `fullgraph` and `options`, as for `fuse`.

    Returns:
        A function that takes the arguments of `program` and returns an `Explanation`.  It has `kernels`, `externs`,
            `refusals`, `graph_breaks`, and `traffic_before` and `traffic_after` in bytes; printed, it is a list.

    Raises:
        TypeError: `program` cannot be called, or a setting is unknown or has the wrong type.
        ValueError: unknown mode, option or value of an option.

    >>> import torch
    >>> report = explain(lambda x: torch.relu(x) + 1)(torch.randn(8))
    >>> len(report.kernels), report.traffic_after.read, report.traffic_after.written
    (1, 32, 32)
    """
    options = options_of("explain", program, settings)
    measurement = Measurement() if measure else None
    if measure:
        options = replace(options, graph_cache=False, cudagraphs=False)
    backend = Backend(options, measurement)

    def run(*args: object, **kwargs: object) -> Explanation:
        backend.reports.clear()
        start = time.time()
        result = compile_anew(program, backend, **torch_settings(settings))(*args, **kwargs)
        if measure or backward:
            _backward(result, program, args, kwargs)
        explanation = _explanation(tuple(backend.reports), program, start)
        if measurement is not None:
            explanation = replace(explanation, graphs=measurement.measured(explanation.graphs))
        if verify:
            certificate = certify(program, args, kwargs, options, torch_settings(settings))
            explanation = replace(explanation, certificate=certificate)
        return explanation

    return run


def accuracy(program: Callable[..., object], /, **settings: object) -> Callable[..., Accuracy]:
    """Run a program once and measure the error of each kernel against float64: `accuracy(model)(*args, **kwargs)`.

    Each launch is compared with float64 arithmetic on the tensors that it was given, so an error shows in the kernel
    that makes it and not in the kernels that it reaches.  If results require gradients, backward runs too; the `.grad`
    of parameters and inputs is left alone.

    Args:
        program: an `nn.Module` or a function.
        settings: `mode`, `dynamic`, `fullgraph` and `options`, as for `fuse`; launches are not recorded as CUDA
            graphs, and no graph is kept in the cache.

    Returns:
        A function that takes the arguments of `program` and returns an `Accuracy`.  It has `launches` in their order
            and `worst`, the same with the largest errors first; printed, it is a list.

    Raises:
        TypeError: `program` cannot be called, or a setting is unknown or has the wrong type.
        ValueError: unknown mode, option or value of an option.

    >>> import torch
    >>> result = accuracy(lambda x: torch.softmax(x, -1))(torch.randn(4, 100))
    >>> [(launch.tensor, launch.error < 1e-6) for launch in result.launches]
    [('out0', True)]
    """
    options = replace(options_of("accuracy", program, settings), graph_cache=False, cudagraphs=False)
    errors: list[LaunchError] = []
    backend = Backend(options, watching(errors.append))

    def run(*args: object, **kwargs: object) -> Accuracy:
        errors.clear()
        result = compile_anew(program, backend, **torch_settings(settings))(*args, **kwargs)
        _backward(result, program, args, kwargs)
        return Accuracy(tuple(errors))

    return run


def _backward(result: object, program: Callable[..., object], *given: object) -> None:
    """Compute the gradients of all inputs and parameters from the parts of `result` that have gradients."""
    starts = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    leaves = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
    leaves += program.parameters() if isinstance(program, torch.nn.Module) else []
    wanted = [each for each in leaves if each.requires_grad]
    if starts and wanted:
        torch.autograd.grad(starts, wanted, [cotangent(each) for each in starts], allow_unused=True)


def _explanation(graphs: tuple[Report, ...], program: Callable[..., object], since: float) -> Explanation:
    """Return the reports of a program, and where it leaves its graphs otherwise."""
    known = [graph.graph_break for graph in graphs if graph.graph_break is not None]
    return Explanation(graphs, other_breaks(codes_of(program), since, known))
