"""Real architectures, tiny: forward and backward graphs lower to little but generated nodes, and mean the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Program
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_program
from tests.lowering.lowered import calls

transformers = pytest.importorskip("transformers")

LIBRARY = ("convolution", "_scaled_dot_product", "embedding_dense_backward", "max_pool", "index_put")


def text(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(1, 100, (2, 12))
    return model, {"input_ids": ids, "labels": ids}


def images(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 64}
    return text(transformers.BertForMaskedLM(transformers.BertConfig(**size, **quiet)))


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 64, "use_cache": False, "attn_implementation": "eager"}
    return text(transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **more)))


def resnet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    size = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return images(transformers.ResNetForImageClassification(transformers.ResNetConfig(**size)))


def swin() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    size = {"image_size": 32, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
    return images(transformers.SwinForImageClassification(transformers.SwinConfig(**size, drop_path_rate=0.0)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, llama, resnet, swin])
def test_training_step(make: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]):
    model, inputs = make()
    programs: list[Program] = []

    def compiler(graph: torch.fx.GraphModule, example: object) -> object:
        program = lower(graph)
        verify_program(program)
        programs.append(program)

        def run(*args: torch.Tensor) -> list[torch.Tensor | int | None]:
            actual = run_program(program, args)
            with torch.no_grad():
                expected = torch.fx.Interpreter(graph).run(*args)
            for one, other in zip(actual, expected, strict=True):
                if isinstance(other, torch.Tensor):
                    scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 0.0
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * scale + 1e-6, equal_nan=True)
            return actual

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=dict(decompositions()),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(model, backend=backend)(**inputs).loss.backward()
    assert len(programs) == 2
    left = {name for program in programs for name in calls(program)}
    assert not [name for name in left if not name.startswith(LIBRARY)]
