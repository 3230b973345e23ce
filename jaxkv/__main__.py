"""``python -m jaxkv``: the command line."""

import sys

from jaxkv.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
