"""Events for routers, metrics for dashboards, and lines for the log."""
