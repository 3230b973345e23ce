"""Measurements that ship: run by ``jaxkv bench``."""
