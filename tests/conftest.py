"""Which tests run on a GPU: `JAXKV_TEST_PLATFORM=cuda pytest -m gpu`."""

from pathlib import Path

import pytest

_ROOT = Path(__file__).parent
# Folders and files whose tests move blocks of the platform's devices.
_ON_GPU = (
    "transfer/test_",
    "test_examples.py",
    "test_example_engine.py",
    "tools/demo/test_engine.py",
)
# These touch no device, or the CPU's alone, in processes of their own.
_NOT_ON_GPU = (*("bits", "extent_table", "limits", "processes", "sharded"),)


@pytest.hookimpl(tryfirst=True)  # Before `-m` looks at the marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(_ROOT):
            continue
        name = str(item.path.relative_to(_ROOT))
        without = (f"transfer/test_{name}.py" for name in _NOT_ON_GPU)
        if name.startswith(_ON_GPU) and name not in without:
            item.add_marker("gpu")
