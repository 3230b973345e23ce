"""Which tiers would pay for recorded traffic, and how large they should be."""
