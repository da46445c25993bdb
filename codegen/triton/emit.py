"""Emit: a Kernel as the text of a Python file.

What enters is a Kernel; what leaves is a file that stands on its own: where its operations come from, the device
functions it needs, the `@triton.jit` kernel, its configuration, its grid, and a `launch` that anyone can call.  It is
imported and compiled as it is, so an edited file is an edited kernel.  Equal kernels give equal text (up to the
comments on their origin).
"""

from __future__ import annotations

from codegen.triton import contract, descriptors, prelude
from codegen.triton.blocks import Blocked, Dim, block
from codegen.triton.body import Body
from codegen.triton.configs import PROGRAMS, Config, configure
from codegen.triton.indices import Layout, index_code, lay_out
from codegen.triton.spell import HALF, PRODUCT, UNARY
from codegen.triton.values import Names, Values
from lowering.expr import Cast, Op, postorder
from lowering.kernel import Kernel, Param, statements, values_of

_INDENT = "    "
_ROUNDS = {"floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "remainder", "fmod"}


def choose(blocked: Blocked, arch: str, *, tf32: bool = False) -> Config:
    """The default configuration of a kernel."""
    if not blocked.contraction:
        return configure(blocked)
    persistent = descriptors.candidates(blocked, arch)
    return persistent[0] if persistent else contract.candidates(blocked, arch, tf32=tf32)[0]


def emit(kernel: Kernel, config: Config | None = None, *, arch: str = "sm_90", tf32: bool = False) -> str:
    """The source of `kernel` for `arch`, in `config` or in the default configuration."""
    blocked = block(kernel)
    chosen = config or choose(blocked, arch, tf32=tf32)
    layout = lay_out(blocked, chosen, grid_depth=int(chosen.persistent))
    functions, ending, taken = [_function(layout, kernel.name, arch)], "", {kernel.name}
    for number, step in enumerate(chain(kernel)[1:], 1):
        name = step.name if step.name not in taken else f"{step.name}_{number}"
        taken.add(name)
        after = block(step)
        last = lay_out(after, choose(after, arch, tf32=tf32))
        functions.append(_function(last, name, arch))
        positions = ", ".join(str(kernel.params.index(kernel.param(param.name))) for param in step.params)
        ending += f"{_INDENT}({name}, ({positions},), {_config(last)}),\n"
    helpers = prelude.needed("".join(functions))
    head = f"{_docstring(kernel)}\n\n{_imports(chosen, [*functions, *helpers])}"
    parts = [head, *helpers, *functions, *_launching(kernel, layout, ending)]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def chain(kernel: Kernel) -> list[Kernel]:
    """The kernel and those that follow it in its launch, in order."""
    found = [kernel]
    while found[-1].then is not None:
        found.append(found[-1].then)
    return found


def _function(layout: Layout, name: str, arch: str) -> str:
    """The `@triton.jit` function of one kernel."""
    kernel = layout.blocked.kernel
    constants = [dim.constant for dim in layout.blocked.dims if dim in layout.tiled]
    taken = [*(f"{param.name}_ptr" for param in kernel.params), *(size.name for size in kernel.sizes), *constants]
    names = Names([*taken, name, *prelude.FUNCTIONS])
    values = Values(kernel, layout, names, fast=_is_rounded(kernel), zero_fill=layout.blocked.contraction)
    lines = Body(values, arch).lines()
    return "\n".join([*_signature(kernel, name, constants), *(_INDENT + line for line in lines)])


def _is_rounded(kernel: Kernel) -> bool:
    """Is every result a 16-bit float, with nothing rounded to an integer on the way?"""
    if not all(param.dtype in HALF for param in kernel.params if param.written):
        return False
    for node in postorder(*(value for stmt in statements(kernel.body) for value in values_of(stmt))):
        if isinstance(node, Op) and node.name in _ROUNDS:
            return False
        if isinstance(node, Cast) and node.arg.dtype.is_floating_point and not node.dtype.is_floating_point:
            return False
    return True


# Parts of the file ----------------------------------------------------------------------------------------------------


def _docstring(kernel: Kernel) -> str:
    origins = "".join(f"\n{_INDENT}{origin}" for origin in kernel.origins)
    computes = f" computes\n{origins}\n" if origins else "."
    text = f"{kernel.name}{computes}".replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}"""'


def _imports(config: Config, texts: list[str]) -> str:
    lines = ["import torch"] if config.persistent else []
    lines += ["import triton", "import triton.language as tl"]
    if any("libdevice." in text for text in texts):
        lines.append("from triton.language.extra import libdevice")
    return "\n".join(lines)


def _signature(kernel: Kernel, name: str, constants: list[str]) -> list[str]:
    lines = ["@triton.jit", f"def {name}("]
    lines += [f"{_INDENT}{param.name}_ptr,  # {_shape(param)}" for param in kernel.params]
    lines += [f"{_INDENT}{size.name}," for size in kernel.sizes]
    lines += [f"{_INDENT}{constant}: tl.constexpr," for constant in constants]
    return [*lines, "):"]


def _shape(param: Param) -> str:
    shape = ", ".join(str(size) for size in param.shape)
    strides = ", ".join(str(stride) for stride in param.strides)
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{dtype}[{shape}] strides [{strides}]" + (", written" if param.written else "")


def _config(layout: Layout) -> str:
    """Block sizes and options of one function, as a Python literal."""
    config = layout.config
    entries = {dim.constant: config.block(dim.name) for dim in layout.blocked.dims if dim in layout.tiled}
    entries |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in entries.items()) + "}"


def _launching(kernel: Kernel, layout: Layout, ending: str) -> list[str]:
    """The configuration, the grid and the function that launches the kernel and those that follow it."""
    persistent, sizes = layout.config.persistent, [size.name for size in kernel.sizes]
    settings = f"CONFIG = {_config(layout)}"
    count = " * ".join(_blocks(layout, dim) for dim in layout.blocked.grid()) or "1"
    if persistent:
        count = f"min(programs, {count})"
    if ending:
        settings += (
            "\n\n# One program each, after the grid: the function, which of the tensors it takes, its configuration.\n"
        )
        settings += f"THEN = [\n{ending}]"
    given = ", ".join([*sizes, f"programs={PROGRAMS}"] if persistent else sizes)
    grid = f'def grid({given}):\n{_INDENT}"""How many programs to launch{", at most one per multiprocessor" if persistent else ""}."""\n{_INDENT}return ({count},)'
    first = len(kernel.params)
    launch = ["def launch(*args):", f'{_INDENT}"""Launch on the tensors and sizes of the signature, in order."""']
    if persistent:  # descriptors are made in memory that the launch provides
        allocate = "lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=args[0].device)"
        launch.append(f"{_INDENT}triton.set_allocator({allocate})")
    launch.append(f"{_INDENT}{kernel.name}[grid({f'*args[{first}:]' if sizes else ''})](*args, **CONFIG)")
    if ending:
        launch += [
            f"{_INDENT}for function, tensors, config in THEN:",
            f"{_INDENT * 2}function[(1,)](*(args[position] for position in tensors), **config)",
        ]
    return [settings, grid, "\n".join(launch)]


def _blocks(layout: Layout, dim: Dim) -> str:
    """The number of blocks of a GRID dimension, as Python text."""
    size = index_code(dim.size, layout, lambda symbol: symbol.name)
    if dim not in layout.tiled:
        return size.at(PRODUCT if dim.size.is_Integer else UNARY)
    return f'triton.cdiv({size.text}, CONFIG["{dim.constant}"])'
