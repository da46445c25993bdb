"""`python -m benchmarks [SUITE] [--only NAME] [--quick]`, or `python -m benchmarks opinfo|random [options]`.

The suites are `cpu`, `gpu`, `contractions`, `training`, `inference`, `modes`, `small`, `dynamic`, `scheduling`,
`price`, `artifact` and `generation`.
Without a suite: `gpu` where there is a device, else `cpu`.
"""

import argparse
import importlib
import sys

import torch

ON_GPU = ("gpu", "contractions", "training", "inference", "modes")


def main() -> int:
    if sys.argv[1:2] == ["opinfo"]:
        from benchmarks.opinfo.table import main as opinfo

        return opinfo(sys.argv[2:])
    if sys.argv[1:2] == ["random"]:
        from benchmarks.random_programs import main as random_programs

        return random_programs(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suite",
        nargs="?",
        choices=(*ON_GPU, "cpu", "small", "dynamic", "scheduling", "price", "artifact", "generation"),
    )
    parser.add_argument("--only", default="", metavar="NAME", help="only the cases whose name contains NAME")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller graphs, no cold compilation")
    parser.add_argument("--json", metavar="FILE", help="of price: write all figures")
    parser.add_argument("--jobs", type=int, default=1, help="of price: processes, of which one at a time measures")
    parser.add_argument(
        "--systems", nargs="+", default=(), metavar="NAME", help="of generation: beside eager, only these"
    )
    arguments = parser.parse_args()
    suite = arguments.suite or ("gpu" if torch.cuda.is_available() else "cpu")
    if suite in ON_GPU and not torch.cuda.is_available():
        print("benchmarks: this PyTorch sees no CUDA device; run `python -m benchmarks cpu`", file=sys.stderr)
        return 2
    if arguments.json is not None and suite != "price":
        parser.error("only price writes its figures as JSON")
    if arguments.jobs != 1 and suite != "price":
        parser.error("only price takes --jobs")
    module = importlib.import_module(f"benchmarks.{suite}")
    if arguments.systems and suite != "generation":
        parser.error("only generation takes --systems")
    settings = {
        "price": {"json": arguments.json, "jobs": arguments.jobs},
        "generation": {"systems": arguments.systems},
    }.get(suite, {})
    return int(module.run(only=arguments.only, quick=arguments.quick, **settings))


if __name__ == "__main__":
    sys.exit(main())
