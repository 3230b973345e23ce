"""The command line, `jaxkv`: how its process begins and ends.

Next to nothing is imported before the process is ready for signals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxkv.tools import command_name
from jaxkv.tools.process import (
    EXIT_INTERRUPTED,
    end_on_signals,
    end_process,
    write_lines_at_once,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns the exit code: 0 on success; 1 if a check failed, or a store, an engine or
    the output; 2 for a wrong command line; 3 if `verify` left checks out; 130 after an
    interrupt.
    """
    if argv is None:
        _run_as_process(sys.argv[1:])
    from jaxkv.tools import commands

    return commands.run(argv)


def _run_as_process(argv: list[str]) -> NoReturn:
    name = command_name(argv)
    try:
        end_on_signals(name)
        write_lines_at_once()
        from jaxkv.tools import commands

        code = commands.run(argv)
    except KeyboardInterrupt:  # Before the process was ready for it.
        print(f"{name}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    end_process(code)


if __name__ == "__main__":
    sys.exit(main())
