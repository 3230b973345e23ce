"""Built on jaxkv: the programs of the command line, a folder a command.

Each has its `command.py`, the options and what becomes of them.
"""

COMMANDS = "demo", "replay", "plan", "doctor", "status", "store", "verify"
SUBCOMMANDS = {"store": ("ls", "size", "rm")}
