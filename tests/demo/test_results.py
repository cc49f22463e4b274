"""What is made of the ranks' runs, and how it is shown."""

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from tests.demo.runs import combined, made_up
from tide_triton.demo.results import Corpus, Results, Run, Way, combine
from tide_triton.demo.runner import Progress
from tide_triton.demo.show import plot, progress, summary


def test_counts_are_sums_over_ranks_losses_means_and_seconds_of_the_slowest() -> None:
    results = combined()
    assert results.model_dump() == {
        "ranks": 2,
        "steps": 2,
        "transport": "host",
        "parameters": 42,
        "data": {"name": "a text", "bytes": 123},
        "loss": {"stock": (5.5, 4.5), "tide": (5.5, 4.5), "reference": (5.5, 4.5)},
        "max_abs_loss_diff": 0.0,
        "all_gather": {"calls": 20, "zero_copy": 20, "fallback": 0, "wire_bytes": 198, "layout_copy_bytes": 0},
        "reduce_scatter": {"calls": 10, "zero_copy": 8, "fallback": 2, "wire_bytes": 180, "layout_copy_bytes": 6},
        "stock": {
            "wire_bytes": 600,
            "layout_copy_bytes": 200,
            "all_gather_wire_bytes": 200,
            "reduce_scatter_wire_bytes": 400,
            "all_gather_calls": 20,
            "reduce_scatter_calls": 10,
        },
        "peak_buffer_bytes": {"stock": 2000, "tide": 1400},
        "seconds": {"stock": 2.0, "tide": 2.0},
        "grads_match_reference": True,
        "grads_match_stock": True,
        "versions": {"torch": "2"},
    }
    assert results.equals_stock
    assert results.equals_reference


@pytest.mark.parametrize("at", range(3))
def test_one_digest_of_one_rank_that_differs_from_the_reference_is_found(at: int) -> None:
    run = made_up(1, Way.TIDE)
    digests = tuple("another" if index == at else digest for index, digest in enumerate(run.digests))
    results = combined(tide=replace(run, digests=digests))
    assert not results.grads_match_reference
    assert not results.grads_match_stock
    assert not results.equals_reference


def test_losses_that_differ_from_stock_are_a_no_with_the_difference() -> None:
    results = combined(stock=replace(made_up(1, Way.STOCK), losses=(6.0, 5.5)))
    assert not results.equals_stock
    assert results.equals_reference
    assert results.max_abs_loss_diff == 0.25
    assert results.max_relative_loss_diff == 0.25 / 4.75
    text = _text(results)
    assert "losses bitwise equal to stock: no, relative difference up to 5.3e-02" in text
    assert "max abs difference of losses, TIDE to stock: 0.25" in text


def test_the_summary_shows_both_sides_their_ratio_and_the_verdicts() -> None:
    text = _text(combined())
    assert "losses bitwise equal to stock: yes" in text
    assert "gradients bitwise equal to stock: yes" in text
    assert "equal to rank-ordered reference: yes" in text
    rows = {cells[1]: cells[2:5] for line in text.splitlines() if len(cells := _cells(line)) > 4}
    assert rows["all-gather wire (MB)"] == ["0.00", "0.00", "0.990"]
    assert rows["reduce-scatter wire (MB)"][2] == "0.450"
    assert rows["peak buffers (MB)"][2] == "0.700"
    assert rows["fallbacks"] == ["", "2", ""]


def test_progress_on_what_is_no_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(Console(force_terminal=False), 2, 25) as hear:
        for step in range(1, 26):
            hear(Progress(Way.TIDE, step, 3.0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("starting 2 ranks")
    assert [line.split(",")[0] for line in lines[1:]] == [f"tide: step {step} of 25" for step in (1, 10, 20, 25)]


def test_progress_on_a_terminal_is_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(Console(force_terminal=True, width=100), 2, 3) as hear:
        for way in Way:
            for step in range(1, 4):
                hear(Progress(way, step, 3.0))
    out = capsys.readouterr().out
    assert all(way in out for way in Way)
    assert "3/3" in out


def test_a_plot_is_drawn_for_one_step_as_for_many(tmp_path: Path) -> None:
    def cut(way: Way) -> Run:
        return replace(made_up(1, way), losses=(5.0,))

    one = combine([{way: cut(way) for way in Way}], Corpus(name="a text", bytes=1), {})
    for name, results in (("one.png", one), ("two.png", combined())):
        plot(results, tmp_path / name)
        assert matplotlib.image.imread(tmp_path / name)[..., :3].std() > 0.01


def _text(results: Results) -> str:
    console = Console(width=200, record=True, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(summary(results))
    return captured.get()


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")]
