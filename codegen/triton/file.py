"""File: the Python file around the functions of a kernel: imports, configuration, grid, and what launches the kernel.

What enters are the texts of the functions and how the last of them is launched (`Launch`); what leaves is the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion.codegen.triton.arguments import argument, on_device, type_of
from fusion.codegen.triton.blocks import Config, Dim
from fusion.codegen.triton.call import COUNTER
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.indices import Layout, index_code
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.expressions.spell import PRODUCT, UNARY
from fusion.codegen.triton.rewrites.denormals import may_flush
from fusion.lowering.checks import has_checks
from fusion.lowering.expr import TileRef, postorder
from fusion.lowering.kernel import Kernel, Param, Role, statements, values_of
from fusion.lowering.last_bits import compared, may_differ
from fusion.lowering.printer import format_param
from fusion.lowering.scalar_ops import HALVES

INDENT = "    "


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        constants: the block sizes that the function takes, by name.
        count: how many blocks there are, as Python text.
        limit: what has to be below 2³¹ for these sizes, as Python text; None where any sizes do.
        tiles: for how many tiles programs count themselves, as Python text; empty if they do not do so for each.
        hosted: the descriptors that the function is passed.
        per_multiprocessor: how many persistent programs share a multiprocessor; 0: each program computes one block.
    """

    kernel: Kernel
    device: Device
    config: Config
    constants: Mapping[str, int]
    count: str
    limit: str | None
    tiles: str = ""
    hosted: Mapping[str, Hosted] = field(default_factory=dict)
    per_multiprocessor: int = 0


def file_of(launch: Launch, functions: Sequence[str], *, strict: bool) -> str:
    """The whole text: `functions`, of which the last is launched."""
    kernel = launch.kernel
    helpers = prelude.needed("".join(functions))
    described = any("make_tensor_descriptor(" in text for text in functions)
    texts = [*functions, *helpers]
    imports = _imports(described or kernel.then is not None, texts, passed=bool(launch.hosted))
    head = f"{_docstring(kernel)}\n\n{imports}"
    launching = [_settings(launch, strict=strict), *_descriptors(launch), *_grid(launch)]
    sections = [head, *helpers, *functions, *launching, _launching(launch, described=described)]
    return "\n\n\n".join(section.strip("\n") for section in sections) + "\n"


# The function that is launched ----------------------------------------------------------------------------------------


def signature(
    kernel: Kernel, name: str, given: Mapping[str, str], constants: list[str], told: Sequence[str] = ()
) -> list[str]:
    """The first lines of a `@triton.jit` function; `given` and `told` are further arguments, behind and before."""
    lines = ["@triton.jit", f"def {name}(", *(f"{INDENT}{number}," for number in told)]
    lines += [f"{INDENT}{_declared(param)},  # {format_param(param)}" for param in kernel.params]
    lines += [f"{INDENT}{size.name}," for size in kernel.sizes]
    lines += [f"{INDENT}{name},  # {what}" for name, what in given.items()]
    lines += [f"{INDENT}{constant}: tl.constexpr," for constant in constants]
    return [*lines, "):"]


def passed(hosted: Mapping[str, Hosted]) -> dict[str, str]:
    """What the descriptors that are passed move."""
    return {name: f"{made.param} in blocks of {made.block}" for name, made in hosted.items()}


def _declared(param: Param) -> str:
    """A parameter; Triton would take each float for one of 32 bits."""
    return f'{argument(param)}: "{type_of(param)}"' if param.number else argument(param)


def blocks_of(layout: Layout, dim: Dim) -> str:
    """The number of blocks of a GRID dimension, as Python text."""
    size = index_code(dim.size, layout, lambda symbol: symbol.name)
    if dim not in layout.tiled:
        return size.at(PRODUCT if dim.size.is_Integer else UNARY)
    return f'triton.cdiv({size.text}, CONFIG["{dim.constant}"])'


# What stands before and behind it -------------------------------------------------------------------------------------


def _docstring(kernel: Kernel) -> str:
    origins = "".join(f"\n{INDENT}{origin}" for origin in kernel.origins)
    computes = f" computes\n{origins}\n" if origins else "."
    text = f"{kernel.name}{computes}".replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}"""'


def _imports(needs_torch: bool, texts: list[str], *, passed: bool) -> str:
    lines = ["import torch"] if needs_torch else []
    lines += ["import triton", "import triton.language as tl"]
    if any("@gluon.jit" in text for text in texts):
        lines.append("from triton.experimental import gluon")
        lines.append("from triton.experimental.gluon import language as gl")
        lines.append("from triton.experimental.gluon.language.nvidia import hopper")
    if any("libdevice." in text for text in texts):
        lines.append("from triton.language.extra import libdevice")
    if passed:
        lines.append("from triton.tools.tensor_descriptor import TensorDescriptor")
    return "\n".join(lines)


def _settings(launch: Launch, *, strict: bool) -> str:
    """The configuration, with what else Triton is told."""
    kernel, config = launch.kernel, launch.config
    entries = {**launch.constants, "num_warps": config.num_warps, "num_stages": config.num_stages}
    entries |= {"maxnreg": config.registers} if config.registers else {}
    entries |= {"debug": True, "sanitize_overflow": False} if has_checks(kernel) else {}  # for its assertions alone
    if strict:
        entries |= {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    elif may_flush(kernel) and any(param.written and param.dtype not in HALVES for param in kernel.params):
        entries["enable_reflect_ftz"] = True
    if _compared_again(kernel):
        entries["enable_fp_fusion"] = False
    listed = ", ".join(f'"{name}": {value}' for name, value in entries.items())
    return f"CONFIG = {{{listed}}}"


def _compared_again(kernel: Kernel) -> bool:
    """Does a loop compare what a loop before it has folded, and which the compiler may round otherwise there?"""
    if not kernel.with_role(Role.LOOP):
        return False
    values = [value for stmt in statements(kernel.body) for value in values_of(stmt)]
    return any(
        any(isinstance(node, TileRef) for node in postorder(one)) and may_differ(other)
        for left, right in compared(*values)
        for one, other in ((left, right), (right, left))
    )


def _descriptors(launch: Launch) -> list[str]:
    """The function that makes the descriptors that are passed, if there are any."""
    if not launch.hosted:
        return []
    kernel = launch.kernel
    takes = ", ".join([*(param.name for param in kernel.params), *(size.name for size in kernel.sizes)])
    blocks = ", ".join(launch.constants)
    listed = ", ".join(f'CONFIG["{name}"]' for name in launch.constants)
    lines = [f"def descriptors({takes}):", f'{INDENT}"""Of the tensors and sizes of the signature, in its order."""']
    lines += [f"{INDENT}{blocks} = {listed}", f"{INDENT}return ("]
    for made in launch.hosted.values():
        lines.append(f"{INDENT * 2}TensorDescriptor({made.param}, {made.shape}, {made.strides}, {made.block}),")
    return ["\n".join([*lines, f"{INDENT})"])]


def _grid(launch: Launch) -> list[str]:
    """The functions that say how many programs there are, which sizes they take, and how many count themselves."""
    sizes, count, most = [size.name for size in launch.kernel.sizes], launch.count, ""
    given = sizes
    each = launch.per_multiprocessor
    if each:
        given = [*sizes, f"processors={launch.device.multiprocessors}"]
        most = f", at most {'one' if each == 1 else each} per multiprocessor"
        count = f"min({'' if each == 1 else f'{each} * '}processors, {count})"
    found = [_function("grid", given, f"How many programs to launch{most}.", f"({count},)")]
    if launch.limit is not None:
        found.append(_function("fits", sizes, "Do all indices fit into 32 bits?", f"{launch.limit} < 2**31"))
    if launch.tiles:
        found.append(_function("counters", [], "For how many tiles programs count.", launch.tiles))
    return found


def _function(name: str, takes: Sequence[str], what: str, result: str) -> str:
    return f'def {name}({", ".join(takes)}):\n{INDENT}"""{what}"""\n{INDENT}return {result}'


def _launching(launch: Launch, *, described: bool) -> str:
    """The function `launch`; where the kernel makes descriptors, it is `described`."""
    kernel, first = launch.kernel, len(launch.kernel.params)
    numbers = [position for position, param in enumerate(kernel.params) if param.number]
    lines = ["def launch(*args):", f'{INDENT}"""Launch on the tensors and sizes of the signature, in order."""']
    device = f"args[{on_device(kernel)}].device"
    if numbers:
        given_as = f"[arg.item() if position in {numbers} else arg for position, arg in enumerate(args)]"
        lines.append(f"{INDENT}args = {given_as}")
    if launch.limit is not None:
        lines.append(f'{INDENT}assert fits(*args[{first}:]), "this is for smaller sizes"')
    if described:  # descriptors are made in memory that the launch provides
        allocate = f"lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device={device})"
        lines.append(f"{INDENT}triton.set_allocator({allocate})")
    counted = ""
    if kernel.then is not None:
        counted = f", {COUNTER}"
        shape = "counters()" if launch.tiles else "()"
        lines.append(f"{INDENT}{COUNTER} = torch.zeros({shape}, dtype=torch.int32, device={device})")
    counted += ", *descriptors(*args)" if launch.hosted else ""
    call = f"{kernel.name}[grid({f'*args[{first}:]' if kernel.sizes else ''})](*args{counted}, **CONFIG)"
    return "\n".join([*lines, f"{INDENT}{call}"])
