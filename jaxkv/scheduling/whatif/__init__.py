"""What other policies and host sizes would have found, and the choice made by it."""
