"""The part of the grammar that is a table: each entry one expression, with holes for its operands.

The first tensor of an entry is its subject; the others follow from it.  Holes, where a digit separates two of a kind:

    x n f i b    a tensor: any, number, float, integer, bool
    X N F I B    one of that kind that broadcasts to the subject; with s before it (sx, sf …), of equal shape
    d, e         a dimension of the subject; another one
    D            one or several of its dimensions, or all
    c, k, p      a float, a small integer, an integer from 1 to 3
    w            a vector as long as the subject's last dimension, of its dtype
    keep, dt     a bool, a dtype

No entry tests whether a computed float equals another one, zero above all: roundings would decide it.  Nor does any
read the sign of a NaN, or a gradient of `topk`, which may select any of equal elements.  Nor the results that eager
computes by
chance: the gradient of `elu` at NaN, which is NaN only in full vectors; in float64 that of `hardsigmoid`, and on GPUs
`hardswish`, which use a sixth in float32; and the median of an expanded tensor, which eager reads past its end.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable

from tests.random_programs.builder import Builder, is_any, is_bool, is_float, is_integer, is_number

KINDS = {"x": is_any, "n": is_number, "f": is_float, "i": is_integer, "b": is_bool}

ARITHMETIC = (
    *("{x} + {X}", "{n} - {N}", "{X} - {n}", "{x} * {X}", "{f} * {F}", "{f} + {F}", "{f} - {F}", "{f} * {F} + {F2}")
    * 2,
    *("{f} + {c}", "{f} * {c}", "{c} - {f}", "{f} / {c}", "{i} + {k}", "{i} * {c}", "{k} - {i}", "{i} * {k}") * 2,
    "{f} / ({F}.abs() + 0.5)",
    "{c} / ({f}.abs() + 0.5)",
    "{i} / ({I}.abs() + 1)",
    "{i} // ({I}.abs() % 9 + 1)",  # never 0, also where the number of largest magnitude wraps around
    "{i} % ({I}.abs() % 9 + 1)",
    "{i} // {p}",
    "{i} % {p}",
    "-{n}",
    "{n}.abs()",
    "{i} & {I}",
    "{i} ^ {k}",
    "~{i}",
    "({i} & 15) << {p}",
    "{i} >> {p}",
    "{b} & {B}",
    "{b} ^ {B}",
    "~{b}",
    "torch.maximum({x}, {X})",
    "torch.minimum({x}, {X})",
    "{n}.clamp(-{p}, {p})",
    "torch.addcmul({f}, {F}, {F2}, value={c})",
    "torch.addcdiv({f}, {F}, {F2}.abs() + 1, value={c})",
    "torch.lerp({f}, {sf}.to({f}.dtype), {c})",
    "{f} ** 2",
    "{i} ** 2",
    "({f}.abs() + 0.1) ** {c}",
    "torch.fmod({f}, {c} + 3)",
    "torch.remainder({f}, 1.3)",
)

FUNCTIONS = (
    *("{f}.exp()", "{f}.tanh()", "{f}.sigmoid()", "torch.relu({f})", "F.gelu({f})", "F.silu({f})") * 2,
    "{f}.sin()",
    "{f}.cos()",
    "{f}.atan()",
    "{f}.erf()",
    "torch.log({f}.abs() + 0.5)",
    "torch.log1p({f}.abs())",
    "torch.expm1({f})",
    "torch.sqrt({f}.abs() + 0.1)",
    "torch.rsqrt({f}.abs() + 0.1)",
    "torch.exp2({f}.clamp(-4, 4))",
    "F.softplus({f})",
    "F.leaky_relu({f}, 0.1)",
    "F.elu({f}.nan_to_num())",
    "F.hardswish({f}.float())",
    "F.gelu({f}, approximate='tanh')",
    "F.logsigmoid({f})",
    "torch.logaddexp({f}, {F}.to({f}.dtype))",
    "torch.atan2({f}, {F}.abs() + 0.5)",
    "{f}.square()",
    "{f}.reciprocal().clamp(-2, 2)",
    "{i}.sigmoid()",
    "({i} % 5).exp()",
    "torch.hypot({f}, {sf}.to({f}.dtype))",
    "{f}.sign()",
    "{f}.floor()",
    "{f}.round()",
    "torch.nan_to_num({f})",
    "{f}.isnan()",
    "torch.isfinite({f})",
    "torch.signbit(torch.nan_to_num({f}))",
)

CHOICES = (
    *("torch.where({x} > 0, {X}, {X2})", "torch.where({b}, {F}, {c})", "torch.where({b}, {F}, {F2})") * 2,
    "{x} > {X}",
    "{n} <= {N}",
    "{i} == {I}",
    "{i} != {k}",
    "{f} < {c}",
    "{f}.masked_fill({B}, {c})",
    "{f}.masked_fill({B}, -1.0)",
    "{n}.masked_fill({B}, 0)",
    "torch.where({f}.abs() < 1, {f}, {F})",
    "torch.where({i} % 2 == 0, {I}, -{i})",
    "{x}.to({dt}) if {x}.dtype != torch.uint8 else {x}.float()",
    "{i}.to({dt})",
    "{b}.to({dt})",
    "{f}.clamp(-9, 9).to(torch.int64)",
    "{f}.clamp(-9, 9).to(torch.int32)",
    "{f}.abs().clamp(max=9).to(torch.uint8)",
    "{f}.float()",
    "{f}.to(torch.bfloat16)",
    "{f}.to(torch.float16).to(torch.float32)",
    "{i}.bool()",
    "torch.logical_or({b}, {I})",
    "torch.logical_not({i})",
)

REDUCTIONS = (
    *("{f}.sum({D}, keepdim={keep})", "{f}.mean({D}, keepdim={keep})", "{f}.amax({D}, keepdim={keep})") * 3,
    *("{n}.sum({D})", "{x}.sum({d}, keepdim={keep})", "{f}.sum()", "{f}.mean()", "{x}.sum({D})"),
    "{x}.amin({D}, keepdim={keep})",
    "{x}.amax({D}, keepdim={keep})",
    "{x}.max()",
    "{x}.min()",
    "{x}.max({d}, keepdim={keep})[0]",
    "{x}.max({d})[1]",
    "{n}.min({d}, keepdim={keep})[0]",
    "{n}.argmax({d}, keepdim={keep})",
    "{n}.argmin({d})",
    "{n}.argmax()",
    "({n} % 3).prod({d}, keepdim={keep})",
    "({f} * 0.25 + 1).prod({d})",
    "{b}.any({d}, keepdim={keep})",
    "({x} > -1).all({D})",
    "{i}.count_nonzero({d})",
    "torch.logsumexp({f}, {D}, keepdim={keep})",
    "{f}.norm(dim={d}, keepdim={keep})",
    "torch.linalg.vector_norm({f}, 1, {D}, {keep})",
    "{f}.var({D}, correction=0, keepdim={keep})",
    "{f}.std({d}, correction=0)",
    "torch.var_mean({f}, {D}, correction=0, keepdim={keep})[{keep}]",
    "{f}.nansum({d})",
    "{n}.aminmax(dim={d})[0]",
    "{f}.sum({d}, dtype={dt})",
)

NORMS = (
    *("torch.softmax({f}, {d})", "torch.log_softmax({f}, {d})", "F.layer_norm({f}, {f}.shape[-1:])") * 2,
    "{f} - {f}.mean({d}, keepdim=True)",
    "{f} / ({f}.abs().amax({d}, keepdim=True) + 0.5)",
    "{f} / ({f}.abs().sum({D}, keepdim=True) + 0.5)",
    "{f} * torch.rsqrt({f}.square().mean({d}, keepdim=True) + 0.1)",
    "({f} - {f}.mean({D}, keepdim=True)) / ({f}.var({D}, correction=0, keepdim=True) + 0.1).sqrt()",
    "torch.softmax({f}.masked_fill({f} < -1, float('-inf')), {d}).nan_to_num()",
    "F.normalize({f} + 0.01, dim={d}, eps=0.1)",
    "F.rms_norm({f}, {f}.shape[-1:], eps=0.1)",
    "{f} * torch.softmax({f}, {d}).sum({d}, keepdim=True)",
    "torch.softmax({f}, {d}, dtype=torch.float32)",
    "F.mse_loss({f}, {sf}.to({f}.dtype))",
    "F.smooth_l1_loss({f}, {sf}.to({f}.dtype), reduction='none')",
    "F.glu(torch.cat([{f}, {f} + 1], {d}), {d})",
)

VIEWS = (
    *(
        "{x}.transpose({d}, {e})",
        "{x}.flatten()",
        "{x}.unsqueeze({d})",
        "{x}.flip({d})",
        "{x}.mT",
        "{x}.movedim({d}, {e})",
    )
    * 2,
    "{x}.flatten(0, 1)",
    "{x}.flatten(-2)",
    "{x}.reshape(-1)",
    "{x}.reshape({x}.shape[0], -1)",
    "{x}.transpose({d}, {e}).reshape({x}.shape)",
    "{x}.flip({d}, {e})",
    "{x}.flip({d}).flip({e})",
    "{x}.roll({k}, {d})",
    "{x}.roll(({p}, {k}), ({d}, {e}))",
    "{x}.roll({k})",
    "{x}.squeeze()",
    "{x}.unsqueeze(0).expand({p}, *{x}.shape)",
    "{x}.unsqueeze(-1).expand(*{x}.shape, {p})",
    "{x}.unsqueeze({d}).repeat_interleave({p}, {d})",
    "{x}.repeat_interleave({p}, {d})",
    "{x}.repeat({p}, *[1] * {x}.dim())",
    "{x}[{p}:]",
    "{x}[::{p}]",
    "{x}[..., {p}:]",
    "{x}[..., :-{p}]",
    "{x}[..., ::{p}]",
    "{x}[:, {p}::2]",
    "{x}[..., None, :]",
    "{x}[0]",
    "{x}[-1]",
    "{x}[..., -1]",
    "{x}.select({d}, -1)",
    "{x}.narrow({d}, 1, 2)",
    "{x}.narrow({d}, 0, {x}.shape[{d}] - 1)",
    "{x}.diagonal()",
    "{x}.diagonal(1, {d}, {e})",
    "{x}.diagonal(0, -1, -2)",
    "{x}.unfold({d}, 2, {p})",
    "{x}.unfold({d}, 3, 1)",
    "{x}.chunk(2, {d})[-1]",
    "{x}.unflatten({d}, (-1, 2))",
    "{x}.unflatten({d}, (2, -1))",
    "torch.as_strided({x}, ({x}.shape[0],), (1,))",
    "{x}.contiguous()",
    "{x}.clone()",
    "torch.rot90({x}, {p}, ({d}, {e}))",
    "{x}.tril()",
    "{x}.triu({k})",
    "torch.diag_embed({x})",
    "{x}.t()",
    "{x}.view(-1)",
    "{x}.expand_as({sx})",
    "{x}.T",
)

ASSEMBLIES = (
    *("torch.cat([{x}, {sx}], {d})", "torch.stack([{x}, {sx}], {d})", "torch.cat([{f}, {f} * 2], {d})") * 2,
    "torch.cat([{x}, {sx}, {x}], {d})",
    "torch.cat([{x}[..., {p}:], {x}[..., :{p}]], -1)",
    "torch.stack([{x}, {X}.expand_as({x})], -1)",
    "F.pad({x}, ({p}, {p2}))",
    "F.pad({n}, (0, 0, {p}, 0), value={k})",
    "F.pad({f}, ({p}, -1))",
    "F.pad({f}[None], (1, 1), mode='reflect')[0]",
    "torch.cat([{x}.flatten(), {x2}.flatten()])",
    "torch.hstack([{x}, {sx}])",
    "torch.vstack([{x}, {sx}])",
    "torch.where(torch.arange({x}.shape[-1], device={x}.device) < {p}, {x}, 0)",
    "{f} + torch.arange({f}.shape[-1], device={f}.device)",
    "{x} * torch.ones({x}.shape[-1], device={x}.device)",
    "torch.zeros_like({x})",
    "torch.full_like({n}, {k}) + {N}",
    "torch.linspace(0, 1, 5, device={x}.device)",
    "torch.eye({f}.shape[-1], device={f}.device) * {f}",
    "{x}.new_ones({x}.shape[0])",
    "torch.meshgrid({x}.flatten(), {x}.flatten(), indexing='ij')[1]",
)

GATHERS = (
    "{x}.index_select({d}, {i}.long().flatten() % {x}.shape[{d}])",
    "{x}.index_select({d}, torch.arange({x}.shape[{d}] - 1, -1, -1, device={x}.device))",
    "{x}[{i}.long() % {x}.shape[0]]",
    "{x}[..., {i}.long() % {x}.shape[-1]]",
    "{x}[{i}.long() % {x}.shape[0], {I}.long() % {x}.shape[0]]",
    "{x}[{i}.long() % {x}.shape[0], {i}.long() % {x}.shape[1]]",
    "{x}[:, {i}.long() % {x}.shape[1]]",
    "{x}[{i}.long() % {x}.shape[0], ..., 0]",
    "torch.gather({x}, {d}, {si}.long() % {x}.shape[{d}])",
    "torch.gather({x}, {d}, {x}.argmax({d}, keepdim=True))",
    "torch.take_along_dim({x}, {n}.argmin({d}, keepdim=True) % {x}.shape[{d}], {d})",
    "F.embedding({i}.long() % {f}.shape[0], {f})",
    "{x}.take({i}.long() % {x}.numel())",
    "F.one_hot({i}.long().flatten() % 4, 4)",
    "{x}[torch.tensor([0, -1], device={x}.device)]",
)

SCANS = (
    "{x}.cumsum({d})",
    "{f}.cumsum({d})",
    "({f} * 0.25 + 1).cumprod({d})",
    "{n}.cummax({d})[0]",
    "{n}.cummin({d})[1]",
    "torch.logcumsumexp({f}, {d})",
    "torch.zeros_like({f}).index_add({d}, torch.arange({f}.shape[{d}], device={f}.device) % 2, {f})",
    "torch.zeros_like({x}).scatter({d}, {si}.long() % {x}.shape[{d}], {x}) if {x}.shape[{d}] < 2 else {x}",
    "torch.zeros_like({f}).scatter_add({d}, {si}.long() % {f}.shape[{d}], {f})",
    # `+ 0.0` leaves zeros of one sign: which of two stays, eager itself says differently by layout and lane.
    "({f} + 0.0).scatter_reduce({d}, {si}.long() % {f}.shape[{d}], {f} + 0.0, 'amax')",
    "{x}.sort({d})[0]",
    "{x}.sort(dim={d}, stable=True)[1]",
    "{f}.topk(1, {d})[0].detach()",
    "{x}.select_scatter({x}.select({d}, 0), {d}, -1)",
    "{x}.slice_scatter({x}.narrow({d}, 0, 1), {d}, 0, 1)",
    "{x}.index_put(({i}.long().flatten()[:1] % {x}.shape[0],), {x}[:1])",
    "{f}.index_fill({d}, torch.tensor([0], device={f}.device), 1.5)",
)

MUTATIONS = (
    *("{f}.mul_({c})", "{f}.add_({F}.to({f}.dtype))", "{n}.add_({k})", "{x}.copy_({X}.to({x}.dtype))", "{x}.zero_()")
    * 2,
    "{n}.sub_({N}.to({n}.dtype))",
    "{f}.relu_()",
    "{f}.clamp_(-{p}, {p})",
    "{x}.fill_({k})",
    "{f}.masked_fill_({B}, {c})",
    "{x}[0].copy_({x}[-1])",
    "{x}[{p}:].fill_({k})",
    "{n}[..., ::2].add_({k})",
    "{f}.transpose({d}, {e}).mul_({F} + 0.5)",
    "{x}.select({d}, 0).zero_()",
    "{f}.select({d}, -1).add_({f}.select({d}, 0))",
    "{n}.diagonal().add_({p})",
    "{f}.narrow({d}, 0, 1).mul_({f}.narrow({d}, -1, 1))",
    "{f}.flatten().mul_({c})",
    "{f}.view(-1)[{p}:].add_({c})",
    "{n}[{i}.long() % {n}.shape[0]] = {k}",
    "{x}[..., 0] = {x}[..., -1]",
    "{x}[{b}] = {k}",
    "{f}[{f} > 1] = {c}",
    "{f}.copy_({f}.flip({d}))",
    "{f}[1:].copy_({f}[:-1].clone())",
    "{f}.unsqueeze(0).mul_({c})",
    "{i}.bitwise_and_({k})",
    "{b}.logical_not_()",
    "{f}.addcmul_({F}, {F2}, value={c})",
    "{f}.exp_()",
    "{n}.div_({N}.abs() + 1)",
    "{f}[:, {p} : {p} + 1] = {f}[:, :1] * 2",
    "{f}[..., {p}:, 1:] *= {c}",
    "{x}[{p}:, ..., 0] = {x}[:1, ..., -1]",
    "{f}.index_copy_({d}, torch.arange(1, device={f}.device), {f}.narrow({d}, -1, 1) * 2)",
    "{f}.index_add_({d}, torch.arange({f}.shape[{d}], device={f}.device).flip(0), {f} * 0.5)",
    "{f}.scatter_add_({d}, {si}.long() % {f}.shape[{d}], {f} * 0.5)",
    "{f}.index_put_(({i}.long().flatten()[:3] % {f}.shape[0],), {f}[:1] * 0.5, accumulate=True)",
    "{f}.chunk(2, {d})[0].mul_({c})",
    "{f}.lerp_({F}.expand_as({f}).to({f}.dtype), {c})",
    "{f}.unflatten({d}, (-1, 2)).select({d}, 0).add_({c})",
)

_HOLE = re.compile(r"\{(\w+)\}")


def filled(builder: Builder, template: str) -> str | None:
    """Return the template with its holes filled; None if no operand fits one of them."""
    result: dict[str, str] = {}
    subject = ""
    holes = sorted(dict.fromkeys(_HOLE.findall(template)), key=lambda hole: hole.rstrip(string.digits) not in KINDS)
    for hole in holes:  # subjects first
        part: str | None
        what = hole.rstrip(string.digits)
        if what in KINDS:
            part = builder.operand(KINDS[what])
            subject = subject or part or ""
        elif what in PARTNERS:
            part = builder.matching(subject, KINDS[what[-1].lower()], exactly=what.startswith("s"))
        else:
            part = SETTINGS[what](builder, subject)
        if part is None:
            return None
        result[hole] = part
    return _HOLE.sub(lambda match: result[match.group(1)], template)


def _dims(builder: Builder, subject: str) -> str | None:
    rank = builder.values[subject].dim()
    count = builder.rng.randrange(rank + 1)
    dims = sorted(builder.rng.sample(range(rank), count))
    if not dims:
        return "()" if builder.chance(0.5) else "None"
    return str(dims[0]) if len(dims) == 1 else str(tuple(d - rank if builder.chance(0.3) else d for d in dims))


def _dim(builder: Builder, subject: str) -> str | None:
    dim = builder.dim(subject)
    return None if dim is None else str(dim)


def _weight(builder: Builder, subject: str) -> str | None:
    value = builder.values[subject]
    return None if value.dim() == 0 else builder.shaped(value.shape[-1:], value.dtype)


PARTNERS = {"X", "N", "F", "I", "B", "sx", "sn", "sf", "si", "sb"}
SETTINGS: dict[str, Callable[[Builder, str], str | None]] = {
    "d": _dim,
    "e": _dim,
    "D": _dims,
    "w": _weight,
    "c": lambda builder, subject: builder.one(("0.5", "1.5", "0.25", "2.0", "0.3", "1.1")),
    "k": lambda builder, subject: builder.one(("0", "1", "2", "3", "5", "-1", "-2")),
    "p": lambda builder, subject: builder.one(("1", "2", "3")),
    "keep": lambda builder, subject: builder.one(("True", "False")),
    "dt": lambda builder, subject: builder.one(
        ("torch.float32", "torch.float32", "torch.float16", "torch.bfloat16", "torch.int64", "torch.int32")
    ),
}
