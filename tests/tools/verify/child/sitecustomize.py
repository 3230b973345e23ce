"""Put a fault into the processes of stages, as JAXKV_TEST_FAULT names it."""

import os
import sys

if "jaxkv.tools.verify" in sys.orig_argv:
    from tests.tools.verify import faults

    faults.put(os.environ["JAXKV_TEST_FAULT"])
