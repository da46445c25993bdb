"""Faults of what is around a process: compilers, disks, directories, variables, limits of the system."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fusion.codegen.c import compiler
from fusion.codegen.cache import folders
from fusion.codegen.cache.folders import Folder
from tests.faults.outcomes import Outcome
from tests.faults.trial import Trial

FAULTY = {
    "fails": "exit 1",
    "kills itself": "kill -9 $$",
    "says that it has succeeded": "exit 0",
    "writes rubbish": '"$real" "$@"; for last; do :; done; [ "$last" != -lm ] || echo rubbish >"$out"',
    "writes an empty object": ': >"$out"',
    "writes rubbish as object": 'echo rubbish >"$out"',
    "writes the start of an object": '"$real" "$@"; truncate -s 700 "$out"',
    "writes half an object": '"$real" "$@"; truncate -s $(($(stat -c %s "$out") / 2)) "$out"',
    "writes most of an object": '"$real" "$@"; truncate -s -64 "$out"',
    "writes another object": 'echo "int other(void) { return 1; }" | "$real" -shared -nostdlib -x c - -o "$out"',
    "hangs": "exec sleep 1000",
    "hangs with a child": "sleep 1000 | cat",
    "says much": 'yes warning | head -c 3000000 >&2; exec "$real" "$@"',
    "says what is no text": "printf '\\377\\376 error' >&2; exit 1",
    "is gone": 'rm -f "$0"; exit 1',
    "loses its folder": 'rm -rf "$(dirname "$out")"; exit 1',
}
"""What a compiler does, by shell code; `$out` is the file it is to write."""

WRAPPER = """#!/bin/sh
real={real}
out=
previous=
for word; do [ "$previous" = -o ] && out="$word"; previous="$word"; done
[ -e {healed} ] && exec "$real" "$@"
[ "$1" = --version ] && exec "$real" "$@"
{fault}
"""


def compilers(trial: Trial) -> tuple[str, Outcome]:
    """Let the compiler fail, die, hang or lie; the same compiler works afterwards."""
    name = trial.rng.choice(sorted(FAULTY))
    folder = trial.place / trial.rng.choice(("bin", "a path with spaces", "it's", 'a "path"'))
    folder.mkdir()
    real, healed = shutil.which("gcc") or "cc", trial.place / "healed"
    wrapper = folder / "cc"
    text = WRAPPER.format(real=real, healed=f"'{healed}'", fault=FAULTY[name])

    def write() -> None:
        wrapper.write_text(text)
        wrapper.chmod(0o700)

    write()
    trial.environment["CC"] = trial.environment["CXX"] = str(wrapper)
    outcome = trial.child(lambda: setattr(compiler, "TIME_LIMIT", 0.5))
    healed.touch()
    if not wrapper.exists():
        write()
    return name, outcome


def disks(trial: Trial) -> tuple[str, Outcome]:
    """Refuse to write, by errors of the system or by limits."""
    number = trial.rng.choice((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENAMETOOLONG))
    after = trial.rng.randint(0, 6)
    ways: dict[str, Callable[[], object]] = {
        "files of few bytes": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << trial.rng.randint(4, 16),) * 2),
        "renaming": lambda: _refusing(Folder, "rename", number, after),
        "opening": lambda: _refusing(Folder, "open", number, after),
        "making folders": lambda: _refusing(folders, "_make", number, after % 3),
        "temporary files": lambda: _refusing(tempfile, "TemporaryDirectory", number, after % 2),
        "memory with a descriptor": lambda: _refusing(os, "memfd_create", number, after % 2),
        "few descriptors": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (_lowest() + after,) * 2),
    }
    name = trial.rng.choice(sorted(ways))
    limited = name in ("files of few bytes", "few descriptors")
    return f"{name}{'' if limited else ' ' + errno.errorcode[number]}", trial.child(ways[name])


def _lowest() -> int:
    """Return the lowest number that no descriptor of this process has."""
    descriptor = os.dup(2)
    os.close(descriptor)
    return descriptor


def _refusing(where: object, name: str, number: int, after: int) -> None:
    """Have each call of a function fail, but for the first ones."""
    true = getattr(where, name)
    left = [after]

    def call(*arguments: object, **settings: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return true(*arguments, **settings)

    setattr(where, name, call)


def environments(trial: Trial) -> tuple[str, Outcome]:
    """Change directories, variables and the state of the interpreter."""
    gone = trial.place / "gone"
    gone.mkdir()
    directory = str(trial.rng.choice(NAMES))
    ways: dict[str, Callable[[], object]] = {
        "no current directory": lambda: (os.chdir(gone), gone.rmdir()),
        "no HOME": lambda: os.environ.pop("HOME", None),
        "no place for temporary files": lambda: _temporary(str(gone / "nowhere")),
        "temporary files in a strange place": lambda: _temporary(_made(trial.place / directory)),
        "no PATH": lambda: os.environ.update(PATH=""),
        "nothing on the PATH": lambda: os.environ.update(PATH=str(gone)),
        "another locale": lambda: os.environ.update(LC_ALL="tr_TR.UTF-8", LANG="xx"),
        "an empty LD_PRELOAD": lambda: os.environ.update(LD_PRELOAD=""),
        "a library that is not there": lambda: os.environ.update(LD_PRELOAD="/nowhere/lib.so"),
        "compilers' own variables": lambda: os.environ.update(CPATH=str(gone), LIBRARY_PATH="", GCC_EXEC_PREFIX=""),
        "a cache in a strange place": lambda: trial.environment.update(FUSION_CACHE_DIR=str(trial.place / directory)),
        "a relative cache": lambda: (os.chdir(trial.place), trial.environment.update(FUSION_CACHE_DIR="below/it")),
        "a file instead of a cache": lambda: trial.environment.update(FUSION_CACHE_DIR=__file__),
        "an endless path": lambda: trial.environment.update(FUSION_CACHE_DIR=str(trial.place / ("x" * 300))),
        "a mask of all rights": lambda: os.umask(0o777),
        "a mask of no rights": lambda: os.umask(0),
        "no standard streams": lambda: [os.close(number) for number in (0, 1, 2)],
        "no sys.stdout": lambda: (setattr(sys, "stdout", None), setattr(sys, "stderr", None)),
        "children that nobody waits for": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        "no garbage collection": gc.disable,
        "constant garbage collection": lambda: gc.set_threshold(50, 2, 2),
        "no arguments": lambda: sys.argv.clear(),
        "a clock that stands": lambda: _standing(),
    }
    name = trial.rng.choice(sorted(ways))
    return name, trial.child(ways[name])


NAMES = ("a b", "a\nb", "it's", 'q"uote', "a;b", "$HOME", "ä€𝄞", "-o", "*", "\udcff\udcfe", "a%sb{0}")
"""Names of folders, one of them not UTF-8."""


def _made(path: Path) -> str:
    path.mkdir(exist_ok=True)
    return str(path)


def _temporary(path: str) -> None:
    os.environ["TMPDIR"] = path
    tempfile.tempdir = path


def _standing() -> None:
    import time

    now = time.time()
    time.time = lambda: now - 1e9


__all__ = ["compilers", "disks", "environments"]
