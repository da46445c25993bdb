"""Runs generated kernels on CPU tensors under Triton's interpreter (`TRITON_INTERPRET=1`).

Input: an imported source; output: a launcher for CPU tensors that runs the same text, program by program, with numpy:
for tests, and for stepping through a kernel with a Python debugger.  The interpreter lacks the vendor's math library,
its assembly, and arithmetic of bfloat16; these are added here, with torch's functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from fusion.codegen.target import Launcher
from fusion.codegen.triton.expressions.scalar_code import TYPES
from fusion.codegen.triton.file import WAIT
from fusion.codegen.triton.launch import ptx
from fusion.codegen.triton.launch.launchers import promise
from fusion.codegen.triton.launch.load import Generated
from fusion.codegen.triton.launch.sources import Sources
from fusion.lowering.checks.checked import failure
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.scalar_ops import SCALAR_OPS

_MEANINGS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: op.meaning for name, op in SCALAR_OPS.items()},
    "nearbyint": torch.round,  # under names of their own
    "fast_dividef": torch.true_divide,
}


class Libdevice:
    """Replaces `triton.language.extra.libdevice`: each function has its meaning from `SCALAR_OPS`."""

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


def complete(module: ModuleType) -> None:
    """Replace what an imported source takes from Triton and the interpreter lacks."""
    if hasattr(module, "libdevice"):
        vars(module)["libdevice"] = Libdevice()
    if hasattr(module, WAIT):
        vars(module)[WAIT] = lambda: None  # launches follow one another


def launcher(kernel: Kernel, generated: Generated, sources: Sources) -> Launcher:
    """Return a launcher of `kernel` for CPU tensors, with the source that serves them."""
    _complete_interpreter()
    is_aligned, tensors = promise(kernel.params, near=generated.near), len(kernel.params)
    numbers = {position for position, param in enumerate(kernel.params) if param.number}

    def source(args: Sequence[Any]) -> Generated:
        aligned = is_aligned([tensor.data_ptr() for tensor in args[:tensors]])
        chosen = sources.of(aligned, sources.wide(aligned, args[tensors:]))
        complete(chosen.module)
        return chosen

    def launch(*args: Any) -> None:
        chosen = source(args)
        programs = chosen.grid(*args[tensors:])
        arguments = [_number(arg) if position in numbers else arg for position, arg in enumerate(args)]
        counter = [torch.zeros(chosen.counters, dtype=torch.int32)] if chosen.counted else []
        described = chosen.module.descriptors(*args) if chosen.descriptor_types and programs > 0 else ()
        if programs > 0:
            try:
                with np.errstate(all="ignore"):  # masked lanes compute on zeros
                    chosen.function[(programs,)](
                        *(*arguments, *counter, *described), **chosen.constants, **chosen.options
                    )
            except interpreter.InterpreterError as failed:
                if not _is_assertion(failed):
                    raise
                raise failure(kernel, args) from None

    return launch


def _number(number: torch.Tensor) -> Any:
    """Return a number as the interpreter holds it; passed by value, floats would become float32, bools int32."""
    bits = number.view(torch.int16).numpy().view(np.uint16) if number.dtype is torch.bfloat16 else number.numpy()
    dtype = getattr(tl, TYPES[number.dtype].removeprefix("tl."))
    return tl.core.tensor(TensorHandle(bits.reshape(1), dtype), dtype)


def _is_assertion(error: BaseException | None) -> bool:
    """Return whether an assertion on the device has failed.  Functions that call one another wrap the errors they
    raise.
    """
    while error is not None and not isinstance(error, AssertionError):
        error = error.__cause__
    return error is not None


@functools.cache
def _complete_interpreter() -> None:
    """Add assembly to the interpreter, and bfloat16, which it holds as bits: constants, conversion and products.

    Comparisons otherwise have the dtype of their operands; a single one would be broadcast as such.  Values are arrays
    of one element even where they are scalars; numpy 2.4 no longer accepts these as loop bounds.
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
    interpreter.InterpretedFunction.__call__ = _call_on_device
    numpy_dtype = functools.cache(interpreter._get_np_dtype)  # which makes a table of all dtypes at each call
    interpreter._get_np_dtype = lambda dtype: numpy_dtype(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)


def _call_on_device(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the kernel or of Triton's library.  Triton's version patches the language at each call."""
    _patch_library(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _patch_library(function: Any) -> None:
    """Patch the modules that a function reads the language from.  Triton never reverts that for other than `tl`, which
    each launch patches anew.
    """
    interpreter._patch_lang(function)


def _sum(self: Any, tile: Any) -> Any:
    """Return a sum in the dtype of its terms, which wraps around.  Numpy's is wider; 32-bit operations refuse it."""
    data = tile.handle.data
    return self.to_tensor(data.sum(axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype), tile.dtype)


def _reduce_by_pairs(self: Any, tiles: Sequence[Any]) -> list[Any]:
    """Return a reduction by a function of the kernel: neighbours are combined until one is left, as on a device.

    The interpreter's version calls the function for one element after the other: seconds for a few thousand.
    """
    axis, rank = self.axis or 0, tiles[0].handle.data.ndim
    columns = [tile.handle.data.reshape(-1) if self.axis is None else tile.handle.data for tile in tiles]
    while columns[0].shape[axis] > 1:
        sides = (
            self.to_tensor(data.take(range(first, data.shape[axis], 2), axis), tile.dtype)
            for first in (0, 1)
            for data, tile in zip(columns, tiles, strict=True)
        )
        combined = self.combine_fn.fn(*sides)
        columns = [tile.handle.data for tile in (combined if isinstance(combined, tuple) else (combined,))]
    if self.keep_dims and self.axis is None:
        columns = [data.reshape((1,) * rank) for data in columns]
    elif not self.keep_dims:
        columns = [data.squeeze(axis) for data in columns]
    return [self.to_tensor(data, tile.dtype) for data, tile in zip(columns, tiles, strict=True)]


class _Results:
    """The results of a call."""

    def __init__(self, *handles: Any) -> None:
        self.get_result = handles.__getitem__


def _run_assembly(text: str, constraints: str, handles: list[Any], types: list[Any], is_pure: bool, pack: int) -> Any:
    """Return the result of an `inline_asm_elementwise` with one result."""
    (result,) = types
    shape, dtype = handles[0].data.shape, result.scalar
    flat = [np.broadcast_to(handle.data, shape).reshape(-1) for handle in handles]
    bits = ptx.run(text, flat, dtype.primitive_bitwidth // 8, pack)
    numpy_dtype = np.dtype({"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[str(dtype)])
    return _Results(TensorHandle(bits.view(numpy_dtype)[: flat[0].size].reshape(shape), dtype))
