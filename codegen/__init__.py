"""From Kernels to launchable code: one folder per target, one protocol (`target.py`), one build path (`build.py`)."""
