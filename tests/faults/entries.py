"""Faults of cache entries: damage, exchange, other things under their names, owners and modes, eviction."""

from __future__ import annotations

import os
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusion.codegen import cache
from fusion.codegen.cache import entries
from tests.faults.outcomes import Outcome, in_child
from tests.faults.programs import Program
from tests.faults.trial import Trial

ANOTHER_USER = 12345


def corruption(trial: Trial) -> tuple[str, Outcome]:
    """Harm some entries of one program, or of two, and run the first."""
    other = Program.drawn(trial.rng)
    trial.others.append(other)

    def both() -> Outcome:
        trial.attempt(other)
        return trial.attempt()

    in_child(both)
    folders = sorted({path.parent.name for path in files(trial)})
    chosen = trial.rng.choice(folders) if folders else ""
    harm = trial.rng.choice(HARMS)
    for path in [path for path in files(trial) if path.parent.name == chosen]:
        with suppress(FileNotFoundError):  # exchanged with one before
            harm(path, trial.rng)
    return f"{chosen} {harm.__name__}", trial.child()


def files(trial: Trial) -> list[Path]:
    """Return all entries, also TorchInductor's."""
    folders = (trial.cache, trial.place / "inductor")
    return sorted(path for folder in folders for path in folder.rglob("[!.]*") if path.is_file())


def flipped_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncated(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def emptied(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def lengthened(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 200)))


def zeros(path: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def exchanged(path: Path, rng: random.Random) -> None:
    """Another entry of the folder, complete, under this name."""
    other = rng.choice([each for each in path.parent.iterdir() if each.is_file()])
    spare = path.with_name("spare")
    path.rename(spare)
    if other != path:
        other.rename(path)
    spare.rename(other)


def directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if rng.random() < 0.5:
        (path / "file").write_text("in the way")


def pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, rng: random.Random) -> None:
    spare = path.with_name("spare")
    path.rename(spare)
    path.symlink_to(rng.choice([spare, Path("/dev/zero"), Path("nowhere"), path]))


def huge(path: Path, rng: random.Random) -> None:
    os.truncate(path, 1 << 40)


def _sealed(path: Path, content: bytes) -> None:
    """Store content of which only the seal is right."""
    folder = path.parent.name
    if folder in cache.FOLDERS:
        data = content + entries._seal(folder, path.name, content)  # type: ignore[arg-type]  # just looked at
        path.write_bytes(data)


def sealed_deep_json(path: Path, rng: random.Random) -> None:
    _sealed(path, zlib.compress(b"[" * 100_000 + b"]" * 100_000))


def sealed_bomb(path: Path, rng: random.Random) -> None:
    _sealed(path, zlib.compress(b'["' + b"a" * (1 << 24) + b'"]', 9))


def sealed_number(path: Path, rng: random.Random) -> None:
    _sealed(path, zlib.compress(rng.choice([b'[["int","1e400"]]', b"1e400", b"NaN", b"9" * 5000, b'[["float","x"]]'])))


def sealed_rubbish(path: Path, rng: random.Random) -> None:
    _sealed(path, rng.randbytes(rng.randint(0, 300)))


def sealed_object_header(path: Path, rng: random.Random) -> None:
    """The start of an object, which a loader begins to read."""
    data = path.read_bytes()
    _sealed(path, data[: rng.randrange(min(len(data), 4096))])


HARMS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flipped_bit, flipped_bit, truncated, emptied, lengthened, zeros, exchanged, directory, pipe, link, huge),
    *(sealed_deep_json, sealed_bomb, sealed_number, sealed_rubbish, sealed_object_header),
)


def permissions(trial: Trial) -> tuple[str, Outcome]:
    """Give entries, a folder or the cache directory to another user, or open or close them."""
    trial.child()
    trial.cache.mkdir(exist_ok=True)
    paths = [trial.cache, *(path for path in trial.cache.iterdir() if path.is_dir()), *files(trial)]
    what = trial.rng.choice(("the directory", "a folder", "entries"))
    level = {"the directory": paths[:1], "a folder": [each for each in paths[1:] if each.is_dir()]}
    chosen = level.get(what, [path for path in paths if path.is_file()]) or paths[:1]
    chosen = chosen if what == "entries" else [trial.rng.choice(chosen)]
    change = trial.rng.choice(CHANGES if os.getuid() == 0 else CHANGES[1:])
    before = [(path, path.stat()) for path in chosen]
    for path in chosen:
        change(path)
    outcome = trial.child()
    for path, status in before:
        with suppress(OSError):
            os.chown(path, status.st_uid, status.st_gid)
            path.chmod(status.st_mode & 0o700)
    return f"{what} {change.__name__}", outcome


def of_another_user(path: Path) -> None:
    os.chown(path, ANOTHER_USER, -1)


def writable_for_all(path: Path) -> None:
    path.chmod(0o777)


def closed(path: Path) -> None:
    path.chmod(0)


def read_only(path: Path) -> None:
    path.chmod(0o500 if path.is_dir() else 0o400)


CHANGES = (of_another_user, writable_for_all, closed, read_only)


def eviction(trial: Trial) -> tuple[str, Outcome]:
    """Remove entries, by a limit that none fits or by another process, while they are written and read."""
    ways = {"a limit of nothing": _no_room, "entries removed": _removing(trial), "all removed": _removing(trial, 1)}
    name = trial.rng.choice(sorted(ways))
    others = [Program.drawn(trial.rng) for _ in range(trial.rng.randint(0, 2))]

    def work() -> Outcome:
        ways[name]()
        outcomes = [trial.attempt(program) for program in (*others, trial.program)]
        return next((outcome for outcome in outcomes if outcome.status != "right"), outcomes[-1])

    return name, in_child(work)


def _no_room() -> None:
    entries.MOST_BYTES = 1 << 14


def _removing(trial: Trial, share: float = 0.5) -> Callable[[], None]:
    rng = random.Random(trial.rng.random())

    def remove() -> None:
        while True:
            for path in files(trial):
                if rng.random() < share:
                    with suppress(OSError):
                        path.unlink()
            if share == 1 and rng.random() < 0.1:
                for folder in cache.FOLDERS:
                    shutil.rmtree(trial.cache / folder, ignore_errors=True)

    return lambda: threading.Thread(target=remove, daemon=True).start()


__all__ = ["corruption", "eviction", "permissions"]
