"""Disassembles cubins with the `nvdisasm` that Triton brings.

Input: a cubin; output: SASS, in which comments name the lines of the source (`//## File "…", line 7`).
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from triton import knobs

from fusion.lowering.errors import BuildError

TIME_LIMIT = 60
"""Seconds after which the tool counts as hung."""


def disassembly(cubin: bytes) -> str:
    """Return the SASS of a cubin; empty where there is no `nvdisasm`.

    Raises:
        BuildError: with the tool's own message.
    """
    try:
        tool = knobs.nvidia.nvdisasm.path
    except RuntimeError:  # Triton finds none
        return ""
    with tempfile.TemporaryDirectory(prefix="fusion-sass-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [tool, "--print-code", "--print-line-info", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIME_LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"nvdisasm could not be run: {error}") from error
    if done.returncode:
        raise BuildError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout
