"""Blocks in a store that outlives the process: a folder, a bucket, Redis."""

from jaxkv.transfer.storage.local import LocalStore as LocalStore
from jaxkv.transfer.storage.objects import REFUSAL_REASONS as REFUSAL_REASONS
from jaxkv.transfer.storage.objects import ObjectFormat as ObjectFormat
from jaxkv.transfer.storage.objects import Refusal as Refusal
from jaxkv.transfer.storage.opening import open_store as open_store
from jaxkv.transfer.storage.storage_io import Completion as Completion
from jaxkv.transfer.storage.storage_io import ListedPage as ListedPage
from jaxkv.transfer.storage.storage_io import StorageIO as StorageIO
from jaxkv.transfer.storage.storage_io import StorageIOStats as StorageIOStats
from jaxkv.transfer.storage.store import BlobStore as BlobStore
from jaxkv.transfer.storage.store import MemoryStore as MemoryStore
from jaxkv.transfer.storage.store import StoreError as StoreError
