"""``jaxkv status``: what a running engine is doing, from its metrics."""
