"""Computes the cache key of a region that Dynamo captured: everything that decides its compilation, as one text.

Input: Dynamo's graph with its inputs, and AOTAutograd's configuration; output: the key.  In addition to the parts of a
graph that `key.py` covers, it covers the state on which PyTorch's tracing depends: modes of autograd and autocast,
switches of its libraries, its configurations, which inputs are views, and of which tensors.

Regions are refused if their parts may differ under the same name in another process (operations and functions that are
not PyTorch's own, tensor subclasses, hooks and modes), and if they have data-dependent sizes.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from types import CodeType

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
from torch import fx
from torch._decomp import decomposition_table
from torch._functorch import predispatch
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from fusion.codegen.target import Target
from fusion.graph_cache.key import SerialisedGraph, held_by, key_for
from fusion.graph_cache.serialise import Unwritten, write
from fusion.options import Options

OWN = frozenset({"aten", "prims"})
"""PyTorch's own operator libraries, which are the same in each process of one release."""

_MODULES = ("torch", operator.__name__, operator.add.__module__, math.__name__, "builtins", "fusion")

_CONFIGURATIONS = (
    *(torch._functorch.config, torch._dynamo.config, torch._inductor.config),
    torch.fx.experimental._config,
)

_SWITCHES = tuple(
    name
    for name in sorted(dir(torch._C))
    if name.startswith("_get_") and name.endswith(("_enabled", "_benchmark", "_deterministic", "_reduction", "_order"))
)
"""The functions that return the settings of PyTorch's libraries."""

_TRACED_BY = (
    *("Autograd", "Autocast", "Composite", "Python", "PreDispatch", "FuncTorch", "Functionalize"),
    *("ADInplaceOrView", "BackendSelect", "Conjugate", "Negative", "ZeroTensor"),
)
"""Prefixes of the dispatch keys under which a program may register how an operation is traced."""

_KNOWN = tuple(os.path.join(sys.modules[name].__path__[0], "") for name in ("torch", "fusion"))
"""Directories of PyTorch and of this compiler; code outside of them is the user's."""

_OF_NODES = frozenset(
    {
        *("example_value", "stack_trace", "nn_module_stack", "grapharg", "recompute", "original_aten"),
        *("tensor_dict", "creation_timestamp", "source_fn_stack", "seq_nr", "from_node"),
    }
)
"""Allowed metadata of nodes: covered by the key, or (second row) without influence."""

_OF_GRAPHS = frozenset({"backend_id", "dynamo_compile_id", "dynamo_flat_name_to_original_fqn"})

_OF_CALL = (
    *("num_params_buffers", "keep_inference_input_mutations", "is_export", "no_tangents", "dynamic_shapes"),
    *("static_input_indices", "pre_dispatch", "disable_functionalization", "force_non_lazy_backward_lowering"),
)
"""The fields of AOTAutograd's configuration that the key covers."""

_NOT_DECIDING = frozenset({"dump", "override", "strict", "graph_cache", "require"})


def key_of_region(
    graph: fx.GraphModule, inputs: Sequence[object], asked: object, options: Options, targets: Sequence[Target]
) -> str:
    """Return the cache key of a region that Dynamo captured.

    Args:
        asked: AOTAutograd's configuration of this trace.
        targets: of each device that the region has tensors on.

    Raises:
        Unwritten: a part cannot be serialised; the message says which.
    """
    form = _Captured(graph)
    chosen = [(each.name, getattr(options, each.name)) for each in fields(options) if each.name not in _NOT_DECIDING]
    call = [(name, getattr(asked, name, None)) for name in _OF_CALL]
    nodes, arguments = list(form.nodes()), list(map(form.given, inputs))
    others = [(target.name, target.identity, repr(target.numerics)) for target in targets[1:]]
    _refuse_foreign_tracing()
    return key_for(targets[0], "region", chosen, call, *others, *_settings(), nodes, arguments, *form.facts())


def devices_of(graph: fx.GraphModule) -> list[torch.device]:
    """Return the devices of the tensors in a graph that Dynamo captured."""
    values = (value for node in graph.graph.nodes for value in tree_leaves(node.meta.get("example_value")))
    return sorted({value.device for value in values if isinstance(value, torch.Tensor)}, key=str)


class _Captured(SerialisedGraph):
    """A graph as Dynamo captures it, which calls PyTorch's functions."""

    VALUE = "example_value"

    def nodes(self) -> Iterator[object]:
        unknown = set(self.graph.meta) - _OF_GRAPHS
        if unknown:
            raise Unwritten(f"a graph with {', '.join(map(str, sorted(unknown)))}")
        yield from super().nodes()

    def node(self, node: fx.Node) -> tuple[object, ...]:
        unknown = set(node.meta) - _OF_NODES
        if unknown:
            raise Unwritten(f"{node.name} with {', '.join(map(str, sorted(unknown)))}")
        return super().node(node)

    def target(self, node: fx.Node) -> tuple[object, ...]:
        if node.op == "call_module":
            raise Unwritten(f"{node.name}, a module")
        if node.op == "call_function":
            return (_name_of(node.target),)
        if node.op == "get_attr":
            held = held_by(self.graph, node)
            if isinstance(held, fx.GraphModule):
                return str(node.target), self._within(held)
        if node.op == "call_method" and not _is_known(getattr(torch.Tensor, str(node.target), None)):
            raise Unwritten(f"a call of Tensor.{node.target}, which is not PyTorch's")
        return super().target(node)

    def _within(self, body: fx.GraphModule) -> object:
        """Return a graph that this one calls."""
        inner = type(self)(body)
        inner.memory, inner.known = self.memory, self.known
        return list(inner.nodes())

    def tensor(self, val: torch.Tensor) -> object:
        if type(val) not in _PLAIN:
            raise Unwritten(f"a {type(val).__name__}")
        return super().tensor(val)

    def size(self, size: object) -> object:
        unbacked = isinstance(size, torch.SymInt) and free_unbacked_symbols(size)
        if unbacked or isinstance(size, (torch.SymFloat, torch.SymBool)):
            raise Unwritten(f"{size}, which depends on data")
        return super().size(size)

    def given(self, value: object) -> object:
        """Return an input of the region."""
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, torch.SymInt)):
                return self.size(value)
            raise Unwritten(f"an input that is a {type(value).__name__}")
        base = value._base if value._is_view() else None
        viewed = None if base is None else (self.tensor(base), base.is_leaf)
        return self.tensor(value), value.is_leaf, value.is_inference(), viewed


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _name_of(function: object) -> str:
    """Return the qualified name of a function of PyTorch, Python or this compiler.

    Raises:
        Unwritten: it is none of them.
    """
    if function is tag_activation_checkpoint:
        return "checkpoint"
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        operation = str(function)
        if operation.split(".")[0] in OWN:
            return operation
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    named = isinstance(module, str) and isinstance(name, str) and module.split(".")[0] in _MODULES
    if named and getattr(sys.modules.get(str(module)), str(name), None) is function and _is_known(function):
        return f"{module}.{name}"
    raise Unwritten(f"a call of {name or function}, which is not PyTorch's")


def _is_known(function: object) -> bool:
    """Return whether the code of a function, and of the function it wraps, is PyTorch's or this compiler's."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and not code.co_filename.startswith(_KNOWN):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _refuse_foreign_tracing() -> None:
    """Refuse where the program takes part in PyTorch's tracing.

    Raises:
        Unwritten: a mode, transform, hook or registration is active; the message names it.
    """
    context = TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        raise Unwritten("a part of a model that PyTorch splits by DDP's buckets")
    if _get_current_dispatch_mode_stack():
        raise Unwritten("a mode that operations are dispatched to")
    if torch._C._functorch.maybe_current_level() is not None:
        raise Unwritten("a transform of functions")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise Unwritten("hooks on what is saved for backward")
    batched = predispatch.VMAP_DECOMPOSITIONS_LIB  # PyTorch's own, there once something has been batched
    for name in torch.library._impls - (batched._op_impls if batched is not None else set()):
        library, _, rest = name.partition("/")
        if library == "aten" and rest.rpartition("/")[2].startswith(_TRACED_BY):
            raise Unwritten(f"{name}, which is not PyTorch's")
    for operation, parts in decomposition_table.items():
        if not _is_known(parts) and str(operation).split(".")[0] in OWN:
            raise Unwritten(f"a decomposition of {operation}, which is not PyTorch's")


def _settings() -> Iterator[object]:
    """Yield the settings of PyTorch that tracing a region depends on."""
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    yield str(torch.get_default_dtype()), str(torch.get_default_device()), torch.get_float32_matmul_precision()
    yield torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch._C._get_deterministic_fill_uninitialized_memory(), torch.backends.opt_einsum.enabled
    yield torch.is_autocast_cache_enabled()
    budget = torch._functorch.config
    yield budget.activation_memory_budget_runtime_estimator, budget.activation_memory_budget_solver
    for device in torch._C._autocast_supported_devices():
        yield device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    for name in _SWITCHES:
        switch: Callable[[], object] = getattr(torch._C, name)
        try:
            yield name, str(switch())
        except (RuntimeError, TypeError):  # a function that takes arguments, or is not in this build
            continue
    for configuration in _CONFIGURATIONS:
        saved = configuration.save_config_portable(ignore_private_configs=False)
        yield write(dict(sorted(saved.items())), {})


__all__ = ["devices_of", "key_of_region"]
