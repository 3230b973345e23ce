"""The measurement of blocks on their way to a store and back."""
