"""Removes views that only autograd needs (`detach`).

Input: a joint graph; it is changed in place and computes the same.
"""

from __future__ import annotations

import torch
from torch import fx


def drop_detached(joint: fx.GraphModule) -> None:
    """Replace detached views by their values: the graph is not differentiated again.

    Operations whose gradient is a function of their result (softmax, tanh, exp) read it through such a view.  The
    partition takes that for a reader that cannot be fused, and would save the result whatever its size.  A view that
    is returned stays: AOTAutograd marks it as having no gradient, which would be wrong for the value itself.

    >>> from fusion.inspect.examples import show_graph
    >>> from torch import empty
    >>> show_graph(drop_detached, lambda x: x.sin().detach() * 2, empty(3))
      sin = sin(x)
    - detach = detach(sin)
    - mul = mul.Tensor(detach, 2)
    + mul = mul.Tensor(sin, 2)
      return mul
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            joint.graph.erase_node(node)
    joint.recompile()
