"""Arrays that are late."""

from tests.transfer.conftest import delayed  # noqa: F401
