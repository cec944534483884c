"""Tables, units, and a run's progress on a terminal and off one."""

from __future__ import annotations

import io
import threading

import pytest

from onecurve.report.console import Progress, Stages, human_bytes, human_seconds, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_aligns_its_columns() -> None:
    assert table(["step", "loss"], [[1, "4.25"], [20, "3.5"]], left=()) == ["step  loss", "   1  4.25", "  20   3.5"]
    assert table(["name", "n"], [["a", 1], ["long name", 10]]) == ["name        n", "a           1", "long name  10"]
    assert table(["only", "headers"], []) == ["only  headers"]


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises((ValueError, IndexError)):
        table(["a", "b"], [[1]])


def test_units() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 89_472, 5 << 30)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "87.4 KiB",
        "5.0 GiB",
    ]
    assert [human_seconds(s) for s in (-1, 0, 59.6, 61, 3600)] == ["0:00", "0:00", "1:00", "1:01", "1:00:00"]


def test_off_a_terminal_it_writes_plain_lines_every_so_many_steps_and_the_last() -> None:
    stream = io.StringIO()
    with Progress(7, log_every=3, stream=stream) as progress:
        for step in range(1, 8):
            progress.update(step, loss=1 / step, tokens_per_second=12345.6)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert lines[0].split("  ")[1:3] == ["loss 0.3333", "12,346 tokens/s"] and lines[-1].endswith("0:00 left")
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_log_every_zero_shows_the_last_step_only() -> None:
    stream = io.StringIO()
    with Progress(4, log_every=0, stream=stream) as progress:
        for step in range(1, 5):
            progress.update(step)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_validation_loss_always_has_its_line() -> None:
    stream = io.StringIO()
    with Progress(20, log_every=10, stream=stream) as progress:
        progress.update(7, loss=2.5, val_loss=2.25)
        progress.update(8, loss=2.5)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step 7/20  loss 2.5000  val_loss 2.2500  ")


def test_on_a_terminal_it_draws_a_bar_without_a_thread() -> None:
    stream, before = Terminal(), threading.active_count()
    with Progress(20, start=10, stream=stream) as progress:
        progress.update(20, loss=2.5, tokens_per_second=1000.0)
        progress.update(12, loss=3.5)  # back, after a rollback
        progress.say("checkpoint [bold]10[/bold]")
        assert threading.active_count() == before
        progress.update(20, loss=2.5, tokens_per_second=1000.0)
    text = stream.getvalue()
    assert "step 20/20" in text and "loss 2.5000" in text and "1,000 tokens/s" in text and "left" in text
    assert "checkpoint [bold]10[/bold]" in text  # taken as it is


def test_stages_are_a_line_each_off_a_terminal_and_one_line_on_it() -> None:
    plain, screen = io.StringIO(), Terminal()
    for stream in (plain, screen):
        with Stages("layouts", stream) as stages:
            stages.update(0, 2, "dp 1")
            stages.update(1, 2, "dp 2")
            stages.update(2, 2, "")
    assert [line.split(":")[-1] for line in plain.getvalue().splitlines()] == [" dp 1", " dp 2"]
    assert "\n" not in screen.getvalue() and screen.getvalue().endswith("\r\x1b[K")
    with pytest.raises(ZeroDivisionError), Stages("layouts", screen) as stages:
        stages.update(0, 2, "dp 1")
        raise ZeroDivisionError
    assert screen.getvalue().endswith("\n")  # what comes next does not write over it
