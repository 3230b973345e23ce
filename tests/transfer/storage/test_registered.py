"""A store of another package: its entry point is found, and its URL is checked."""

import sys
from pathlib import Path

import pytest

from jaxkv import OffloadConfig
from jaxkv.transfer.storage import MemoryStore, open_store
from jaxkv.transfer.storage.store_url import StoreUrl

ROOT = Path(__file__).resolve().parents[3]
OWN = """
from jaxkv.transfer.storage import MemoryStore

class OwnStore(MemoryStore):
    def __init__(self, url):
        if "level" not in url.options:
            raise ValueError(f"storage={url.shown!r} must have level=")
        super().__init__()
        self.place = url.nodes, url.path, url.options
"""


@pytest.fixture
def register(tmp_path, monkeypatch):
    """Puts a package that registers a scheme into a folder of modules."""

    def put(scheme, target, folder=tmp_path):
        info = tmp_path / f"{scheme}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {scheme}\n")
        (info / "entry_points.txt").write_text(f"[jaxkv.stores]\n{scheme} = {target}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.syspath_prepend(folder)

    return put


def test_a_registered_store_is_opened_by_its_scheme(register, tmp_path):
    text = "own://a:1,b/kv?level=hunter2"
    with pytest.raises(ValueError, match="unknown 'own'"):
        open_store(text)
    (tmp_path / "own_store.py").write_text(OWN)
    register("own", "own_store:OwnStore")
    store = open_store(text.replace("own", "OWN"))
    assert isinstance(store, MemoryStore)
    assert store.place == ((("a", 1), ("b", None)), "/kv", {"level": "hunter2"})
    assert OffloadConfig(storage=text).storage == text
    # Its options may be secrets.
    url = StoreUrl.parse(text)
    assert url.shown == "own://a:1,b/kv"
    assert url.hide("refused hunter2") == "refused ..."
    assert (url.extra, url.probe_s, url.is_folder) == (None, 0.005, False)
    for wrong, message in (
        ("own://a", "storage='own://a' must have level="),
        ("own://", "must be own://HOST:PORT/PATH"),
        ("own://me:hunter2@a", "must be own://HOST:PORT/PATH"),
        ("own://a:port", "must be own://HOST:PORT/PATH"),
        ("owm://a?hunter2", "unknown 'owm'"),
    ):
        with pytest.raises(ValueError, match=message) as info:
            open_store(wrong)
        assert "hunter2" not in str(info.value)


def test_a_scheme_of_jaxkv_is_not_taken_over(register, tmp_path):
    (tmp_path / "own_store.py").write_text(OWN)
    register("memory", "own_store:OwnStore")
    assert type(open_store("memory://x")) is MemoryStore


def test_the_example_of_mooncake_checks_its_url(register, monkeypatch, tmp_path):
    register("mooncake", "jaxkv_mooncake:open_store", ROOT / "examples" / "mooncake")
    for text, message in (
        ("mooncake://a,b", "it must be mooncake://HOST:PORT of the master"),
        ("mooncake://host:1/kv", "it must be mooncake://HOST:PORT of the master"),
        ("mooncake://host?segmnt=1GiB", "unknown option 'segmnt': did you mean segm"),
        ("mooncake://host?segment=few", "segment='few' must be a size such as 64MiB"),
        ("mooncake://host?protocol=ib", "protocol='ib' must be tcp or rdma"),
        ("mooncake://host?device=mlx5_0", "device='mlx5_0' needs protocol=rdma"),
    ):
        with pytest.raises(ValueError, match=r"^storage=") as info:
            open_store(text)
        assert message in str(info.value)
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libnuma.so.1: not there')")
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"libnuma.so.1: not.*apt-get install"):
        open_store("mooncake://host")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"needs its client: pip install \"mooncake"):
        open_store("mooncake://host")
    sys.modules.pop("mooncake", None)
