"""The metrics file of a run that goes on, after somebody else had been at it."""

import json

import pytest

from onecurve.train.records import METRICS, REMOVED, Metrics


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"step": step, "loss": loss}) + "\n"


@pytest.fixture
def rows(tmp_path):
    """Cuts a file of this text after a step: (its steps then, rows lost, lines removed, the lines beside it)."""

    def cut(text, keep):
        (tmp_path / METRICS).write_bytes(text if isinstance(text, bytes) else text.encode())
        metrics = Metrics(tmp_path, keep)
        metrics.write({"step": keep + 1})
        found = [json.loads(row)["step"] for row in (tmp_path / METRICS).read_text().splitlines()]
        beside = (tmp_path / REMOVED).read_bytes().splitlines() if (tmp_path / REMOVED).exists() else []
        return found, metrics.lost, metrics.removed, beside

    return cut


WHOLE = "".join(map(line, range(1, 6)))


@pytest.mark.parametrize("end", ["", '{"step": 6, "lo', '{"step"', line(6) + "{"])
def test_a_run_that_was_killed_loses_nothing(rows, end):
    assert rows(WHOLE + end, 4) == ([1, 2, 3, 4, 5], 0, 0, [])


def test_a_last_row_without_its_end_of_line_is_a_row(rows):
    assert rows(WHOLE[:-1], 5) == ([1, 2, 3, 4, 5, 6], 0, 0, [])


@pytest.mark.parametrize(
    "bad", [b"what", b"\xff\xfe", b"", b"[" * 100_000, b"7", b'{"step": "2"}', b'{"step": 2.5}', b'{"step": 0}', b"{}"]
)
def test_a_damaged_line_costs_its_own_step_and_is_kept_beside(rows, bad):
    text = WHOLE.encode().replace(line(2).encode(), bad + b"\n")
    assert rows(text, 4) == ([1, 3, 4, 5], 1, 1, [bad])


def test_each_step_is_there_once_in_order(rows, tmp_path):
    text = line(3) + WHOLE + line(2, 7.0)
    assert rows(text, 4) == ([1, 2, 3, 4, 5], 0, 2, [line(3).strip().encode(), line(2).strip().encode()])
    assert json.loads((tmp_path / METRICS).read_text().splitlines()[1])["loss"] == 7.0


def test_missing_steps_are_counted_not_lines(rows):
    assert rows(line(1) + line(1) + line(4), 5) == ([1, 4, 6], 3, 1, [line(1).strip().encode()])


def test_what_was_removed_before_stays_beside(rows, tmp_path):
    assert rows("x\n" + WHOLE, 4)[2:] == (1, [b"x"])
    assert rows(WHOLE + "y\n" + line(6), 4)[2:] == (1, [b"x", b"y"])
