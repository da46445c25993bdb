"""Statements about memory that several tensors share: views by strides, writes through views, repeated elements.

Each first makes a temporary, which the compiler computes, and then views it, writes to it or assembles it.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.random_programs.builder import Builder, is_float, is_number


def _temporary(builder: Builder, least: int = 1) -> str | None:
    """Add a contiguous temporary of an operand, and return its name."""
    name = builder.operand(lambda value: is_number(value) and value.dim() > 0 and value.numel() >= least)
    if name is None or not builder.add(f"({name} * {builder.one(('1', '2', '0.5'))}).contiguous()"):
        return None
    return f"t{builder.count - 1}"


def strided(builder: Builder) -> bool:
    """View a temporary by strides of its own (windows, diagonals, every other element), and compute with it."""
    name = _temporary(builder, 6)
    if name is None:
        return False
    form = builder.one(
        (
            "{x}.as_strided(({x}.numel() - 2, 3), (1, 1))",
            "{x}.as_strided(({x}.numel() // 2,), (2,), 1)",
            "{x}.as_strided((2, {x}.numel() // 3), (1, 3), 0)",
            "{x}.as_strided(({x}.numel() // 2, 2), (1, {x}.numel() // 2))",
            "{x}.as_strided((3, 2), (0, 1), 2)",
            "{x}.flatten().as_strided((2, 2, 2), (1, 2, 1))",
        )
    )
    if not builder.add(form.format(x=name)):
        return False
    view = f"t{builder.count - 1}"
    if builder.chance(0.4):
        builder.attempt(f"{name}.{builder.one(('mul_(3)', 'add_(1)', 'zero_()'))}", [])
    return builder.add(
        builder.one(("{v} * 2 + 1", "{v}.sum(0)", "{v}.t().contiguous() if {v}.dim() == 2 else {v} + 1")).format(v=view)
    )


def expanded_writes(builder: Builder) -> bool:
    """Expand a temporary, copy it, and write to the copy, or to what was expanded."""
    name = _temporary(builder)
    if name is None:
        return False
    count = builder.one(("2", "3", f"{name}.shape[0]"))
    form = builder.one(
        (
            f"{name}.unsqueeze(0).expand({count}, *{name}.shape).clone()",
            f"{name}.unsqueeze(-1).expand(*{name}.shape, {count}).contiguous()",
            f"{name}[None].expand({count}, *{name}.shape) + 0",
        )
    )
    if not builder.add(form):
        return False
    copy = f"t{builder.count - 1}"
    act = builder.one(
        ("[0].mul_(3)", "[-1:].zero_()", "[..., -1].add_(2)", "[1].copy_({c}[0] * 2)", ".select(-1, 0).sub_(1)")
    )
    written = builder.attempt(f"{copy}{act.format(c=copy)}", [])
    if builder.chance(0.5):
        builder.attempt(f"{name}.add_(1)", [])
    return written and builder.add(f"{copy} * 2")


def duplicates(builder: Builder) -> bool:
    """Scatter to indices of which several are equal; the result does not depend on their order."""
    name = _temporary(builder)
    if name is None:
        return False
    length = builder.one(("2 * {x}.shape[0]", "{x}.shape[0]", "{x}.shape[0] + 3")).format(x=name)
    index = f"(torch.arange({length}, device={name}.device) * {builder.one((1, 2, 3, 7))} % {name}.shape[0])"
    source = f"{name}[{index}]"
    places = f"{index}.view(-1, *[1] * ({name}.dim() - 1)).expand({source}.shape)"
    form = builder.one(
        (
            f"{name}.index_add(0, {index}, {source})",
            f"{name}.index_put(({index},), {source} * 2, accumulate=True)",
            f"{name}.index_copy(0, {index}, {source} * 2)",
            f"{name}.index_put(({index} // 2,), {name}[{index} // 2] + 1)",
            f"{name}.scatter_reduce(0, {places}, {source}, 'amax')",
            f"{name}.scatter_add(0, {places}, {source})",
            f"{name}.index_fill(0, {index}[:2], 1)",
        )
    )
    return builder.add(form)


def permuted_writes(builder: Builder) -> bool:
    """Write to a temporary, or to an argument, through a permuted view of it, and read both."""
    name = builder.operand(lambda value: is_number(value) and value.dim() > 1 and value.numel() > 1)
    if name is None:
        return False
    if builder.chance(0.7):
        if not builder.add(f"{name} * 1"):
            return False
        name = f"t{builder.count - 1}"
    if any(stride == 0 for stride in builder.values[name].stride()):
        return False
    view = builder.one((f"{name}.transpose(0, -1)", f"{name}.movedim(-1, 0)", f"{name}.mT", f"{name}.transpose(0, 1)"))
    act = builder.one(
        (
            *(".mul_(2)", "[0].add_(1)", "[1:].copy_({v}[:-1] * 2)", ".add_({v}.flip(0))", ".cumsum_(0)"),
            *("[..., 0].zero_()", ".index_add_(0, torch.tensor([0, 0], device={n}.device), {v}[[0, 0]])"),
        )
    )
    return builder.attempt(f"{view}{act.format(v=view, n=name)}", []) and builder.add(f"{name} + 1")


def assembled(builder: Builder) -> bool:
    """Concatenate or stack tensors that are expanded, and reshape what is not contiguous."""
    name = _temporary(builder)
    if name is None:
        return False
    form = builder.one(
        (
            "torch.cat([{x}[:1].expand({x}.shape), {x}], 0)",
            "torch.cat([{x}[..., :1].expand({x}.shape), {x} * 2], -1)",
            "torch.cat([{x}, {x}[:1].expand(3, *{x}.shape[1:])], 0)",
            "torch.stack([{x}[:1].expand({x}.shape), {x}], -1).flatten()",
            "torch.cat([{x}.new_ones(()).expand({x}.shape), {x}], 0)",
            "{x}.transpose(0, -1).reshape(-1)",
            "{x}.transpose(0, -1).flatten() + {x}.reshape(-1)",
            "{x}.unsqueeze(1).expand(-1, 2, *{x}.shape[1:]).reshape(-1, *{x}.shape[1:])",
            "{x}[..., ::2].reshape(-1)",
            "{x}.movedim(0, -1).reshape({x}.shape[0], -1)",
            "{x}.flip(0).transpose(0, -1).reshape({x}.shape[-1], -1)",
        )
    )
    return builder.add(form.format(x=name))


def epilogues(builder: Builder) -> bool:
    """A product whose result is joined with biases that broadcast in every way."""
    name = builder.operand(lambda value: is_float(value) and value.dim() == 2 and 0 not in value.shape)
    if name is None:
        return False
    left = builder.values[name]
    width = builder.one([*[size for size in builder.sizes.values() if size > 0], 1, 5])
    other = builder.shaped((left.shape[1], width), left.dtype)
    rows, columns = left.shape[0], width
    bias = builder.shaped(builder.one(((columns,), (1, columns), (rows, 1), (1, 1), (), (rows, columns))), left.dtype)
    form = builder.one(
        (
            "({p} + {b}).relu()",
            "torch.addmm({b}, {x}, {y}, beta=0.5, alpha=2)",
            "{p} * {b} + {b}",
            "torch.sigmoid({p} + {b}.expand({p}.shape)) * {p}",
            "({p} + {b}).sum(-1)",
            "torch.where({p} > {b}, {p}, {b})",
            "({p} + {b}).softmax(-1)",
            "({p}.t() + {b}.expand({p}.shape).t()).tanh()",
        )
    )
    return builder.add(form.format(p=f"({name} @ {other})", x=name, y=other, b=bias))


SHARING: tuple[Callable[[Builder], bool], ...] = (
    *(strided, expanded_writes, duplicates, permuted_writes, assembled, epilogues),
)
"""The productions of this file."""
