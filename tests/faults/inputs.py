"""Faults of what a program is given: memory that ends at a page nobody may read, and names of every form."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import torch
from torch import Tensor

import fusion
from tests.faults.outcomes import Outcome, in_child
from tests.faults.programs import Program, agree
from tests.faults.trial import Trial

PAGE = mmap.PAGESIZE


def guard_pages(trial: Trial) -> tuple[str, Outcome]:
    """Run on arguments that begin after a page without access, or end before one."""
    at_end = trial.rng.random() < 0.5
    program = replace(trial.program, shape=(trial.rng.randint(1, 40), trial.rng.randint(1, 70)))

    def guarded() -> Outcome:
        arguments = Program.arguments

        def within_guards(self: Program, seed: int = 0) -> list[Tensor]:
            return [between_guards(tensor, at_end=at_end) for tensor in arguments(self, seed)]

        Program.arguments = within_guards  # type: ignore[method-assign]  # of this child alone
        return trial.strictly(program)

    return "before the end" if at_end else "after the start", in_child(guarded)


_libc = ctypes.CDLL(None, use_errno=True)
_mappings: list[mmap.mmap] = []


def between_guards(tensor: Tensor, *, at_end: bool) -> Tensor:
    """Return a copy of a contiguous tensor that touches a page without access."""
    size = max(tensor.nbytes, 1)
    pages = -(-size // PAGE)
    mapping = mmap.mmap(-1, (pages + 2) * PAGE)
    _mappings.append(mapping)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for guard in (base, base + (pages + 1) * PAGE):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE * (pages + 1) - tensor.nbytes if at_end else PAGE
    flat = torch.frombuffer(mapping, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return flat.view(tensor.shape).copy_(tensor)


WORDS = (
    *("int", "double", "main", "restrict", "static", "void", "exp", "memset", "sizeof", "inline", "union", "NULL"),
    *("tl", "triton", "program_id", "kernel", "fusion", "self", "e", "i", "i0", "GOMP_parallel", "float32", "_", "__a"),
    *("ä", "変数", "a" * 300, "printf", "asm", "__attribute__", "INFINITY", "int64_t", "threads", "linux", "unix"),
)
FILES = (
    *("a\nb.py", 'a"b.py', "a'b.py", "*/ int x; /*", '\n#include "/etc/passwd"\n', "\\", "\\\n", "??/", "{}", "%s%n"),
    *("\udcff.py", "\x01.py", "ä€𝄞.py", "", "<string>", '"""', "x" * 5000, "// x", "\r", "\u2028"),
)
"""File names; none is that of a folder, which PyTorch's own profile of sizes would try to read."""


def names(trial: Trial) -> tuple[str, Outcome]:
    """Name functions, arguments, modules, parameters and files like parts of C or Triton, or like nothing else."""
    word, file = trial.rng.choice(WORDS), trial.rng.choice(FILES)
    program = replace(trial.program, name=word if word != "self" else "f", file=file)
    if trial.rng.random() < 0.5:
        return "of a function and its file", in_child(lambda: trial.strictly(program))
    return "of modules and parameters", in_child(lambda: _module(trial, word))


def _module(trial: Trial, word: str) -> Outcome:
    """Run a module whose parts have a name that is a word of C, with what no identifier has."""
    odd = trial.rng.choice(("", " ", "*/", "\n", '"', "'", "\\", "-", "[0]", "\udcff"))
    name = word + (odd or "_" if hasattr(torch.nn.Module, word) else odd)  # a part may not have the name of a method
    inner = torch.nn.LayerNorm(8)
    outer = torch.nn.Module()
    outer.add_module(name, inner)
    outer.register_parameter(f"{name}2", torch.nn.Parameter(torch.randn(8)))

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, outer)

        def forward(self, x: Tensor) -> Tensor:
            part = self._modules[name]
            assert part is not None
            return part._modules[name](x).relu() * part._parameters[f"{name}2"]

    trial.strictly()  # for the environment, and the entries of the trial's own program
    module, x = Outer(), torch.randn(4, 8, requires_grad=True)
    results = []
    for function in (module, fusion.fuse(module, options={"strict": True})):
        result = function(x)
        results.append([result, *torch.autograd.grad(result.sum(), [x, *module.parameters()])])
    return Outcome("right" if agree(*results) else "wrong", f"names with {name!r}")


__all__ = ["guard_pages", "names"]
