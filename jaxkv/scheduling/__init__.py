"""The books of `jaxkv.scheduler`: searches, loads, stores, and the rules they keep."""
