"""The `tide` command.

Each command is a small function that imports what it runs only when it is called, so that `tide --help` and `tide plan`
start without torch. What the user can mend ends in one message on stderr and exit code 2, under `mendable`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

#: Exit code where the input is refused, as for a misspelt option.
REFUSED = 2

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
        Path,
        typer.Option(
            "--spec",
            metavar="FILE",
            help='JSON: {"world_size": 3, "tensors": [{"name": "w", "shape": [7, 3], "dtype": "bfloat16", '
            '"shard_dim": 0}]}. shard_dim may be left out.',
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON instead of tables.")] = False,
) -> None:
    """Show where tensors lie in a slot, which bytes each rank owns, and what an all-gather copies.

    Runs anywhere: nothing is allocated and no GPU is needed.
    """
    from tide_triton.plan import build_plan, read_spec, render, to_json

    with mendable():
        group = read_spec(spec)
        layout = build_plan(group)
    if as_json:
        typer.echo(to_json(layout))
    else:
        from rich.console import Console

        # A pipe or a file has no width of its own: give long parameter names the room that rich's 80 would not.
        width = None if sys.stdout.isatty() else UNBOUNDED_COLUMNS
        Console(width=width).print(render(group, layout))


def main() -> None:
    """Entry point of the `tide` console script."""
    app(prog_name="tide")


if __name__ == "__main__":
    main()
