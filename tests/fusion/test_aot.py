"""Ahead of time: kernels and their artefacts, without a device and without running anything."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fusion.aot import export_kernels

pytestmark = pytest.mark.usefixtures("without_disassembly")


def normalised(x, weight):
    return torch.softmax(x, dim=-1) * weight


def test_a_function_becomes_triton_and_ptx():
    export = export_kernels(normalised, torch.empty(64, 300), torch.empty(300), target="triton", arch="sm_90")
    assert len(export.steps) == 1
    (kernel,) = export.kernels
    assert "@triton.jit" in kernel.source
    assert ".target sm_90" in kernel.artefacts["ptx"]
    assert kernel.origins and all("test_aot.py:" in str(origin) for origin in kernel.origins)


def test_the_architecture_is_the_one_asked_for():
    export = export_kernels(normalised, torch.empty(64, 300), torch.empty(300), target="triton", arch="sm_80")
    assert ".target sm_80" in export.kernels[0].artefacts["ptx"]


def test_positions_of_16_bits_are_not_added_in_pairs() -> None:
    """`ptxas` loses the constant of such an addition if one half of the sum is unused."""

    def program(x: Tensor) -> Tensor:
        at = torch.arange(153, device=x.device) * 7 % 150
        return x.index_add(0, at, x[at])

    (kernel,) = export_kernels(program, torch.empty(150, 2), target="triton", arch="sm_90").kernels
    assert "add.s16 " in kernel.artefacts["ptx"]  # otherwise LLVM no longer adds them in pairs, and this shows nothing
    assert "add.s16x2" not in kernel.artefacts["ptx"]


def test_a_module_keeps_its_parameters_and_its_state():
    module = nn.Sequential(nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    export = export_kernels(module, torch.empty(16, 32), target="triton")
    assert len(export.kernels) == 1
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_keyword_arguments_and_nested_inputs():
    def program(pair, *, scale):
        return pair["a"] * scale + pair["b"]

    export = export_kernels(program, {"a": torch.empty(8), "b": torch.empty(8)}, scale=2.0, target="c")
    assert len(export.kernels) == 1


def test_decomposed_operations_in_place_are_one_kernel():
    """PyTorch adds the epsilon of this norm in place; that was a call between two kernels."""
    export = export_kernels(nn.RMSNorm(256).bfloat16(), torch.empty(64, 256, dtype=torch.bfloat16), target="c")
    assert len(export.steps) == len(export.kernels) == 1
    assert all("functional.py:" in origin for origin in export.kernels[0].origins)


def test_equal_kernels_are_exported_once():
    def program(x):
        for _ in range(3):
            x = torch.topk(torch.relu(x) * 2, 65, dim=0)[0]  # the call keeps the maps apart
        return x

    export = export_kernels(program, torch.empty(65, 8), target="c")
    assert len(export.kernels) < len([step for step in export.steps if not step.startswith("aten")]) + 1
    assert len(export.kernels) == 1


def test_equal_parts_of_sums_are_exported_once():
    """Nodes that the compiler adds are named after their source nodes, whose names have numbers in a graph."""

    def kernels_of(layers: int) -> list[str]:
        def program(x):
            for _ in range(layers):
                x = torch.topk(x * x.sum(0), 64, dim=1)[0]
            return x

        export = export_kernels(program, torch.empty(65536, 64), target="triton", arch="sm_90")
        assert len(export.steps) > 3 * layers
        return [kernel.name for kernel in export.kernels]

    assert kernels_of(3) == kernels_of(5)


def test_files_are_written_for_every_artefact(tmp_path):
    export = export_kernels(normalised, torch.empty(64, 300), torch.empty(300), target="triton", arch="sm_90")
    written = export.write(tmp_path)
    assert {path.suffix for path in written} >= {".txt", ".py", ".ptx"}
    assert all(path.stat().st_size for path in written)


def test_settings_of_torch_compile_may_be_copied(monkeypatch):
    """Lightning's `torch.compile` copies its settings deeply; the compiler among them has locks."""
    compiles = torch.compile

    def copying(program, **settings):
        assert "backend" in copy.deepcopy(settings)
        return compiles(program, **settings)

    monkeypatch.setattr(torch, "compile", copying)
    assert len(export_kernels(torch.sin, torch.empty(64), target="c").kernels) == 1


def test_an_unknown_target_is_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown target 'metal'; known: c"):
        export_kernels(normalised, torch.empty(2, 3), torch.empty(3), target="metal")


def test_parts_of_attention_keep_the_line_that_asked_for_it():
    def attend(x):
        y = x * 2  # something to fuse with
        mask = torch.ones(512, 512, device=x.device).tril() > 0
        return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask).relu()

    export = export_kernels(attend, torch.empty(2, 8, 512, 64, dtype=torch.bfloat16), target="triton", arch="sm_90")
    origins = [str(origin) for kernel in export.kernels for origin in kernel.origins]
    assert origins and all("test_aot.py:" in origin for origin in origins)
