"""How fast blocks move between device and host, beside other designs."""
