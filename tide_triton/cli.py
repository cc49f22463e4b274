"""The `tide` command.

Each command is a small function that imports what it runs only when it is called, so that `tide --help` and `tide plan`
start without torch. What the user can mend ends in one message on stderr and exit code 2, under `mendable`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Exit code where the input is refused, as for a misspelt option.
REFUSED = 2

#: GPUs of a node where the command is not told.
GPUS_PER_NODE = 8

#: Columns that tables may take where the output is not a terminal.
UNBOUNDED_COLUMNS = 200

app = typer.Typer(
    name="tide",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def mendable() -> Iterator[None]:
    """Turn a SpecError into its message on stderr, one `error:` a line, and exit code 2 instead of a traceback."""
    from tide_triton.layouts import SpecError

    try:
        yield
    except SpecError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(REFUSED) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tide {version('tide_triton')}")
        raise typer.Exit


@app.callback()
def tide(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Zero-copy collectives for FSDP2: look at layouts, and see them at work."""


@app.command()
def plan(
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec",
            metavar="FILE",
            help='JSON: {"world_size": 3, "tensors": [{"name": "w", "shape": [7, 3], "dtype": "bfloat16", '
            '"shard_dim": 0}]}. shard_dim may be left out.',
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="llama-3.1-70b, wan2.2-a14b or qwen3-30b-a3b."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="GPUs that the model is sharded over.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", metavar="G", help="GPUs of a node: 8, or all if they are fewer.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="M", help="So many nodes of --gpus-per-node, in place of --gpus.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="L", help="Blocks that are trained: all where it is left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON instead of tables.")] = False,
) -> None:
    """Show a group's layout (--spec), or a model's training (--model, and --gpus or --nodes).

    A layout: where tensors lie in a slot, which bytes each rank owns, and what an all-gather copies. Memory: what one
    GPU holds with stock FSDP2, with symmetric memory and with TIDE; and what a block's collectives move between nodes.

    Runs anywhere: nothing is allocated and no GPU is needed.
    """
    with mendable():
        if spec is not None:
            others = {"--model": model, "--gpus": gpus, "--gpus-per-node": gpus_per_node, "--nodes": nodes}
            _refuse_beside("--spec", {**others, "--layers": layers})
            shown = _layout(spec)
        else:
            shown = _memory(model, gpus, gpus_per_node, nodes, layers)
    if as_json:
        typer.echo(shown.as_json())
    else:
        from rich.console import Console

        # A pipe or a file has no width of its own: give long parameter names the room that rich's 80 would not.
        width = None if sys.stdout.isatty() else UNBOUNDED_COLUMNS
        Console(width=width).print(shown.as_tables())


class _Shown(NamedTuple):
    """A plan in both of its forms, each made when it is asked for."""

    as_json: Callable[[], str | bytes]
    as_tables: Callable[[], "RenderableType"]


def _layout(spec: Path) -> _Shown:
    """Raises SpecError."""
    from tide_triton.plan import build_plan, read_spec, render, to_json

    group = read_spec(spec)
    layout = build_plan(group)
    return _Shown(partial(to_json, layout), partial(render, group, layout))


def _memory(
    model: str | None, gpus: int | None, gpus_per_node: int | None, nodes: int | None, layers: int | None
) -> _Shown:
    """Raises SpecError."""
    from tide_triton.layouts import SpecError
    from tide_triton.memory import model_named, plan_memory, topology_of
    from tide_triton.memory_show import render, to_json

    if model is None:
        raise SpecError(
            "give --spec FILE for a layout, or --model NAME and --gpus N or --nodes M for the memory of training"
        )
    spec = model_named(model)
    if nodes is not None:
        if nodes < 1:
            raise SpecError(f"nodes must be at least 1, got {nodes}")
        there = nodes * (GPUS_PER_NODE if gpus_per_node is None else gpus_per_node)
        if gpus is not None and gpus != there:
            raise SpecError(f"--gpus {gpus} is not --nodes {nodes} of {there // nodes} GPUs; leave --gpus out")
        gpus, gpus_per_node = there, there // nodes
    if gpus is None:
        raise SpecError(
            f"--model {spec.name} needs --gpus N, the GPUs that it is sharded over, such as --gpus 64, or --nodes M of "
            f"{GPUS_PER_NODE} GPUs"
        )
    topology = topology_of(gpus, max(1, min(gpus, GPUS_PER_NODE)) if gpus_per_node is None else gpus_per_node)
    memory = plan_memory(spec, topology, layers=layers)
    return _Shown(partial(to_json, memory), partial(render, memory))


def _refuse_beside(option: str, others: Mapping[str, object]) -> None:
    from tide_triton.layouts import SpecError

    for name, value in others.items():
        if value is not None:
            raise SpecError(f"{name} {value} does not go with {option}, which says all; give one of --spec and --model")


def _at_least_two(ranks: int) -> int:
    from tide_triton.demo.runner import MAX_RANKS

    if ranks < 2:
        raise typer.BadParameter(
            f"FSDP2 has nothing to communicate with fewer than 2 ranks; give 2 or more, not {ranks}"
        )
    if ranks > MAX_RANKS:
        raise typer.BadParameter(f"each rank is a process of this machine; give at most {MAX_RANKS}, not {ranks}")
    return ranks


def _writable(path: Path | None) -> Path | None:
    from tide_triton.demo.files import require_writable

    return _checked(path, require_writable)


def _plottable(path: Path | None) -> Path | None:
    from tide_triton.demo.files import require_plottable

    return _checked(path, require_plottable)


def _checked(path: Path | None, check: Callable[[Path], None]) -> Path | None:
    try:
        if path is not None:
            check(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return path


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes to train on.", callback=_at_least_two)] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 30,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", callback=_writable, help="Write the results as JSON.")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", callback=_plottable, help="Draw both losses, as .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Train a small GPT with stock FSDP2 and with TIDE, and compare losses, bytes and buffers.

    A third training adds gradients in rank order: TIDE must equal it bit for bit, or the exit code is 1.

    Runs anywhere: the ranks are processes of this machine, and the text is in every Python.
    """
    if json_file is not None and plot_file is not None and json_file.resolve() == plot_file.resolve():
        raise typer.BadParameter(f"--json and --plot both name {json_file}; give them files of their own")
    from rich.console import Console

    from tide_triton.demo.processes import RankFailedError
    from tide_triton.demo.runner import run
    from tide_triton.demo.show import plot, progress, summary

    try:
        with progress(Console(stderr=True), ranks, steps) as hear:
            results = run(ranks, steps, hear)
    except RankFailedError as error:
        typer.echo(f"{error.trace}error: {error}", err=True)
        raise typer.Exit(1) from None
    Console(width=None if sys.stdout.isatty() else UNBOUNDED_COLUMNS).print(summary(results))
    if json_file is not None:
        json_file.write_text(results.model_dump_json(indent=2) + "\n")
    if plot_file is not None:
        plot(results, plot_file)
        typer.echo(f"both losses are drawn in {plot_file}")
    else:
        typer.echo("give --plot FILE.png to see both losses drawn")
    if not results.equals_reference:
        typer.echo("error: TIDE is not bitwise equal to the rank-ordered reference", err=True)
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `tide` console script."""
    app(prog_name="tide")


if __name__ == "__main__":
    main()
