"""Arrays that are ready late."""

from tests.transfer.conftest import delayed  # noqa: F401
