"""The measurement of transfers between device and host."""
