"""Interpreted: generated kernels on CPU tensors, under Triton's interpreter (`TRITON_INTERPRET=1`).

What enters is an imported source; what leaves is a launcher for CPU tensors that runs the very same text, program by
program, with numpy: for tests, and for stepping through a kernel with a Python debugger.  The interpreter knows
neither the vendor's math library, nor its assembly, nor arithmetic of bfloat16; what is missing is added here, with
torch's functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from fusion.codegen.target import Launcher
from fusion.codegen.triton.expressions.scalar_code import TYPES
from fusion.codegen.triton.launch import ptx
from fusion.codegen.triton.launch.launchers import promise
from fusion.codegen.triton.launch.load import Generated
from fusion.codegen.triton.launch.sources import Sources
from fusion.lowering.checks import failure
from fusion.lowering.kernel import Kernel
from fusion.lowering.scalar_ops import SCALAR_OPS

_MEANINGS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: op.meaning for name, op in SCALAR_OPS.items()},
    "nearbyint": torch.round,  # under names of their own
    "fast_dividef": torch.true_divide,
}


class Libdevice:
    """Stands in for `triton.language.extra.libdevice`: each function has its meaning from `SCALAR_OPS`."""

    def __getattr__(self, name: str) -> Any:
        meaning = _MEANINGS[name]

        def function(*args: Any) -> Any:
            tiles = [interpreter.interpreter_semantic.to_tensor(arg) for arg in args]
            dtype = tiles[0].dtype
            result = meaning(*(torch.from_numpy(np.array(tile.handle.data)) for tile in tiles)).numpy()
            blocks = [tile for tile in tiles if tile.type.is_block()]
            shaped = tl.block_type(dtype, list(result.shape)) if blocks else dtype
            return tl.core.tensor(TensorHandle(result, dtype), shaped)

        return function


def launcher(kernel: Kernel, generated: Generated, sources: Sources) -> Launcher:
    """Runs `kernel` on CPU tensors, from the source that serves them."""
    _complete_interpreter()
    kept, tensors = promise(kernel.params, near=generated.near), len(kernel.params)
    numbers = {position for position, param in enumerate(kernel.params) if param.number}

    def source(args: Sequence[Any]) -> Generated:
        aligned = kept([tensor.data_ptr() for tensor in args[:tensors]])
        found = sources.of(aligned, sources.wide(aligned, args[tensors:]))
        if hasattr(found.module, "libdevice"):
            vars(found.module)["libdevice"] = Libdevice()
        return found

    def launch(*args: Any) -> None:
        taken = source(args)
        programs = taken.grid(*args[tensors:])
        given = [_number(arg) if position in numbers else arg for position, arg in enumerate(args)]
        counter = [torch.zeros(taken.counters, dtype=torch.int32)] if taken.counted else []
        described = taken.module.descriptors(*args) if taken.passed and programs > 0 else ()
        if programs > 0:
            try:
                with np.errstate(all="ignore"):  # masked lanes compute on zeros
                    taken.function[(programs,)](*(*given, *counter, *described), **taken.constants, **taken.options)
            except interpreter.InterpreterError as failed:
                if not _is_assertion(failed):
                    raise
                raise failure(kernel, args) from None

    return launch


def _number(given: torch.Tensor) -> Any:
    """A number as the interpreter holds it; of one passed as such it would take floats for float32, bools for int32."""
    bits = given.view(torch.int16).numpy().view(np.uint16) if given.dtype is torch.bfloat16 else given.numpy()
    dtype = getattr(tl, TYPES[given.dtype].removeprefix("tl."))
    return tl.core.tensor(TensorHandle(bits.reshape(1), dtype), dtype)


def _is_assertion(error: BaseException | None) -> bool:
    """Has an assertion on the device failed?  Functions that call one another wrap what they raise."""
    while error is not None and not isinstance(error, AssertionError):
        error = error.__cause__
    return error is not None


@functools.cache
def _complete_interpreter() -> None:
    """Teach the interpreter assembly, and bfloat16, which it holds as bits: constants, conversion and products.

    What it compares it still takes for numbers of the operands' dtype; a single one would be spread as such.
    Its values are arrays of one element even where they are scalars; numpy 2.4 no longer takes these for loop bounds.
    """
    builder: Any = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)  # with assertions
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def to_bits(values: torch.Tensor) -> Any:
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_impl(handle: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and handle.dtype.scalar != tl.bfloat16:
            return TensorHandle(to_bits(torch.from_numpy(np.array(handle.data))), tl.bfloat16)
        return cast(handle if target.scalar == tl.bfloat16 else widen(handle), target)

    def create_dot(a: Any, b: Any, *rest: Any) -> Any:
        return dot(widen(a), widen(b), *rest)

    def get_bf16(value: float) -> Any:
        return TensorHandle(to_bits(torch.tensor([value])), tl.bfloat16)

    def binary_op(a: Any, b: Any, op: Any) -> Any:
        result = binary(a, b, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    builder.cast_impl, builder.create_dot, builder.get_bf16 = cast_impl, create_dot, get_bf16
    builder.binary_op = binary_op
    builder.create_inline_asm = _run_assembly
    interpreter.ReduceOps.generic_reduce = _reduce_by_pairs
    interpreter.ReduceOps.sum = _sum


def _sum(self: Any, tile: Any) -> Any:
    """A sum in the dtype of its terms, which wraps around.  Numpy's is wider, and refused as one number of 32 bits."""
    data = tile.handle.data
    return self.to_tensor(data.sum(axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype), tile.dtype)


def _reduce_by_pairs(self: Any, tiles: Sequence[Any]) -> list[Any]:
    """A reduction by a function of the kernel's own: neighbours are joined until one is left, as on a device.

    The interpreter's own form calls the function for one element after the other: seconds for a row of a few thousand.
    """
    axis, rank = self.axis or 0, tiles[0].handle.data.ndim
    found = [tile.handle.data.reshape(-1) if self.axis is None else tile.handle.data for tile in tiles]
    while found[0].shape[axis] > 1:
        sides = (
            self.to_tensor(data.take(range(first, data.shape[axis], 2), axis), tile.dtype)
            for first in (0, 1)
            for data, tile in zip(found, tiles, strict=True)
        )
        joined = self.combine_fn.fn(*sides)
        found = [tile.handle.data for tile in (joined if isinstance(joined, tuple) else (joined,))]
    if self.keep_dims and self.axis is None:
        found = [data.reshape((1,) * rank) for data in found]
    elif not self.keep_dims:
        found = [data.squeeze(axis) for data in found]
    return [self.to_tensor(data, tile.dtype) for data, tile in zip(found, tiles, strict=True)]


class _Results:
    """What a call gives."""

    def __init__(self, *handles: Any) -> None:
        self.get_result = handles.__getitem__


def _run_assembly(text: str, constraints: str, handles: list[Any], types: list[Any], is_pure: bool, pack: int) -> Any:
    """An `inline_asm_elementwise` with one result."""
    (result,) = types
    shape, dtype = handles[0].data.shape, result.scalar
    flat = [np.broadcast_to(handle.data, shape).reshape(-1) for handle in handles]
    bits = ptx.run(text, flat, dtype.primitive_bitwidth // 8, pack)
    held = np.dtype({"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[str(dtype)])
    return _Results(TensorHandle(bits.view(held)[: flat[0].size].reshape(shape), dtype))
