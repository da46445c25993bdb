"""Entries of the grammar's table for the operations of models around their layers; see `templates`."""

from __future__ import annotations

POSITIONS = "torch.arange({f}.shape[-2], device={f}.device)"
SQUARE = "torch.ones({f}.shape[-2], {f}.shape[-2], device={f}.device, dtype=torch.bool)"
ROWS = "{f}.reshape(-1, {f}.shape[-1])"
ONE_HOT = "F.one_hot({f}.argmax(-1), {f}.shape[-1])"
LEVELS = "({f} / ({f}.abs().amax(-1, keepdim=True) + 0.1) * 7)"
LAST = "memory_format=torch.channels_last"

CACHES = (
    "torch.cat([{x}, {sx}], {d}).narrow({d}, 1, {x}.shape[{d}])",
    "torch.cat([{x}.narrow({d}, 1, {x}.shape[{d}] - 1), {x}.narrow({d}, 0, 1)], {d})",
    "{f}.index_copy({d}, torch.arange(1, device={f}.device), {f}.narrow({d}, -1, 1) * 2)",
    "{f}.slice_scatter({f}.narrow({d}, 0, 1) * 2, {d}, 1, 2)",
    "{f}.select_scatter({f}.select({d}, 0) * 2, {d}, -1)",
    "{x}.index_put((torch.tensor([0, 1], device={x}.device),), {x}[-1:])",
    "F.scaled_dot_product_attention({f}.clamp(-3, 3)[..., -1:, :], torch.cat([{f}, {sf}.to({f}.dtype)], -2), "
    "torch.cat([{f}, {f} * 2], -2))",
    "torch.zeros_like({f}).index_copy(0, torch.arange({f}.shape[0], device={f}.device), {f}) @ {f}.mT",
)
"""Caches that are kept from one step to the next."""

EXPERTS = (
    f"{ONE_HOT}.to({{f}}.dtype) * {{f}}",
    f"({ONE_HOT} * {{f}}.softmax(-1)).sum(-1)",
    f"{ONE_HOT}.reshape(-1, {{f}}.shape[-1]).cumsum(0) - 1",
    f"{ONE_HOT}.reshape(-1, {{f}}.shape[-1]).to(torch.float32).mean(0) * {{f}}",
    "{f}.argmax(-1).flatten().bincount(minlength={f}.shape[-1])",
    f"{ROWS}[{ROWS}.argmax(-1).argsort(stable=True)]",
    f"torch.zeros_like({ROWS}).index_add(0, {ROWS}.argmax(-1) % {ROWS}.shape[0], {ROWS})",
    "torch.zeros_like({f}).scatter(-1, {f}.argmax(-1, keepdim=True), 1.0)",
    "torch.zeros_like({f}).scatter_add({d}, {f}.argmax({d}, keepdim=True), {f}.amax({d}, keepdim=True))",
    "{f}.sort(dim=-1, descending=True, stable=True)[1][..., :2]",
    "{f}.gather(-1, {f}.sort(dim=-1, descending=True, stable=True)[1][..., :2]).softmax(-1)",
    "{f}.masked_fill({f} < {f}.detach().topk(2, -1)[0][..., -1:], -1e4).softmax(-1)",
    "({f}.detach().softmax(-1).sort(-1, descending=True)[0].cumsum(-1) < 0.7).sum(-1)",
    "torch.logsumexp({f}, -1).square().mean()",
    "torch.stack([{f} * k for k in range(1, 4)], -1).gather(-1, {f}.argmax(-1, keepdim=True).expand({f}.shape)[..., "
    "None] % 3).squeeze(-1)",
)
"""Routing: one way of several for each row."""

PLACES = (
    "({b}.cumsum({d}) - 1).clamp(min=0)",
    "{f} * ({B}.expand_as({f}).cumsum({d}) % 5)",
    "F.embedding(({b}.cumsum(-1) - 1).clamp(min=0) % {f}.shape[0], {f})",
    f"{{f}} @ {{f}}.mT - {{c}} * ({POSITIONS}[:, None] - {POSITIONS}).abs()",
    f"F.embedding(({POSITIONS}[:, None] - {POSITIONS}).clamp(-2, 2) % {{f}}.shape[0], {{f}})",
    "torch.outer(torch.arange({f}.shape[-2], device={f}.device), 100.0 ** -(torch.arange({f}.shape[-1], "
    "device={f}.device) / {f}.shape[-1])).cos() * {f}",
    "F.linear(F.embedding({i}.long() % {f}.shape[0], {f}), {f})",
    f"F.cross_entropy(F.linear({ROWS}[:-1], {ROWS}), torch.arange(1, {ROWS}.shape[0], device={{f}}.device))",
    "F.cross_entropy({f}[..., :-1, :].reshape(-1, {f}.shape[-1]), {f}[..., 1:, :].argmax(-1).flatten())",
)
"""Positions of rows, and tables that are looked up and multiplied by."""

MASKS = (
    f"({{f}} @ {{f}}.mT).masked_fill({SQUARE}.triu(1), float('-inf')).softmax(-1)",
    f"torch.where({SQUARE}.tril(), {{f}} @ {{f}}.mT, torch.finfo({{f}}.dtype).min).softmax(-1) @ {{f}}",
    f"({{f}} @ {{f}}.mT).masked_fill(({POSITIONS}[:, None] - {POSITIONS}).abs() > 1, float('-inf')).softmax(-1)",
    "({f} * {B}).sum({d}) / {B}.expand_as({f}).sum({d}).clamp(min=1)",
    "{f}.masked_fill({B}, float('-inf')).softmax({d}).nan_to_num()",
    "torch.where({B}, {f}, float('-inf')).amax({d}).clamp(-9, 9)",
    "torch.where({B}, {f}, 0).square().mean({D})",
    "({b} & {B}).logical_not().to(torch.float32).cumprod(-1)",
    "{f}[..., torch.arange({f}.shape[-1], device={f}.device) % 2 == 0]",
    f"F.scaled_dot_product_attention({{f}}.clamp(-3, 3), {{f}}, {{f}}, attn_mask={{B}}[..., :1] | {SQUARE}.tril())",
)

PARTS = (
    "F.silu({f}.chunk(2, -1)[0]) * {f}.chunk(2, -1)[1]",
    "{f}.chunk(2, {d})[0] + {f}.chunk(2, {d})[0].flip({d}) * {c}",
    "torch.stack({x}.narrow({d}, 0, 2).unbind({d}), {e})",
    "torch.stack(torch.split({x}.narrow({d}, 0, 3), 1, {d})).sum(0)",
    "torch.cat({x}.split({x}.shape[{d}] // 3 + 1, {d})[::-1], {d})",
    "torch.cat([{f}.chunk(4, {d})[0] * 2, *{f}.chunk(4, {d})[1:]], {d})",
    "torch.stack([{f}.cos(), {f}.sin()], -1).flatten(-2)",
    "sum(part.sum() for part in {f}.chunk(3, {d}))",
    "torch.einsum('...i,...i->...', {f}, {sf}.to({f}.dtype))",
    "torch.einsum('...id,...jd->...ij', {f}, {sf}.to({f}.dtype))",
    "torch.einsum('a...,b...->ab...', {f}[:2], {f})",
    "torch.einsum('i...,i->...', {f}, {f}.flatten()[: {f}.shape[0]])",
    "F.normalize({f} + 0.1, dim=-1, eps=0.1) @ F.normalize({sf}.to({f}.dtype) - 0.1, dim=-1, eps=0.1).mT",
    "torch.complex({f}.float(), {sf}.float()).conj().imag * {c}",
    "(torch.complex({f}.float(), {sf}.float()).conj() * torch.complex({sf}.float(), {f}.float() + 1)).real",
    "torch.view_as_real(torch.complex({f}.float(), {sf}.float()) * {c}).select(-1, 1)",
    "(({i} & 15) << 4 | ({I} & 15)) >> 2",
    f"{LEVELS}.round().clamp(-8, 7).to(torch.int8)",
    f"{LEVELS}.detach().round().clamp(-8, 7).to(torch.int8).to(torch.float32) * {{c}}",
    "({i} % 16 - 8).to({f}.dtype) * {f}.flatten()[:1]",
    "F.linear({f}, ({f}.shape[-1] - torch.arange(3 * {f}.shape[-1], device={f}.device) % 7).to(torch.int8)"
    ".reshape(3, -1).to({f}.dtype) * 0.125)",
)
"""Products, halves of features, parts of complex numbers, and numbers of few bits."""

FORMATS = (
    f"{{f}}.contiguous({LAST}) + {{sf}}",
    f"F.conv2d({{f}}.contiguous({LAST}), torch.ones(4, {{f}}.shape[1], 3, 3, device={{f}}.device, dtype={{f}}.dtype) * "
    "0.1, padding=1).relu()",
    f"F.max_pool2d({{f}}.contiguous({LAST}), 2, {{p}})",
    f"F.avg_pool2d({{f}}.contiguous({LAST}), 2)",
    f"F.batch_norm({{f}}.contiguous({LAST}), None, None, training=True, eps=0.1).relu()",
    f"F.group_norm({{f}}.contiguous({LAST}), 2, eps=0.1)",
    "F.group_norm({f}.movedim(-1, 1), 1, {w}, {w2}, eps=0.1)",
    "F.silu(F.group_norm({f}.movedim(-1, 1), {f}.shape[-1], {w}, {w2}, eps=0.1))",
    f"F.interpolate({{f}}.contiguous({LAST}), scale_factor=2)",
    "F.interpolate({f}, size=(5, 7), mode='bicubic')",
    "F.interpolate({f}, size=(3, 4), mode='area')",
    "F.interpolate({f}, size=(3, 5), mode='nearest-exact')",
    "F.interpolate({f}, size=(3, 4), mode='bilinear', antialias=True)",
    "F.adaptive_avg_pool2d({f}, 1).flatten(1)",
    f"{{f}}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous({LAST}).mean((2, 3))",
    "{f}.flatten(2).transpose(1, 2) @ {f}.flatten(2)",
    "F.unfold({f}, 2, stride=2).transpose(1, 2)",
    "F.dropout({f}, 0.3, training=False) * {c}",
)
"""Images."""

MIXED = (
    "{f} @ {f}.mT",
    "F.linear({f}, torch.ones(3, {f}.shape[-1], device={f}.device), None).relu()",
    "F.linear({f}.float(), {sf}.float().reshape(-1, {f}.shape[-1]))",
    "F.layer_norm({f}, {f}.shape[-1:], eps=0.1) @ {f}.float().mT",
    "({f} @ {f}.mT).softmax(-1) @ {f}",
    "F.scaled_dot_product_attention({f}.clamp(-3, 3), {f}, {f})",
    "F.gelu(F.linear({f}, {f}.reshape(-1, {f}.shape[-1]))).float().sum(-1)",
    "F.mse_loss({f} @ {f}.mT, {f}.float() @ {f}.float().mT * 0.5)",
    "torch.cat([{f}.float(), {f}.bfloat16()], {d})",
    "torch.einsum('...id,...jd->...ij', {f}, {f}).float().exp().clamp(max=9)",
    "F.cross_entropy({f}.float().reshape(-1, {f}.shape[-1]), {f}.detach().reshape(-1, {f}.shape[-1]).argmax(-1))",
    "{f}.float().norm(dim=-1) + ({f} * {f}).float().sum(-1).bfloat16()",
)
"""Operations under autocast, which casts operands of products down, and those of losses and norms up.

The operations that cast up differ between devices: results have the same dtype on all of them because those operands
are floats.
"""
