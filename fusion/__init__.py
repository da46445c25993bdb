"""Compiles PyTorch programs: runs them with subgraphs replaced by generated kernels.

import fusion

fused = fusion.fuse(model)                          # or @fusion.fuse on a function
fused = torch.compile(model, backend="fusion")      # the same, through torch.compile
print(fusion.explain(model)(*inputs))               # the kernels, and the fusions refused, with reasons
print(fusion.accuracy(model)(*inputs))              # the error of each kernel against float64
fusion.save(model, "model.fusion", inputs=inputs)   # one file; another process loads it without compiling
loaded = fusion.load("model.fusion")
fusion.export_library(model, "libmodel.so", inputs=inputs)  # a library with a C interface, without Python

A name is imported from its module at its first use: importing this package loads no part of the compiler.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion.aot import Export, ExportedKernel, export_kernels
    from fusion.api import accuracy, explain, fuse, report
    from fusion.artifact.load import load
    from fusion.artifact.loaded import Artifact
    from fusion.artifact.save import save
    from fusion.artifact.standalone.export import export_library
    from fusion.backend import Backend, fusion_backend
    from fusion.diagnosis.bisection import Bisection, bisect
    from fusion.diagnosis.verification import verify
    from fusion.inspect.accuracy import Accuracy, LaunchError
    from fusion.inspect.agreement import Agreement, NotComparable
    from fusion.inspect.explanation import Explanation
    from fusion.inspect.report import Report
    from fusion.inspect.required import NotAsRequired, require
    from fusion.lowering.errors import (
        ArtifactError,
        BuildError,
        FusionError,
        FusionWarning,
        Unsupported,
        VerifyError,
    )
    from fusion.options import Options
    from fusion.quantize import QuantizedLinear, quantize_weights

__version__ = "0.1.0"

__all__ = [
    "Accuracy",
    "Agreement",
    "Artifact",
    "ArtifactError",
    "Backend",
    "Bisection",
    "BuildError",
    "Explanation",
    "Export",
    "ExportedKernel",
    "FusionError",
    "FusionWarning",
    "LaunchError",
    "NotAsRequired",
    "NotComparable",
    "Options",
    "QuantizedLinear",
    "Report",
    "Unsupported",
    "VerifyError",
    "accuracy",
    "bisect",
    "explain",
    "export_kernels",
    "export_library",
    "fuse",
    "fusion_backend",
    "load",
    "quantize_weights",
    "report",
    "require",
    "save",
    "verify",
]

_HOMES = {
    "fusion.aot": ("Export", "ExportedKernel", "export_kernels"),
    "fusion.api": ("accuracy", "explain", "fuse", "report"),
    "fusion.artifact.load": ("load",),
    "fusion.artifact.loaded": ("Artifact",),
    "fusion.artifact.save": ("save",),
    "fusion.artifact.standalone.export": ("export_library",),
    "fusion.backend": ("Backend", "fusion_backend"),
    "fusion.diagnosis.bisection": ("Bisection", "bisect"),
    "fusion.inspect.accuracy": ("Accuracy", "LaunchError"),
    "fusion.inspect.agreement": ("Agreement", "NotComparable"),
    "fusion.inspect.explanation": ("Explanation",),
    "fusion.inspect.report": ("Report",),
    "fusion.lowering.errors": (
        *("ArtifactError", "BuildError", "FusionError", "FusionWarning", "Unsupported", "VerifyError"),
    ),
    "fusion.options": ("Options",),
    "fusion.inspect.required": ("NotAsRequired", "require"),
    "fusion.diagnosis.verification": ("verify",),
    "fusion.quantize": ("QuantizedLinear", "quantize_weights"),
}
"""Module → the public names that it defines."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name from its module, and cache it."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    """Return every public name, imported or not, with the module's other names."""
    return sorted({*globals(), *__all__})
