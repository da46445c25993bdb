"""GPT-2 through the compiler: `python examples/gpt2.py [--quick]` does what `fusion demo` does.

The program itself is `fusion/cli/demo.py`, so that the command finds it where Fusion is installed without its examples.
"""

import sys

from fusion.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
