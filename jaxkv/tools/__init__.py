"""Built on jaxkv: the programs of the command line, a folder a command.

Each has its `command.py`, the options and what becomes of them. `replay` is no command:
it reads traces and runs them through simulated tiers, for `plan` and for benchmarks.
"""

COMMANDS = "demo", "plan", "doctor", "status", "store", "verify"
SUBCOMMANDS = {"store": ("ls", "size", "rm")}
