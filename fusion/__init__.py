"""Fusion: PyTorch programs in, the same programs out with their subgraphs as generated block kernels.

import fusion

fused = fusion.fuse(model)                          # or @fusion.fuse on a function
fused = torch.compile(model, backend="fusion")      # the same, through torch.compile
print(fusion.explain(model)(*inputs))               # the kernels, and what was not fused and why
print(fusion.accuracy(model)(*inputs))              # the error of each kernel against float64
"""

from fusion.aot import Export, ExportedKernel, export_kernels
from fusion.api import accuracy, explain, fuse, report
from fusion.backend import Backend, FusionWarning, fusion_backend
from fusion.inspect.accuracy import Accuracy, LaunchError
from fusion.inspect.report import Explanation, Report
from fusion.options import Options
from lowering.errors import BuildError, FusionError, Unsupported, VerifyError

__version__ = "0.1.0"

__all__ = [
    "Accuracy",
    "Backend",
    "BuildError",
    "Explanation",
    "Export",
    "ExportedKernel",
    "FusionError",
    "FusionWarning",
    "LaunchError",
    "Options",
    "Report",
    "Unsupported",
    "VerifyError",
    "accuracy",
    "explain",
    "export_kernels",
    "fuse",
    "fusion_backend",
    "report",
]
