"""Turns Kernels into launchable code: one folder per target, one protocol (`target.py`), a build path (`build.py`)."""
