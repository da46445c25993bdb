"""Uses an installed Fusion, in a process that runs outside of the repository: `python installed.py FOLDER`.

FOLDER is where the package has to come from.
"""

import os
import sys

import torch

import fusion

assert os.path.dirname(fusion.__file__) == os.path.join(sys.argv[1], "fusion"), fusion.__file__
model, x = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU()).eval(), torch.randn(4, 6)
with torch.no_grad():
    torch.testing.assert_close(fusion.fuse(model, options={"strict": True})(x), model(x))
    fusion.save(model, "model.fusion", inputs=(x,))
    torch.testing.assert_close(fusion.load("model.fusion")(x), model(x))
fusion.export_library(model, "libmodel.so", inputs=(x,))

train = fusion.fuse(torch.nn.LayerNorm(6), options={"strict": True})
train(x).square().sum().backward()
assert train.weight.grad is not None

print(*sorted(os.listdir()))
