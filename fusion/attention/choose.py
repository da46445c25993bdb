"""Decides who computes a call of attention: the library's kernel, or kernels generated from its decomposition.

Input: Dynamo's graph, in which the calls that are predicted to be faster decomposed are decomposed; output: a `Choice`
for each call, with both predicted times.  Calls that are not understood stay the library's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from fusion.attention.call import AttentionNode, Call, calls, read, settle
from fusion.attention.masks import Mask, read_mask
from fusion.attention.price import generated_time, library_kernel, library_time, refuse_small, stores_scores
from fusion.codegen.target import Target
from fusion.lowering.aten.attention import attention
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Origin, Unsupported


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for one call.

    Attributes:
        kernel: the library's kernel for it; empty if unknown.
        library_us: predicted microseconds of that kernel, None if unknown.
        generated_us: predicted microseconds of the generated kernels, None if none can be generated.
        reason: why there is no alternative.

    >>> print(Choice(Origin("out", "", "model.py:3"), True, "efficient", 90.0, 41.5))
    attention out (model.py:3): generated, 41.5 µs against 90.0 µs of the library's efficient kernel
    """

    origin: Origin
    generated: bool
    kernel: str = ""
    library_us: float | None = None
    generated_us: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        kernel = f"the library's {self.kernel} kernel".replace("  ", " ")
        if self.reason:
            return f"attention {self.origin}: {kernel} ({self.reason})"
        parts, whole = f"{self.generated_us:.1f} µs", f"{self.library_us:.1f} µs"
        if self.generated:
            return f"attention {self.origin}: generated, {parts} against {whole} of {kernel}"
        return f"attention {self.origin}: {kernel}, {whole} against {parts} generated"


class Chooser:
    """Decides for all calls of a graph; equal calls are priced once.

    Args:
        target_of: returns the target of a device.
        strict: raise when pricing fails by an internal error, rather than leave the call to the library with a note.
        generated: whether calls are decomposed that can be, whatever the prices; None asks the prices.

    >>> from torch import empty
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> from fusion.inspect.examples import TARGET, show_captured
    >>> choose = Chooser(lambda device: TARGET)
    >>> q = empty(1, 2, 30, 4)
    >>> show_captured(lambda graph: print(*choose(graph)), scaled_dot_product_attention, q, q + 1, q + 2)
    attention scaled_dot_product_attention: the library's kernel (few scores, not worth a loop over tiles)
      scaled_dot_product_attention = scaled_dot_product_attention(l_args_0_, l_args_1_, l_args_2_)
      return scaled_dot_product_attention
    """

    def __init__(
        self,
        target_of: Callable[[torch.device], Target],
        *,
        strict: bool = False,
        generated: bool | None = None,
    ) -> None:
        self._target_of, self._strict, self._generated = target_of, strict, generated
        self._known: dict[tuple[object, ...], Choice] = {}
        self._lock = threading.Lock()

    def __call__(self, graph: fx.GraphModule) -> tuple[Choice, ...]:
        """Decide for every call in `graph`, and decompose the calls to be generated."""
        with unset_fake_temporarily():
            return tuple(self._choices(graph))

    def _choices(self, graph: fx.GraphModule) -> Iterator[Choice]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # the library creates real tensors of numbers
        masks: dict[object, Mask] = {}
        changed: set[fx.GraphModule | None] = set()
        for call_node in list(calls(graph)):
            node = call_node.node
            origin = origin_of(node)
            try:
                mask = self._mask(call_node, masks, mode)
                if mask is not None and settle(call_node, mask):
                    changed.add(node.graph.owning_module)
                    mask = None
                call = read(call_node, mask, mode)
            except Exception as failure:  # as in `choose`
                if self._strict and not isinstance(failure, Unsupported):
                    raise
                yield Choice(origin, False, reason=_reason(failure))
                continue
            choice = self._choice(call, origin)
            if choice.generated:
                node.target = attention
                node.kwargs = {**node.kwargs, "order": call.order}
                if stores_scores(call, self._target_of(call.query.device)):
                    node.kwargs = {**node.kwargs, "wide": True}
                changed.add(node.graph.owning_module)
            yield choice
        for module in filter(None, changed):
            module.recompile()

    def _mask(self, call_node: AttentionNode, masks: dict[object, Mask], mode: FakeTensorMode) -> Mask | None:
        """Return the mask of a call; those in `masks` are known, by node and dtype of autocast."""
        node, autocast = call_node.arguments.get("attn_mask"), call_node.autocast
        if node is not None and (node, autocast) not in masks:
            masks[node, autocast] = read_mask(node, mode, autocast)
        return masks.get((node, autocast))

    def _choice(self, call: Call, origin: Origin) -> Choice:
        target = self._target_of(call.query.device)
        key = (target.name, target.numerics, *call.signature())
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = choose(call, origin, target, strict=self._strict)
            with self._lock:
                self._known[key] = known
        if self._generated is not None and not known.reason:
            known = replace(known, generated=self._generated)
        return replace(known, origin=origin)


def choose(call: Call, origin: Origin, target: Target, *, strict: bool = False) -> Choice:
    """Price one call on `target`, and decide; see `Chooser` for `strict`."""
    if "dot" not in target.capabilities.fold_ops:
        return Choice(origin, False, reason=f"{target.name} generates no products")
    kernel = ""
    try:
        refuse_small(call, target)
        kernel = library_kernel(call, target)
        library = library_time(call, kernel, target)
        generated = generated_time(call, kernel, target)
    except Exception as failure:  # whatever fails while the kernels are generated, the library's kernel is right
        if strict and not isinstance(failure, Unsupported):
            raise
        return Choice(origin, False, kernel, reason=_reason(failure))
    return Choice(origin, generated < library, kernel, library, generated)


def _reason(failure: Exception) -> str:
    return str(failure) if isinstance(failure, Unsupported) else f"{type(failure).__name__}: {failure}"
