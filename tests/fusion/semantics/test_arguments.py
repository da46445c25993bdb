"""Arguments and results other than tensors: trees, numbers, None, objects; and exceptions."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch

import fusion
from tests.fusion.agreement import STRICT, agree


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0
    extra: dict[str, torch.Tensor] | None = None


def test_trees_of_tensors() -> None:
    def f(data: dict[str, object], *rest: torch.Tensor, flag: bool = False) -> object:
        x, (y, nothing) = data["x"], data["pair"]
        assert nothing is None
        total = x + y
        for other in rest:
            total = total * other
        return {"total": total, "list": [total * 2, (x - y, None)], "flag": flag, **({"more": x} if flag else {})}

    x, y, z = torch.randn(3), torch.randn(3), torch.randn(3)
    agree(f, {"x": x, "pair": (y, None)}, z, z + 1, flag=True)
    agree(f, {"x": x, "pair": [y, None]})


def test_named_tuples_and_ordered_mappings() -> None:
    def f(pair: Pair) -> object:
        return Pair(pair.left * 2, pair.right), OrderedDict(b=pair.left + 1, a=pair.left - 1), type(pair).__name__

    agree(f, Pair(torch.randn(3), None))
    agree(f, Pair(torch.randn(3), torch.randn(2)))


def test_data_classes() -> None:
    def f(batch: Batch) -> Batch:
        return Batch(batch.x * batch.scale, batch.scale + 1, {"sum": batch.x.sum()})

    fused = fusion.fuse(f, options=STRICT)
    for scale in (2.0, 3.0):
        batch = Batch(torch.randn(4), scale)
        expected, got = f(batch), fused(batch)
        assert type(got) is Batch and got.scale == expected.scale
        torch.testing.assert_close((got.x, got.extra), (expected.x, expected.extra))


def test_numbers_that_change() -> None:
    def f(x: torch.Tensor, n: int, a: float, flag: bool, name: str | None) -> object:
        y = x * a + n
        return y.relu() if flag else y.neg(), n + 1, a * 2, name

    fused = fusion.fuse(f, options=STRICT)
    x = torch.randn(5)
    for n, a, flag, name in ((2, 0.5, True, "a"), (3, 0.25, False, None), (7, -1.5, True, None), (1, 0.0, True, "b")):
        expected, got = f(x, n, a, flag, name), fused(x, n, a, flag, name)
        torch.testing.assert_close(got[0], expected[0])
        assert got[1:] == expected[1:]


def test_arguments_of_the_usual_kinds() -> None:
    def f(a: torch.Tensor, /, b: torch.Tensor, *args: torch.Tensor, c: torch.Tensor, d: float = 1.0, **more: object):
        return a + b * c + d + sum(args), sorted(more)

    x = torch.randn(3)
    agree(f, x, x + 1, x + 2, c=x * 2)
    agree(f, x, b=x + 1, c=x * 2, d=3.0, e=1, g=None)


def test_objects_are_changed_as_in_eager() -> None:
    class State:
        def __init__(self) -> None:
            self.steps, self.last, self.all = 0, None, []

    def f(state: State, x: torch.Tensor) -> torch.Tensor:
        state.steps += 1
        state.last = x * 2
        state.all.append(state.last)
        return state.last + 1

    fused, state, x = fusion.fuse(f, options=STRICT), State(), torch.randn(3)
    for _ in range(3):
        fused(state, x)
    assert state.steps == 3 and len(state.all) == 3 and state.last is state.all[-1]
    torch.testing.assert_close(state.last, x * 2)


def test_lists_and_mappings_are_changed_in_place() -> None:
    def f(cache: dict[str, list[torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        cache["keys"].append(x * 2)
        cache["count"] = [x.sum()]
        return torch.stack(cache["keys"]).sum(0)

    agree(f, {"keys": [torch.randn(3)]}, torch.randn(3))
    agree(f, defaultdict(list, keys=[]), torch.randn(3))


def test_numpy_arrays() -> None:
    np = pytest.importorskip("numpy")
    fused = fusion.fuse(lambda x: (torch.from_numpy(x) * 2).numpy() + 1)
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_allclose(fused(x), x * 2 + 1)


def test_numbers_taken_out_of_tensors() -> None:
    def f(x: torch.Tensor) -> object:
        n = int(x.sum().item())
        return x * n, n, x.tolist()

    x = torch.tensor([1.0, 2.0, 3.0])
    expected, got = f(x), fusion.fuse(f)(x)
    torch.testing.assert_close(got[0], expected[0])
    assert got[1:] == expected[1:]


def test_sizes_that_data_decide() -> None:
    def f(x: torch.Tensor) -> object:
        return x[x > 0] * 2, x.nonzero(), torch.unique(x.round())

    for _ in range(3):
        x = torch.randn(20)
        torch.testing.assert_close(fusion.fuse(f)(x), f(x))


# What raises --------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def test_an_error_of_the_user_is_unchanged() -> None:
    def f(x: torch.Tensor, fail: bool) -> torch.Tensor:
        y = x * 2
        if fail:
            raise OwnError("the reason", 3)
        return y

    fused = fusion.fuse(f)
    x = torch.randn(3)
    for fail in (False, True, False, True):
        if fail:
            with pytest.raises(OwnError) as caught:
                fused(x, fail)
            assert caught.value.args == ("the reason", 3)
        else:
            torch.testing.assert_close(fused(x, fail), x * 2)


def test_errors_that_the_function_catches() -> None:
    def f(x: torch.Tensor, table: dict[str, float]) -> torch.Tensor:
        try:
            return x * table["scale"]
        except KeyError:
            return x * 3
        finally:
            table["seen"] = 1.0

    agree(f, torch.randn(3), {})
    agree(f, torch.randn(3), {"scale": 2.0})


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + torch.ones(7),
        lambda x: x @ x,
        lambda x: x.view(5),
        lambda x: x.sum(4),
        lambda x: torch.cat([x, x.sum()]),
        lambda x: x[9],
        lambda x: x.missing,
        lambda x: torch.relu("x"),
        lambda x: x.reshape(-1, 0),
        lambda x: torch.zeros(3, device="nowhere"),
    ],
)
def test_errors_of_shapes_and_arguments_have_eagers_type(f: object) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(Exception) as expected:  # noqa: PT011  # of the kind that eager raises
        f(x)
    with pytest.raises(Exception) as dynamos:  # noqa: PT011  # some releases put their own type around eager's
        torch.compile(f, backend="eager")(x)
    with pytest.raises((expected.type, dynamos.type)) as got:
        fusion.fuse(f)(x)
    words = str(expected.value).split("\n")[0]
    assert words in str(got.value) or len(str(got.value)) > 20


def test_after_an_error_the_function_still_works() -> None:
    fused = fusion.fuse(lambda a, b: torch.softmax(a + b, -1))
    a = torch.randn(3, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            fused(a, torch.randn(3, 5))
        torch.testing.assert_close(fused(a, a), torch.softmax(a + a, -1))


def test_assertions_of_the_user() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2, "two axes, please"
        if x.shape[1] != 4:
            raise AssertionError("four columns")
        return x * 2

    fused = fusion.fuse(f)
    torch.testing.assert_close(fused(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    with pytest.raises(AssertionError, match="two axes"):
        fused(torch.ones(3))
    with pytest.raises(AssertionError, match="four columns"):
        fused(torch.ones(3, 5))


def test_tensors_of_other_devices() -> None:
    meta = torch.ones(3, device="meta")
    assert fusion.fuse(lambda x: x * 2 + 1)(meta).device.type == "meta"
    with pytest.raises(RuntimeError):
        fusion.fuse(lambda a, b: a + b)(torch.ones(3), meta)
    with pytest.raises(Exception, match=r"(?i)device|meta"):
        fusion.fuse(lambda a, b: torch.mm(a, b))(torch.ones(3, 3), torch.ones(3, 3, device="meta"))
    torch.testing.assert_close(
        fusion.fuse(lambda x: x + torch.ones(x.shape, device="meta").to(x).shape[0])(torch.ones(3)),
        torch.full((3,), 4.0),
    )


def test_sizes_without_any_tensor() -> None:
    """A program of numbers alone, and such a part after a graph break, generates nothing."""

    def f(x: torch.Tensor) -> torch.Tensor:
        places = x.argwhere()  # of a size that only the numbers tell, in Python
        count = places.shape[0] * 2
        torch._dynamo.graph_break()
        return torch.ones(count).sum() + x.sum()

    fused = fusion.fuse(lambda count: count * 2 + 1, dynamic=True, options=STRICT)
    assert [fused(count) for count in (3, 4, 5)] == [7, 9, 11]
    fused = fusion.fuse(f, dynamic=True, options=STRICT)
    for size in (1, 3):
        torch.testing.assert_close(fused(torch.ones(size, size)), f(torch.ones(size, size)))
