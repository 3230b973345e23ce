"""The check of a machine: facts, problems and recommended settings."""
