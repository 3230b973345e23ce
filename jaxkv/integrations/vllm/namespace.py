"""The namespace of vLLM's blocks in a store.

The hashes of vLLM's prefix cache are made for one process: they cover tokens, adapters,
images and salts, but neither the model nor how it is run. A store outlives the process
and may be shared, so its namespace covers the rest. Blocks of another namespace are
never found. If the weights cannot be identified, the store is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv._util import shown
from jaxkv.integrations import weights as weights_of
from jaxkv.integrations.vllm.installed import find_name
from jaxkv.integrations.weights import Description, UnknownWeightsError

# Collision-resistant hashes, which are the same in all processes.
_HASHES = ("sha256", "sha256_cbor")

# These read only the files of the model's folder.
_LOAD_FORMATS = {"auto", "hf", "safetensors", "pt", "mistral", "npcache", "gguf"}
_LOAD_FORMATS |= {"fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"}

# tpu-inference's variables that change the KV, or its layout in a block.
_VARIABLES = re.compile(
    "MODEL_IMPL_TYPE|NEW_MODEL_DESIGN|USE_2D_TP|.*QUANTIZ.*|LAYOUT_.*|.*_RPA_.*|"
    ".*MOE_.*|.*MLA_.*|.*ROPE.*|USE_DENSE_MOE|NUM_SLICES"
)

# Parts of a configuration that name the model's folder, or devices.
_PLACES = ("_name_or_path", "transformers_version", "device_indexes")

_PACKAGES = ("vllm", "vllm-tpu")


def namespace_of(
    vllm_config: Any,
    kv_cache_config: Any,
    weights: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return JSON values that the bytes of all blocks depend on, by name.

    `weights` is a name that identifies the weights; without it, the model's commit or
    its files do. ValueError if the weights cannot be identified, or if no other process
    would compute the same hashes.
    """
    environ = os.environ if environ is None else environ
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    sharding = getattr(vllm_config, "sharding_config", None)
    try:
        return {
            "hashes": _hashes(cache.prefix_caching_hash_algo, environ),
            "versions": _versions(sharding),
            "weights": (
                {"named": weights} if weights else _weights(vllm_config, environ)
            ),
            "model": {
                "config": _without_places(model.hf_config.to_dict()),
                "dtype": str(model.dtype),
                "quantization": model.quantization,
                # Some rotary embeddings depend on it.
                "max_model_len": model.max_model_len,
                **_optional(model, "quantization_config", "disable_sliding_window"),
                **_optional(model, "model_impl", "model_class_overrides"),
            },
            "cache": {
                "dtype": cache.cache_dtype,
                **_optional(cache, "kv_cache_dtype_skip_layers", "kv_cache_layout"),
                "groups": [
                    [str(type(group.kv_cache_spec).__name__), *_numbers_of(group)]
                    for group in kv_cache_config.kv_cache_groups
                ],
            },
            "parallel": {
                "tensor": parallel.tensor_parallel_size,
                "sharding": _text(getattr(sharding, "sharding_strategy", sharding)),
                **_optional(parallel, "enable_expert_parallel"),
            },
            "additional": _without_places(
                getattr(vllm_config, "additional_config", None)
            ),
            "images": _images(model),
            "environment": {
                name: value
                for name, value in sorted(environ.items())
                if _VARIABLES.fullmatch(name)
            },
        }
    except AttributeError as error:
        raise ValueError(
            "storage cannot be used with this vLLM: its configuration has an unknown "
            f"form, so that blocks cannot be identified: {error}"
        ) from None


def encode(namespace: Mapping[str, Any]) -> bytes:
    """Encode a namespace, or a part of it, the same way in every process."""
    return json.dumps(
        namespace, sort_keys=True, separators=(",", ":"), default=_text
    ).encode()


def summary(namespace: Mapping[str, Any]) -> str:
    """Return a line of digests, to compare two namespaces."""
    return ", ".join(
        f"{name} {hashlib.sha256(encode(part)).hexdigest()[:8]}"
        for name, part in namespace.items()
    )


def _optional(owner: Any, *names: str) -> Description:
    """Return attributes, None for those that this vLLM does not have."""
    return {name: getattr(owner, name, None) for name in names}


def _text(value: Any) -> str:
    """Return a value that is not JSON as text, without its address in memory."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def _hashes(algorithm: str, environ: Mapping[str, str]) -> Description:
    """Describe vLLM's hashes; refuse hashes that differ between processes."""
    if algorithm not in _HASHES:
        raise ValueError(
            f"storage needs --prefix-caching-hash-algo sha256 or sha256_cbor, not "
            f"{shown(algorithm)}: with a hash that is not collision-resistant, an "
            "attacker can make a prompt that gets the blocks of another prompt."
        )
    seed: str | None = environ.get("PYTHONHASHSEED")
    if seed is None:  # vLLM has a default, unless it is random.
        seed = find_name("vllm.v1.core.kv_cache_utils", "DEFAULT_NONE_HASH_SEED")
    if seed is None:
        raise ValueError(
            "storage needs the same PYTHONHASHSEED in the environment of every vLLM "
            "that uses the store, such as PYTHONHASHSEED=0: without it, the block "
            "hashes of this version differ between processes."
        )
    # It may be a secret.
    return {"algorithm": algorithm, "seed": hashlib.sha256(seed.encode()).hexdigest()}


def _weights(vllm_config: Any, environ: Mapping[str, str]) -> Description:
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == "dummy":
        return {"dummy": model.seed}
    try:
        if load_format not in _LOAD_FORMATS:
            raise UnknownWeightsError(
                f"load_format={shown(load_format)} may read weights from elsewhere"
            )
        if environ.get("VLLM_USE_MODELSCOPE", "0").lower() in ("1", "true"):
            raise UnknownWeightsError("weights of ModelScope have no known version")
        weights_path = getattr(model, "model_weights", "")
        weights = weights_of.describe_weights(
            str(weights_path or model.model),
            model.revision,
            hub_folder=weights_of.hub_folder_of(environ, load.download_dir),
            read_since_s=weights_of.process_started_s(),
        )
        # A branch may have moved while the weights were read. transformers records the
        # commit of the configuration, unless it belongs to another model.
        commit = getattr(model.hf_config, "_commit_hash", None)
        is_other = weights_path or getattr(model, "hf_config_path", None)
        if commit and not is_other and weights.get("commit", commit) != commit:
            raise UnknownWeightsError(
                f"revision={shown(model.revision or 'main')} was {commit} when the "
                f"configuration was read, and is {weights['commit']} now"
            )
        return weights
    except (UnknownWeightsError, OSError) as error:
        raise ValueError(
            f"storage must identify the weights, but {error}. Name them by "
            "storage_namespace, and change the name with the weights."
        ) from None


def _versions(sharding: Any) -> Description:
    """Return the versions of the packages that compute blocks and choose layouts.

    vLLM's platform has made `sharding`, so its module belongs to the runner's package.
    """
    module = type(sharding).__module__.partition(".")[0]
    of_runner = importlib.metadata.packages_distributions().get(module, [])
    versions = {}
    for package in (*_PACKAGES, *(name.replace("_", "-") for name in of_runner)):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _numbers_of(group: Any) -> Iterable[Any]:
    """Yield the names of a group's layers, and the numbers of their specs."""
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None) or {"": spec}
    yield list(group.layer_names)
    names = ("block_size", "sliding_window", "num_kv_heads", "head_size", "dtype")
    for layer_spec in specs.values():
        yield [str(getattr(layer_spec, name, None)) for name in names]


def _images(model: Any) -> Description | None:
    """Describe how images and videos become tokens, except what hashes cover."""
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return None
    return _optional(
        multimodal,
        *("mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm"),
        *("interleave_mm_strings", "video_pruning_rate", "video_pruning_method"),
    )


def _without_places(config: Any) -> Any:
    """Return a configuration without the model's folder and devices."""
    if isinstance(config, Mapping):
        return {
            str(name): _without_places(value)
            for name, value in config.items()
            if name not in _PLACES
        }
    if isinstance(config, list | tuple):
        return [_without_places(value) for value in config]
    return config
