"""Times one cold compilation in this process: `python -m benchmarks.cold SUITE CASE SYSTEM` prints JSON.

`harness.start_seconds` starts it with empty caches, and again with the caches of the first start.  The measurement
lasts from the first call to its result; imports before it (PyTorch, and the compiler itself) are not counted.
"""

import importlib
import json
import sys
import time

import torch

import fusion


def main(suite: str, name: str, system: str) -> None:
    module = importlib.import_module(f"benchmarks.{suite}")
    case = next(case for case in module.CASES if case.name == name)
    once = case.prepared(module.DEVICE)
    if system == "inductor":
        importlib.import_module("torch._inductor.compile_fx")  # now, so that it is not measured
    backend = "inductor" if system == "inductor" else fusion.fusion_backend
    once(lambda program: program)
    start = time.perf_counter()
    once(lambda program: torch.compile(program, backend=backend, dynamic=False))
    if module.DEVICE == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
