"""Shadows of other policies and host sizes."""
