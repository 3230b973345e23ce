"""sglang-jax's server with jaxkv's host tier, in place of HiCache.

It takes the arguments of ``python -m sgl_jax.launch_server``, and jaxkv's settings as
environment variables, such as ``JAXKV_HOST_BYTES=64GiB``.
"""

from sgl_jax import launch_server
from sgl_jax.srt.entrypoints import engine
from sgl_jax.srt.managers import scheduler

from jaxkv.integrations.sglang import attach


class Scheduler(scheduler.Scheduler):
    """The scheduler, with a host tier from its start."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        attach(self)


def run_scheduler_process(*args):
    """Run sglang-jax's function of this name, in the process that it starts."""
    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(*args)


if __name__ == "__main__":
    scheduler.Scheduler = Scheduler  # For --enable-single-process.
    engine.run_scheduler_process = run_scheduler_process
    launch_server.main()
