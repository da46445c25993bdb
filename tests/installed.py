"""Uses an installed Fusion, in a process that runs outside of the repository: `python installed.py FOLDER`.

FOLDER is where the package has to come from.
"""

import os
import sys

import torch

import fusion

assert os.path.dirname(fusion.__file__) == os.path.join(sys.argv[1], "fusion"), fusion.__file__
model, x = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU()), torch.randn(4, 6)
trained = fusion.fuse(model, options={"strict": True})(x)
torch.testing.assert_close(trained, model(x))
trained.square().sum().backward()
assert model[0].weight.grad is not None
with torch.no_grad():
    fusion.save(model.eval(), "model.fusion", inputs=(x,))
    torch.testing.assert_close(fusion.load("model.fusion")(x), model(x))
fusion.export_library(model, "libmodel.so", inputs=(x,))

print(*sorted(os.listdir()))
