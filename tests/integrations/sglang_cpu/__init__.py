"""The real sglang-jax on CPUs, for tests: a model, its scheduler, and scenes."""
