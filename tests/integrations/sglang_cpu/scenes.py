"""Requests of users who come back, with their history and more."""

import numpy as np
from sgl_jax.srt.managers import io_struct

from tests.integrations.sglang_cpu import rig

NUM_IDLE_STEPS = 300  # In which all transfers end.


def conversations(seed, name, *, users, turns, at_once, first=130, more=30, num_new=8):
    """Return waves: users one by one, or all at once, each turn longer by `more`."""
    rng = np.random.default_rng(seed)
    history = {user: tokens(rng, first) for user in range(users)}
    waves = []
    for turn in range(turns):
        wave = [
            (f"{name}-{turn}-{user}", list(history[user]), num_new) for user in history
        ]
        for user in history:
            history[user] += tokens(rng, more)
        waves += [wave] if at_once else [[request] for request in wave]
    return waves


def random_requests(seed, count):
    """Return requests of eight users, some with a common beginning, who come back."""
    rng = np.random.default_rng(seed)
    shared, users = tokens(rng, 64), {}
    requests = []
    for number in range(count):
        user = int(rng.integers(8))
        if len(users.get(user, ())) > 260 or rng.random() < 0.05 or user not in users:
            beginning = shared if rng.random() < 0.5 else []
            users[user] = beginning + tokens(rng, rng.integers(20, 150))
        requests.append((f"r{number}", users[user], int(rng.integers(1, 40))))
        users[user] = users[user] + tokens(rng, rng.integers(0, 40))
    return requests


def random_script(engine, requests, seed, aborted):
    """Send requests at random; abort some, pause and flush at random moments."""
    rng, left = np.random.default_rng(seed), list(requests)
    while left or engine.open:
        messages = []
        if left and len(engine.open) < 6 and rng.random() < 0.2:
            arrived, left = left[:4], left[4:]
            messages += [engine.request(*request) for request in arrived]
        if engine.open and rng.random() < 0.01:
            name = str(rng.choice(sorted(engine.open)))
            aborted.add(name)
            messages.append(io_struct.AbortReq(rid=name))
        if rng.random() < 0.01:
            messages.append(rig.flush())
        yield messages
        last = engine.scheduler.last_batch
        # sglang-jax loses the requests of a prefill if it is paused right after it.
        if rng.random() < 0.01 and last is not None and last.forward_mode.is_decode():
            mode = ("retract", "in_place")[rng.integers(2)]
            yield [io_struct.PauseGenerationReqInput(mode=mode)]
            yield []
            # Else sglang-jax never admits a request again if its batch was full.
            for info in engine.scheduler.running_batch.reqs_info:
                info.batch_is_full = False
            yield [io_struct.ContinueGenerationReqInput()]
        if rng.random() < 0.01:
            while engine.open:
                yield []
            yield from idle(3)
            yield [rig.flush()]
    yield from idle(NUM_IDLE_STEPS)


def idle(num_steps):
    """Do nothing for some steps."""
    for _ in range(num_steps):
        yield []


def tokens(rng, count):
    """Return random tokens."""
    return rng.integers(3, rig.VOCABULARY - 20, int(count)).tolist()
