"""Beginning: what an accelerator's target needs once in a process begins when Dynamo does, not when it has traced.

Which devices a graph has tensors of is known once it is traced; that this process uses an accelerator is known before.
Importing this module has Dynamo say when it begins.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler

from fusion.codegen.targets import prepare


@callback_handler.register_start_callback
def begin(started: CallbackArgs) -> None:
    """Have the target of an accelerator that is in use begin.  Whoever needs what fails then is told."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # PyTorch's own
        with suppress(Exception):
            prepare("cuda")
