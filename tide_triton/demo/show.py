"""What a person sees: progress while the ranks train, then a table, the verdicts and a plot."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tide_triton.demo import runner
from tide_triton.demo.results import Results, Way

#: Steps between two lines of progress, where the output is no terminal.
LINE_EVERY = 10


@contextlib.contextmanager
def progress(console: Console, ranks: int, steps: int) -> Iterator[Callable[[runner.Progress], None]]:
    """Bars on a terminal, lines elsewhere; yields what wants to hear every step."""
    starting = f"starting {ranks} ranks"
    if not console.is_terminal:
        console.print(f"{starting}: {steps} steps each of {', '.join(Way)}")

        def line(done: runner.Progress) -> None:
            if done.step in (1, steps) or done.step % LINE_EVERY == 0:
                console.print(f"{done.way}: step {done.step} of {steps}, loss of rank 0 {done.loss:.4f}")

        yield line
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        waiting = bars.add_task(starting, total=None, loss="")
        tasks = {way: bars.add_task(way, total=steps, loss="", start=False, visible=False) for way in Way}

        def bar(done: runner.Progress) -> None:
            bars.update(waiting, visible=False)
            bars.start_task(tasks[done.way])
            bars.update(tasks[done.way], completed=done.step, loss=f"loss {done.loss:.4f}", visible=True)

        yield bar


def summary(results: Results) -> Group:
    """Everything that came out, for humans."""
    r = results
    title = (
        f"{r.steps} steps of a {r.parameters:,}-parameter GPT on {r.data.bytes:,} bytes of {r.data.name}, "
        f"{r.ranks} ranks, transport '{r.transport}'"
    )
    note = Text(
        "losses are means over the ranks, calls and bytes sums; seconds leave out the first step, and on ranks that "
        "share cores they say nothing of GPUs"
    )
    return Group(Text(title), _table(results), note, Text(), _verdicts(results))


def _table(results: Results) -> Table:
    r, timed = results, max(results.steps - 1, 1)
    table = Table()
    table.add_column("")
    for heading in ("stock", "TIDE", "TIDE / stock"):
        table.add_column(heading, justify="right")
    table.add_row("final loss", f"{r.loss.stock[-1]:.6f}", f"{r.loss.tide[-1]:.6f}", "")
    seconds = (r.seconds.stock / timed, r.seconds.tide / timed)
    table.add_row("seconds per step (CPU)", *(f"{s:.3f}" for s in seconds), f"{seconds[1] / seconds[0]:.2f}")
    copied = r.all_gather.layout_copy_bytes + r.reduce_scatter.layout_copy_bytes
    for name, stock, tide in (
        ("all-gather wire", r.stock.all_gather_wire_bytes, r.all_gather.wire_bytes),
        ("reduce-scatter wire", r.stock.reduce_scatter_wire_bytes, r.reduce_scatter.wire_bytes),
        ("layout copies", r.stock.layout_copy_bytes, copied),
        ("peak buffers", r.peak_buffer_bytes.stock, r.peak_buffer_bytes.tide),
    ):
        table.add_row(f"{name} (MB)", f"{stock / 1e6:,.2f}", f"{tide / 1e6:,.2f}", f"{tide / stock:.3f}")
    calls = r.stock.all_gather_calls, r.stock.reduce_scatter_calls
    table.add_row("calls", f"{sum(calls):,}", f"{r.all_gather.calls + r.reduce_scatter.calls:,}", "")
    table.add_row("fallbacks", "", f"{r.all_gather.fallback + r.reduce_scatter.fallback:,}", "")
    return table


def _verdicts(results: Results) -> Text:
    r = results
    apart = "" if r.equals_stock else f", relative difference up to {r.max_relative_loss_diff:.1e}"
    why = " (from 3 ranks on, gloo adds in an order of its own)" if r.ranks > 2 and not r.grads_match_stock else ""
    return Text(
        f"losses bitwise equal to stock: {_yes(r.equals_stock)}{apart}\n"
        f"gradients bitwise equal to stock: {_yes(r.grads_match_stock)}{why}\n"
        f"equal to rank-ordered reference: {_yes(r.equals_reference)}"
        f" (every loss and gradient, final parameters and optimizer state)\n"
        f"max abs difference of losses, TIDE to stock: {r.max_abs_loss_diff:.3g}"
    )


def _yes(so: bool) -> str:
    return "yes" if so else "no"


def plot(results: Results, path: Path) -> None:
    """Draw both losses, and what lies between them, into `path`, in the format of its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, results.steps + 1)
    losses.plot(steps, results.loss.stock, label="stock FSDP2", color="tab:orange", linewidth=5, alpha=0.6)
    losses.plot(steps, results.loss.tide, label="TIDE", color="tab:blue", linewidth=1.5, marker=".")
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title(f"{results.parameters:,}-parameter GPT on {results.data.name}, {results.ranks} ranks")
    losses.legend()
    losses.grid(alpha=0.3)
    apart = [abs(t - s) for t, s in zip(results.loss.tide, results.loss.stock, strict=True)]
    differences.plot(steps, apart, color="tab:red", marker=".")
    differences.set_ylabel("|TIDE - stock|")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    if results.equals_stock:
        differences.set_ylim(-0.5, 0.5)
        differences.set_yticks([0.0])
    differences.set_xlabel("step")
    if results.equals_stock:
        differences.set_title("bitwise equal in every step", fontsize="medium")
        differences.set_ylim(0.0, 1e-6)
    differences.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
