"""Runs passes: named steps of a stage, each checked, timed and dumped.

A stage is a tuple of passes over one subject: an fx graph, a `Program`, the steps of a schedule.  Input: the subject
and a context (target, sizes, options); output: the subject after the last pass.  A pass returns the changed subject,
the same object if it changes nothing, or None if it changes the subject in place.

The runner excludes nested passes and builds from the time of each pass, so that the times of one compilation add up to
its duration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

S = TypeVar("S")
C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


def always(context: object) -> bool:
    """Return True in every context."""
    return True


@dataclass(frozen=True, slots=True)
class Pass(Generic[S, C]):
    """One step of a stage.

    Attributes:
        name: the pass in dumps, times and verification errors.
        run: takes the subject and the context; returns the subject, or None if it was changed in place.
        when: returns whether the pass runs in a context.
        needed: whether results may be wrong without it, or nothing is compiled; others can be left out.
    """

    name: str
    run: Callable[[S, C], S | None]
    when: Callable[[C], bool] = always
    needed: bool = False


def in_place(
    name: str, edit: Callable[[S, C], object], when: Callable[[C], bool] = always, *, needed: bool = False
) -> Pass[S, C]:
    """Make a pass from a function that changes its subject in place, whatever it returns."""

    def run(subject: S, context: C) -> None:
        edit(subject, context)

    return Pass(name, run, when, needed)


def none_left_out(context: object) -> frozenset[str]:
    """Return the empty set in every context."""
    return frozenset()


def no_parts(subject: object) -> Mapping[str, object]:
    """Return nothing: the changes of such a subject are not named."""
    return {}


@dataclass(frozen=True, slots=True)
class Stage(Generic[S, C]):
    """Passes over one subject, in order.

    Attributes:
        check: raises if the subject is malformed after a pass.
        text: prints the subject for dumps, as (file suffix, content) pairs.
        first: the number of the first pass in the names of dumps.
        parts: returns the named parts of a subject (its nodes, clusters, launches) with values that are equal as long
            as a part is unchanged; a pass in place must not change the values themselves.
        left_out: returns the passes, as "stage/pass", that do not run in a context though they apply.
    """

    name: str
    passes: tuple[Pass[S, C], ...]
    check: Callable[[S, C], object]
    text: Callable[[S], Iterator[tuple[str, str]]]
    first: int = 1
    parts: Callable[[S], Mapping[str, object]] = no_parts
    left_out: Callable[[C], Collection[str]] = none_left_out

    @property
    def optional(self) -> tuple[str, ...]:
        """The passes that can be left out, as "stage/pass", in order."""
        return tuple(f"{self.name}/{each.name}" for each in self.passes if not each.needed)

    def only(self, name: str, *passes: str) -> Stage[S, C]:
        """Return a stage of some passes of this one, in its order; a pass left out here is left out there.

        >>> numbers = Stage(
        ...     "numbers", (Pass("double", lambda x, by: 2 * x), Pass("next", lambda x, by: x + 1)), print, iter
        ... )
        >>> numbers.only("first_look", "next").optional
        ('first_look/next',)
        """
        kept = tuple(each for each in self.passes if each.name in passes)
        assert len(kept) == len(passes), passes

        def left_out(context: C) -> frozenset[str]:
            return frozenset(f"{name}/{each}" for each in passes if f"{self.name}/{each}" in self.left_out(context))

        return replace(self, name=name, passes=kept, left_out=left_out)


@dataclass(frozen=True, slots=True)
class Change:
    """Names the parts of a subject that a pass added, removed and edited, in the order of the subject."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()

    @classmethod
    def between(cls, before: Mapping[str, object], after: Mapping[str, object]) -> Change:
        """Compare the parts of a subject before and after a pass.

        >>> Change.between({"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 4, "d": 5})
        Change(added=('d',), removed=('b',), edited=('c',))
        """
        return cls(
            tuple(name for name in after if name not in before),
            tuple(name for name in before if name not in after),
            tuple(name for name, part in after.items() if name in before and before[name] != part),
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.edited)


@dataclass(frozen=True, slots=True)
class PassTime:
    """The duration of one pass.

    Attributes:
        seconds: without nested passes and builds.
        changed: whether it changed the subject; None for a pass in place whose subject was not dumped.
        change: the parts that it added, removed and edited; marks on the nodes of an fx graph do not count.
    """

    stage: str
    name: str
    seconds: float
    changed: bool | None = None
    change: Change = Change()


class Dumps(Protocol):
    """Receives the text of a stage's subject after each pass that changed it."""

    def passed(self, number: int, name: str, texts: Iterator[tuple[str, str]]) -> bool:
        """Write the texts after the pass `name`, if they differ from those before it; return whether they do."""


class Observer(Protocol):
    """Sees the subject of each stage before its first pass, and after each pass that may have changed it."""

    def passed(self, stage: str, name: str, subject: object, context: object) -> None:
        """Record a subject after the pass `name` (empty before the first pass); an observer must not change it."""


def run_stage(stage: Stage[S, C], subject: S, context: C, log: PassLog) -> S:
    """Run the passes of `stage` that apply in `context` and are not left out, in order.

    The subject is checked after each pass that changed it; after passes in place, which do not report changes, once at
    the end of the stage, or after each if dumps are written.

    Raises:
        Exception: of a pass or the stage's check.

    >>> double = Pass("double", lambda x, by: x * by)
    >>> odd = Pass("add one", lambda x, by: x + 1, when=lambda by: by % 2 == 1)
    >>> stage = Stage("numbers", (double, odd), lambda x, by: None, lambda x: iter([("txt", str(x))]))
    >>> log = PassLog()
    >>> run_stage(stage, 5, 2, log), [each.name for each in log.times]
    (10, ['double', 'check'])
    """
    unchecked, checking = False, 0.0
    parts = stage.parts(subject)
    if log.observer is not None:
        log.observer.passed(stage.name, "", subject, context)
    left_out = {*stage.left_out(context)} & {*stage.optional}
    for number, each in enumerate(stage.passes, stage.first):
        if not each.when(context) or f"{stage.name}/{each.name}" in left_out:
            continue
        changed: bool | None = None
        with _measured() as clock:
            result = each.run(subject, context)
            if result is not None:
                changed, subject = result is not subject, result
        if changed is None and log.dumps is None:
            unchecked = True
        elif changed is not False:
            checking += _checked(stage, subject, context)
        if log.dumps is not None:
            changed = log.dumps.passed(number, each.name, stage.text(subject))
        before = parts
        if changed is not False or result is None:
            parts = stage.parts(subject)
        log.times.append(PassTime(stage.name, each.name, clock.seconds, changed, Change.between(before, parts)))
        if log.observer is not None and changed is not False:
            log.observer.passed(stage.name, each.name, subject, context)
    if unchecked:
        checking += _checked(stage, subject, context)
    log.times.append(PassTime(stage.name, "check", checking))
    return subject


def _checked(stage: Stage[S, C], subject: S, context: C) -> float:
    """Check a subject; return the seconds."""
    with _measured() as clock:
        stage.check(subject, context)
    return clock.seconds


@dataclass(slots=True)
class _Clock:
    """A running measurement; `inside` are the seconds of nested measurements."""

    inside: float = 0.0
    seconds: float = 0.0


_running: ContextVar[_Clock | None] = ContextVar("running_clock", default=None)


@contextmanager
def _measured() -> Iterator[_Clock]:
    """Measure the block, without nested measurements; `seconds` is set at its end."""
    outer, clock = _running.get(), _Clock()
    token, start = _running.set(clock), time.perf_counter()
    try:
        yield clock
    finally:
        seconds = time.perf_counter() - start
        _running.reset(token)
        clock.seconds = seconds - clock.inside
        if outer is not None:
            outer.inside += seconds


@dataclass(slots=True)
class PassLog:
    """The times of the passes of one compilation, in order, the receiver of dumps, and an observer."""

    dumps: Dumps | None = None
    times: list[PassTime] = field(default_factory=list)
    observer: Observer | None = None

    @contextmanager
    def timed(self, stage: str, name: str) -> Iterator[None]:
        """Log the time of a step that is no pass (a trace, a build), without nested measurements in any log."""
        with _measured() as clock:
            yield
        self.times.append(PassTime(stage, name, clock.seconds))
