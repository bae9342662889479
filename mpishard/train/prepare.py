"""What a run is made of, before any memory is taken: model, optimiser, schedule settings and the memory plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from mpishard.array.device import choose
from mpishard.comm.base import Communicator
from mpishard.comm.together import together
from mpishard.nn.model import Model
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.forecast import Forecast
from mpishard.shard.schedule import Settings
from mpishard.train.config import check_ranks
from mpishard.train.display import size
from mpishard.train.model import build_model
from mpishard.train.room import LESS, planned, thread_warning
from mpishard.train.sections import Config
from mpishard.train.settings import in_words, loss_scale_of, places_of, settings_of, types_of

__all__ = ["Prepared", "introduce", "make_engine", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """What a run is made of.

    Attributes:
        forecast: this rank's memory, to the byte.
        unsharded: bytes by category that a rank would hold where nothing is sharded.
    """

    model: Model
    optimizer: AdamW
    settings: Settings
    forecast: Forecast
    unsharded: dict[str, int]

    @property
    def held(self) -> int:
        """Bytes that this rank will hold."""
        return self.forecast.total


def prepare(config: Config, comm: Communicator, *, alone: bool = False) -> Prepared:
    """Return what the run of a configuration is made of, and tell the communicator how to add up. Collective.

    Args:
        alone: as in :func:`~mpishard.train.settings.places_of`.

    Raises:
        ConfigError: on all ranks, where the settings do not fit the ranks or the machine.
    """
    optim = config.optim
    model = build_model(config.model, recompute_attention=config.shard.recompute == "attention")
    optimizer = AdamW(optim.beta1, optim.beta2, optim.eps, optim.decay, optim.clip)
    places = places_of(config, comm, alone=alone)
    comm.bracket = places.bracket
    comm.shares_gathered = comm.shares_gathered and config.comm.share_gathered and not config.debug.poison
    settings = settings_of(config, check_ranks(config, comm.size), places.group)
    types = types_of(config.precision)

    def plan(settings: Settings) -> Forecast:
        batch, offload = config.train.micro_batch, config.shard.offload
        return planned(model, comm, optimizer, settings, batch, types, offload)

    found = together(comm, lambda: plan(settings))
    whole = replace(settings, strategy="no_shard", group=0, reshard_after_forward=True)
    unsharded = together(comm, lambda: plan(whole))
    return Prepared(model, optimizer, settings, found, dict(unsharded.held))


def make_engine(config: Config, comm: Communicator, prepared: Prepared, *, ledger: bool = False) -> Engine:
    """Return the engine of a run, with its memory taken. Collective.

    Args:
        ledger: note the memory in use at each instruction.
    """
    kind, wire = types_of(config.precision)
    try:
        return Engine(
            prepared.model,
            comm,
            comm.ops,
            prepared.optimizer,
            prepared.settings,
            micro_batch=config.train.micro_batch,
            global_batch=config.train.global_batch,
            seed=config.train.seed,
            dtype_name=kind,
            reduce_dtype=wire,
            loss_scale=loss_scale_of(config.precision),
            offload=config.shard.offload,
            ledger=ledger,
            poison=config.debug.poison,
        )
    except MemoryError:
        # One rank may fail alone, and the others would wait for it.
        comm.abort(f"mpishard: rank {comm.rank} cannot get the {size(prepared.held)} that it needs; {LESS}", 2)
        raise


def introduce(config: Config, comm: Communicator, prepared: Prepared, data: str) -> None:
    """Say what is about to be trained, before any memory is taken for it; ``data`` in words."""
    device, host = comm.ops.device, prepared.forecast.host
    held = f"{size(prepared.held)} and {size(host)} of host memory" if host else size(prepared.held)
    device = f"{device} on rank 0" if comm.size > 1 and device != "cpu" else device
    print(
        f"mpishard: {prepared.model.parameters:,} parameters, {comm.size} rank{'s' if comm.size > 1 else ''} "
        f"({comm.transport}), {in_words(config, prepared.settings)}\n"
        f"device: {device} ({choose(config.device.kind).why}); transport: {comm.describe()}\n"
        f"data: {data}; memory: {held} a rank, {size(sum(prepared.unsharded.values()))} unsharded",
        flush=True,
    )
    if comm.ops.device == "cpu" and (warning := thread_warning(comm.node.local_size)):
        print(f"mpishard: warning: {warning}", file=sys.stderr, flush=True)
