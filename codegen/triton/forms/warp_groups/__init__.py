"""Defines the frame of programs in which one warp loads and groups of warps compute (sm_90).

| module      | contents                                                       |
| ----------- | -------------------------------------------------------------- |
| `groups`    | the frame: registers, the start of the groups, lines in Gluon  |
| `functions` | the functions of such a program, and loop bodies as functions  |
"""
