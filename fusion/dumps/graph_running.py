"""Runs the dumped files of graphs and of compiled modules.

Input: a graph with its inputs, and the module compiled of it; output: lines on standard output, and the exit code 1 if
the module's results are wrong.  The graph runs with PyTorch's own operations twice, as it is and in float64: the
module's error may be a few times PyTorch's.  A module launches the kernels of its folder's files, so that an
edited one takes part.
"""

from __future__ import annotations

import base64
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.codegen.target import Launcher
from fusion.codegen.tuning.timing import median_time
from fusion.dumps.checks import is_close
from fusion.dumps.inputs import Draw, attempts
from fusion.dumps.kernel_files import read_kernel_file
from fusion.dumps.running import built
from fusion.graph_cache import KINDS
from fusion.graph_cache.serialise import read
from fusion.inspect.accuracy import copied, distance
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.program import Buffer, Program
from fusion.runtime.chunks import InChunks
from fusion.runtime.memory import allocator as allocator_on

Values = list[object]
Inputs = Callable[[Draw], Values]


# What the files contain -----------------------------------------------------------------------------------------------


def module_of(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """Return an instance of a class, with instances of the classes inside it under their names."""
    module = kind()
    for name, inner in vars(kind).items():
        if isinstance(inner, type) and issubclass(inner, torch.nn.Module):
            vars(module)[name] = module_of(inner)
    return module


def constant(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str, data: str | None = None
) -> torch.Tensor:
    """Return a constant of a graph; without its `data`, which were too large for the file, one of the same layout."""
    if data is None:
        draw = Draw(torch.device(device), limit=1)
        return draw.normal(shape, strides, dtype) if dtype.is_floating_point else draw.integers(shape, strides, dtype)
    values = torch.tensor(list(base64.b64decode(data)), dtype=torch.uint8).view(dtype).reshape(tuple(shape))
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(values)


def allocator(device: str) -> Callable[..., torch.Tensor]:
    """Return the function that allocates the tensors of a compiled module."""
    allocate = allocator_on(torch.device(device), torch.device(device))
    assert allocate is not None, f"modules allocate on {device} by another function"
    return allocate


def kernel(module: str, path: str) -> Launcher:
    """Return the launcher of the kernel in a file, at a path relative to the module's."""
    return built(read_kernel_file(Path(module).parent / path))


def in_chunks(module: str, bodies: Sequence[str], form: str) -> InChunks:
    """Return a call that runs modules chunk by chunk; `bodies` are their folders, beside the file `module`."""
    node, results = cast("tuple[Chunked[Program], tuple[Buffer, ...]]", read(form, KINDS))
    folder = Path(module).parent
    return InChunks(node, results, [_loaded(folder / name / Path(module).name)["module"].forward for name in bodies])


def _loaded(path: Path) -> dict[str, Any]:
    return runpy.run_path(str(path), run_name="dumped")


# Running --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_graph(module: torch.nn.Module, inputs: Inputs) -> None:
    """Run a graph with PyTorch's operations; print its results, with their errors against float64, and its time.

    Raises:
        Unsupported: the graph accepts no inputs that were drawn.
    """
    given, results, _ = _drawn(module, inputs)
    again, exact = [*module(*_copies(given))], _exact(module, given)
    for number, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            shown = f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
            against = "" if exact is None else f", error {_error(result, exact[number]):.1e} against float64"
            is_random = not _is_same(result, again[number])
            print(f"  result {number}: {shown}{', which is random' if is_random else against}")
    print(f"  {_time(module, given):.1f} µs a run, with PyTorch's operations")


@torch.no_grad()
def run_module(file: str, module: torch.nn.Module, graph: str) -> None:
    """Compare a compiled module with the graph in a file of its folder, on the inputs of that file; print both times.

    Raises:
        Unsupported: the graph accepts no inputs that were drawn.
        SystemExit: with code 1, if a result is wrong.
    """
    known = _loaded(Path(file).parent / graph)
    if "module" not in known:
        raise SystemExit(f"{graph} does not run by itself, so there is nothing to compare with")
    eager = known["module"]
    given, theirs, changed = _drawn(eager, known["inputs"])
    exact, arguments = _exact(eager, given), _copies(given)
    ours = [*module([*arguments])]
    if known["RANDOM"]:
        print("  results that depend on random numbers are not compared: PyTorch draws others")
    compared = [k for k in range(len(theirs)) if k not in known["RANDOM"]]
    right = _compared("result", compared, ours, theirs, exact)
    written = [k for k, (before, after) in enumerate(zip(given, changed, strict=True)) if not _is_same(before, after)]
    right &= _compared("input", written, arguments, changed, None if exact is None else exact[len(theirs) :])
    took, taken = _time(lambda *each: module([*each]), given), _time(eager, given)
    print(f"  {took:.1f} µs a run; {taken:.1f} with PyTorch's operations")
    if not right:
        raise SystemExit(1)


def _compared(kind: str, positions: Sequence[int], ours: Values, theirs: Values, exact: Values | None) -> bool:
    """Print the errors of the values at these positions; return whether none is wrong."""
    verdicts = []
    for k in positions:
        verdict, said = _verdict(ours[k], theirs[k], None if exact is None else exact[k])
        verdicts.append(verdict)
        if verdict != "right" or isinstance(theirs[k], torch.Tensor):
            print(f"  {verdict}: {kind} {k}: {said}")
    return "WRONG" not in verdicts


def _verdict(mine: object, other: object, exact: object) -> tuple[str, str]:
    """Return "right", "WRONG", or "unclear" where PyTorch's own result overflows; and the error, in words."""
    if not isinstance(other, torch.Tensor) or not isinstance(mine, torch.Tensor):
        return "right" if mine == other else "WRONG", f"{mine}, with PyTorch's operations {other}"
    if mine.shape != other.shape or mine.dtype is not other.dtype:
        return "WRONG", f"{mine.dtype}{list(mine.shape)} instead of {other.dtype}{list(other.shape)}"
    is_right, error, rounding = is_close(mine, other, exact if isinstance(exact, torch.Tensor) else other)
    said = f"error {error:.1e} against float64, with PyTorch's operations {rounding:.1e}"
    if not isinstance(exact, torch.Tensor):
        said = f"{error:.1e} from PyTorch's operations"
    return "right" if is_right else "unclear" if math.isinf(rounding) else "WRONG", said


def _drawn(module: torch.nn.Module, inputs: Inputs) -> tuple[Values, Values, Values]:
    """Return inputs that a graph accepts, its results on copies of them, and the copies after the run."""
    refusal: Exception | None = None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = [each for each in inputs(Draw(device)) if isinstance(each, torch.Tensor)]
    dims = {size for each in tensors for size in each.shape}
    # Refused data end the use of a GPU by the process: there, positions without a range are 0, and floats in [0, 1).
    careful = [Draw(device, limit=1, unit=True)]
    for draw in careful if any(each.is_cuda for each in tensors) else attempts(device, dims):
        given = inputs(draw)
        arguments = _copies(given)
        try:
            return given, [*module(*arguments)], arguments
        except (IndexError, RuntimeError) as error:
            refusal = error
        if draw.is_last:
            break
    raise Unsupported(f"the graph accepts no inputs that were drawn: {refusal}")


def _is_same(left: object, right: object) -> bool:
    """Return whether two values are equal, with NaN at the same places."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left.nan_to_num(), right.nan_to_num())
    return left == right


def _copies(values: Values) -> Values:
    return [copied(each, each.dtype) if isinstance(each, torch.Tensor) else each for each in values]


def _exact(module: torch.nn.Module, given: Values) -> Values | None:
    """Return the results of a graph in float64, and its inputs after the run; None if an operation cannot run so."""
    arguments = [
        copied(each, torch.float64) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in _copies(given)
    ]
    try:
        with _InDouble():  # type: ignore[no-untyped-call]  # not annotated in PyTorch
            return [*module(*arguments), *arguments]
    except (RuntimeError, NotImplementedError, TypeError) as reason:
        print(f"  not computed in float64: {str(reason).splitlines()[0]}")
        return None


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not annotated in PyTorch
    """Computes in float64 whatever an operation computes in floats."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        def wide(value: object) -> object:
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
                return value.double()
            return value

        wide_args, wide_kwargs = pytree.tree_map(wide, (args, dict(kwargs or {})))
        return func(*wide_args, **wide_kwargs)


def _error(computed: torch.Tensor, exact: object) -> float:
    assert isinstance(exact, torch.Tensor)
    return distance(computed.reshape(exact.shape), exact)[0]


def _time(run: Callable[..., object], given: Values) -> float:
    """Return the microseconds of a run; changes of its inputs stay between runs."""
    arguments = _copies(given)
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    device = next((each.device for each in tensors if each.is_cuda), torch.device("cpu"))
    return median_time(partial(run, *arguments), device)


__all__ = ["allocator", "constant", "in_chunks", "kernel", "module_of", "run_graph", "run_module"]
