import asyncio
import json
import threading
import time

import pytest

from tunix.profiling.spans import Spans


def test_parts_are_exclusive_and_add_up():
    spans = Spans()
    start = time.perf_counter()
    with spans("rollout"):
        time.sleep(0.02)
        with spans("reward"):
            time.sleep(0.03)
        time.sleep(0.01)
    with spans("update"):
        time.sleep(0.02)
    passed = time.perf_counter() - start
    times = spans.step_times()
    assert set(times) == {"rollout", "reward", "update"}
    assert times["reward"] >= 0.03
    assert times["rollout"] >= 0.03
    assert times["update"] >= 0.02
    assert 0.08 <= sum(times.values()) <= passed  # counted once: twice would be more than passed
    assert spans.step_times() == {}


def test_interleaved_tasks_add_up_to_the_time_passed():
    spans = Spans()

    async def one(delay):
        with spans("environment"):
            await asyncio.sleep(delay)

    async def all_of_them():
        with spans("rollout"):
            await asyncio.gather(*(one(0.01 * i) for i in range(1, 6)))

    start = time.perf_counter()
    asyncio.run(all_of_them())
    passed = time.perf_counter() - start
    times = spans.step_times()
    assert sum(times.values()) <= passed + 1e-6
    assert times["environment"] >= 0.04


def test_an_open_span_is_booked_up_to_now():
    spans = Spans()
    with spans("rollout"):
        time.sleep(0.2)
        assert spans.step_times()["rollout"] >= 0.2
        assert spans.step_times().get("rollout", 0.0) < 0.2


def test_other_threads_are_named_by_track():
    spans = Spans()

    def work():
        with spans("decode"):
            time.sleep(0.01)

    thread = threading.Thread(target=work, name="tunix-engine-3")
    with spans("rollout"):
        thread.start()
        thread.join()
    times = spans.step_times()
    assert set(times) == {"rollout", "engine/decode"}


def test_added_span_is_taken_from_the_open_one():
    spans = Spans()
    with spans("rollout"):
        start = time.perf_counter()
        time.sleep(0.02)
        spans.add("prefill", start, start + 0.015)
        spans.add("decode", start, start + 0.5, track="engine")
    times = spans.step_times()
    assert times["prefill"] == pytest.approx(0.015)
    assert times["engine/decode"] == pytest.approx(0.5)
    assert times["rollout"] >= 0.005


def test_an_exception_closes_the_span():
    spans = Spans()
    with pytest.raises(ValueError, match="x"), spans("update"):
        raise ValueError("x")
    spans.step_times()
    time.sleep(0.002)
    assert spans.step_times() == {}


def test_trace_nests_on_each_track_and_is_bounded(tmp_path):
    spans = Spans(max_events=50)
    for i in range(60):
        spans.add("old", float(i), i + 0.5)
    spans.add("a", 100.0, 102.0)
    spans.add("b", 101.0, 103.0)  # overlaps without nesting
    spans.add("c", 100.5, 101.5)  # nests in a
    spans.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == 50
    lanes: dict = {}
    for event in sorted(drawn, key=lambda e: (e["ts"], -e["dur"])):
        ends = lanes.setdefault(event["tid"], [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.2
        ends.append(event["ts"] + event["dur"])
    tracks = {e["name"]: e["tid"] for e in drawn}
    assert tracks["a"] != tracks["b"]
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]


def test_a_span_costs_microseconds_and_threads_leave_nothing():
    spans = Spans()
    seconds = []
    for _ in range(10):  # the fastest round: other work on the machine slows the rest
        start = time.perf_counter()
        for _ in range(200):
            with spans("decode"):
                pass
        seconds.append((time.perf_counter() - start) / 200)
    assert min(seconds) < 200e-6
    for _ in range(20):
        thread = threading.Thread(target=lambda: spans("x").__enter__ and None)
        thread.start()
        thread.join()
    assert spans._threads == {}
