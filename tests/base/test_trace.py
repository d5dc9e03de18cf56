"""Events of a trace: in JSON, in an order in which whatever lies in another follows it."""

import json

from prunex_mpi.base.trace import HELPER, Trace, label


def test_events_count_microseconds_from_the_beginning_of_the_trace() -> None:
    trace = Trace(3, HELPER, base=100.0)
    trace.note("message", "Allreduce", 100.25, 100.5, {"payload": 12, "sent": 8})
    trace.note("step", "step 1", 100.000001, 101.0, {})
    step, message = map(json.loads, trace.take())
    assert message == {
        "ph": "X",
        "pid": 3,
        "tid": HELPER,
        "ts": 250_000,
        "dur": 250_000,
        "cat": "message",
        "name": "Allreduce",
        "args": {"payload": 12, "sent": 8},
    }
    # It began before and ended after.
    assert (step["name"], step["ts"], step["dur"]) == ("step 1", 1, 999_999)
    assert trace.take() == []


def test_what_begins_together_is_written_with_the_longest_first() -> None:
    trace = Trace(0)
    trace.note("message", "inner", 5.0, 5.1, {})
    trace.note("phase", "outer", 5.0, 5.2, {})
    assert [json.loads(event)["name"] for event in trace.take()] == ["outer", "inner"]


def test_ends_stay_inside_of_what_they_lie_in_after_days() -> None:
    trace = Trace(0)
    for number in range(2000):
        start = 1e6 + number * 0.0123456789
        trace.note("phase", "outer", start, start + 0.01, {})
        trace.note("message", "inner", start + 0.0099, start + 0.01, {})
    events = [json.loads(event) for event in trace.take()]
    for outer, inner in zip(events[::2], events[1::2], strict=True):
        assert (outer["name"], inner["name"]) == ("outer", "inner")
        # As nanoseconds, which is how they were written.
        ends = [round(1e3 * (event["ts"] + event["dur"])) for event in (outer, inner)]
        assert ends[1] <= ends[0] + 1


def test_ranks_and_threads_have_names() -> None:
    events = [json.loads(event) for event in label(2, 'rank 2, node 1 (a "host")')]
    assert all(event["ph"] == "M" and event["pid"] == 2 for event in events)
    names = {event["name"]: event["args"] for event in events}
    assert names["process_name"] == {"name": 'rank 2, node 1 (a "host")'}
    assert names["process_sort_index"] == {"sort_index": 2}
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {0: "main", HELPER: "helper"}
