"""What others see of the tiers: events for routers, metrics for dashboards."""
