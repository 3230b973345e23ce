"""An engine that records until it is killed: run by tests in a process of its own.

python -m tests.rigs.recording_engine PATH MODE [ARGUMENT]
"""

import gc
import os
import random
import resource
import sys
import time
from unittest import mock

from jaxkv.scheduling.record import record
from jaxkv.scheduling.record.record import TraceRecorder

BLOCK_SIZE = 1


def serve(recorder, number, num_blocks=50):
    keys = [random.randbytes(32) for _ in range(num_blocks)]
    recorder.begin(str(number), keys, num_blocks + number)
    recorder.finish(str(number))


def main(path, mode, argument="0"):
    random.seed(1)
    if mode == "small files":
        limit = int(argument)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    max_bytes = 1 << 18 if mode == "rotating" else 1 << 20
    with mock.patch.object(record, "MIN_MAX_BYTES", max_bytes):
        recorder = TraceRecorder(path, max_bytes=max_bytes, max_files=3)
    recorder.describe(BLOCK_SIZE)
    if mode == "exit":
        serve(recorder, 1)
        recorder.begin("runs", [], 9)
    elif mode == "exit at once":
        recorder.begin("runs", [], 9)
    elif mode == "garbage":
        recorder.me = recorder  # Unreachable, but kept by a cycle.
        serve(recorder, 1)
        recorder.begin("runs", [], 9)
        del recorder
        gc.collect()
        with open(path, encoding="utf-8") as file:
            print(len(file.readlines()))
    elif mode in ("endless", "rotating"):
        for number in range(1 << 30):
            serve(recorder, number)
            if number % 100 == 0:
                recorder.flush()
                print(number, flush=True)
            time.sleep(0.0005)
    elif mode in ("small files", "full disk"):
        for number in range(40):
            serve(recorder, number)
            recorder.flush()
        print(*recorder.stats, flush=True)
        os.truncate(path, os.path.getsize(path))  # It is there, and ours.
    elif mode == "fork":
        serve(recorder, 1)
        child = os.fork()
        if not child:
            serve(recorder, 2)
            recorder.flush()
            recorder.close()
            sys.exit(0)  # With all that the interpreter does at its end.
        assert os.waitpid(child, 0)[1] == 0
        serve(recorder, 3)


if __name__ == "__main__":
    main(*sys.argv[1:])
