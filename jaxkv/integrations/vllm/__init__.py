"""jaxkv as the host tier of vLLM on TPU; docs/vllm.md has the keys."""

from jaxkv.integrations.vllm.connector import OffloadConnector as OffloadConnector
from jaxkv.integrations.vllm.connector import TPUOffloadConnector as TPUOffloadConnector
