"""Describes the autograd node of a compiled region, one for forward and backward, by AOTAutograd's metadata.

Its results are the inputs that the region changes in place, then the region's own, then bases of views among these.
Input: the metadata; output: where to find the node, the tensors on which its gradients depend, and whether the region
can be differentiated again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch._functorch._aot_autograd.schemas import OutputAliasInfo, OutputType, ViewAndMutationMeta
from torch.autograd.graph import Node

from fusion.joint.dependence import Dependence

OWN = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
"""Results that the region computes, and that are no views."""

GIVEN = (OutputType.alias_of_input, OutputType.is_input)
"""Results with a path to an input outside the region."""


@dataclass(frozen=True, slots=True)
class AutogradNode:
    """Properties of the autograd node of every call of a region.

    Attributes:
        changed: inputs that the region changes in place, with gradients or without.
        first: the number of results of the node before the region's own.
        holder: a result of the region that has the node; a view, if no other has it; None if none has.
        needs: for each input that is a tensor, the results of the node that its gradient depends on; empty if each
            depends on all or on none, or if that is unknown.
        refusal: why the gradients cannot be recomputed; empty if they can.
    """

    changed: frozenset[int]
    first: int
    holder: int | None
    needs: tuple[frozenset[int], ...]
    refusal: str

    @classmethod
    def of(cls, known: ViewAndMutationMeta, inputs: int, dependence: Dependence | None) -> AutogradNode:
        """Derive the node from AOTAutograd's metadata and the dependence of gradients; `inputs` counts inputs."""
        changed = frozenset(k for k, info in enumerate(known.input_info) if info.mutates_data)
        first = known.num_mutated_inp_runtime_indices
        return cls(changed, first, _holder(known), _needs(known, dependence), _refusal(known, inputs))


def node_of(result: Tensor) -> Node | None:
    """Return the autograd node of the call of which this is a result, or a view of one."""
    node = result.grad_fn
    while node is not None and "CompiledFunction" not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def _holder(known: ViewAndMutationMeta) -> int | None:
    kinds = {k: info.output_type for k, info in enumerate(known.output_info) if info.requires_grad}
    own = [k for k, kind in kinds.items() if kind in OWN] or [k for k, kind in kinds.items() if kind not in GIVEN]
    return own[0] if own else None


def _needs(known: ViewAndMutationMeta, dependence: Dependence | None) -> tuple[frozenset[int], ...]:
    """See `AutogradNode.needs`: results with gradients are in the order of the tangents that backward takes."""
    if dependence is None or not dependence.partial:
        return ()
    changed = [known.input_info[k] for k in known.mutated_inp_runtime_indices]
    first, last = len(changed), len(changed) + len(known.output_info)
    positions = [k for k, info in enumerate(changed) if info.mutates_data and info.requires_grad]
    positions += [
        first + k
        for k, info in enumerate(known.output_info)
        if info.output_type in OWN and issubclass(info.raw_type, Tensor) and _differentiable(info)
    ]
    positions += range(last, last + known.num_intermediate_bases)
    if len(positions) != dependence.tangents:
        return ()
    return tuple(frozenset(positions[number] for number in numbers) for numbers in dependence.of)


def _differentiable(info: OutputAliasInfo) -> bool:
    """Return whether backward takes a gradient of a result; PyTorch before 2.12 has another attribute for it."""
    return bool(getattr(info, "requires_grad_for_backward", info.requires_grad))


def _refusal(known: ViewAndMutationMeta, inputs: int) -> str:
    if len(known.input_info) != inputs or any(info.mutates_data and info.requires_grad for info in known.input_info):
        return "it changes its inputs in place"
    if any(info.requires_grad and info.output_type not in (*OWN, *GIVEN) for info in known.output_info):
        return "it returns views of what it makes"
    return ""
