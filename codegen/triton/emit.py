"""Emit: a Kernel as the text of a Python file.

What enters is a Kernel; what leaves is a file that stands on its own: where its operations come from, the device
functions it needs, the `@triton.jit` kernel, its configuration, its grid, and a `launch` that anyone can call.  It is
imported and compiled as it is, so an edited file is an edited kernel.  Equal kernels give equal text (up to the
comments on their origin).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import sympy

from codegen.numerics import DEFAULT, Numerics
from codegen.triton import beside, joined, tail
from codegen.triton.ahead import Ahead
from codegen.triton.arguments import argument, on_device, type_of
from codegen.triton.beside import Part
from codegen.triton.blocks import PROGRAMS, Config, Dim, block
from codegen.triton.body import Body
from codegen.triton.choices import candidates
from codegen.triton.expressions import prelude
from codegen.triton.expressions.indices import Layout, index_code, lay_out
from codegen.triton.expressions.limits import limit_of
from codegen.triton.expressions.matrices import Hosted
from codegen.triton.expressions.scopes import Names
from codegen.triton.expressions.spell import PRODUCT, UNARY
from codegen.triton.expressions.values import Values
from codegen.triton.products import turns
from codegen.triton.products.groups import GROUP, Given, in_gluon
from codegen.triton.rewrites.denormals import may_flush
from codegen.triton.rewrites.rounding import is_rounded, rounded_parts
from codegen.triton.rewrites.sigmoids import as_sigmoids
from codegen.triton.statements.unchanged import return_unchanged
from codegen.triton.tail import Follower
from lowering.checks import has_checks
from lowering.kernel import Kernel, Param
from lowering.printer import format_param
from lowering.scalar_ops import HALVES

_INDENT = "    "


def emit(
    kernel: Kernel,
    config: Config | None = None,
    *,
    arch: str = "sm_90",
    numerics: Numerics = DEFAULT,
    wide: bool = False,
) -> str:
    """The source of `kernel` for `arch`, in `config` or in the default configuration.

    Of symbolic sizes it takes those with which all indices fit into 32 bits, as its function `fits` says of them; it
    takes any where `wide` is asked for, or where there is no such limit (`limits`).
    """
    if kernel.sizes and not wide:
        limited = _emit(kernel, config, arch, numerics, within_limit=True)
        if limited is not None:
            return limited
    text = _emit(kernel, config, arch, numerics, within_limit=False)
    assert text is not None
    return text


def _emit(kernel: Kernel, config: Config | None, arch: str, numerics: Numerics, *, within_limit: bool) -> str | None:
    """The source for sizes `within_limit`, if there is a limit, or for any."""
    tf32, strict = numerics.tf32, numerics.strict
    if kernel.beside:
        products = joined.products_of(kernel.parts, arch)
        parts = beside.parts_of(
            *(products or kernel.parts, kernel.name, arch),
            joined=bool(products),
            tf32=tf32,
            within_limit=within_limit,
        )
        limit = limit_of([part.layout for part in parts]) if within_limit else None
        if within_limit and limit is None:
            return None
        together = _emit_joined if products else _emit_together
        return together(kernel, parts, arch, limit, strict=strict)
    blocked = block(kernel)
    chosen = config or tail.with_room(candidates(blocked, arch, tf32=tf32)[0], kernel)
    loops = turns.depth(blocked, chosen) if chosen.groups else int(chosen.persistent)
    layout = lay_out(blocked, chosen, loops, within_limit=within_limit)
    if kernel.awaited:
        steps = [tail.of_tile(kernel, layout)]
    else:
        steps = tail.followers(kernel, chosen.num_warps, arch, tf32=tf32, within_limit=within_limit)
    limit = limit_of([layout, *(step.layout for step in steps)]) if within_limit else None
    if within_limit and limit is None:
        return None
    hosted: dict[str, Hosted] = {}
    if chosen.groups:
        functions = _in_groups(layout, kernel.name, arch, strict=strict)
    elif chosen.persistent and not steps:
        functions = [_function(layout, kernel.name, arch, hosted=hosted, strict=strict)]
    else:
        functions = [_function(step.layout, step.name, arch, behind=step.behind, strict=strict) for step in steps]
        functions.append(_function(layout, kernel.name, arch, steps=steps, strict=strict))
    count = " * ".join(_blocks(layout, dim) for dim in layout.blocked.grid()) or "1"
    tiles = " * ".join(_blocks(layout, dim) for dim in layout.blocked.grid() if dim.name != "b" and kernel.awaited)
    given = (kernel, functions, layout.config, _constants(layout), count, limit, tiles)
    return _file(*given, hosted=hosted, strict=strict)


def _emit_together(kernel: Kernel, parts: Sequence[Part], arch: str, limit: str | None, *, strict: bool) -> str:
    """The source of a kernel with others beside it: a function for each, and the one that is launched."""
    functions = [_function(part.layout, part.name, arch, part=True, strict=strict) for part in parts]
    lines = beside.dispatch(parts)
    functions.append("\n".join([*_signature(kernel, kernel.name, {}, []), *(_INDENT + line for line in lines)]))
    count = " + ".join(part.blocks for part in parts)
    return _file(kernel, functions, parts[0].layout.config, {}, count, limit, strict=strict)


def _emit_joined(kernel: Kernel, parts: Sequence[Part], arch: str, limit: str | None, *, strict: bool) -> str:
    """The source of products that are one walk."""
    layouts = [part.layout for part in parts]
    constants = _constants(layouts[0])
    taken = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
    values = _values(layouts[0], Names([*taken, kernel.name, *prelude.FUNCTIONS]), strict=strict)
    hosted: dict[str, Hosted] = {}
    values.hosted = hosted
    lines = joined.lines(values, layouts, arch)
    head = _signature(kernel, kernel.name, _passed(hosted), list(constants))
    function = "\n".join([*head, *(_INDENT + line for line in lines)])

    def blocks(name: str) -> list[str]:
        return [_blocks(layout, dim) for layout in layouts for dim in layout.blocked.grid() if dim.name == name]

    count = f"{blocks('m')[0]} * ({' + '.join(blocks('n'))})"
    return _file(kernel, [function], layouts[0].config, constants, count, limit, hosted=hosted, strict=strict)


def _file(
    kernel: Kernel,
    functions: list[str],
    config: Config,
    constants: dict[str, int],
    count: str,
    limit: str | None,
    tiles: str = "",
    *,
    hosted: Mapping[str, Hosted] = MappingProxyType({}),
    strict: bool,
) -> str:
    """The whole text: `functions`, of which the last is launched on `count` programs, for sizes with this `limit`.

    `tiles`: for how many of them programs count themselves, if they do that for each.
    """
    helpers = prelude.needed("".join(functions))
    described = any("make_tensor_descriptor(" in text for text in functions)
    imports = _imports(described or kernel.then is not None, [*functions, *helpers], passed=bool(hosted))
    head = f"{_docstring(kernel)}\n\n{imports}"
    launching = _launching(
        *(kernel, config, constants, count, limit, tiles), described=described, passed=bool(hosted), strict=strict
    )
    settings, *rest = launching
    sections = [head, *helpers, *functions, settings, *_descriptors(kernel, hosted, constants), *rest]
    return "\n\n\n".join(section.strip("\n") for section in sections) + "\n"


def _function(
    layout: Layout,
    name: str,
    arch: str,
    *,
    steps: Sequence[Follower] = (),
    behind: frozenset[str] = frozenset(),
    part: bool = False,
    hosted: dict[str, Hosted] | None = None,
    strict: bool = False,
) -> str:
    """The `@triton.jit` function of one kernel, which `steps` follow; `behind`: see `Follower`.

    As a `part` of a launch it is told which of its programs runs.  What it adds to `hosted` it is passed.
    """
    kernel = layout.blocked.kernel
    counted, told = [tail.COUNTER] if steps else [], [beside.PROGRAM] if part else []
    starts = {dim: tail.start_of(dim) for dim in layout.blocked.grid()} if behind else {}
    told += starts.values()
    constants = [dim.constant for dim in layout.blocked.dims if dim in layout.tiled]
    taken = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
    taken += [*told, *counted, *(["done"] if steps else []), *(step.name for step in steps)]
    names = Names([*taken, name, *prelude.FUNCTIONS])
    values = _values(layout, names, behind=behind, strict=strict)
    values.program, values.hosted = beside.PROGRAM if part else values.program, hosted
    values.starts.update(starts)
    written = Body(values, arch)
    if not steps and not part:
        return_unchanged(values)
    lines = written.lines()
    if kernel.awaited:
        lines += tail.ending_of_tile(steps[0], values.block, sympy.Mul(*(axis.size for axis in kernel.awaited)))
    elif steps:
        lines += tail.ending(steps)
    given = dict.fromkeys(counted, "int32: finished programs, 0 between launches") | _passed(hosted or {})
    return "\n".join([*_signature(kernel, name, given, constants, told), *(_INDENT + line for line in lines)])


def _values(layout: Layout, names: Names, *, behind: frozenset[str] = frozenset(), strict: bool) -> Values:
    """What writes the expressions of one function."""
    fast, zero_fill = is_rounded(layout.blocked.kernel) and not strict, layout.blocked.contraction
    if fast:
        layout = replace(layout, blocked=replace(layout.blocked, body=as_sigmoids(layout.blocked.body)))
    values = Values(layout, names, fast=fast, zero_fill=zero_fill, behind=behind)
    values.quick = frozenset() if strict else rounded_parts(layout.blocked.body)
    return values


def _in_groups(layout: Layout, name: str, arch: str, *, strict: bool) -> list[str]:
    """The functions of a program whose warps do different things; the last one is launched."""
    kernel = layout.blocked.kernel
    constants = [dim.constant for dim in layout.blocked.dims if dim in layout.tiled]
    params = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    form = Ahead(layout, Given(params, constants))
    taken = [*form.fetch_takes, *form.compute_takes, *form.reserved, "gl", "gluon", "hopper", name]

    def values() -> Values:
        return _values(layout, Names([*taken, *prelude.FUNCTIONS]), strict=strict)

    def function(suffix: str, takes: Sequence[str], lines: Sequence[str]) -> str:
        typed = (f"{each}: tl.constexpr" if each in (*constants, GROUP) else each for each in takes)
        head = ["@gluon.jit", f"def {name}_{suffix}(", *(f"{_INDENT}{each}," for each in typed), "):"]
        return "\n".join([*head, *(_INDENT + line for line in in_gluon(lines))])

    launched = ["@gluon.jit", *_signature(kernel, name, {}, constants)[1:]]
    return [
        function("fetch", form.fetch_takes, form.fetch(values())),
        function("compute", [GROUP, *form.compute_takes], form.compute(values(), arch)),
        "\n".join([*launched, *(_INDENT + line for line in form.launched(values(), name))]),
    ]


# Parts of the file ----------------------------------------------------------------------------------------------------


def _docstring(kernel: Kernel) -> str:
    origins = "".join(f"\n{_INDENT}{origin}" for origin in kernel.origins)
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


def _signature(
    kernel: Kernel, name: str, given: Mapping[str, str], constants: list[str], told: Sequence[str] = ()
) -> list[str]:
    lines = ["@triton.jit", f"def {name}(", *(f"{_INDENT}{number}," for number in told)]
    lines += [f"{_INDENT}{_declared(param)},  # {format_param(param)}" for param in kernel.params]
    lines += [f"{_INDENT}{size.name}," for size in kernel.sizes]
    lines += [f"{_INDENT}{name},  # {what}" for name, what in given.items()]
    lines += [f"{_INDENT}{constant}: tl.constexpr," for constant in constants]
    return [*lines, "):"]


def _passed(hosted: Mapping[str, Hosted]) -> dict[str, str]:
    """What the descriptors that are passed move."""
    return {name: f"{made.param} in blocks of {made.block}" for name, made in hosted.items()}


def _declared(param: Param) -> str:
    """A parameter; Triton would take each float for one of 32 bits."""
    return f'{argument(param)}: "{type_of(param)}"' if param.number else argument(param)


def _constants(layout: Layout) -> dict[str, int]:
    """The block sizes of one function."""
    return {dim.constant: layout.config.block(dim.name) for dim in layout.blocked.dims if dim in layout.tiled}


def _launching(
    kernel: Kernel,
    config: Config,
    constants: dict[str, int],
    count: str,
    limit: str | None,
    tiles: str,
    *,
    described: bool,
    passed: bool,
    strict: bool,
) -> list[str]:
    """The configuration, the grid of `count` blocks, the sizes within `limit` and what launches the kernel."""
    sizes = [size.name for size in kernel.sizes]
    entries = {**constants, "num_warps": config.num_warps, "num_stages": config.num_stages}
    entries |= {"maxnreg": config.registers} if config.registers else {}
    entries |= {"debug": True, "sanitize_overflow": False} if has_checks(kernel) else {}  # for its assertions alone
    if strict:
        entries |= {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    elif may_flush(kernel) and any(param.written and param.dtype not in HALVES for param in kernel.params):
        entries["enable_reflect_ftz"] = True
    listed = ", ".join(f'"{name}": {value}' for name, value in entries.items())
    settings = f"CONFIG = {{{listed}}}"
    given, most = ", ".join(sizes), ""
    fits = [f'def fits({given}):\n{_INDENT}"""Do all indices fit into 32 bits?"""\n{_INDENT}return {limit} < 2**31']
    if config.persistent:
        each = config.per_processor
        given = ", ".join([*sizes, f"processors={PROGRAMS}"])
        most = f", at most {'one' if each == 1 else each} per multiprocessor"
        count = f"min({'' if each == 1 else f'{each} * '}processors, {count})"
    grid = f'def grid({given}):\n{_INDENT}"""How many programs to launch{most}."""\n{_INDENT}return ({count},)'
    first = len(kernel.params)
    numbers = [position for position, param in enumerate(kernel.params) if param.number]
    launch = ["def launch(*args):", f'{_INDENT}"""Launch on the tensors and sizes of the signature, in order."""']
    device = f"args[{on_device(kernel)}].device"
    if numbers:
        given_as = f"[arg.item() if position in {numbers} else arg for position, arg in enumerate(args)]"
        launch.append(f"{_INDENT}args = {given_as}")
    if limit is not None:
        launch.append(f'{_INDENT}assert fits(*args[{first}:]), "this is for smaller sizes"')
    if described:  # descriptors are made in memory that the launch provides
        allocate = f"lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device={device})"
        launch.append(f"{_INDENT}triton.set_allocator({allocate})")
    counted = ""
    if kernel.then is not None:
        counted = f", {tail.COUNTER}"
        shape = "counters()" if tiles else "()"
        launch.append(f"{_INDENT}{tail.COUNTER} = torch.zeros({shape}, dtype=torch.int32, device={device})")
    counted += ", *descriptors(*args)" if passed else ""
    call = f"{kernel.name}[grid({f'*args[{first}:]' if sizes else ''})](*args{counted}, **CONFIG)"
    counts = [f'def counters():\n{_INDENT}"""For how many tiles programs count."""\n{_INDENT}return {tiles}']
    told = [*(fits if limit is not None else []), *(counts if tiles else [])]
    return [settings, grid, *told, "\n".join([*launch, f"{_INDENT}{call}"])]


def _descriptors(kernel: Kernel, hosted: Mapping[str, Hosted], constants: Iterable[str]) -> list[str]:
    """The function that makes the descriptors that are passed, if there are any."""
    if not hosted:
        return []
    takes = ", ".join([*(param.name for param in kernel.params), *(size.name for size in kernel.sizes)])
    blocks = ", ".join(constants)
    listed = ", ".join(f'CONFIG["{name}"]' for name in constants)
    lines = [f"def descriptors({takes}):", f'{_INDENT}"""Of the tensors and sizes of the signature, in its order."""']
    lines += [f"{_INDENT}{blocks} = {listed}", f"{_INDENT}return ("]
    for made in hosted.values():
        lines.append(f"{_INDENT * 2}TensorDescriptor({made.param}, {made.shape}, {made.strides}, {made.block}),")
    return ["\n".join([*lines, f"{_INDENT})"])]


def _blocks(layout: Layout, dim: Dim) -> str:
    """The number of blocks of a GRID dimension, as Python text."""
    size = index_code(dim.size, layout, lambda symbol: symbol.name)
    if dim not in layout.tiled:
        return size.at(PRODUCT if dim.size.is_Integer else UNARY)
    return f'triton.cdiv({size.text}, CONFIG["{dim.constant}"])'
