"""Where a program leaves its graphs, and Python and eager go on: between two of them, or for a whole function.

Input: what Dynamo says of a graph that it captured, and what it remembers of the frames that it looked at; output:
 places in the user's program, with Dynamo's reason.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType

import torch
from torch import fx
from torch._dynamo import exc
from torch._dynamo.utils import get_compilation_metrics

from fusion.lowering.errors import Origin

RESUMED = "torch_dynamo_resume_in_"
"""The names of functions that go on after a break begin with this."""


@dataclass(frozen=True, slots=True)
class Break:
    """A place that no graph holds.

    Attributes:
        reason: Dynamo's.
        origin: the function and the line, that of the function where Dynamo does not say more.
        whole: is the function left to eager as a whole?  What it calls may still be compiled.
    """

    reason: str
    origin: Origin
    whole: bool = False

    def __str__(self) -> str:
        return f"{'left to eager' if self.whole else 'graph break'}: {self.origin}: {self.reason}"


def break_after(graph: fx.GraphModule) -> Break | None:
    """Why a graph that Dynamo captured ends before its function returns; None if it does not."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    origin = Origin("") if frame is None else Origin(frame.name, line=_line(frame.filename, frame.lineno))
    return Break(_first_sentence(str(reason.reason)), origin)


def other_breaks(codes: Iterable[CodeType], since: float, known: Iterable[Break] = ()) -> tuple[Break, ...]:
    """Breaks in the functions `codes` that ended no graph, as far as Dynamo remembers.

    A break inside of a loop or a `with` leaves the whole function to eager, for good; so do more compilations than
    Dynamo's limit.  A break before the first tensor operation has no graph to end.

    Args:
        since: breaks before this time do not count; what is left for good does.
        known: those that ended a graph.
    """
    reasons = {found.reason for found in known}
    spans = [(code.co_filename, code.co_name, *_span(code)) for code in codes]
    frames: dict[str, Mapping[str, object]] = {}
    found: dict[Break, None] = {}
    for metrics in get_compilation_metrics():
        seen: Mapping[str, object] = vars(metrics)
        number = str(seen["compile_id"]).rsplit("/", 1)[0]
        if seen["co_filename"] is not None:
            frames[number] = seen
        frame = frames.get(number, seen)  # of a limit that was reached, Dynamo keeps only the number of the frame
        file, line = str(frame["co_filename"]), _number(frame["co_firstlineno"])
        begun = seen["start_time"]
        name = str(frame["co_name"])
        named = (of for f, of, first, last in spans if file == f and first <= line <= last)
        if not any(name == of or name.startswith(RESUMED) for of in named):
            continue
        if _is_left(seen):
            at = _line(file, _number(seen["fail_user_frame_lineno"]) or line)
            found[Break(_first_sentence(str(seen["fail_reason"])), Origin(name, line=at), whole=True)] = None
            continue
        for reason in _broken_by(seen):
            if reason not in reasons and isinstance(begun, float) and begun >= since:
                found[Break(reason, Origin(name, line=_line(file, line)))] = None
    return tuple(found)


def codes_of(target: Callable[..., object]) -> Iterator[CodeType]:
    """The Python code of a function, or of all that a module consists of."""
    parts: list[object] = [target]
    if isinstance(target, torch.nn.Module):
        parts = [part.forward for part in target.modules()]
        if callable(target._compiled_call_impl):
            parts.append(inspect.unwrap(target._compiled_call_impl))  # where Dynamo begins at modules of PyTorch's own
    for part in parts:
        code = getattr(part, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _is_left(seen: Mapping[str, object]) -> bool:
    """Did Dynamo leave a frame quietly?  Other failures are raised."""
    kind = getattr(exc, str(seen["fail_type"]), None)
    return isinstance(kind, type) and issubclass(kind, exc.Unsupported)


def _broken_by(seen: Mapping[str, object]) -> list[str]:
    """Why a frame was broken.  Dynamo begins anew for other reasons, too, which it does not explain in this form."""
    restarts = seen["restart_reasons"]
    found = restarts if isinstance(restarts, (set, frozenset)) else ()
    return sorted(_first_sentence(str(reason)) for reason in found if "\n  Explanation: " in str(reason))


def _span(code: CodeType) -> tuple[int, int]:
    """First and last line: functions that go on after a break begin in between."""
    return code.co_firstlineno, max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)


def _first_sentence(reason: str) -> str:
    """What it is, and its explanation, of a message of many lines.

    >>> _first_sentence("Dynamic shape\\n  Explanation: it depends\\n  on data\\n  Hint: none\\n\\n  more")
    'Dynamic shape: it depends on data'
    """
    title, _, rest = reason.partition("\n")
    explanation = re.match(r"\s*Explanation: (.*?)(?=\n\s*Hint:|\n\n|\Z)", rest, re.DOTALL)
    return f"{title}: {' '.join(explanation[1].split())}" if explanation else title


def _line(file: str, number: int) -> str:
    return f"{file.rsplit('/', 1)[-1]}:{number}"


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
