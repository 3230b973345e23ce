"""Blocks on their way between device and host, next to other designs."""
