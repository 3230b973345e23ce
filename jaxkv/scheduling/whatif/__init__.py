"""Shadows of other policies and host sizes, and the choice of a policy by them."""
