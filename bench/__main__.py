"""`python -m bench kernels|all_gather|reduce_scatter|interference|step|memory|all`.

Starts one process per GPU, or joins those of torchrun. Results go to bench/results/<machine>/ as JSON and plots. A row
that is measured again (of the same model, tokens, ...) replaces the one before, whatever its transport and variants
were; others stay.
"""

import math
import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

VARIANTS = "floor,stock,symm,tide"
ALL_VARIANTS = "floor,stock,symm,tide,tide_ring,tide_early"

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model of tide_triton.models, or tiny-llama, tiny-wan, tiny-qwen. Repeatable."),
]
Tokens = Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Tokens of each rank. Repeatable.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="In place of bench/results/<machine>.")]
Transport = Annotated[
    str,
    typer.Option(help="TIDE's transport: auto; on GPUs nccl, symm, nccl_rma or nvshmem; else host or host_switch."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of each model, in place of what fits in memory.")]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")]
Variants = Annotated[str, typer.Option(help=f"What to train, comma-separated: {ALL_VARIANTS}.")]


def _run(
    benchmarks: tuple[str, ...],
    out: Path | None,
    models: list[str] | None,
    transport: str = "auto",
    *,
    tokens: list[int] | None = None,
    layers: int | None = None,
    steps: int = 8,
    variants: str = VARIANTS,
    nodes: int = 1,
    budget_s: float = 590.0,
) -> None:
    from bench import cases, results
    from tide_triton.layouts import SpecError

    try:
        cases.models_named(models or [])
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise typer.BadParameter(f"must be a number of seconds above 0, got {budget_s}", param_hint="--budget")
    chosen = _chosen(variants)
    _check_transport(transport, nodes)
    from bench import runner

    options = runner.Options(
        tuple(dict.fromkeys(models or ())), transport, tuple(tokens or ()), layers, steps, chosen, nodes
    )
    folder = out or Path(__file__).parent / "results" / results.machine()
    _check_folder(folder, benchmarks)
    if not runner.run(benchmarks, folder, options, budget_s=budget_s):
        raise typer.Exit(1)


def _chosen(text: str) -> tuple[str, ...]:
    known = ALL_VARIANTS.split(",")
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        raise typer.BadParameter(f"{unknown or text!r}: choose from {ALL_VARIANTS}", param_hint="--variants")
    return chosen


def _check_folder(folder: Path, benchmarks: tuple[str, ...]) -> None:
    """Before anything is measured: that results can be kept there, beside those that are."""
    from bench import results

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
        for benchmark in benchmarks:
            results.read(folder / f"{benchmark}.json")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _check_transport(transport: str, nodes: int) -> None:
    import torch

    from bench import all_gather, ranks
    from tide_triton.transports import select

    device = torch.device(ranks.device_type())
    try:
        select.check(transport, device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--transport") from None
    if nodes == 1:
        return
    if ranks.rank_count() % nodes:
        raise typer.BadParameter(
            f"{nodes} does not divide the {ranks.rank_count()} ranks here; start more of them with torchrun, or give "
            f"fewer nodes",
            param_hint="--nodes",
        )
    between = all_gather.BETWEEN_NODES[device.type]
    if transport not in ("auto", *between):
        raise typer.BadParameter(
            f"{transport!r} does not put between nodes; give auto, {' or '.join(between)}", param_hint="--transport"
        )


@app.command()
def kernels(out: Out = None) -> None:
    """`place` and `accumulate` alone: bandwidth and SM-time, by CTAs and ranks."""
    _run(("kernels",), out, None)


@app.command("all_gather")
def all_gather(
    model: Models = None,
    out: Out = None,
    transport: Transport = "auto",
    nodes: Annotated[
        int, typer.Option(min=1, help="Time it between so many logical nodes instead, by nccl_rma and nvshmem.")
    ] = 1,
) -> None:
    """All-gather of a block: stock, symm and TIDE against the link's limit."""
    _run(("nodes",) if nodes > 1 else ("all_gather",), out, model, transport, nodes=nodes)


@app.command("reduce_scatter")
def reduce_scatter(model: Models = None, out: Out = None, transport: Transport = "auto") -> None:
    """Reduce-scatter of a block: time and SM-time of stock, symm and TIDE."""
    _run(("reduce_scatter",), out, model, transport)


@app.command()
def interference(model: Models = None, out: Out = None, transport: Transport = "auto") -> None:
    """A single-wave GEMM beside each collective of a block."""
    _run(("interference",), out, model, transport)


@app.command()
def step(
    model: Models = None,
    tokens: Tokens = None,
    out: Out = None,
    transport: Transport = "auto",
    layers: Layers = None,
    steps: Steps = 8,
    variants: Variants = VARIANTS,
) -> None:
    """Training steps: the floor without FSDP, stock, symm and TIDE."""
    _run(
        ("step",),
        out,
        model,
        transport,
        tokens=tokens,
        layers=layers,
        steps=steps,
        variants=variants,
    )


@app.command()
def memory(
    model: Models = None,
    tokens: Tokens = None,
    out: Out = None,
    transport: Transport = "auto",
    layers: Layers = None,
) -> None:
    """Memory in use on each GPU: stock, symm and TIDE's ways, beside the plan; and the reduce-scatter's buffer."""
    _run(("memory",), out, model, transport, tokens=tokens, layers=layers)


@app.command("all")
def everything(
    model: Models = None,
    tokens: Tokens = None,
    out: Out = None,
    transport: Transport = "auto",
    layers: Layers = None,
    steps: Steps = 8,
    variants: Variants = VARIANTS,
    budget: Annotated[float, typer.Option(help="Seconds for all of them; what does not fit is cut off.")] = 590.0,
) -> None:
    """All of them, one after the other, each in processes of its own."""
    _run(
        ("kernels", "all_gather", "reduce_scatter", "interference", "step", "memory"),
        out,
        model,
        transport,
        tokens=tokens,
        layers=layers,
        steps=steps,
        variants=variants,
        budget_s=budget,
    )


@app.command()
def show(folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Where results are.")]) -> None:
    """Print and draw results again, e.g. those of a machine that cannot draw."""
    from bench import runner

    try:
        _, undrawn = runner.show(runner.BENCHMARKS, folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for problem in undrawn:
        typer.echo(f"error: {problem}", err=True)


if __name__ == "__main__":
    app(prog_name="python -m bench")
