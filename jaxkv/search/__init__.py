"""Search for the longest cached prefix, for every kind of attention."""

from jaxkv.search.groups import ChunkedLocal as ChunkedLocal
from jaxkv.search.groups import FullAttention as FullAttention
from jaxkv.search.groups import Mamba as Mamba
from jaxkv.search.groups import SlidingWindow as SlidingWindow
from jaxkv.search.groups import num_host_blocks as num_host_blocks
from jaxkv.search.tiers import find_cached_prefix as find_cached_prefix
