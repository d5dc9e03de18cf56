"""Events of a trace in order, and its file: whole, broken off, continued."""

import json
from pathlib import Path
from typing import Any

import pytest

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.trace import HELPER, Trace, TraceFile


def test_events_count_microseconds_from_the_beginning_of_the_trace():
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


def test_what_begins_together_is_written_with_the_longest_first():
    trace = Trace(0)
    trace.note("message", "inner", 5.0, 5.1, {})
    trace.note("phase", "outer", 5.0, 5.2, {})
    assert [json.loads(event)["name"] for event in trace.take()] == ["outer", "inner"]


def test_ends_stay_inside_of_what_they_lie_in_after_days():
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


def event(number: int) -> dict[str, Any]:
    return {"ph": "X", "name": f"event {number}"}


def written(path: Path, count: int, *, ended: bool = True) -> float:
    file = TraceFile(path, resume=False)
    file.append([json.dumps(event(number)) for number in range(count)])
    file.close(ended)
    return file.zero


def test_it_is_an_array_when_it_has_ended(tmp_path):
    path = tmp_path / "trace.json"
    zero = written(path, 3)
    first, *others = json.loads(path.read_text())
    assert first["args"] == {"unix_s": zero}
    assert others == [event(0), event(1), event(2)]


def test_what_was_interrupted_lacks_a_bracket_alone(tmp_path):
    path = tmp_path / "trace.json"
    written(path, 2, ended=False)
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    assert json.loads(path.read_text() + "]")[1:] == [event(0), event(1)]


@pytest.mark.parametrize("cut", [0, 1, 5, 20, 32, 33])
@pytest.mark.parametrize("ended", [True, False])
def test_it_is_continued_wherever_it_was_cut(tmp_path, ended, cut):
    path = tmp_path / "trace.json"
    zero = written(path, 40, ended=ended)
    path.write_bytes(path.read_bytes()[: -cut or None])
    again = TraceFile(path, resume=True)
    again.append([json.dumps(event(99))])
    again.close(True)
    assert again.zero == zero
    _, *events, last = json.loads(path.read_text())
    assert last == event(99)
    # Of what was cut in the middle nothing is left.
    assert events == [event(number) for number in range(len(events))]
    assert len(events) in (39, 40)


def test_one_without_events_is_continued(tmp_path):
    path = tmp_path / "trace.json"
    written(path, 0, ended=False)
    again = TraceFile(path, resume=True)
    again.append([json.dumps(event(1))])
    again.close(True)
    assert json.loads(path.read_text())[1:] == [event(1)]


def test_a_new_run_begins_a_new_one(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("anything")
    written(path, 1)
    assert json.loads(path.read_text())[1:] == [event(0)]
    path.unlink()
    TraceFile(path, resume=True).close(True)
    assert len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize(
    "text", ["", "[", "{}", "[\n3", '[\n{"name": "x"}', '[\n{"name": "trace_begins", "args": 3}']
)
def test_what_is_no_trace_is_not_touched(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"not a trace .*; move it away") as caught:
        TraceFile(path, resume=True)
    assert caught.value.exit_code == UNREADABLE
    assert path.read_text() == text
