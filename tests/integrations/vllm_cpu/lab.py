"""Makes a folder where the real vLLM runs on CPUs, with small random models.

    eval "$(PYTHONPATH=tests/integrations python -m vllm_cpu.lab FOLDER)"

prints, for a shell, the environment that vLLM then needs.
"""

import os
import shlex
import sys
from pathlib import Path

from . import models

MODELS = (
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("deep", "bfloat16"),  # The dtype of all drafts.
    ("shallow", "bfloat16"),
    ("hybrid", "float32"),
    ("latents", "float32"),
    ("deltas", "float32"),
    ("experts", "float32"),
    ("predictor", "float32"),
)
ADAPTERS = (1, 2)
HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parents[1]


def make_lab(folder):
    """Write models, adapters, and the metadata of the plugin for vLLM."""
    package = folder / "packages" / "jaxkv_vllm_cpu-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: jaxkv-vllm-cpu\nVersion: 0\n"
    )
    (package / "entry_points.txt").write_text(
        "[vllm.general_plugins]\njaxkv_vllm_cpu = vllm_cpu.plugin:register\n"
    )
    for kind, dtype in MODELS:
        models.make_model(folder / f"{kind}-{dtype}", kind, dtype)
    models.make_draft(folder / "draft", folder / "deep-bfloat16")
    models.make_flash_draft(folder / "flash", folder / "deep-bfloat16")
    models.make_draft(folder / "copy", folder / "shallow-bfloat16", is_copy=True)
    for number in ADAPTERS:
        models.make_adapter(folder / f"adapter{number}", number)


def environ(folder):
    """Return the variables that vLLM needs."""
    paths = (folder.resolve() / "packages", HERE, ROOT)
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        # What tpu-inference would ask the machine, or a cloud's metadata, about.
        "TPU_ACCELERATOR_TYPE": "v6e-1",
        "TPU_NAME": "none",
        "TPU_WORKER_ID": "0",
        "SKIP_JAX_PRECOMPILE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def main():
    """Make the folder, and print the environment."""
    folder = Path(sys.argv[1])
    if not (folder / "packages").exists():
        make_lab(folder)
    for name, value in environ(folder).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
