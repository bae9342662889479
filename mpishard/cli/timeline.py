"""``mpishard timeline``."""

from __future__ import annotations

from pathlib import Path

import click

from mpishard.errors import ConfigError

__all__ = ["timeline"]


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--step", type=int, metavar="N", help="The step that the picture shows; by default the last one timed.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg or .pdf.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all steps as a trace file (JSON) that https://ui.perfetto.dev opens.",
)
def timeline(run: Path, step: int | None, plot: Path | None, perfetto: Path | None) -> int:
    """Say what each rank computed, what it waited for, and which rank the others waited for.

    RUN is the directory of a run of mpishard train --trace STEPS. The picture and the trace file show what the schedule
    planned beside what each rank did.
    """
    from mpishard.launched import environment_rank
    from mpishard.pictures import check_picture
    from mpishard.timeline.perfetto import write_trace
    from mpishard.timeline.picture import draw
    from mpishard.timeline.reading import read_run
    from mpishard.timeline.summary import lines, summarise

    if environment_rank() not in (None, 0):
        return 0
    if plot is not None:
        check_picture(plot)
    traces = read_run(run)
    numbers = [each.number for each in traces[0].steps]
    if step is not None and step not in numbers:
        raise ConfigError(f"--step is {step}; {run} has times of step {', '.join(map(str, numbers))}")
    if step is not None and plot is None:
        raise ConfigError("--step chooses what --plot draws, and --plot was not given; give both or leave it out")
    click.echo("\n".join(lines(summarise(traces), traces)))
    if plot is not None:
        draw(traces, numbers.index(step) if step is not None else len(numbers) - 1, plot)
        click.echo(f"written: {plot}")
    if perfetto is not None:
        write_trace(traces, perfetto)
        click.echo(f"written: {perfetto}")
    return 0
