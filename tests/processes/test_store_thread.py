"""The threads that talk to the store end together, so that none asks it after the last word."""

import threading

from lightning_shard.processes.failures.store_thread import StoreThread


def test_all_threads_end_at_once():
    beats = [threading.Event(), threading.Event()]
    threads = [StoreThread(beat.set, every_s=0.01) for beat in beats]
    assert all(beat.wait(30) for beat in beats)
    assert all(thread._thread.is_alive() for thread in threads)
    StoreThread.end_all()
    assert not any(thread._thread.is_alive() for thread in threads)
