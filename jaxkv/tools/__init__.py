"""Built on jaxkv: the programs of the command line, a folder a command.

Each has its `command.py`, the options and what becomes of them.
"""

COMMANDS = ("demo", "replay", "plan", "bench", "doctor", "verify")
BENCHMARKS = ("transfer", "storage")
