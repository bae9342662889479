"""The library interface: an engine inside a program of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishard.array.device import operations
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.launch import communicator, leave_together
from mpishard.comm.nodes import ranks_of_a_node
from mpishard.comm.together import same_on_all_ranks, together
from mpishard.errors import ConfigError, MpishardError
from mpishard.nn.model import Model
from mpishard.shard.dealing import deal, divisors
from mpishard.shard.engine import Engine
from mpishard.shard.loss_scale import LossScale
from mpishard.shard.precision import precision
from mpishard.shard.results import Optimizer
from mpishard.shard.strategy import ACCUMULATE, ALIASES, RECOMPUTE, STRATEGIES, Settings, canonical

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["full_shard"]

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_OFFLOAD = ("none", "optimizer")
#: arrays and files that are not an optimiser's
_TAKEN = frozenset(("param", "grad", "cast", "resident", "model"))
#: the command line's words for them
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_shard(
    model: Model,
    optimizer: Optimizer | None,
    comm: MPI.Intracomm | Communicator | None = None,
    *,
    global_batch: int,
    micro_batch: int = 1,
    seed: int = 0,
    strategy: str = "full_shard",
    group: int = 0,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    recompute: str = "none",
    recompute_every: int = 1,
    accumulate: str = "reduce",
    dtype: str = "float32",
    reduce_dtype: str = "",
    loss_scale: LossScale | str | None = "dynamic",
    offload: str = "none",
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
        strategy: what each rank holds 1/N of (Rajbhandari et al. 2020, section 5): ``full_shard`` (or ``zero3``)
            everything, ``shard_grad_op`` (``zero2``) and ``shard_optimizer`` (``zero1``) gradients and moments,
            ``no_shard`` (``ddp``) nothing; or ``hybrid_shard``, everything inside groups (Zhao et al. 2023, 3.2.2).
        group: ranks of a group of ``hybrid_shard``, which follow one another; 0 for the ranks of a node.
        prefetch: units that are gathered ahead of the one that computes.
        reshard_after_forward: False keeps what ``full_shard`` and ``hybrid_shard`` gathered until its backward.
        recompute: ``none``, or ``block``: stages keep only their input for backward (Chen et al. 2016).
        recompute_every: of these stages, every how many-th does so.
        accumulate: ``reduce`` adds each micro-batch's gradient to the shards; ``no_sync`` keeps whole gradients and
            reduces once a step.
        dtype: float32 or float64, of parameters, gradients and activations; bfloat16 and float16 compute in 16 bits
            and keep masters, gradient shards and moments in float32.
        reduce_dtype: of gradients on their way between ranks; empty for ``dtype``. Sums are float32 all the same.
        loss_scale: of float16: ``dynamic``, a ``LossScale`` of one's own, or None for no scaling. The engine moves it.
        offload: ``optimizer`` keeps masters and moments in host memory, where arrays are on a GPU.
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

    # What is no text waits for the other ranks to hear of it.
    dtype, reduce_dtype = (_SHORT.get(word, word) if isinstance(word, str) else word for word in (dtype, reduce_dtype))
    strategy = canonical(strategy) if isinstance(strategy, str) else strategy
    given_ranks = isinstance(comm, Communicator)
    ranks = comm if isinstance(comm, Communicator) else communicator(comm, make_ops, transport)
    numbers = {
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "seed": seed,
        "prefetch": prefetch,
        "group": group,
        "recompute_every": recompute_every,
    }
    words = {
        "strategy": (strategy, STRATEGIES),
        "recompute": (recompute, RECOMPUTE),
        "accumulate": (accumulate, ACCUMULATE),
        "dtype": (dtype, _DTYPES),
        "reduce_dtype": (reduce_dtype, ("", *_DTYPES)),
        "offload": (offload, _OFFLOAD),
    }

    def settings() -> tuple[Settings, LossScale | None]:
        if not isinstance(model, Model):
            raise ConfigError(f"model is {_kind(model)}; give a Model, such as gpt2(sizes) returns")
        _check_optimizer(optimizer)
        for name, own in (("device", device), ("transport", transport)):
            if given_ranks and own != "auto":
                raise ConfigError(f"{name} is {own!r} and comm is a Communicator, which brings its own; leave it out")
        for name, value in numbers.items():
            _check_number(name, value, least=0 if name in ("seed", "prefetch", "group") else 1)
        for name, (word, known) in words.items():
            if not isinstance(word, str) or word not in known:
                more = f", or {', '.join(ALIASES)}" if name == "strategy" else ""
                raise ConfigError(f"{name} is {word!r}; it must be one of {', '.join(filter(None, known))}{more}")
        made = Settings(
            strategy,
            prefetch,
            recompute,
            recompute_every=recompute_every,
            reshard_after_forward=reshard_after_forward,
            accumulate=accumulate,
            group=group,
        )
        _check_together(made, ranks)
        deal(global_batch, micro_batch, ranks.size)
        if offload != "none" and ranks.ops.device == "cpu":
            raise ConfigError(
                f"offload is {offload!r} and the device is the CPU, where all memory is the host's; leave it out"
            )
        return made, _scale(loss_scale, precision(dtype, reduce_dtype).overflows)

    try:
        found, scale = together(ranks, settings)
        given: dict[str, object] = {**numbers, **{name: word for name, (word, _) in words.items()}}
        given |= {"reshard_after_forward": reshard_after_forward, "loss_scale": scale}
        same_on_all_ranks(ranks, [f"{name} = {value}" for name, value in given.items()])
        if found.hybrid and not found.group:
            ranks_of_a_node(ranks, "group is 0, the ranks of a node,")
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
            reduce_dtype=reduce_dtype,
            loss_scale=scale,
            offload=offload,
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


def _check_together(settings: Settings, ranks: Communicator) -> None:
    """Refuse settings that have no meaning beside the others."""
    group, strategy = settings.group, settings.strategy
    if not isinstance(settings.reshard_after_forward, bool):
        raise ConfigError(f"reshard_after_forward is {settings.reshard_after_forward!r}; it must be True or False")
    if not settings.reshard_after_forward and settings.resident:
        raise ConfigError(
            f"reshard_after_forward is False and strategy is {strategy!r}, which gathers nothing for a forward; "
            "leave it out, or take full_shard"
        )
    if settings.recompute_every > 1 and settings.recompute != "block":
        raise ConfigError(
            f"recompute_every is {settings.recompute_every} and recompute is {settings.recompute!r}; it chooses among "
            "stages: leave it out, or take recompute='block'"
        )
    if group and not settings.hybrid:
        raise ConfigError(
            f"group is {group} and strategy is {strategy!r}; only hybrid_shard has groups: leave it out, or take that"
        )
    if group and ranks.size % group:
        raise ConfigError(f"group is {group} and does not divide {ranks.size} ranks; use {divisors(ranks.size)}")


def _scale(given: LossScale | str | None, overflows: bool) -> LossScale | None:
    """Return the loss scale that was asked for, where gradients pass through float16."""
    if isinstance(given, str):
        if given != "dynamic":
            raise ConfigError(f"loss_scale is {given!r}; it must be 'dynamic', a LossScale, or None for no scaling")
        return LossScale() if overflows else None
    if given is not None and not isinstance(given, LossScale):
        raise ConfigError(
            f"loss_scale is {given!r}; it must be 'dynamic', a LossScale such as LossScale(65536, dynamic=False), or "
            "None for no scaling"
        )
    if given is not None and not overflows:
        raise ConfigError("loss_scale is a LossScale and there is no float16 in dtype and reduce_dtype; leave it out")
    return given


def _check_optimizer(optimizer: object) -> None:
    needed = ("states", "decay", "clip", "update")
    if isinstance(optimizer, type):
        raise ConfigError(f"optimizer is {_kind(optimizer)}; give an object of it: {optimizer.__name__}()")
    if optimizer is not None and (missing := [name for name in needed if not hasattr(optimizer, name)]):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)} without {', '.join(missing)}; give one such as AdamW(), "
            "or None to evaluate only"
        )
    states = getattr(optimizer, "states", ())
    if not isinstance(states, tuple | list) or not all(isinstance(one, str) and one.isidentifier() for one in states):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)} whose states are {states!r}; they must be a tuple of names, "
            "such as ('exp_avg', 'exp_avg_sq')"
        )
    if wrong := [name for name in states if name in _TAKEN or states.count(name) > 1]:
        raise ConfigError(
            f"optimizer is {_kind(optimizer)} whose states are {states!r}; each needs a name of its own, and "
            f"{', '.join(sorted(_TAKEN))} are the engine's: rename {wrong[0]}"
        )


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    if not least <= value < 2**63:
        raise ConfigError(f"{name} is {value}; it must be {least} or more, and below 2**63")
