"""How fast blocks move between device and host."""
