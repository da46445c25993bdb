"""Stepping through a generated kernel with Python's debugger, on a machine that need not have a GPU.

    python examples/step_through.py         # a scripted session: stop, look around, go on
    python examples/step_through.py --pdb   # the same stop, and the prompt is yours

Under Triton's interpreter a kernel is ordinary Python over numpy arrays, and the generated file is the file that runs:
break where you like, print any tile, step line by line.  Editing a copy of it and calling its `launch` works as well.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import io
import pdb
import sys
from pathlib import Path

import torch

import fusion


def row_shares(x):
    """Each element's share of its row's sum of squares."""
    squares = x * x
    return squares / squares.sum(dim=1, keepdim=True)


def main():
    torch.manual_seed(0)
    x = torch.randn(3, 7)  # seven columns in a block of eight: the last lane is masked
    fused = fusion.fuse(row_shares, options={"target": "triton"})
    torch.testing.assert_close(fused(x), row_shares(x))

    # The generated file is a module of its own, and lies in Fusion's cache.
    generated = next(module for name, module in sys.modules.items() if name.startswith("fusion_triton_"))
    lines = Path(generated.__file__).read_text().splitlines()
    stop = next(number for number, line in enumerate(lines, 1) if "tl.store(" in line)
    print("\n".join(f"{number:4} {'->' if number == stop else '  '} {line}" for number, line in enumerate(lines, 1)))

    commands = ["continue", "p xi", "p sum0", "p mul", "continue"]
    interactive = "--pdb" in sys.argv
    if interactive:
        print(f"\ntype for example: {'; '.join(commands)}")
        debugger = pdb.Pdb()
    else:
        print(f"\nthe kernel stopped before its store, and was asked: {'; '.join(commands)}")
        debugger = pdb.Pdb(stdin=io.StringIO("\n".join([*commands, ""])), stdout=sys.stdout, nosigint=True)
        debugger.use_rawinput = False
    debugger.set_break(generated.__file__, stop, temporary=True)  # stops in the first program, and not again
    out = torch.full((3, 7), -1.0)
    debugger.runcall(generated.launch, x, out)
    assert not debugger.get_all_breaks(), "the breakpoint was not reached"
    torch.testing.assert_close(out, row_shares(x))
    print("\nthe result agrees with eager")


if __name__ == "__main__":
    main()
