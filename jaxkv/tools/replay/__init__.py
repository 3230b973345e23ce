"""Replays request traces against cache policies."""
