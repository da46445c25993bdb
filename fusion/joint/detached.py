"""Views that autograd alone knows of (`detach`) are read through.

Input: a joint graph; it is changed in place and computes the same.
"""

from __future__ import annotations

import torch
from torch import fx


def drop_detached(joint: fx.GraphModule) -> None:
    """Read values themselves instead of detached views of them: no gradient is left to be derived.

    Operations whose gradient is made of their result (softmax, tanh, exp) read it through such a view.  The partition
    takes that for a reader that no kernel could hold, and would save the result whatever its size.  A view that is
    returned stays: AOTAutograd says of it that it has no gradient, which must not be said of the value itself.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            joint.graph.erase_node(node)
    joint.recompile()
