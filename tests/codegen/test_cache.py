"""The cache directory: who may write it, what counts as an entry, and how many there are."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion.codegen import cache
from fusion.codegen.cache import (
    FOLDERS,
    Damaged,
    FolderName,
    cache_dir,
    clear,
    digest,
    entries,
    get,
    kept,
    publish,
    put,
)
from fusion.codegen.cache.folders import Folder
from fusion.lowering.errors import BuildError

NAME = "0" * 64
OTHER = "1" * 64
SOMEBODY = 12345

root_only = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test alone; it does not exist yet."""
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# The directory ------------------------------------------------------------------------------------------------------


def test_the_environment_chooses_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FUSION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fusion"
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "plain" / "below"))
    with pytest.raises(BuildError, match=r"cannot be used.*(?s:.*)FUSION_CACHE_DIR"):
        cache_dir()


def test_everything_that_is_made_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.umask(0)
    try:
        monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
        put("graphs", NAME, b"content")
    finally:
        os.umask(old)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c", tmp_path / "a" / "b" / "c" / "graphs"]
    assert [mode(path) for path in made] == [0o700] * 4
    assert mode(made[-1] / NAME) == 0o600


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_others_may_write_is_closed_to_them(root: Path, folder: FolderName) -> None:
    put(folder, NAME, b"content")
    for path in (root, root / folder):
        path.chmod(0o777)
    assert get(folder, NAME) == b"content"
    assert (mode(root), mode(root / folder)) == (0o700, 0o700)


def uses(folder: FolderName) -> list[Callable[[], object]]:
    """What is done with a folder."""
    return [
        lambda: get(folder, NAME),
        lambda: put(folder, NAME, b"other"),
        lambda: publish(folder, NAME, b"other"),
        lambda: kept(folder),
        lambda: clear(folder),
    ]


@root_only
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_of_another_user_is_refused(root: Path, folder: FolderName) -> None:
    put(folder, NAME, b"content")
    os.chown(root / folder, SOMEBODY, -1)
    for use in uses(folder):
        with pytest.raises(BuildError, match=rf"{folder} belongs to another user(?s:.*)FUSION_CACHE_DIR"):
            use()
    os.chown(root / folder, os.getuid(), -1)
    assert get(folder, NAME) == b"content"
    os.chown(root, SOMEBODY, -1)
    for use in (cache_dir, *uses(folder)):
        with pytest.raises(BuildError, match="cache belongs to another user"):
            use()


@root_only
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_of_another_user_is_refused(root: Path, folder: FolderName, tmp_path: Path) -> None:
    put(folder, NAME, b"content")
    (root / folder).rename(tmp_path / "elsewhere")
    (root / folder).symlink_to(tmp_path / "elsewhere")
    assert get(folder, NAME) == b"content"  # the user's own link
    os.chown(root / folder, SOMEBODY, -1, follow_symlinks=False)
    for use in uses(folder):
        with pytest.raises(BuildError, match="belongs to another user"):
            use()


@root_only
def test_a_file_of_another_user_is_no_entry(root: Path) -> None:
    put("c", NAME, b"content")
    os.chown(root / "c" / NAME, SOMEBODY, -1)
    with pytest.raises(Damaged):
        get("c", NAME)
    put("c", NAME, b"content")
    assert get("c", NAME) == b"content" and (root / "c" / NAME).stat().st_uid == os.getuid()


def test_a_file_that_others_may_write_is_no_entry(root: Path) -> None:
    put("c", NAME, b"content")
    (root / "c" / NAME).chmod(0o620)
    with pytest.raises(Damaged):
        get("c", NAME)
    put("c", NAME, b"content")
    assert get("c", NAME) == b"content" and mode(root / "c" / NAME) == 0o600


@pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="paths are opened anew here")
def test_a_folder_that_is_exchanged_once_it_is_checked_is_not_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("c", NAME, b"right")
    shutil.copytree(root, tmp_path / "theirs")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "theirs"))
    put("c", NAME, b"wrong")
    monkeypatch.setenv("FUSION_CACHE_DIR", str(root))
    opened = Folder.open

    def exchanged(self: Folder, name: str, flags: int) -> int:
        root.rename(tmp_path / "away")
        (tmp_path / "theirs").rename(root)
        return opened(self, name, flags)

    monkeypatch.setattr(Folder, "open", exchanged)
    assert get("c", NAME) == b"right"


# Entries ------------------------------------------------------------------------------------------------------------


def test_parts_of_a_digest_count_and_names_need_not_be_text() -> None:
    assert digest("a", b"b") != digest("ab", b"")
    assert digest("a\udcff") != digest("a\udcfe")


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_entry_is_bound_to_its_name(root: Path, folder: FolderName) -> None:
    put(folder, NAME, b"first")
    put(folder, OTHER, b"second")
    first, second = root / folder / NAME, root / folder / OTHER
    assert (get(folder, NAME), get(folder, OTHER)) == (b"first", b"second")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for name in (NAME, OTHER):
        with pytest.raises(Damaged):
            get(folder, name)


def test_an_entry_is_bound_to_its_folder(root: Path) -> None:
    put("graphs", NAME, b"content")
    put("regions", OTHER, b"")
    shutil.copy(root / "graphs" / NAME, root / "regions" / NAME)
    with pytest.raises(Damaged):
        get("regions", NAME)


@pytest.mark.parametrize("harm", ["flipped", "flipped in the seal", "cut", "empty", "longer"])
def test_damage_is_noticed(root: Path, harm: str) -> None:
    put("graphs", NAME, bytes(range(256)))
    path = root / "graphs" / NAME
    content = bytearray(path.read_bytes())
    content[-5 if harm == "flipped in the seal" else 100] ^= harm.startswith("flipped")
    path.write_bytes({"cut": content[:-3], "empty": b"", "longer": content + b"\n"}.get(harm, bytes(content)))
    with pytest.raises(Damaged):
        get("graphs", NAME)


def obstructed_by_folder(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_text("")


def obstructed_by_pipe(path: Path) -> None:
    os.mkfifo(path)


def obstructed_by_link(path: Path) -> None:
    put("c", OTHER, b"content")
    path.symlink_to(path.with_name(OTHER))


def obstructed_by_broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def obstructed_by_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


OBSTACLES = (
    *(obstructed_by_folder, obstructed_by_pipe, obstructed_by_link),
    *(obstructed_by_broken_link, obstructed_by_socket),
)


@pytest.mark.parametrize("obstruct", OBSTACLES)
def test_anything_else_in_the_place_of_an_entry_is_replaced(root: Path, obstruct: Callable[[Path], None]) -> None:
    put("c", OTHER, b"")  # the folder is there
    obstruct(root / "c" / NAME)
    with pytest.raises(Damaged):
        get("c", NAME)
    put("c", NAME, b"content")
    assert get("c", NAME) == b"content"


def test_an_interrupted_write_leaves_the_old_entry(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("graphs", NAME, b"before")

    def interrupted(*paths: object, **folders: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put("graphs", NAME, b"after")
    assert get("graphs", NAME) == b"before"
    assert len(list((root / "graphs").iterdir())) == 1


def test_concurrent_writers_and_readers_see_complete_entries() -> None:
    contents = [str(k).encode() * 5000 for k in range(8)]
    seen: list[bytes | None] = []

    def work(content: bytes) -> None:
        for _ in range(10):
            put("graphs", NAME, content)
            seen.append(get("graphs", NAME))

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert {*seen} <= {*contents}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems want text")
def test_a_directory_whose_name_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, os.fsdecode(b"caf\xe9"))
        monkeypatch.setenv("FUSION_CACHE_DIR", path)
        put("graphs", NAME, b"content")
        assert get("graphs", NAME) == b"content"
        assert os.listdir(os.fsencode(folder)) == [b"caf\xe9"]


# How many -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Room for eight blocks, and the folders whose files were looked at."""
    looked: list[str] = []
    files = Folder.files

    def watched(self: Folder) -> object:
        looked.append(self.path.name)
        return files(self)

    monkeypatch.setattr(Folder, "files", watched)
    monkeypatch.setattr(entries, "MOST_BYTES", 8 * entries.DISK_BLOCK)
    return looked


def test_the_least_recently_used_entries_are_removed(root: Path, looks: list[str]) -> None:
    names = [str(number) * 64 for number in range(8)]
    for number, name in enumerate(names):
        put("c", name, name.encode())
        os.utime(root / "c" / name, (number, number))
    assert get("c", names[0]) == names[0].encode()  # the oldest is used now
    put("c", "f" * 64, b"one too many")
    left = {path.name for path in (root / "c").iterdir()}
    assert left == {names[0], *names[4:], "f" * 64}, "three quarters of the limit"


def test_entries_are_not_looked_at_one_by_one(root: Path, looks: list[str]) -> None:
    for number in range(8):
        put("graphs", f"{number:064x}", b"content")
    assert looks == ["graphs"], "only where nothing was counted yet"
    put("graphs", f"{8:064x}", b"content")
    put("graphs", f"{9:064x}", b"content")
    assert looks == ["graphs"] * 2, "beyond the limit, then not again"
    assert len(list((root / "graphs").iterdir())) == 7


def test_files_from_before_they_were_counted_are_counted(root: Path, looks: list[str]) -> None:
    (root / "graphs").mkdir(parents=True, mode=0o700)
    for number in range(20):
        (root / "graphs" / f"{number:064x}").write_bytes(b"content")
    put("graphs", NAME[1:], b"content")
    assert len(list((root / "graphs").iterdir())) == 6


@pytest.mark.parametrize("obstruct", [obstructed_by_folder, obstructed_by_pipe])
def test_a_count_that_cannot_be_written_hinders_nothing(root: Path, obstruct: Callable[[Path], None]) -> None:
    cache_dir()
    obstruct(root / ".c.blocks")
    put("c", NAME, b"content")
    assert get("c", NAME) == b"content"


def test_what_is_cleared_is_counted_anew(root: Path, looks: list[str]) -> None:
    for number in range(6):
        put("c", f"{number:064x}", b"content")
    (root / "c" / "notes.txt").write_text("not ours")
    clear("c")
    assert [path.name for path in (root / "c").iterdir()] == ["notes.txt"]
    assert kept("c") == []
    for number in range(7):
        put("c", f"{number:064x}", b"content")
    assert len(kept("c")) == 7


def test_a_published_file_is_plain_and_is_not_written_again(root: Path) -> None:
    publish("triton", f"{NAME}.py", b"text")
    path = root / "triton" / f"{NAME}.py"
    before = path.stat().st_ino
    publish("triton", f"{NAME}.py", b"text")
    assert path.read_bytes() == b"text" and path.stat().st_ino == before
    path.write_bytes(b"edited")
    publish("triton", f"{NAME}.py", b"text")
    assert path.read_bytes() == b"text"
    assert cache.kept("triton") == [path]
