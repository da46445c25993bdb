"""Defines the models of the whole-model benchmarks: those of `transformers` and `torchvision`, with random weights.

Dropout is off, so that systems agree.  Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model, a batch for it on a device, and the compared tensor: a loss, or a result."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[str], Batch]
    call: Callable[[nn.Module, Batch], Tensor]


def gpt2(**sizes: int) -> nn.Module:
    """Return GPT-2 of 124 M parameters, or of other sizes.

    Its loss is named, as transformers cannot derive it from the class: it would warn when it looks the loss up, and
    Dynamo breaks the graph at a warning, so that the logits would be written to memory for a graph of the loss.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **sizes)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def bert() -> nn.Module:
    """Return BERT base with its head for masked words."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0))


def resnet50() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50(weights=None)
    return model


def convnext_tiny() -> nn.Module:
    """Return ConvNeXt-T without stochastic depth, whose random draws would differ between systems."""
    from torchvision.models import convnext_tiny

    model: nn.Module = convnext_tiny(weights=None, stochastic_depth_prob=0.0)
    return model


def tokens(rows: int, length: int, words: int, *, masked: bool = False) -> Callable[[str], Batch]:
    """Return batches of random words, with themselves as labels; `masked`: with a mask, rows half filled or more."""

    def batch(device: str) -> Batch:
        ids = torch.randint(words, (rows, length), device=device)
        if not masked:
            return {"input_ids": ids, "labels": ids}
        lengths = torch.randint(length // 2, length + 1, (rows, 1), device=device)
        mask = (torch.arange(length, device=device) < lengths).long()
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}

    return batch


def images(rows: int, size: int = 224) -> Callable[[str], Batch]:
    """Return batches of random images, and labels of a thousand classes."""

    def batch(device: str) -> Batch:
        pixels = torch.randn(rows, 3, size, size, device=device)
        return {"images": pixels, "labels": torch.randint(1000, (rows,), device=device)}

    return batch


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model of transformers computes from its labels."""
    loss: Tensor = model(**batch).loss
    return loss


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a model of transformers."""
    result: Tensor = model(input_ids=batch["input_ids"]).logits
    return result


def classes(model: nn.Module, batch: Batch) -> Tensor:
    """Return the scores of an image model for a batch in the dtype of its parameters."""
    result: Tensor = model(batch["images"].to(next(model.parameters()).dtype))
    return result


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of `classes`."""
    return F.cross_entropy(classes(model, batch).float(), batch["labels"])
