"""Runs the command `fusion`: `python -m fusion`."""

import sys

from fusion.cli import main

sys.exit(main())
