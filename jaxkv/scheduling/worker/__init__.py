"""The workers' side of a step: transfers run, outcomes agreed between processes."""
