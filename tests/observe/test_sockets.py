import socket

import pytest

from jaxkv.observe.publisher import EventPublisher


def test_an_ipc_address_whose_owner_has_a_full_queue_is_in_use(tmp_path):
    path = str(tmp_path / "events")
    with socket.socket(socket.AF_UNIX) as owner, socket.socket(socket.AF_UNIX) as other:
        owner.bind(path)
        owner.listen(0)
        other.connect(path)  # The owner never accepts it.
        with pytest.raises(OSError, match="events' is in use"):
            EventPublisher(f"ipc://{path}")
