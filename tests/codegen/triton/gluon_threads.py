"""Gluon programs of two groups and a loading warp, run as threads on the CPU.

Input: the text of a generated file and the tensors of its launch; output: in these tensors.  A product reads its
operands only when it is awaited, as late as the program allows, and a slot is filled as soon as its barrier reports it
empty (or, where `LATE` is set, when its arrival is awaited): so a slot that is released too early shows as wrong
numbers, and one that is never released as a program that does not end.  One program runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from fusion.codegen.triton.expressions.prelude import LOAD, STORE
from fusion.codegen.triton.file import WAIT
from fusion.lowering.ir.kernel import Kernel
from tests.codegen.triton.gluon_rows import Pointer

PATIENCE = 10.0
"""Seconds after which a barrier is assumed never to complete."""

LATE = False
"""Whether what is loaded arrives only when somebody waits for it, instead of at once."""

_LOOK = 0.1  # seconds after which a thread that waits looks whether another one has failed
_FAILED = threading.Event()


class Barrier:
    """Completes a phase when the expected number of signals and all expected bytes have arrived."""

    def __init__(self, count: int) -> None:
        self.count, self.left, self.bytes, self.completed = count, count, 0, 0
        self.changed = threading.Condition()
        self.late: list[Callable[[], object]] = []

    def take(self, messages: int = 0, expected: int = 0) -> None:
        with self.changed:
            self.left -= messages
            self.bytes += expected
            assert self.left >= 0, "more messages than a phase has"
            if self.left == 0 and self.bytes == 0:
                self.left, self.completed = self.count, self.completed + 1
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            for _ in range(int(PATIENCE / _LOOK)):
                if self.changed.wait_for(lambda: self.completed % 2 != phase, _LOOK):
                    while self.late:
                        self.late.pop(0)()
                    return
                assert not _FAILED.is_set(), "another thread has failed"
            raise AssertionError("a barrier that nobody completes")


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape = data, tuple(data.shape)

    def index(self, slot: int) -> Shared:
        return Shared(self.data[int(slot)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(tuple(shape)))

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class Barriers:
    """A number of barriers, which `init` creates."""

    def __init__(self, count: int) -> None:
        self.each: list[Barrier | None] = [None] * count

    def index(self, slot: int) -> Place:
        return Place(self, int(slot))


@dataclass(frozen=True, slots=True)
class Place:
    """One of them."""

    among: Barriers
    slot: int

    def init(self, count: int) -> None:
        self.among.each[self.slot] = Barrier(count)

    def __call__(self) -> Barrier:
        barrier = self.among.each[self.slot]
        assert barrier is not None
        return barrier


class Product:
    """A product that has been started; `sums`, to which it is added, may still be on their way."""

    def __init__(self, left: Any, right: Shared, sums: torch.Tensor | Running) -> None:
        self.left, self.right, self.sums = left, right, sums
        self.result: torch.Tensor | None = None

    def end(self) -> torch.Tensor:
        if self.result is None:
            left = self.left.data if isinstance(self.left, Shared) else self.left
            sums = self.sums.product.end() if isinstance(self.sums, Running) else self.sums
            self.result = left.float() @ self.right.data.float() + sums
        return self.result


@dataclass(frozen=True, slots=True)
class Running:
    """The sums of a product that may be running: only another product of the same thread may add to them."""

    product: Product


class _Thread(threading.local):
    """The products that each thread has started, in order."""

    def __init__(self) -> None:
        self.begun: list[Product] = []


_OWN = _Thread()


def _wait(outstanding: int, deps: Sequence[Any]) -> Any:
    while len(_OWN.begun) > outstanding:
        _OWN.begun.pop(0).end()
    result = tuple(map(_awaited, deps))
    return result[0] if len(result) == 1 else result


def _awaited(dep: Any) -> Any:
    product = dep.product if isinstance(dep, Running) else dep
    if not isinstance(product, Product):
        return dep
    return Running(product) if product.result is None else product.result


def _begin(
    left: Any, right: Shared, sums: torch.Tensor | Running, *, use_acc: bool = True, is_async: bool = False
) -> Product:
    assert is_async and (use_acc or isinstance(sums, torch.Tensor))
    assert isinstance(sums, torch.Tensor | Running), "added to before it has been waited for"
    product = Product(left, right, sums if use_acc else torch.zeros(left.shape[0], right.shape[1]))
    _OWN.begun.append(product)
    return product


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> torch.Tensor:
    found = pointer.read(mask)
    return found if mask is None else torch.where(mask, found, torch.full_like(found, other))


class _Matrix:
    """The matrix of a descriptor, in blocks."""

    def __init__(self, flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        assert strides[-1] == 1 and len(shape) == len(strides) == len(block) <= 5
        self.layout = None
        self.shape, self.strides, self.flat, self.block = shape, strides, flat, tuple(block)

    def at(self, corner: Sequence[int]) -> torch.Tensor:
        """The part of a block that is not past any end; no block may begin before the matrix."""
        first = [int(x) for x in corner]
        assert all(x >= 0 for x in first)
        inside = [max(0, min(length, size - x)) for x, length, size in zip(first, self.block, self.shape, strict=True)]
        if 0 in inside:
            return self.flat.new_empty(inside)
        begin = sum(x * stride for x, stride in zip(first, self.strides, strict=True))
        return self.flat.as_strided(inside, tuple(self.strides), begin + self.flat.storage_offset())


def _fetch(matrix: _Matrix, corner: Sequence[int], barrier: Place, slot: Shared) -> None:
    assert slot.shape == matrix.block
    inside = matrix.at(corner)

    def arrive() -> None:
        slot.data.zero_()  # elements past the end arrive as zeros
        slot.data[tuple(map(slice, inside.shape))] = inside

    if LATE:
        barrier().late.append(arrive)
    else:
        arrive()
    barrier().take(expected=-slot.data.numel() * slot.data.element_size())


def _leave(matrix: _Matrix, corner: Sequence[int], staged: Shared) -> None:
    assert staged.shape == matrix.block
    inside = matrix.at(corner)
    inside.copy_(staged.data[tuple(map(slice, inside.shape))])


def _run_together(
    parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: object, registers: object
) -> None:
    failures: list[BaseException] = []

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as failure:
            failures.append(failure)
            _FAILED.set()

    _FAILED.clear()
    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _swizzle2d(i: int, j: int, rows: int, columns: int, group: int) -> tuple[int, int]:
    number = i * columns + j
    first = number // (group * columns) * group
    size, rest = min(rows - first, group), number - first * columns
    return first + rest % size, rest // size


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float32)
    return torch.where(condition, *(x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype) for x in (a, b)))


def _most(pick: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def of(a: Any, b: Any, propagate_nan: object = None) -> Any:
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            return plain(a, b)
        return pick(*(x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (a, b)))

    return of


def _namespace(program: list[int], programs: int) -> dict[str, Any]:
    """The imports of a generated file, for the program whose number `program` holds."""
    return {
        "tl": _triton_language(program, programs),
        "gl": _gluon_language(),
        "hopper": _hopper(),
        WAIT: lambda: None,  # launches follow one another
    }


def _triton_language(program: list[int], programs: int) -> SimpleNamespace:
    types = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32")}
    return SimpleNamespace(
        **types,
        int1=torch.bool,
        constexpr=int,
        PropagateNan=SimpleNamespace(ALL=None),
        program_id=lambda axis: program[0],
        num_programs=lambda axis: programs,
        cdiv=lambda a, b: -(-a // b),
        swizzle2d=_swizzle2d,
        where=_where,
        cast=lambda x, dtype: x,
        load=_load,
        store=Pointer.write,
        maximum=_most(torch.maximum, max),
        minimum=_most(torch.minimum, min),
        exp=torch.exp,
        exp2=torch.exp2,
        sum=lambda x, axis: x.sum(axis),
        reduce=lambda x, axis, combine: x.amax(axis),  # of `_maximum`, the only one here
    )


def _gluon_language() -> SimpleNamespace:
    return SimpleNamespace(
        float32=torch.float32,
        float16=torch.float16,
        bfloat16=torch.bfloat16,
        int64=torch.int64,
        arange=torch.arange,
        full=lambda shape, number, dtype, layout=None: torch.full(shape, number, dtype=dtype),
        static_range=range,
        to_tensor=int,
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=lambda dtype, shape, layout: (
            Barriers(shape[0]) if dtype is torch.int64 else Shared(torch.full(shape, float("nan"), dtype=dtype))
        ),
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda block, dtype: None),
        NVMMADistributedLayout=lambda *parts: None,
        SliceLayout=lambda *parts: None,
        BlockedLayout=lambda *parts: None,
        DotOperandLayout=lambda *parts: None,
        warp_specialize=_run_together,
    )


def _hopper() -> SimpleNamespace:
    return SimpleNamespace(
        fence_async_shared=lambda: None,
        warpgroup_mma=_begin,
        warpgroup_mma_wait=lambda outstanding, deps: _wait(outstanding, deps),
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, phase: barrier().wait(int(phase)),
            expect=lambda barrier, count: barrier().take(messages=1, expected=int(count)),
            arrive=lambda barrier, count: barrier().take(messages=count),
        ),
        tma=SimpleNamespace(
            make_tensor_descriptor=lambda place, shape, strides, block, layout: _Matrix(
                place.flat[place.at :], shape, strides, block
            ),
            store_wait=lambda pending: None,
            **{LOAD.rpartition(".")[2]: _fetch, STORE.rpartition(".")[2]: _leave},
        ),
    )


def run(kernel: Kernel, source: str, args: Sequence[torch.Tensor], programs: int, sizes: Sequence[int] = ()) -> None:
    """Run the file's kernel on `args` of these `sizes`, with a limited number of programs, in sequence."""
    program = [0]
    decorated = SimpleNamespace(jit=lambda function: function, cdiv=lambda a, b: -(-a // b))
    names: dict[str, Any] = {"triton": decorated, "gluon": decorated, "torch": torch}
    text = "\n".join(line for line in source.splitlines() if not line.startswith(("import ", "from ")))
    names |= _namespace(program, programs)
    names["TensorDescriptor"] = lambda base, shape, strides, block, layout: _Matrix(base, shape, strides, block)
    exec(text, names)
    (count,) = names["grid"](*sizes, processors=programs)
    assert count == programs, "a program for every multiprocessor"
    constants = {name: size for name, size in names["CONFIG"].items() if name.isupper()}
    for number in range(count):
        program[0] = number
        flat = [arg.view(-1) for arg in args]
        described = names["descriptors"](*flat, *sizes) if "descriptors" in names else ()
        names[kernel.name](*map(Pointer, flat), *sizes, *described, **constants)
