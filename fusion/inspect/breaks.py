"""Finds graph breaks: where Python and eager run, between two graphs or for a whole function.

Input: Dynamo's reason for the end of a captured graph, and its records of frames; output: places in the user's program,
with Dynamo's reason.
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
"""The prefix of the names of functions that resume after a break."""


@dataclass(frozen=True, slots=True)
class Break:
    """Names a place at which the program leaves its graphs.

    Attributes:
        reason: Dynamo's reason.
        origin: the function and the line; the function's first line where Dynamo does not say more.
        whole: whether the whole function is left to eager.  The functions that it calls may still be compiled.
    """

    reason: str
    origin: Origin
    whole: bool = False

    def __str__(self) -> str:
        return f"{'left to eager' if self.whole else 'graph break'}: {self.origin}: {self.reason}"


def break_after(graph: fx.GraphModule) -> Break | None:
    """Return why a graph that Dynamo captured ends before its function returns; None if it does not."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    origin = Origin("") if frame is None else Origin(frame.name, line=_line(frame.filename, frame.lineno))
    return Break(_first_sentence(str(reason.reason)), origin)


def other_breaks(codes: Iterable[CodeType], since: float, known: Iterable[Break] = ()) -> tuple[Break, ...]:
    """Return the breaks in the functions `codes` that ended no graph, as far as Dynamo has recorded them.

    A break inside a loop or a `with` makes the whole function eager, for good; so do more compilations than Dynamo's
    limit. A break before the first tensor operation has no graph to end.

    Args:
        since: breaks before this time do not count, except those after which a function is eager.
        known: the breaks that ended a graph.
    """
    reasons = {breaks.reason for breaks in known}
    spans = [(code.co_filename, code.co_name, *_span(code)) for code in codes]
    frames: dict[str, Mapping[str, object]] = {}
    breaks: dict[Break, None] = {}
    for metrics in get_compilation_metrics():
        record: Mapping[str, object] = vars(metrics)
        number = str(record["compile_id"]).rsplit("/", 1)[0]
        if record["co_filename"] is not None:
            frames[number] = record
        frame = frames.get(number, record)  # for a limit that was reached, Dynamo records only the frame's number
        file, line = str(frame["co_filename"]), _number(frame["co_firstlineno"])
        started = record["start_time"]
        name = str(frame["co_name"])
        functions = (of for f, of, first, last in spans if file == f and first <= line <= last)
        if not any(name == of or name.startswith(RESUMED) for of in functions):
            continue
        if _is_left(record):
            at = _line(file, _number(record["fail_user_frame_lineno"]) or line)
            breaks[Break(_first_sentence(str(record["fail_reason"])), Origin(name, line=at), whole=True)] = None
            continue
        for reason in _broken_by(record):
            if reason not in reasons and isinstance(started, float) and started >= since:
                breaks[Break(reason, Origin(name, line=_line(file, line)))] = None
    return tuple(breaks)


def codes_of(target: Callable[..., object]) -> Iterator[CodeType]:
    """Yield the code object of a function; for a module, of the `forward` of it and of each submodule."""
    parts: list[object] = [target]
    if isinstance(target, torch.nn.Module):
        parts = [part.forward for part in target.modules()]
        if callable(target._compiled_call_impl):
            parts.append(inspect.unwrap(target._compiled_call_impl))  # where Dynamo begins at modules of PyTorch's own
    for part in parts:
        code = getattr(part, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _is_left(record: Mapping[str, object]) -> bool:
    """Return whether Dynamo left a frame to eager without raising; other failures are raised."""
    kind = getattr(exc, str(record["fail_type"]), None)
    return isinstance(kind, type) and issubclass(kind, exc.Unsupported)


def _broken_by(record: Mapping[str, object]) -> list[str]:
    """Return the reasons of a frame's breaks.  Dynamo also restarts for other reasons, without this explanation."""
    restarts = record["restart_reasons"]
    reasons = restarts if isinstance(restarts, (set, frozenset)) else ()
    return sorted(_first_sentence(str(reason)) for reason in reasons if "\n  Explanation: " in str(reason))


def _span(code: CodeType) -> tuple[int, int]:
    """Return the first and the last line: functions that resume after a break begin in between."""
    return code.co_firstlineno, max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)


def _first_sentence(reason: str) -> str:
    """Return the title of a message of many lines, with its explanation.

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
