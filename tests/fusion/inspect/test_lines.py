"""Lines of artefacts: their locations are taken out, and name lines of the kernel's own source."""

from __future__ import annotations

import pytest
import torch

import fusion
from fusion.inspect.document.lines import located
from fusion.lowering.errors import FusionError

TTIR = """\
#loc = loc("/x/kernel.py":3:0)
#loc1 = loc(unknown)
module {
  tt.func public @k(%a: !tt.ptr<f32> loc("a"(#loc))) {
    %c = arith.constant 1 : i32 loc(#loc1)
    %0 = tt.load %a : !tt.ptr<f32> loc(#loc4)
    %1 = arith.addf %0, %0 : f32 loc(#loc6)
    tt.return loc(#loc3)
  } loc(#loc)
}
#loc2 = loc("/x/kernel.py":7:4)
#loc3 = loc("/x/kernel.py":9:4)
#loc4 = loc("value"(#loc2))
#loc5 = loc("/lib/standard.py":263:15)
#loc6 = loc(callsite(#loc5 at #loc2))
"""

LLIR = """\
define void @k(ptr %0) !dbg !4 {
  %1 = load i32, ptr %0, !dbg !6
  %2 = add i32 %1, 1, !dbg !7
  ret void, !dbg !8
}
!1 = !DIFile(filename: "kernel.py", directory: "/x")
!2 = !DIFile(filename: "standard.py", directory: "/lib")
!4 = distinct !DISubprogram(name: "k", scope: !1, file: !1, line: 3)
!5 = distinct !DISubprogram(name: "sum", scope: !2, file: !2, line: 1)
!6 = !DILocation(line: 7, column: 4, scope: !9)
!7 = !DILocation(line: 263, column: 15, scope: !5, inlinedAt: !6)
!8 = !DILocation(line: 9, column: 4, scope: !4)
!9 = distinct !DILexicalBlock(scope: !4, file: !1, line: 6)
"""

PTX = """\
.visible .entry k()
{
	.loc	1 3 0                          // kernel.py:3:0
	ld.param.b64 	%rd1, [k_param_0];
$L__tmp1:
	.loc	2 263 15                       // standard.py:263:15 @[ kernel.py:7:4 ]
	add.f32 	%r1, %r1, %r1;
	.loc	1 9 4                          // kernel.py:9:4
	ret;
}
	.file	1 "/x" "kernel.py"
	.section	.debug_info
	{
.b32 7
	}
"""

SASS = """\
k:
	//## File "/x/kernel.py", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "/lib/standard.py", line 263
        /*0010*/                   FADD R0, R0, R0 ;
	//## File "/x/kernel.py", line 9
        /*0020*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("stage", "text", "expected"),
    [
        ("ttir", TTIR, {"tt.load": 7, "arith.addf": 7, "tt.return": 9, "constant": 0}),
        ("llir", LLIR, {"load": 7, "add i32": 7, "ret void": 9, "define": 0}),
        ("ptx", PTX, {"ld.param": 3, "add.f32": 7, "ret;": 9, ".visible": 0}),
        ("sass", SASS, {"LDC": 3, "FADD": 0, "EXIT": 9, "k:": 0}),
    ],
)
def test_lines_of_each_stage(stage: str, text: str, expected: dict[str, int]) -> None:
    found = located(stage, text)
    lines = found.text.splitlines()
    assert len(lines) == len(found.lines)
    for part, number in expected.items():
        assert [n for line, n in zip(lines, found.lines, strict=True) if part in line] == [number], part
    for location in ("loc(", "!dbg", ".loc", "//##", "DIFile", ".debug_info", "$L__tmp", "/lib/"):
        assert location not in found.text


def test_locations_that_name_each_other_end() -> None:
    text = '#loc1 = loc("a"(#loc2))\n#loc2 = loc("b"(#loc1))\nop loc(#loc1)\n'
    assert located("ttir", text).lines == (0,)
    text = "!1 = !DILocation(line: 7, scope: !2, inlinedAt: !1)\n!2 = !DILexicalBlock(scope: !2)\nret void, !dbg !1\n"
    assert located("llir", text).lines == (0,)


def test_an_unknown_stage_keeps_its_text() -> None:
    assert located("other", "a\nb\n") == located("other", "a\nb")
    assert located("other", "a\n.loc 1 2 3").lines == (0, 0)


def test_every_stage_of_triton_names_lines_that_compute() -> None:
    try:
        export = fusion.export_kernels(lambda x: torch.softmax(x, -1), torch.empty(8, 96), arch="sm_90")
    except FusionError as error:
        pytest.skip(f"Triton does not compile here: {error}")
    (kernel,) = export.explanation.json(artefacts=True)["kernels"]
    source = kernel["source"].splitlines()
    (load,) = [number for number, line in enumerate(source, 1) if "tl.load(" in line]
    assert [artefact["stage"] for artefact in kernel["artefacts"]] == ["ttir", "ttgir", "llir", "ptx", "sass"]
    for artefact, word in zip(
        kernel["artefacts"], ("tt.load", "tt.load", "ld.global", "ld.global", "LDG"), strict=True
    ):
        pairs = zip(artefact["text"].splitlines(), artefact["lines"], strict=True)
        assert {number for line, number in pairs if word in line} == {load}
