"""The namespaces of a store: what they hold, and removing one."""
