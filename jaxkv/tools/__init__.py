"""Built on jaxkv: the programs of the command line, a folder a command.

Each has its `command.py`, the options and what becomes of them. `replay` is no command:
it reads traces and runs them through simulated tiers, for `plan` and for benchmarks.
"""

from collections.abc import Sequence

COMMANDS = {
    "demo": "show the effect of offloading on this machine, in about a minute",
    "plan": "replay a trace: what host memory of each size and policy would save",
    "doctor": "check the setup of this machine and recommend settings",
    "status": "show what running engines are doing, from their metrics",
    "store": "list the namespaces of a store, or remove one",
    "verify": "prove that jaxkv works on this machine, in ten minutes",
}
"""A line about each command. Help and a typing error import no more than this."""

SUBCOMMANDS = {
    "store": {
        "ls": "list the namespaces with their blocks, size, last use and limit",
        "size": "add up the blocks and bytes of all namespaces",
        "rm": "remove a namespace: all its blocks and limits",
    }
}


def command_name(words: Sequence[str]) -> str:
    """Return how messages name the command of a command line.

    >>> command_name(["store", "rm", "/kv"]), command_name(["stroe"])
    ('jaxkv store rm', 'jaxkv')
    """
    names = [word for word in words[:1] if word in COMMANDS]
    names += [word for word in words[1:2] if word in SUBCOMMANDS.get(words[0], ())]
    return " ".join(["jaxkv", *names])
