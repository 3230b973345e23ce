"""Files of an earlier version are read: small ones are kept.

`tests/data/e817121` has a store of two blocks, a recording and a configuration, all
written by the tree at e817121, the configuration without settings removed since.
"""

import pathlib
import shutil

from jaxkv import OffloadConfig
from jaxkv.tools.replay.traces import read_trace
from jaxkv.transfer.storage import LocalStore, ObjectFormat, StorageIO
from jaxkv.transfer.storage.census import Bound

DATA = pathlib.Path(__file__).parent / "data" / "e817121"
BLOCKS = ObjectFormat(b"model", "u8[64]", 64)


def test_a_store_written_before_is_listed_and_read(tmp_path):
    shutil.copytree(DATA / "store", tmp_path / "store")
    keys = [bytes([number]) * 32 for number in (1, 2)]
    with StorageIO(LocalStore(str(tmp_path / "store")), BLOCKS) as storage:
        storage.list_all(Bound(10))
        keys_read, ended = [], None
        while ended is None:
            pages, ended = storage.take_pages(100)
            keys_read += [key for page in pages for key in page.keys]
        assert (sorted(keys_read), ended.num_blocks) == (keys, 2)
        storage.submit_reads(keys, float("inf"))
        reads = storage.wait(60, 2)
        assert {read.key: bytes(read.payload) for read in reads} == {
            key: key[:1] * 64 for key in keys
        }


def test_a_recording_written_before_is_read():
    trace = read_trace(DATA / "requests.jsonl")
    assert (trace.num_requests, trace.num_block_refs, trace.block_size) == (1, 2, 16)


def test_a_configuration_written_before_is_read():
    config = OffloadConfig.from_file(DATA / "config.json")
    assert (config.storage_bytes, config.storage_owner) == (1 << 40, False)
