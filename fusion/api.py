"""The front door: `fuse`, `explain`, `report` and `accuracy`."""

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

from fusion.backend import Backend
from fusion.inspect.accuracy import Accuracy, LaunchError, watching
from fusion.inspect.breaks import codes_of, other_breaks
from fusion.inspect.report import Explanation
from fusion.options import Options
from fusion.region import compile_anew

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
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]: ...
def fuse(
    program: object = None,
    /,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, object] | None = None,
) -> object:
    """The same module or function, run on generated kernels.

    Args:
        program: an `nn.Module`, a function of tensors, or what `torch.export.export` returned.  Without it, returns a
            decorator.
        mode: "default"; "reduce-overhead" records launches as CUDA graphs; "max-autotune" times several configurations
            of each kernel and keeps the fastest.
        dynamic: True compiles once for all sizes, False once per size; None lets sizes that change become dynamic.
        fullgraph: raise where a graph breaks, and Python would go on between the parts.
        options: see `fusion.options.Options`.

    Returns:
        For a module, a module of the same type that shares parameters, buffers and submodules with the given one, which
        itself is not changed; `train` and `eval` are to be called on what is returned.  For an exported program, that
        of its module.  For a function, a function of the same signature.  Compilation happens at the first call.

    Raises:
        TypeError: `program` is neither a module nor a function, or is TorchScript.
        ValueError: an unknown mode or option.

    >>> import torch
    >>> double = fuse(lambda x: x * 2 + 1)
    >>> double(torch.tensor([1.0, 2.0]))
    tensor([3., 5.])
    """
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"dynamic must be True, False or None, got {dynamic!r}")
    if not isinstance(fullgraph, bool):
        raise TypeError(f"fullgraph must be True or False, got {fullgraph!r}")
    read = Options.read(mode, options)
    if program is None:
        return functools.partial(fuse, mode=mode, dynamic=dynamic, fullgraph=fullgraph, options=options)
    if isinstance(program, type):
        raise TypeError(f"fuse takes an instance or a function, not the class {program.__name__}; fuse its instance")
    if isinstance(program, torch.export.ExportedProgram):
        program = program.module()
    if isinstance(program, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError("fuse takes no TorchScript, which is compiled already; fuse what it was made from")
    if isinstance(program, torch.nn.Module):
        return _fuse_module(program, read, dynamic, fullgraph)
    if not callable(program):
        raise TypeError(f"fuse takes an nn.Module or a function, got {type(program).__name__}")
    backend = Backend.shared(_code_of(program), read, fullgraph)
    compiled = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
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
    """How a fused module is pickled: as the module, which is fused in the same way where it is loaded."""

    module: torch.nn.Module
    options: Options
    dynamic: bool | None
    fullgraph: bool

    def __call__(self, protocol: int) -> tuple[Callable[..., torch.nn.Module], tuple[object, ...]]:
        return _fuse_module, (_plain(self.module), self.options, self.dynamic, self.fullgraph)


def _plain(module: Module) -> Module:
    """The module without what makes it a fused one."""
    marks = ("__deepcopy__", "__reduce_ex__", "_fusion_backend", "_compiled_call_impl")
    plain: Module = object.__new__(type(module))  # a graph module's own `__new__` makes another class each time
    plain.__dict__.update({name: value for name, value in vars(module).items() if name not in marks})
    return plain


def _fuse_module(module: Module, options: Options, dynamic: bool | None, fullgraph: bool = False) -> Module:
    fused = _plain(module)  # parameters, buffers, submodules and hooks are shared; only the call differs
    fused.__dict__["__deepcopy__"] = _Duplicate(fused, options, dynamic, fullgraph)
    fused.__dict__["__reduce_ex__"] = _Saved(fused, options, dynamic, fullgraph)
    forward, others = module.forward, trace_rules.check(module.forward)
    alone = others or _has_hooks(module)
    backend = Backend(options) if alone else Backend.shared(_code_of(forward), options, fullgraph)
    fused.__dict__["_fusion_backend"] = backend
    if others or inspect.unwrap(forward) is not forward:
        call = _frame_of(fused, None if others else type(module))
        fused._compiled_call_impl = torch.compile(call, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    else:
        fused.compile(backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    return fused


def _has_hooks(module: torch.nn.Module) -> bool:
    """Has it hooks anywhere?  Dynamo does not look for them again: what has none would run for what has some."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(each, kind) for each in module.modules() for kind in kinds)


_FRAMES: WeakKeyDictionary[type, CodeType] = WeakKeyDictionary()
"""Class of modules → the code of their calls."""


def _frame_of(module: torch.nn.Module, kind: type | None) -> Callable[..., object]:
    """A call of `module` for Dynamo to begin at.

    It does not look into frames of PyTorch's own modules, and the code of a `forward` that is decorated is that of the
    decorator, as of all else that is decorated with it.  What Dynamo compiles belongs to the code, and for one code
    that is not many programs: modules of one `kind` share it; without a kind it is new each time.
    """

    def call(*args: object, **kwargs: object) -> object:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # PyTorch's own

    code = call.__code__.replace(co_name=type(module).__qualname__)
    place = None if kind is None else _code_of(module.forward)
    if place is not None:  # where a report says that something was left to eager
        code = code.replace(co_filename=place.co_filename, co_firstlineno=place.co_firstlineno)
    call.__code__ = code if kind is None else _FRAMES.setdefault(kind, code)
    return call


def report(fused: Callable[..., object]) -> Explanation:
    """What has been compiled so far for the result of a `fuse` call: every graph, forward and backward.

    Where the program leaves its graphs is named, too: `graph_breaks`.
    Compiled code belongs to the program text: modules of one class, or results of fusing one function again, share it
    and its report.

    Raises:
        TypeError: `fused` did not come from `fuse`.

    >>> import torch
    >>> square = fuse(lambda x: x * x)
    >>> report(square).kernels
    ()
    >>> _ = square(torch.ones(3))
    >>> [kernel.name for kernel in report(square).kernels]
    ['mul']
    """
    backend = getattr(fused, "_fusion_backend", None)
    if not isinstance(backend, Backend):
        raise TypeError(
            f"report takes what fuse returned, got {type(fused).__name__}; what torch.compile returns keeps none:"
            " give the program to fusion.fuse in its place, or call fusion.explain(program)(*args)"
        )
    return _explanation(backend, inspect.unwrap(fused), backend.since)


def explain(program: Callable[..., object], /, **settings: object) -> Callable[..., Explanation]:
    """What fusing `program` does: `explain(model)(*args, **kwargs)` runs it once and reports.

    Args:
        program: an `nn.Module` or a function.
        settings: `mode`, `dynamic`, `fullgraph` and `options` as for `fuse`.

    Returns:
        A function that takes the arguments of `program` and returns an `Explanation`: `kernels`, `externs`, `refusals`,
        `graph_breaks`, `traffic_before`, `traffic_after` (bytes), and a text for `print`.

    >>> import torch
    >>> found = explain(lambda x: torch.relu(x) + 1)(torch.randn(8))
    >>> len(found.kernels), found.traffic_after.read, found.traffic_after.written
    (1, 32, 32)
    """
    backend = Backend(_options("explain", program, settings))

    def run(*args: object, **kwargs: object) -> Explanation:
        backend.reports.clear()
        start = time.time()
        compile_anew(program, backend, **_wished(settings))(*args, **kwargs)
        return _explanation(backend, program, start)

    return run


def accuracy(program: Callable[..., object], /, **settings: object) -> Callable[..., Accuracy]:
    """How exact each kernel of `program` is: `accuracy(model)(*args, **kwargs)` runs it once and measures.

    Each launch is compared with exact arithmetic on what it was given, so that an error shows where it is made and not
    where it arrives.  If results require gradients, backward runs too; `.grad` is left alone.

    Args:
        program: an `nn.Module` or a function.
        settings: as for `explain`; launches are not recorded, nor graphs kept.

    Returns:
        A function that takes the arguments of `program` and returns an `Accuracy`: `launches`, in their order, `worst`,
        and a text for `print`.

    >>> import torch
    >>> found = accuracy(lambda x: torch.softmax(x, -1))(torch.randn(4, 100))
    >>> [(launch.tensor, launch.error < 1e-6) for launch in found.launches]
    [('out0', True)]
    """
    options = replace(_options("accuracy", program, settings), graph_cache=False, cudagraphs=False)
    found: list[LaunchError] = []
    backend = Backend(options, watching(found.append))

    def run(*args: object, **kwargs: object) -> Accuracy:
        found.clear()
        result = compile_anew(program, backend, **_wished(settings))(*args, **kwargs)
        _backward(result, program, args, kwargs)
        return Accuracy(tuple(found))

    return run


def _backward(result: object, program: Callable[..., object], *given: object) -> None:
    """Go backward from all of `result` that has gradients, to what was given and to the program's parameters."""
    starts = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    leaves = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
    leaves += program.parameters() if isinstance(program, torch.nn.Module) else []
    wanted = [each for each in leaves if each.requires_grad]
    if starts and wanted:
        torch.autograd.grad(starts, wanted, [_cotangent(each) for each in starts], allow_unused=True)


def _cotangent(result: torch.Tensor) -> torch.Tensor:
    """The gradient of `result`: 1 of a loss; else random numbers, as rows of norms and softmax sum to constants."""
    if result.numel() == 1:
        return torch.ones_like(result)
    generator = torch.Generator(result.device).manual_seed(0)
    return torch.empty_like(result).normal_(generator=generator)


def _options(caller: str, program: object, settings: Mapping[str, object]) -> Options:
    """The options of a call that runs `program` once, which is refused where it cannot be run."""
    unknown = set(settings) - {"mode", "dynamic", "fullgraph", "options"}
    if unknown:
        raise TypeError(f"{caller} takes mode, dynamic, fullgraph and options, got {sorted(unknown)}")
    if not callable(program) or isinstance(program, type):
        raise TypeError(f"{caller} takes an nn.Module or a function, got {program!r}")
    return Options.read(settings.get("mode"), settings.get("options"))  # type: ignore[arg-type]  # read checks


def _wished(settings: Mapping[str, object]) -> dict[str, object]:
    """Pick the settings that `torch.compile` takes."""
    return {name: settings[name] for name in ("dynamic", "fullgraph") if name in settings}


def _explanation(backend: Backend, program: Callable[..., object], since: float) -> Explanation:
    """All that `backend` reports, and where the program leaves its graphs otherwise."""
    graphs = tuple(backend.reports)
    known = [graph.graph_break for graph in graphs if graph.graph_break is not None]
    return Explanation(graphs, other_breaks(codes_of(program), since, known))
