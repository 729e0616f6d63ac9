import threading

from python_backends.cpu_engine.worker_starts import _PAUSES_S, WorkerStarts


def test_each_failed_start_in_a_row_waits_longer_until_it_gives_up():
    starts, pauses_s = WorkerStarts(), []
    while not starts.given_up:
        pauses_s.append(starts.pause_s)
        starts.ended()
    assert pauses_s == list(_PAUSES_S) and not starts.wait(0)


def test_a_worker_that_was_ready_did_not_fail_to_start():
    starts = WorkerStarts()
    for _ in range(10):
        starts.succeeded()
        assert starts.ready
        starts.ended()
        assert not starts.ready and not starts.given_up and starts.pause_s == 0


def test_waiting_ends_when_the_worker_is_ready_or_given_up():
    ready, given_up = WorkerStarts(), WorkerStarts()
    found = {}
    threads = [
        threading.Thread(target=lambda: found.update(ready=ready.wait(60))),
        threading.Thread(target=lambda: found.update(given_up=given_up.wait(60))),
    ]
    for thread in threads:
        thread.start()
    ready.succeeded()
    for _ in _PAUSES_S:
        given_up.ended()
    for thread in threads:
        thread.join(60)
    assert found == {"ready": True, "given_up": False}
