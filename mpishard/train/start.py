"""From settings to a run that is ready to train: everything that can be refused is refused here, by all ranks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from mpishard.array.device import choose
from mpishard.checkpoint import load, load_weights, newest, read_manifest
from mpishard.comm.base import Communicator
from mpishard.comm.together import on_rank_zero, same_on_all_ranks, together
from mpishard.comm.watch import Watch
from mpishard.data.corpus import ensure_default_corpus
from mpishard.data.loader import Batches
from mpishard.errors import CheckpointError, ConfigError
from mpishard.nn.model import Model
from mpishard.optim.adamw import AdamW
from mpishard.shard.dealing import deal
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings
from mpishard.train.config import check_ranks, dump_toml
from mpishard.train.directory import RunDirectory, checkpoints, locked
from mpishard.train.display import size
from mpishard.train.keeper import Keeper
from mpishard.train.loop import Run, Stopper
from mpishard.train.model import build_model, sizes_of
from mpishard.train.public import check_weights
from mpishard.train.resume import Resumed
from mpishard.train.room import LESS, check_room, planned_memory, thread_warning
from mpishard.train.sections import DTYPES, Config

__all__ = ["configuration_of", "run"]


def configuration_of(config: Config, training: Batches) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of the run."""
    return {"settings": config.model_dump(), "training_file": training.file.identity.hex()}


def run(
    config: Config, run_dir: Path, comm: Communicator, *, resumed: Resumed | None = None, stopper: Stopper = str
) -> int:
    """Train, save, report, and return the exit code. Collective.

    Args:
        resumed: go on from there; in ``run_dir`` if it holds the checkpoint, else ``run_dir`` is new.
        stopper: asked at each step whether to end, and why.

    Raises:
        ConfigError: on all ranks, for what the user can mend; nothing that was there is changed.
    """
    check_ranks(config, comm.size)
    goes_on = resumed is not None and resumed.run is not None and resumed.run.resolve() == run_dir.resolve()
    lock = on_rank_zero(comm, lambda: _claim(run_dir, resumed if goes_on else None))
    with lock or nullcontext():
        _run(config, run_dir, comm, resumed, stopper, goes_on, lock)
    return 0


def _run(
    config: Config,
    run_dir: Path,
    comm: Communicator,
    resumed: Resumed | None,
    stopper: Stopper,
    goes_on: bool,
    lock: TextIO | None,
) -> None:
    optim, train, sizes = config.optim, config.train, sizes_of(config.model)
    model = build_model(config.model)
    optimizer = AdamW(optim.beta1, optim.beta2, optim.eps, optim.decay, optim.clip)
    micros = deal(train.global_batch, train.micro_batch, comm.size)
    settings = Settings(config.shard.strategy, config.shard.prefetch, config.shard.recompute, micros)

    kind = DTYPES[config.precision.compute]

    def plan(settings: Settings) -> dict[str, int]:
        return planned_memory(model, comm, optimizer, settings, train.micro_batch, kind)

    held = together(comm, lambda: plan(settings))
    together(comm, lambda: check_room(sum(held.values()), comm.node.local_size, comm.ops))
    unsharded = together(comm, lambda: plan(replace(settings, strategy="no_shard")))
    training, heldout = _open_data(config, run_dir, comm)
    if resumed is not None:
        resumed.check(config, training)
    if config.model.init_from and resumed is None:
        together(comm, lambda: check_weights(config.model))
    if comm.rank == 0:
        _introduce(config, comm, model, training, heldout, (held, unsharded))
    try:
        engine = Engine(
            model,
            comm,
            comm.ops,
            optimizer,
            settings,
            micro_batch=train.micro_batch,
            global_batch=train.global_batch,
            seed=train.seed,
            dtype_name=kind,
            poison=config.debug.poison,
        )
    except MemoryError:
        # One rank may fail alone, and the others would wait for it.
        comm.abort(f"mpishard: rank {comm.rank} cannot get the {size(sum(held.values()))} that it needs; {LESS}", 2)
        raise
    if resumed is not None:
        load(engine, resumed.path)
    elif config.model.init_from:
        load_weights(engine, Path(config.model.init_from))
    done = engine.steps if goes_on else None
    # Nothing is written for a run that cannot start.
    directory = on_rank_zero(comm, lambda: RunDirectory(run_dir, dump_toml(config), done, lock))
    if comm.rank == 0 and resumed is not None:
        print(f"goes on after step {engine.steps}, from {resumed.path}", flush=True)
        for change in resumed.changes(config):
            print(f"changed: {change}", flush=True)
    elif comm.rank == 0 and config.model.init_from:
        print(f"begins with the weights of {config.model.init_from}", flush=True)
    keeper = Keeper(engine, checkpoints(run_dir), config.checkpoint, configuration_of(config, training), sizes)
    with Watch(comm, run_dir / "ranks", silence=config.comm.silence) as watch:
        engine.note = watch.note
        session = Run(config, engine, training, heldout, unsharded, directory, keeper, stopper, watch.at_step)
        try:
            if directory is None:
                session.train()
            else:
                with directory:
                    session.train()
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


def _introduce(
    config: Config,
    comm: Communicator,
    model: Model,
    training: Batches,
    heldout: Batches,
    planned: tuple[dict[str, int], dict[str, int]],
) -> None:
    """Say what is about to be trained, before any memory is taken for it."""
    shard, device, (held, unsharded) = config.shard, comm.ops.device, planned
    device = f"{device} on rank 0" if comm.size > 1 and device != "cpu" else device
    print(
        f"mpishard: {model.parameters:,} parameters, {comm.size} rank{'s' if comm.size > 1 else ''} "
        f"({comm.transport}), {shard.strategy}, prefetch {shard.prefetch}, recompute {shard.recompute}, "
        f"{config.precision.compute}\n"
        f"device: {device} ({choose(config.device.kind).why}); transport: {comm.describe()}\n"
        f"data: {len(training.file):,} training and {len(heldout.file):,} held-out tokens; "
        f"memory: {size(sum(held.values()))} a rank, {size(sum(unsharded.values()))} unsharded",
        flush=True,
    )
    if comm.ops.device == "cpu" and (warning := thread_warning(comm.node.local_size)):
        print(f"mpishard: warning: {warning}", file=sys.stderr, flush=True)


def _open_data(config: Config, run_dir: Path, comm: Communicator) -> tuple[Batches, Batches]:
    """Open and check the token files; make the default corpus where none are named."""
    paths = Path(config.data.train), Path(config.data.heldout)
    if not config.data.train:
        folder = run_dir / "corpus"
        on_rank_zero(comm, lambda: ensure_default_corpus(folder))
        paths = folder / "train.tokens", folder / "heldout.tokens"
    common: dict[str, int] = {"global_batch": config.train.global_batch, "micro_batch": config.train.micro_batch}
    shape = config.model.sequence, config.model.vocabulary

    def open_both() -> tuple[Batches, Batches]:
        seed = config.train.seed
        both = (
            Batches.open(paths[0], *shape, **common, seed=seed, epochs=config.data.epochs),
            Batches.open(paths[1], *shape, **common, seed=0, epochs=1),
        )
        if comm.node.local_rank == 0:  # the file may be another one on each node
            for batches in both:
                batches.file.verify()
        return both

    opened = together(comm, open_both)
    names = ("training", "held-out")
    same_on_all_ranks(comm, [f"{name} file {b.file.identity.hex()}" for name, b in zip(names, opened, strict=True)])
    return opened
