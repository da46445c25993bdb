"""Exports programs as shared libraries, which run without Python and PyTorch.

    export     capture → ahead, without library calls → describe → codegen's library

`describe` turns a schedule into a `Standalone`: `sizes` are written as text, `memory` plans the workspace.
"""
