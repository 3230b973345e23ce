"""Blocks on their way to a store and back, next to plain files and client libraries."""
