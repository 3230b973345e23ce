"""The measurements of ``jaxkv bench``."""
