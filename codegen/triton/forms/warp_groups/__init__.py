"""Contains the parts that programs of a loading warp and groups of computing warps share (sm_90).

| module      | contents                                                       |
| ----------- | -------------------------------------------------------------- |
| `groups`    | the frame: registers, the start of the groups, lines in Gluon  |
| `functions` | the functions of such a program, and loop bodies as functions  |
"""
