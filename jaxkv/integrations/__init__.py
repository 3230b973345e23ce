"""Adapters that put jaxkv into engines of others."""
