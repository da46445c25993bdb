"""Writes the Python file around the functions of a kernel: imports, configuration, grid, and the launch function.

Input: the functions as code and the launch of the last of them (`Launch`); output: the text of the file.
The imports and the other functions of the file follow from the names that these functions read, as in a linker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion.codegen.triton.arguments import COUNTER, argument, on_device, type_of
from fusion.codegen.triton.blocks import Config, Dim
from fusion.codegen.triton.devices import Device, Feature
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import PRODUCT, UNARY, Code, names_in
from fusion.codegen.triton.expressions.indices import Layout, index_code
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.rewrites.denormals import may_flush
from fusion.lowering.algebra.last_bits import compared, may_differ
from fusion.lowering.checks.checked import has_checks
from fusion.lowering.ir.expr import Op, TileRef, postorder
from fusion.lowering.ir.kernel import Kernel, Param, Role, statements, values_of
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.lowering.printer import format_param

INDENT = "    "
WAIT = "gdc_wait"
"""Triton's name for the wait of a dependent launch (`griddepcontrol.wait` in PTX)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of a kernel.

    Attributes:
        constants: the block sizes that the function takes, by name.
        count: the number of blocks, as Python text.
        limit: an expression over the sizes that must be below 2³¹, as Python text; None if any sizes are supported.
        tiles: the number of tiles that have a count of programs, as Python text; empty if there is one count for all.
        hosted: the descriptors that are passed to the function.
        per_multiprocessor: persistent programs per multiprocessor; 0: each program computes one block.
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


def file_of(launch: Launch, functions: Sequence[Code], *, strict: bool) -> str:
    """Return the text of the file: `functions`, of which the last is launched."""
    kernel = launch.kernel
    reads = names_in(functions)
    helpers = prelude.needed(reads)
    described = any(name.endswith(".make_tensor_descriptor") for name in reads)
    reads += tuple(name for helper in helpers for name in prelude.READS.get(helper, ()))
    imports = _imports(described or kernel.then is not None, reads, hosted=bool(launch.hosted))
    head = f"{_docstring(kernel)}\n\n{imports}"
    launch_sections = [_settings(launch, strict=strict), *_descriptors(launch), *_grid(launch)]
    sections = [head, *helpers.values(), *(function.text for function in functions), *launch_sections]
    sections.append(_launch_function(launch, described=described))
    return "\n\n\n".join(section.strip("\n") for section in sections) + "\n"


# The function that is launched ----------------------------------------------------------------------------------------


def launched_function(
    head: Sequence[str], lines: Sequence[Code], device: Device, decorator: str = "triton.jit"
) -> Code:
    """Return the function that is launched.

    Its programs wait for the end of the launch before, whose results they may read: where launches may be prepared
    while that one is running, they would else start too early.
    """
    dependent = device.has(Feature.DEPENDENT_LAUNCHES)
    return function_of(head, [Code(f"{WAIT}()", reads=(WAIT,)), *lines] if dependent else lines, decorator)


def function_of(head: Sequence[str], lines: Sequence[Code], decorator: str = "triton.jit") -> Code:
    """Return a function of the device: the lines of its signature, and of its body."""
    text = "\n".join([f"@{decorator}", *head, *(INDENT + line.text for line in lines)])
    return Code(text, reads=(decorator, *names_in(lines)))


def signature(
    kernel: Kernel, name: str, further: Mapping[str, str], constants: list[str], leading: Sequence[str] = ()
) -> list[str]:
    """Return the lines of the signature of a function.

    `leading` are arguments before its own; `further` are arguments after them, each with a comment.
    """
    lines = [f"def {name}(", *(f"{INDENT}{number}," for number in leading)]
    lines += [f"{INDENT}{_declared(param)},  # {format_param(param)}" for param in kernel.params]
    lines += [f"{INDENT}{size.name}," for size in kernel.sizes]
    lines += [f"{INDENT}{name},  # {summary}" for name, summary in further.items()]
    lines += [f"{INDENT}{constant}: tl.constexpr," for constant in constants]
    return [*lines, "):"]


def descriptor_comments(hosted: Mapping[str, Hosted]) -> dict[str, str]:
    """Return a comment for each descriptor that is passed."""
    return {name: f"{descriptor.param} in blocks of {descriptor.block}" for name, descriptor in hosted.items()}


def _declared(param: Param) -> str:
    """Return the declaration of a parameter; Triton would type each float as float32."""
    return f'{argument(param)}: "{type_of(param)}"' if param.number else argument(param)


def blocks_of(layout: Layout, dim: Dim) -> str:
    """Return the number of blocks of a GRID dimension, as Python text."""
    size = index_code(dim.size, layout, lambda symbol: symbol.name)
    if dim not in layout.tiled:
        return size.at(PRODUCT if dim.size.is_Integer else UNARY).text
    return f'triton.cdiv({size.text}, CONFIG["{dim.constant}"])'


# The rest of the file -------------------------------------------------------------------------------------------------


def _docstring(kernel: Kernel) -> str:
    origins = "".join(f"\n{INDENT}{origin}" for origin in kernel.origins)
    computes = f" computes\n{origins}\n" if origins else "."
    text = f"{kernel.name}{computes}".replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}"""'


def _imports(needs_torch: bool, reads: Sequence[str], *, hosted: bool) -> str:
    lines = ["import torch"] if needs_torch else []
    lines += ["import triton", "import triton.language as tl"]
    if "gluon.jit" in reads:
        lines.append("from triton.experimental import gluon")
        lines.append("from triton.experimental.gluon import language as gl")
        lines.append("from triton.experimental.gluon.language.nvidia import hopper")
    if any(name.startswith("libdevice.") for name in reads):
        lines.append("from triton.language.extra import libdevice")
    if WAIT in reads:
        lines.append(f"from triton.language.extra.cuda import {WAIT}")
    if hosted:
        module = "triton.experimental.gluon.nvidia.hopper" if "gluon.jit" in reads else "triton.tools.tensor_descriptor"
        lines.append(f"from {module} import TensorDescriptor")
    return "\n".join(lines)


def _settings(launch: Launch, *, strict: bool) -> str:
    """Return the configuration, with other options of Triton."""
    kernel, config = launch.kernel, launch.config
    entries = {**launch.constants, "num_warps": config.num_warps, "num_stages": config.num_stages}
    entries |= {"maxnreg": config.registers} if config.registers else {}
    entries |= {"launch_pdl": True} if launch.device.has(Feature.DEPENDENT_LAUNCHES) else {}
    entries |= {"debug": True, "sanitize_overflow": False} if has_checks(kernel) else {}  # for its assertions alone
    if strict:
        entries |= {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    elif may_flush(kernel) and any(param.written and param.dtype not in HALVES for param in kernel.params):
        entries["enable_reflect_ftz"] = True
    if _compares_rounded(kernel) or _cancels(kernel):
        entries["enable_fp_fusion"] = False
    listed = ", ".join(f'"{name}": {value}' for name, value in entries.items())
    return f"CONFIG = {{{listed}}}"


def _cancels(kernel: Kernel) -> bool:
    """Return whether a value is subtracted from itself, such as `x - x.detach()`.

    The result is 0.  If the value is a product, a fused multiply-add would subtract it rounded from itself unrounded.
    """
    values = [value for part in kernel.launched for stmt in statements(part.body) for value in values_of(stmt)]
    return any(
        isinstance(node, Op) and node.name == "sub" and node.args[0] is node.args[1] and node.dtype.is_floating_point
        for node in postorder(*values)
    )


def _compares_rounded(kernel: Kernel) -> bool:
    """Return whether a loop compares the result of an earlier fold with a value that the compiler may round differently
    there.
    """
    if not kernel.with_role(Role.LOOP):
        return False
    values = [value for stmt in statements(kernel.body) for value in values_of(stmt)]
    return any(
        any(isinstance(node, TileRef) for node in postorder(one)) and may_differ(other)
        for left, right in compared(*values)
        for one, other in ((left, right), (right, left))
    )


def _descriptors(launch: Launch) -> list[str]:
    """Return the function that creates the descriptors that are passed, if there are any."""
    if not launch.hosted:
        return []
    kernel = launch.kernel
    takes = ", ".join([*(param.name for param in kernel.params), *(size.name for size in kernel.sizes)])
    blocks = ", ".join(launch.constants)
    listed = ", ".join(f'CONFIG["{name}"]' for name in launch.constants)
    lines = [f"def descriptors({takes}):", f'{INDENT}"""Of the tensors and sizes of the signature, in its order."""']
    lines += [f"{INDENT}{blocks} = {listed}", f"{INDENT}return ("]
    for matrix in launch.hosted.values():
        parts = [matrix.param, matrix.shape, matrix.strides, matrix.block, *([matrix.layout] if matrix.layout else [])]
        lines.append(f"{INDENT * 2}TensorDescriptor({', '.join(parts)}),")
    return ["\n".join([*lines, f"{INDENT})"])]


def _grid(launch: Launch) -> list[str]:
    """Return the functions that compute the number of programs, the supported sizes, and the number of counts."""
    sizes, count, most = [size.name for size in launch.kernel.sizes], launch.count, ""
    arguments = sizes
    each = launch.per_multiprocessor
    if each:
        arguments = [*sizes, f"processors={launch.device.multiprocessors}"]
        most = f", at most {'one' if each == 1 else each} per multiprocessor"
        count = f"min({'' if each == 1 else f'{each} * '}processors, {count})"
    functions = [_function("grid", arguments, f"How many programs to launch{most}.", f"({count},)")]
    if launch.limit is not None:
        functions.append(_function("fits", sizes, "Do all indices fit into 32 bits?", f"{launch.limit} < 2**31"))
    if launch.tiles:
        functions.append(_function("counters", [], "For how many tiles programs count.", launch.tiles))
    return functions


def _function(name: str, takes: Sequence[str], summary: str, result: str) -> str:
    return f'def {name}({", ".join(takes)}):\n{INDENT}"""{summary}"""\n{INDENT}return {result}'


def _launch_function(launch: Launch, *, described: bool) -> str:
    """Return the function `launch`; `described`: the kernel creates descriptors."""
    kernel, first = launch.kernel, len(launch.kernel.params)
    numbers = [position for position, param in enumerate(kernel.params) if param.number]
    lines = ["def launch(*args):", f'{INDENT}"""Launch on the tensors and sizes of the signature, in order."""']
    device = f"args[{on_device(kernel)}].device"
    if numbers:
        items = f"[arg.item() if position in {numbers} else arg for position, arg in enumerate(args)]"
        lines.append(f"{INDENT}args = {items}")
    if launch.limit is not None:
        lines.append(f'{INDENT}assert fits(*args[{first}:]), "this is for smaller sizes"')
    if described:  # descriptors are created in memory that the launch provides
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
