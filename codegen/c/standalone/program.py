"""Writes a program in C: tables of its tensors, sizes and conditions, and a function that launches its kernels.

Input: a `Standalone`; output: the text of `program.c`, which implements `program.h`, and of one file for each kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import torch
from typing_extensions import assert_never

from fusion.codegen.c.calls import SCRATCH_SUFFIX, SHARE_SUFFIX
from fusion.codegen.c.standalone.sizes import size_code
from fusion.codegen.c.text.nest import indented
from fusion.codegen.standalone import (
    BlasProduct,
    Copy,
    InterfaceTensor,
    KernelSource,
    Memory,
    MemoryPlace,
    Seed,
    Standalone,
    StandaloneLaunch,
    StoredWeight,
)
from fusion.lowering.errors import Unsupported

_CODES: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
}
"""Dtype → code and bits in DLPack."""

_STORED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Dtype → its name in a file of safetensors."""

_FEATURES = {
    **{name: name for name in ("ssse3", "popcnt", "avx", "avx2", "fma", "bmi2")},
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    **{name: name for name in ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd", "avx512ifma", "avx512vbmi")},
}
"""Feature as Linux calls it → its name for `__builtin_cpu_supports`."""

_OF = {"size": "FUSION_SIZE", "stride": "FUSION_STRIDE", "value": "FUSION_VALUE"}


def kernel_text(number: int, source: KernelSource) -> str:
    """Return the text of a kernel whose functions have names that no other one has."""
    name = source.callee.function
    own = (f"#define {name}{end} {_kernel(number)}{end}" for end in ("", f"_{SHARE_SUFFIX}", f"_{SCRATCH_SUFFIX}"))
    return "\n".join([*own, source.text])


def program_text(program: Standalone, needs: Iterable[str] = ()) -> str:
    """Return the text of a program.

    Args:
        needs: features of the CPU that the kernels use.

    Raises:
        Unsupported: a dtype has no form in DLPack, or a size none in C.
    """
    writer = _ProgramWriter(program)
    lines = ["#include <math.h>", "#include <stddef.h>", "", '#include "program.h"', ""]
    lines += [*writer.kernels(), *writer.constants(), *writer.tables(), *_lacking(needs)]
    lines += [*writer.functions(), *writer.summary()]
    return "\n".join([*lines, ""])


class _ProgramWriter:
    def __init__(self, program: Standalone) -> None:
        self.program = program
        self.names = {size.name: f"sizes[{k}]" for k, size in enumerate(program.sizes)}

    def size(self, text: str) -> str:
        return size_code(text, self.names)

    def kernels(self) -> Iterator[str]:
        for number, source in enumerate(self.program.sources):
            callee = source.callee
            given = ["void *"] * callee.tensors + ["int64_t"] * callee.sizes + ["int"]
            yield f"int {_kernel(number)}({', '.join(given)}); /* {callee.name} */"
        yield ""

    def constants(self) -> Iterator[str]:
        for number, content in enumerate(self.program.constants):
            yield f"static _Alignas(64) char constant_{number}[{len(content) + 1}] ="
            yield from indented(f'"{_octal(content[at : at + 32])}"' for at in range(0, len(content), 32))
            yield '    "";'

    def tables(self) -> Iterator[str]:
        program = self.program
        for name, tensors in (("inputs", program.inputs), ("outputs", program.outputs)):
            yield from _table(f"fusion_tensor {name}", map(_tensor, tensors))
        yield from _table("int changed", (str(int(tensor.changed)) for tensor in program.inputs))
        for k, weight in enumerate(program.weights):
            for what, numbers in (("shape", weight.shape), ("strides", weight.strides)):
                yield f"static const int64_t {what}_{k}[] = {{{', '.join(map(str, (*numbers, 0)))}}};"
        yield from _table("struct fusion_weight weights", (_weight(k, each) for k, each in enumerate(program.weights)))
        sizes = (
            f"{{{_quoted(s.name)}, {s.input}, {_OF[s.of]}, {s.dimension}, {s.times}, {s.plus}}}" for s in program.sizes
        )
        yield from _table("struct fusion_size named", sizes)
        yield from _table("char *const conditions", map(_quoted, program.conditions))

    def functions(self) -> Iterator[str]:
        program = self.program
        broken = [f"if (!{self.size(text)}) return {k};" for k, text in enumerate(program.conditions)]
        yield from _function("int broken(const int64_t *sizes)", ["(void)sizes;", *broken, "return -1;"])
        numbers = [
            number for tensor in (*program.inputs, *program.outputs) for number in (*tensor.shape, *tensor.strides)
        ]
        lines = [f"numbers[{k}] = {self.size(number)};" for k, number in enumerate(numbers)]
        yield from _function(
            "void layouts(const int64_t *sizes, int64_t *numbers)", ["(void)sizes, (void)numbers;", *lines]
        )
        yield from self._slots()
        head = (
            "int run(const int64_t *sizes, char *const *memory, char *workspace, int threads, uint64_t *random,"
            " const char **where)"
        )
        steps = [line for step in program.steps for line in self._step(step)]
        before = ["int64_t slots[SLOTS + 1];", "int wrong = 0;", "places(sizes, slots);"]
        unused = "(void)memory, (void)workspace, (void)threads, (void)random, (void)where;"
        yield from _function(head, [unused, *before, *steps, "return wrong;"])

    def _slots(self) -> Iterator[str]:
        """Write the function that computes where each part of the workspace begins, and where the last one ends."""
        yield f"enum {{ SLOTS = {len(self.program.slots)} }};\n"
        lines = ["(void)sizes;", "slots[0] = 0;"]
        for k, texts in enumerate(self.program.slots):
            largest = self.size(f"max({', '.join(texts)})" if len(texts) > 1 else texts[0])
            lines.append(f"slots[{k + 1}] = slots[{k}] + (({largest} + 63) & ~INT64_C(63));")
        yield from _function("void places(const int64_t *sizes, int64_t *slots)", lines)
        body = ["int64_t slots[SLOTS + 1];", "places(sizes, slots);", "return slots[SLOTS];"]
        yield from _function("int64_t workspace_of(const int64_t *sizes)", body)

    def _step(self, step: StandaloneLaunch | Copy | BlasProduct | Seed) -> Iterator[str]:
        if isinstance(step, StandaloneLaunch):
            given = [*map(self._place, step.operands), *map(self.size, step.sizes), "threads"]
            yield f"*where = {_quoted(step.where)};"
            yield f"if ((wrong = {_kernel(step.kernel)}({', '.join(given)})) != 0) return wrong;"
            return
        if isinstance(step, Seed):
            yield f"fusion_draw(random, {self._place(step.to)});"
            return
        yield "{"
        if isinstance(step, BlasProduct):
            for name, numbers in (("extents", step.sizes), ("steps", step.strides)):
                yield f"    const int64_t {name}[] = {{{', '.join(map(self.size, numbers))}}};"
            places = ", ".join(map(self._place, (step.left, step.right, step.to)))
            yield f"    fusion_product({step.item}, extents, steps, {places}, {int(step.adds)});"
            yield "}"
            return
        layouts = (("shape", step.shape), ("to", step.to_strides), ("from", step.source_strides))
        for name, numbers in layouts:
            yield f"    const int64_t {name}[] = {{{', '.join([*map(self.size, numbers), '0'])}}};"
        places = f"{self._place(step.to)}, to, {self._place(step.source)}, from"
        yield f"    if ({' * '.join(['1', *map(self.size, step.shape)])} > 0)"
        yield f"        fusion_copy({len(step.shape)}, shape, {step.item}, {places});"
        yield "}"

    def _place(self, place: MemoryPlace) -> str:
        program = self.program
        inputs, outputs = len(program.weights), len(program.weights) + len(program.inputs)
        match place.memory:
            case Memory.WEIGHT:
                start = f"memory[{place.number}]"
            case Memory.INPUT:
                start = f"memory[{inputs + place.number}]"
            case Memory.OUTPUT:
                start = f"memory[{outputs + place.number}]"
            case Memory.SLOT:
                start = f"workspace + slots[{place.number}]"
            case Memory.CONSTANT:
                start = f"constant_{place.number}"
            case unknown:
                assert_never(unknown)
        offset = self.size(place.offset)
        return start if offset == "0" else f"{start} + {place.item} * {offset}"

    def summary(self) -> Iterator[str]:
        program = self.program
        counts = [len(each) for each in (program.inputs, program.outputs, program.weights, program.sizes)]
        yield "const struct fusion_program fusion_program = {"
        yield f"    {_quoted(program.weights_file)}, {', '.join(map(str, (*counts, len(program.conditions))))},"
        yield "    inputs, outputs, changed, weights, named, conditions, lacking, broken, layouts, workspace_of, run,"
        yield "};"


def _kernel(number: int) -> str:
    return f"fusion_kernel_{number}"


def _quoted(text: str) -> str:
    """Return a string of C; other characters than ASCII as their bytes in UTF-8.

    >>> print(_quoted('a "b" é?'))
    "a \\"b\\" \\303\\251?"
    """
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if " " <= c < "\x7f" else _octal(c.encode()) for c in plain).replace("??", "?\\?")


def _octal(content: bytes) -> str:
    return "".join(f"\\{byte:03o}" for byte in content)


def _table(declared: str, entries: Iterable[str]) -> Iterator[str]:
    """Write a table, which may be empty: C has none without an element."""
    kind, _, name = declared.rpartition(" ")
    lines = [f"    {entry}," for entry in entries]
    yield f"static const {kind} {name}[{max(1, len(lines))}] = {{"
    yield from lines or ["    0,"]
    yield "};\n"


def _function(head: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"static {head} {{"
    yield from indented(lines)
    yield "}\n"


def _lacking(needs: Iterable[str]) -> Iterator[str]:
    """Write the function that looks for features of an x86-64 CPU, as far as compilers know their names."""
    known = [_FEATURES[need] for need in sorted(needs) if need in _FEATURES]
    lines = [f'if (!__builtin_cpu_supports("{name}")) return "{name}";' for name in known]
    yield from _function(
        "const char *lacking(void)", [*(["__builtin_cpu_init();"] if lines else []), *lines, "return NULL;"]
    )


def _tensor(tensor: InterfaceTensor) -> str:
    shape = ", ".join(tensor.shape)
    return f"{{{_quoted(tensor.name)}, {_dtype(tensor.dtype)}, {len(tensor.shape)}, {_quoted(f'[{shape}]')}}}"


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in _CODES:
        raise Unsupported(f"tensors of {dtype} are not passed as DLPack")
    code, bits = _CODES[dtype]
    return f"{{{code}, {bits}, 1}}"


def _weight(number: int, weight: StoredWeight) -> str:
    if weight.dtype not in _STORED:
        raise Unsupported(f"weights of {weight.dtype} have no form in a file of safetensors")
    layout = f"{weight.dtype.itemsize}, {len(weight.shape)}, shape_{number}, strides_{number}"
    name, dtype, check = _quoted(weight.name), _quoted(_STORED[weight.dtype]), f"{weight.check:#010x}u"
    return f"{{{name}, {dtype}, {layout}, {int(weight.changed)}, {check}}}"


__all__ = ["kernel_text", "program_text"]
