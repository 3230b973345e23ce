"""Proof that jaxkv works on this machine: stages of checks, a process for each stage.

`command.py` starts the stages, `supervise.py` watches over their processes, and each
other module has the checks of a stage, which run in a process of their own (`__main__`)
so that a runtime that crashes or hangs costs one check.
"""
