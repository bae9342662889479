"""From settings to a run that is ready to train: everything that can be refused is refused here, by all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from mpishard.checkpoint import load, load_weights, newest, read_manifest
from mpishard.comm.base import Communicator
from mpishard.comm.together import on_rank_zero, together
from mpishard.comm.tuning import FILE as TUNING
from mpishard.comm.tuning import keep, tune
from mpishard.comm.watch import Watch
from mpishard.data.loader import Batches
from mpishard.errors import CheckpointError, ConfigError
from mpishard.shard.entry import WAITS
from mpishard.shard.traced import traced_steps
from mpishard.train.batches import open_data
from mpishard.train.config import check_ranks, dump_toml
from mpishard.train.directory import RunDirectory, checkpoints, locked
from mpishard.train.keeper import Keeper
from mpishard.train.loop import Reporter, Run, Stopper
from mpishard.train.model import sizes_of
from mpishard.train.prepare import introduce, make_engine, prepare
from mpishard.train.public import check_weights
from mpishard.train.resume import Resumed
from mpishard.train.room import check_room
from mpishard.train.sections import Config
from mpishard.train.tracing import Tracer

__all__ = ["configuration_of", "run"]


def configuration_of(config: Config, training: Batches) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of the run."""
    return {"settings": config.model_dump(), "training_file": training.file.identity.hex()}


def run(
    config: Config,
    run_dir: Path,
    comm: Communicator,
    *,
    resumed: Resumed | None = None,
    stopper: Stopper = str,
    reporter: Reporter | None = None,
) -> int:
    """Train, save, report, and return the exit code. Collective.

    Args:
        resumed: go on from there; in ``run_dir`` if it holds the checkpoint, else ``run_dir`` is new.
        stopper: asked at each step whether to end, and why.
        reporter: reports at the end on the memory that was in use at each instruction, which is then noted.

    Raises:
        ConfigError: on all ranks, for what the user can mend; nothing that was there is changed.
    """
    check_ranks(config, comm.size)
    goes_on = resumed is not None and resumed.run is not None and resumed.run.resolve() == run_dir.resolve()
    lock = on_rank_zero(comm, lambda: _claim(run_dir, resumed if goes_on else None))
    with lock or nullcontext():
        _run(config, run_dir, comm, resumed, stopper, goes_on, lock, reporter)
    return 0


def _run(
    config: Config,
    run_dir: Path,
    comm: Communicator,
    resumed: Resumed | None,
    stopper: Stopper,
    goes_on: bool,
    lock: TextIO | None,
    reporter: Reporter | None,
) -> None:
    prepared = prepare(config, comm)
    together(comm, lambda: check_room(prepared.held, comm.node.local_size, comm.ops, prepared.forecast.host))
    training, heldout = open_data(config, run_dir, comm)
    if resumed is not None:
        resumed.check(config, training)
    if config.model.init_from and resumed is None:
        together(comm, lambda: check_weights(config.model))
    if comm.rank == 0:
        introduce(config, comm, prepared, f"{len(training.file):,} training and {len(heldout.file):,} held-out tokens")
    tune(comm, run_dir / TUNING)
    engine = make_engine(config, comm, prepared, ledger=reporter is not None)
    if resumed is not None:
        load(engine, resumed.path)
        if (scale := engine.loss_scale) is not None and resumed.changed(config, "precision", "scale"):
            scale.restore({"scale": config.precision.scale, "good": 0})
    elif config.model.init_from:
        load_weights(engine, Path(config.model.init_from))
    done = engine.steps if goes_on else None
    # Nothing is written for a run that cannot start.
    directory = on_rank_zero(comm, lambda: RunDirectory(run_dir, dump_toml(config), done, lock))
    keep(comm, run_dir / TUNING)
    if comm.rank == 0 and resumed is not None:
        print(f"goes on after step {engine.steps}, from {resumed.path}", flush=True)
        for change in resumed.changes(config):
            print(f"changed: {change}", flush=True)
    elif comm.rank == 0 and config.model.init_from:
        print(f"begins with the weights of {config.model.init_from}", flush=True)
    told = configuration_of(config, training)
    keeper = Keeper(engine, checkpoints(run_dir), config.checkpoint, told, sizes_of(config.model))
    limits = {"silence": config.comm.silence, "stall": config.comm.stall}
    with Watch(comm, run_dir / "ranks", waits=WAITS, **limits) as watch:
        engine.note = engine.entry.note = keeper.note = watch.note
        steps = traced_steps(config.debug.trace)
        tracer = Tracer(engine, run_dir, *steps) if steps is not None else None

        def at_step(step: int) -> None:
            watch.at_step(step)
            if tracer is not None:
                tracer.at_step(step)

        session = Run(
            config, engine, training, heldout, prepared, directory, keeper, stopper, at_step, reporter
        )
        try:
            if directory is None:
                session.train()
            else:
                with directory:
                    session.train()
            if tracer is not None:
                tracer.finish()
        except CheckpointError:
            raise  # by all ranks alike
        except (ConfigError, OSError) as error:
            # One rank has found this, in the middle of a step or while it wrote: the others wait in a collective.
            if isinstance(error, BrokenPipeError):
                raise
            comm.abort(f"mpishard: {_line(error)}", 2)


def _claim(run_dir: Path, resumed: Resumed | None) -> TextIO | None:
    """Refuse a directory that holds another run, or a newer checkpoint than the one to go on from.

    A run that goes on holds the lock from here on: what is newest now remains so.
    """
    if resumed is None:
        RunDirectory.refuse(run_dir)
        return None
    lock = locked(run_dir)
    last = newest(checkpoints(run_dir))
    if last is not None and read_manifest(last).step > resumed.manifest.step:
        lock.close()
        raise ConfigError(
            f"{resumed.path}: is older than {last.name} in the same run; resume that one, or choose another --run-dir "
            "for the run that branches off"
        )
    return lock


def _line(error: ConfigError | OSError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    where = error.filename or "the run's output"
    return f"{where}: cannot be written ({error.strerror}); make room, or choose another --run-dir"
