"""`python -m fusion` is the command `fusion`."""

import sys

from fusion.cli import main

sys.exit(main())
