"""The transfer programs, compiled for accelerators that are not present."""
