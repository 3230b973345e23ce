"""Built on jaxkv: the programs of the command line, a folder a command.

Each has its `command.py`, the options and what becomes of them.
"""

COMMANDS = (
    *("demo", "replay", "plan", "bench"),
    *("doctor", "status", "store", "verify"),
)
BENCHMARKS = ("transfer", "storage")
SUBCOMMANDS = {"bench": BENCHMARKS, "store": ("ls", "size", "rm")}
