"""The real vLLM and tpu-inference on CPUs, for tests: a plugin, models, and runs."""
