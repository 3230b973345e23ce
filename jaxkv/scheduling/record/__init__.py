"""Requests recorded as a trace."""
