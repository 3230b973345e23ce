"""The processes of stages get the fault that JAXKV_TEST_FAULT names."""

import os
import sys

if "jaxkv.tools.verify" in sys.orig_argv:
    from tests.tools.verify import faults

    faults.put(os.environ["JAXKV_TEST_FAULT"])
