"""Identifies the weights that an engine has read, for keys that outlive the process.

Engines that start months later read a store. Its blocks must have been computed with
the same weights, so a name is not enough: a checkpoint may be replaced under its name.
A revision of the Hugging Face Hub is identified by its commit, which never changes;
files are identified by their sizes, their times, and samples of their content.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxkv._util import shown
from jaxkv._util.files import places_on, read_file

# Files that loaders read: weights, their layout, code of the model.
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt"}
_SUFFIXES |= {".msgpack", ".json", ".py"}
_DESCRIPTIONS = (".json", ".py")
# Files that no block depends on: tokens are in the keys.
_IGNORED = re.compile(r"(tokenizer|special_tokens|added_tokens|generation_).*|vocab.*")

# Samples of all files together. Times show most changes, but images of containers may
# give all files the same time.
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")

Description = dict[str, Any]


class UnknownWeightsError(ValueError):
    """The weights of an engine cannot be identified for certain."""


def describe_weights(
    model: str,
    revision: str | None = None,
    *,
    hub_folder: str | os.PathLike[str] | None = None,
    read_since_s: float | None = None,
) -> Description:
    """Return JSON values that identify a model's weights in every process.

    `model` is a folder, a file, or a name on the Hugging Face Hub, whose snapshots may
    be in `hub_folder`. `read_since_s` is a time in seconds since the epoch: if a file,
    its folder or a link to it changed later, the process may have read other weights.
    UnknownWeightsError if the weights cannot be identified.

    >>> describe_weights("org/name", "0123456789abcdef0123456789abcdef01234567")
    {'hub': 'org/name', 'commit': '0123456789abcdef0123456789abcdef01234567'}
    """
    if os.path.exists(model):
        if snapshot := _SNAPSHOT.fullmatch(os.path.abspath(model)):
            return {"hub": snapshot[1].replace("--", "/"), "commit": snapshot[2]}
        return {"files": list(_describe_files(Path(model), read_since_s))}
    if not _REPOSITORY.fullmatch(model):
        raise UnknownWeightsError(
            f"model={shown(model)} is neither a folder nor a name on the Hugging Face "
            "Hub, so that its weights have no known version"
        )
    revision = revision or "main"
    if _COMMIT.fullmatch(revision):
        return {"hub": model, "commit": revision}
    path = snapshot_of(model, revision, hub_folder) if hub_folder else None
    if path is None:
        raise UnknownWeightsError(
            f"no snapshot of model={shown(model)}, revision={shown(revision)}, is in "
            f"{hub_folder or 'any folder'}, so that its commit is unknown: pass a "
            "commit of 40 digits as the revision"
        )
    return {"hub": model, "commit": path.name}


def hub_folder_of(environ: Mapping[str, str], download_dir: str | None = None) -> str:
    """Return the folder of the Hub's snapshots: `download_dir`, or by the environment.

    >>> hub_folder_of({"HF_HOME": "/cache"})
    '/cache/hub'
    """
    if download_dir is not None:
        return download_dir
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    caches = map(environ.get, ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))
    return next(filter(None, caches), os.path.join(home, "hub"))


def process_started_s() -> float | None:
    """Return the start of this process in seconds since the epoch; None if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def snapshot_of(
    model: str, revision: str, hub_folder: str | os.PathLike[str]
) -> Path | None:
    """Return the folder of a snapshot of the Hub; None if it is not in `hub_folder`."""
    if not _REPOSITORY.fullmatch(model):
        return None
    path = Path(hub_folder, "models--" + model.replace("/", "--"))
    try:
        commit = read_file(path / "refs" / revision, 1 << 10).decode().strip()
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    snapshot = path.joinpath("snapshots", commit)
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _describe_files(
    path: Path, read_since_s: float | None
) -> Iterator[tuple[str, int, int, str]]:
    """Yield each file's name, size, time in ns, and digest of samples."""
    files = [path] if path.is_file() else sorted(_files_in(path))
    weights = [file for file in files if file.suffix not in _DESCRIPTIONS]
    if not weights:
        raise UnknownWeightsError(f"{path} has no file of weights")
    stats = [file.stat() for file in files]
    for file, status in zip(files, stats, strict=True):
        # The time of any change; a copy can set only the other time.
        if read_since_s is not None and status.st_ctime > read_since_s:
            raise _changed(file)
    if read_since_s is not None:
        links = itertools.chain.from_iterable(map(places_on, files))
        folders = {os.path.realpath(file.parent) for file in files}
        for place in dict.fromkeys(links):
            # Except folders above: if one is a layer of a container's image, a write
            # below it changes its times as if it were renamed.
            is_checked = os.path.islink(place) or place in folders
            if is_checked and _was_moved_after(place, read_since_s):
                raise _changed(place)
    total = sum(status.st_size for status in stats)
    step = max(_SAMPLE_BYTES, total // _NUM_SAMPLES)
    for file, status in zip(files, stats, strict=True):
        name = file.name if file == path else file.relative_to(path).as_posix()
        digest = _sampled(file, status.st_size, step)
        yield name, status.st_size, status.st_mtime_ns, digest


def _changed(place: str | Path) -> UnknownWeightsError:
    return UnknownWeightsError(
        f"{place} has changed since this process began, so that it may have read "
        "other bytes"
    )


def _was_moved_after(place: str, time_s: float) -> bool:
    """Whether a link was made, or a folder renamed, after some time."""
    status = os.lstat(place)
    if status.st_ctime <= time_s:
        return False
    if stat.S_ISDIR(status.st_mode):
        # Adding or deleting a file in it also changes the other time.
        return status.st_mtime <= time_s
    return stat.S_ISLNK(status.st_mode)


def _files_in(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        names = file.relative_to(folder).parts
        if any(name.startswith(".") for name in names) or not file.is_file():
            continue
        if file.suffix in _SUFFIXES and not _IGNORED.fullmatch(file.name):
            yield file


def _sampled(file: Path, size: int, step: int) -> str:
    """Return a digest of samples of a file, including its first and last bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        for start in (*range(0, size, step), max(0, size - _SAMPLE_BYTES)):
            data.seek(start)
            digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
