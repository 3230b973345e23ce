"""How fast do blocks move, beside other designs and what the machine can do?

The same as ``jaxkv bench transfer``, for a checkout. ``--help`` lists the options, and
`docs/internals/benchmarks.md` says what is measured.

    python benchmarks/transfer.py [--sizes SIZE,...] [--block-sizes SIZE,...]
                                  [--rounds N] [--plot FILE.png] [--json FILE] ...
"""

from __future__ import annotations

import sys

from jaxkv.tools.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "transfer", *sys.argv[1:]]))
