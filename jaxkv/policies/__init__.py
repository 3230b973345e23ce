"""Cache policies: pure functions over pytrees, and the registry of their names."""

from jaxkv.policies.arc import ARCState as ARCState
from jaxkv.policies.arc import make_arc as make_arc
from jaxkv.policies.base import EvictResult as EvictResult
from jaxkv.policies.base import InsertResult as InsertResult
from jaxkv.policies.base import Policy as Policy
from jaxkv.policies.hazard import HazardState as HazardState
from jaxkv.policies.hazard import make_hazard as make_hazard
from jaxkv.policies.lru import LRUState as LRUState
from jaxkv.policies.lru import make_lru as make_lru
from jaxkv.policies.registry import POLICIES as POLICIES
from jaxkv.policies.registry import PolicyMaker as PolicyMaker
from jaxkv.policies.registry import get_policy_maker as get_policy_maker
from jaxkv.policies.registry import policy_names as policy_names
from jaxkv.policies.registry import register_policy as register_policy
from jaxkv.policies.retained import RetainedState as RetainedState
from jaxkv.policies.retained import make_retained as make_retained
