"""The library interface: an engine inside a program of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishard.array.device import operations
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.launch import communicator, leave_together
from mpishard.comm.together import same_on_all_ranks, together
from mpishard.errors import ConfigError, MpishardError
from mpishard.nn.model import Model
from mpishard.shard.dealing import deal
from mpishard.shard.engine import Engine
from mpishard.shard.results import Optimizer
from mpishard.shard.schedule import RECOMPUTE, STRATEGIES, Settings

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["full_shard"]

_DTYPES = ("float32", "float64", "bfloat16")
#: the command line's words for them
_SHORT = {"fp32": "float32", "bf16": "bfloat16"}


def full_shard(
    model: Model,
    optimizer: Optimizer | None,
    comm: MPI.Intracomm | Communicator | None = None,
    *,
    global_batch: int,
    micro_batch: int = 1,
    seed: int = 0,
    strategy: str = "full_shard",
    prefetch: int = 1,
    recompute: str = "none",
    dtype: str = "float32",
    device: str = "auto",
    transport: str = "auto",
    poison: bool = False,
) -> Engine:
    """Return an engine that trains ``model`` with every rank of ``comm`` holding 1/N of it. Collective.

    Args:
        model: units and stages, such as ``gpt2(sizes)`` returns.
        optimizer: such as ``AdamW()``; None for an engine that only evaluates and predicts.
        comm: an mpi4py intracommunicator, which is duplicated once: messages of the program never meet the engine's;
            a Communicator of mpishard, which stays the caller's; None for one rank without MPI.
        global_batch, micro_batch: samples of a step and of one forward and backward; a step's micro-batches
            are dealt to the ranks in turn, so the ranks must divide their number.
        seed: of initial values and dropout; no number depends on how many ranks there are.
        strategy: ``full_shard`` (ZeRO-3; Rajbhandari et al. 2020, section 5), or ``no_shard``, replicated.
        prefetch: units that are gathered ahead of the one that computes.
        recompute: ``none``, or ``block``: stages keep only their input for backward (Chen et al. 2016).
        dtype: float32 or float64, of parameters, gradients and activations; bfloat16 computes in 16 bits and keeps
            masters, gradient shards and moments in float32.
        device: ``cpu``, ``cuda`` (one GPU a rank), or ``auto``: cuda where CuPy finds a GPU. Feeds and what the engine
            returns are NumPy arrays all the same.
        transport: how GPUs talk: ``mpi`` (needs a GPU-aware MPI), ``staged``, ``nccl``, or ``auto``; see docs/gpus.md.
            A Communicator brings its device and transport with it.
        poison: fill released memory with NaN; slow, finds layers that read what they must not.

    Nothing is installed in the process: exceptions, signals and output remain the program's. An exception on
    one rank leaves the others waiting; ``mpishard.install_abort_hook(engine.comm)`` makes it end them all. The
    engine of a rank where a step failed takes no further one. A rank whose
    program ends before the engine is closed waits for the others at its exit, and they are told where it is.

    Raises:
        ConfigError: on every rank, when an argument is wrong or the ranks give different ones.
        CommError: on every rank, when models or optimisers differ.
    """

    def make_ops(local_rank: int | None) -> Ops:
        return operations(device, local_rank)

    dtype = _SHORT.get(dtype, dtype)
    if isinstance(comm, Communicator) and device != "auto":
        raise ConfigError(f"device is {device!r} and comm is a Communicator, which brings its own; leave it out")
    ranks = communicator(comm, make_ops, transport)
    numbers = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed, "prefetch": prefetch}
    words = {"strategy": strategy, "recompute": recompute, "dtype": dtype}

    def settings() -> Settings:
        if not isinstance(model, Model):
            raise ConfigError(f"model is {_kind(model)}; give a Model, such as gpt2(sizes) returns")
        _check_optimizer(optimizer)
        for name, value in numbers.items():
            _check_number(name, value, least=0 if name in ("seed", "prefetch") else 1)
        for name, known in (("strategy", STRATEGIES), ("recompute", RECOMPUTE), ("dtype", _DTYPES)):
            if words[name] not in known:
                raise ConfigError(f"{name} is {words[name]!r}; it must be one of {', '.join(known)}")
        deal(global_batch, micro_batch, ranks.size)
        return Settings(strategy, prefetch, recompute)

    try:
        found = together(ranks, settings)
        same_on_all_ranks(ranks, [f"{name} = {value}" for name, value in (numbers | words).items()])
        engine = Engine(
            model,
            ranks,
            ranks.ops,
            optimizer,
            found,
            micro_batch=micro_batch,
            global_batch=global_batch,
            seed=seed,
            dtype_name=dtype,
            poison=poison,
        )
    except MpishardError:  # raised on all ranks alike, so what was duplicated can be given back together
        if ranks is not comm:
            ranks.close()
        raise
    engine.owns_comm = ranks is not comm
    if engine.owns_comm:
        leave_together(ranks)
    return engine


def _kind(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _check_optimizer(optimizer: object) -> None:
    needed = ("states", "decay", "clip", "update")
    if isinstance(optimizer, type):
        raise ConfigError(f"optimizer is {_kind(optimizer)}; give an object of it: {optimizer.__name__}()")
    if optimizer is not None and (missing := [name for name in needed if not hasattr(optimizer, name)]):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)} without {', '.join(missing)}; give one such as AdamW(), "
            "or None to evaluate only"
        )


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    if not least <= value < 2**63:
        raise ConfigError(f"{name} is {value}; it must be {least} or more, and below 2**63")
