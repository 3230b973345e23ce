"""A module that has a cache policy, as ``cache_policy_module_path`` names one."""

from jaxkv.policies.lru import make_lru as own_lru  # noqa: F401
