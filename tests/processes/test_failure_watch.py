"""A rank that has failed ends, whatever waits at the end of its process."""

import subprocess
import sys
import time

PROGRAM = """
import atexit, threading, time
import torch.distributed as dist
from lightning_shard.processes.failures import failure_watch

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

failure_watch.GRACE_S = 0.5
atexit.register(time.sleep, 60)
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
failure_watch.FailureWatch(0).leave()
atexit.register(setattr, threading.Thread, "start", refuse)  # as Python 3.12 does of itself
"""


def test_ends_soon_where_no_thread_begins_any_more() -> None:
    begin = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90, check=False
    )
    assert told.returncode == 143, told.stderr
    assert "SIGTERM on rank 0" in told.stderr
    assert time.monotonic() - begin < 50


SLOW = """
import threading, time
import torch.distributed as dist
from lightning_shard.processes.failures import failure_watch

class Slow(failure_watch.StoreThread):
    def __init__(self, *args, **kwargs):
        time.sleep(0.3)
        super().__init__(*args, **kwargs)

failure_watch.POLL_S, failure_watch.StoreThread = 0.05, Slow
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
watch = failure_watch.FailureWatch(0)
time.sleep(0.2)
print([thread.name for thread in threading.enumerate() if thread.name == "failure-guard"])
watch.close()
"""


def test_is_guarded_where_the_thread_that_talks_to_the_store_begins_late() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=90, check=True
    )
    assert told.stdout.strip() == "['failure-guard']", told.stderr


ASKS = """
import contextlib, datetime
import torch.distributed as dist
from lightning_shard.processes.failures.store_thread import StoreThread

store = dist.TCPStore("127.0.0.1", 0, 1, True)
talk = StoreThread(lambda: None, every_s=1)
with contextlib.suppress(TimeoutError):
    talk.ask(lambda: store.wait(["never"], datetime.timedelta(seconds=0.1)), 0.05)
talk.close()
"""


def test_a_process_ends_as_it_should_while_the_store_is_still_asked() -> None:
    told = subprocess.run(
        [sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=90, check=False
    )
    assert told.returncode == 0, told.stderr
