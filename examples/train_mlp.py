"""Training a small network: forward and backward are compiled, and the loss falls as it does in eager.

    python examples/train_mlp.py

The task is to separate two interleaved spirals.  AOTAutograd derives one graph for forward and one for backward, and
decides which values are saved between them; both go through the same compiler.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fusion


def spirals(count):
    """Points [2·count, 2] of two interleaved spirals, and which of them each belongs to, [2·count]."""
    turn = torch.linspace(0.25, 1, count) * 2.5 * torch.pi
    arm = torch.stack([turn.cos(), turn.sin()], dim=1) * turn[:, None] / 8
    points = torch.cat([arm, -arm]) + 0.02 * torch.randn(2 * count, 2)
    return points, torch.arange(2).repeat_interleave(count)


def train(model, loss_of, points, labels, steps):
    """The loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, points, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss_of(model, points, labels):
    return F.cross_entropy(model(points), labels)


def main():
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    points, labels = spirals(200)
    eager = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    fused = copy.deepcopy(eager)

    steps = 150
    backend = fusion.Backend(fusion.Options.read())
    expected = train(eager, loss_of, points, labels, steps)
    losses = train(fused, torch.compile(loss_of, backend=backend), points, labels, steps)
    for step in range(0, steps, 25):
        print(f"step {step:3}: loss {losses[step]:.6f}, eager {expected[step]:.6f}")

    for report in backend.reports:
        assert report.kernels, report
        assert not report.failure, report
        print(f"{report.label}: {report.operations} operations in {len(report.kernels)} kernels")
    assert {report.label for report in backend.reports} == {"forward", "backward"}
    torch.testing.assert_close(torch.tensor(losses[:20]), torch.tensor(expected[:20]), rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.1 * losses[0], (losses[0], losses[-1])
    accuracy = (fused(points).argmax(dim=1) == labels).float().mean()
    print(
        f"final loss {losses[-1]:.4f} (eager {expected[-1]:.4f}), {accuracy:.1%} of the points are classified correctly"
    )


if __name__ == "__main__":
    main()
