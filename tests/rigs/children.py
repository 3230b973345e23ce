"""Python processes that begin with jax and numba imported, which takes a second.

They are forked from a process that has imported these libraries and nothing of jaxkv,
and has started neither a thread nor a backend of jax. Such a process ends without
`atexit` functions: test the end of an interpreter with `subprocess`.
"""

import contextlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.reduction import DupFd
from subprocess import DEVNULL, PIPE

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A process has one parent of forks, so all tests use this one.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["jax.numpy", "jax.experimental.pallas", "numba", "pytest", "xxhash"]
)


class Child:
    """A forked process, like a `subprocess.Popen` of `python -W error *command`."""

    def __init__(
        self, *command, cwd=ROOT, env=None, stdin=DEVNULL, stdout=None, stderr=None
    ):
        self.stdin = self.stdout = self.stderr = None
        with contextlib.ExitStack() as stack:

            def open_end(name, stream):
                """Return the child's end, and keep this process's end of a pipe."""
                if stream == PIPE:
                    ends = os.pipe()
                    is_input = name == "stdin"
                    child_end, end = ends if is_input else ends[::-1]
                    mode = "w" if is_input else "r"
                    setattr(self, name, os.fdopen(end, mode, encoding="utf-8"))
                elif stream == DEVNULL:
                    child_end = os.open(os.devnull, os.O_RDWR)
                else:
                    return stream.fileno()
                stack.callback(os.close, child_end)
                return child_end

            streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            ends = [
                number if stream is None else open_end(name, stream)
                for number, (name, stream) in enumerate(streams.items())
            ]
            environ = dict(os.environ if env is None else env)
            call = _Call(ends, [*map(str, command)], str(cwd), environ)
            self._process = FORKS.Process(target=call, daemon=True)
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a child", timeout)
        return self.returncode

    def send_signal(self, number):
        # The fork server may not have reported the exit yet.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


def run(*command, timeout=300, **options):
    """Run a child to its end; return what `subprocess.run` would, with its output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = Child(*command, stdout=out, stderr=err, **options)
        try:
            child.wait(timeout)
        finally:
            child.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(
            command, child.returncode, out.read(), err.read()
        )


class _Call:
    """The work of a child: its streams, folder and environment, then its program."""

    def __init__(self, ends, command, cwd, environ):
        self._ends, self._command = ends, command
        self._cwd, self._environ = cwd, environ

    def __getstate__(self):
        return {**self.__dict__, "_ends": [DupFd(end) for end in self._ends]}

    def __call__(self):
        for number, end in enumerate(self._ends):
            os.dup2(end.detach(), number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        os.chdir(self._cwd)
        os.environ.clear()
        os.environ.update(self._environ)
        folders = self._environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [self._cwd, *filter(None, folders)]
        sys.dont_write_bytecode = bool(self._environ.get("PYTHONDONTWRITEBYTECODE"))
        sys.modules["numba"].config.reload_config()
        warnings.simplefilter("error")
        kind, *words = self._command
        if kind == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(words[0], {"__name__": "__main__"})
        else:
            sys.argv = self._command
            runpy.run_path(kind, run_name="__main__")
