"""The worker runtime where no controller is: nothing may wait for ever."""

import time

import pytest
import zmq

import runtime
from runtime import Runtime


def test_a_message_to_a_controller_that_is_gone_ends_the_process(monkeypatch):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"hello")
    router.recv_multipart()
    worker = Runtime.__new__(Runtime)
    worker._socket = dealer
    worker._closing = False

    class Ended(Exception):
        pass

    def end(reason: str):
        raise Ended(reason)

    monkeypatch.setattr(runtime, "_kill_own_group", end)
    router.close(0)
    with pytest.raises(Ended, match="nobody to send to"):
        for _ in range(200):  # until the loss of the link is seen; a send that waits would hang here
            worker._transmit([b"more"])
            time.sleep(0.01)
    worker._closing = True
    worker._transmit([b"last"])  # the end has begun: whoever asked for it is gone, too
    context.destroy(0)
