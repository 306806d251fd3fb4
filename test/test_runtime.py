"""The worker runtime where no controller is: nothing may wait for ever."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import zmq

import protocol

# A worker whose work thread sends without a pause, so that the link breaks under a send of the I/O thread.
WORKER = """
import time
from runtime import Runtime
runtime = Runtime.connect("tokenizer", {"vocab_size": 8, "multimodal": False})
print("welcomed", flush=True)
while True:
    for _ in range(100):
        runtime.send("heartbeat", {"received": 0, "stats": {}})
    time.sleep(0.002)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_worker_whose_link_breaks_under_a_send_ends(attempt):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVHWM, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    args = ["--endpoint", f"tcp://127.0.0.1:{port}", "--worker-id", "tokenizer-0"]
    workers = os.path.dirname(protocol.__file__)
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=workers,
        start_new_session=True,
    )
    assert child.stdin and child.stdout
    stuck = threading.Timer(30, lambda: os.killpg(child.pid, signal.SIGTERM))  # not what it should end by
    stuck.start()
    try:
        child.stdin.write(b'{"secret": "s"}\n')
        child.stdin.flush()
        routing = router.recv_multipart()[0]
        welcome = {"incarnation": 1, "options": {}, "heartbeat_ms": 1000}
        router.send_multipart([routing, *protocol.encode("welcome", 0, welcome)])
        assert child.stdout.readline() == b"welcomed\n"
        for _ in range(20):
            router.recv_multipart()
        router.close(0)
        assert child.wait() == -signal.SIGKILL
    finally:
        stuck.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        context.destroy(0)
