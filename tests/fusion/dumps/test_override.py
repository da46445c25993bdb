"""Edited kernels replace the generated ones, if their numbers are right; whatever is not used is named."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusion
from tests.fusion.dumps.programs import dumped, programs

X = torch.arange(-4.0, 8.0).reshape(3, 4)

MARKED = "#define EDITED 1\n"
"""A change that shows in the source alone."""


def program(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sigmoid().sum(-1)


def fused(function: Callable[[torch.Tensor], torch.Tensor] = program, **options: object) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return fusion.fuse(function, options={"strict": True, **options})


def edited(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """Dump the program, and copy its kernel with changes to a folder for `override`."""
    fused(dump=tmp_path / "dump")(X)
    (dump,) = tmp_path.glob("dump/*/40_*.py")
    text = dump.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "edited" / "any name.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def marked(tmp_path: Path) -> Path:
    return edited(tmp_path, ("SOURCE = r'''\n", f"SOURCE = r'''\n{MARKED}"))


def test_an_edited_kernel_is_launched(tmp_path: Path) -> None:
    path = marked(tmp_path)
    run = fused(override=path.parent)
    torch.testing.assert_close(run(X), program(X))
    (report,) = fusion.report(run).graphs
    assert report.kernels[0].source.startswith(MARKED)
    assert f"kernel mul_sigmoid_sum: from {path}" in report.notes


def test_the_edited_text_computes_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that rounding explains shows in the results."""
    path = edited(tmp_path, ("* 2.0f", "* 2.000001f"))
    monkeypatch.setattr(fusion.inspect.accuracy, "_SUMS", 1e-4)
    ours = fused(override=path.parent)(X)
    assert not torch.equal(ours, fused()(X))
    torch.testing.assert_close(ours, program(X), rtol=1e-4, atol=1e-4)


def test_the_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_OVERRIDE", str(marked(tmp_path).parent))
    run = fused()
    run(X)
    assert fusion.report(run).kernels[0].source.startswith(MARKED)


def test_later_programs_without_it_run_the_generated_kernel(tmp_path: Path) -> None:
    fused(override=marked(tmp_path).parent)(X)
    run = fused()
    run(X)
    assert MARKED not in fusion.report(run).kernels[0].source


def test_wrong_numbers_are_refused_with_the_difference(tmp_path: Path) -> None:
    path = edited(tmp_path, ("* 2.0f", "* 3.0f"))
    run = fused(override=path.parent, strict=False)
    said = r"the generated kernel is used instead: .*any name\.py computes other numbers:\n  WRONG: out0: error \d"
    with pytest.warns(fusion.FusionWarning, match=said):
        result = run(X)
    torch.testing.assert_close(result, program(X))
    assert fusion.report(run).kernels and not fusion.report(run).graphs[0].failure


def test_under_strict_wrong_numbers_raise(tmp_path: Path) -> None:
    path = edited(tmp_path, ("* 2.0f", "* 3.0f"))
    with pytest.raises(Exception, match=r"computes other numbers:\n  WRONG: out0: error"):
        fused(override=path.parent)(X)


def test_a_text_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, ("SOURCE = r'''\n", "SOURCE = r'''\nno C;\n"))
    run = fused(override=path.parent, strict=False)
    with pytest.warns(fusion.FusionWarning, match="cannot be checked: the C compiler"):
        torch.testing.assert_close(run(X), program(X))


def test_a_stale_edit_is_named(tmp_path: Path) -> None:
    path = marked(tmp_path)
    path.write_text(path.read_text().replace('ORIGINAL = "', 'ORIGINAL = "0'))
    run = fused(override=path.parent)
    with pytest.warns(fusion.FusionWarning, match=r"any name\.py is not used: it is stale: another source"):
        run(X)
    assert MARKED not in fusion.report(run).kernels[0].source


def test_an_edit_of_another_kernel_of_the_name_is_named(tmp_path: Path) -> None:
    run = fused(override=marked(tmp_path).parent)
    with pytest.warns(fusion.FusionWarning, match=r"any name\.py is not used in this graph: .* has other sizes"):
        run(torch.ones(3, 5))


def test_the_second_edit_of_a_kernel_is_named(tmp_path: Path) -> None:
    path = marked(tmp_path)
    shutil.copy(path, path.with_name("other.py"))
    with pytest.warns(fusion.FusionWarning, match=r"other\.py is not used: .*any name\.py replaces the same kernel"):
        fused(override=path.parent)(X)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = edited(tmp_path, ("ORIGINAL", "ORIGIN"))
    with pytest.warns(fusion.FusionWarning, match=r"any name\.py cannot be read as the file of a kernel"):
        fused(override=path.parent)(X)


def test_moved_lines_of_the_program_do_not_make_an_edit_stale(tmp_path: Path) -> None:
    path = marked(tmp_path)
    moved: dict[str, object] = {}
    text = "\n" * 99 + "def program(x):\n    return (x * 2).sigmoid().sum(-1)\n"
    (tmp_path / "moved.py").write_text(text)
    exec(compile(text, str(tmp_path / "moved.py"), "exec"), moved)
    run = fused(moved["program"], override=path.parent)  # type: ignore[arg-type]  # a function
    torch.testing.assert_close(run(X), program(X))
    assert fusion.report(run).kernels[0].source.startswith(MARKED)


def test_a_whole_dump_without_edits_changes_nothing(tmp_path: Path) -> None:
    dumped("model", tmp_path / "dump")
    small = programs()["model"]
    torch._dynamo.reset()
    run = fusion.fuse(small.program, options={"strict": True, "override": tmp_path / "dump"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusion.FusionWarning)
        run(*small.inputs)
    assert not any(": from " in note for graph in fusion.report(run).graphs for note in graph.notes)


def test_the_dump_of_an_edited_kernel_is_an_edit_of_the_same(tmp_path: Path) -> None:
    path = marked(tmp_path)
    fused(override=path.parent, dump=tmp_path / "second")(X)
    (again,) = tmp_path.glob("second/*/40_*.py")
    path.unlink()
    shutil.copy(again, path.parent / "again.py")
    run = fused(override=path.parent)
    run(X)
    assert fusion.report(run).kernels[0].source.startswith(MARKED)


@pytest.mark.parametrize("inner", ["", "inside"])
def test_a_dump_may_not_overwrite_edits(inner: str, tmp_path: Path) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="override must lie apart from dump"):
        fused(override=tmp_path / inner, dump=tmp_path)
    with pytest.raises(ValueError, match="override must be a directory that exists"):
        fused(override=tmp_path / "none")
