"""What this machine offers, what is wrong with it, and what to set."""
