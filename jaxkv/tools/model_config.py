"""Reading a model's Hugging Face configuration."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxkv._util import shown

_LIMIT = 1 << 30  # Larger than any size of a model.


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    """Read a ``config.json``; of a folder, the one in it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON object.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(str(path))} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{shown(str(path))} must hold a JSON object")
    # Models that see or hear keep the language model's part apart.
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def number_of(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of several keys that is there, which must be a size.

    Raises:
        ValueError: None is there, or the first is no whole number from 1.
    """
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value < _LIMIT:
            raise ValueError(
                f"{key}={shown(value)} must be a whole number from 1 to {_LIMIT - 1}"
            )
        return value
    raise ValueError(f"the model's configuration has no {' or '.join(map(repr, keys))}")


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the width of a head.

    Raises:
        ValueError: It is not there, or wrong.
    """
    if config.get("head_dim") is not None:
        return number_of(config, "head_dim")
    try:
        hidden = number_of(config, "hidden_size")
        heads = number_of(config, "num_attention_heads")
    except ValueError as error:
        raise ValueError(f"{error}, nor 'head_dim'") from error
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}, "
            "or head_dim be given"
        )
    return hidden // heads


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the name of the model's dtype, bfloat16 if it is not there.

    Raises:
        ValueError: It is no dtype of whole bytes.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return check_dtype(str(name).removeprefix("torch."))


def check_dtype(name: str) -> str:
    """Return a dtype's name if it is one of whole bytes.

    Raises:
        ValueError: It is none.
    """
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise ValueError(
            f"{shown(name)} is no dtype, such as bfloat16 or int8"
        ) from error
    if dtype.kind not in "fiuV" or "int4" in name or "int2" in name:
        raise ValueError(f"{shown(name)} is no dtype of numbers of whole bytes")
    return name
