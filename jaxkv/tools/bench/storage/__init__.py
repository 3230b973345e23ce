"""How fast blocks move to a store and back."""
