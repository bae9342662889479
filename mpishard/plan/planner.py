"""Plans of one job on many numbers of ranks: each is made once, whoever asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mpishard.array.arena import CATEGORIES
from mpishard.array.cupy_blas import workspace_bytes
from mpishard.array.cupy_launch import SCRATCH as DEVICE_SCRATCH
from mpishard.array.cupy_launch import SMALL_SCRATCH, TABLES
from mpishard.array.numpy_tiles import SCRATCH, WIDE
from mpishard.errors import ArenaError, ConfigError
from mpishard.nn.model import Model
from mpishard.plan.quantities import MOST_RANKS, readable
from mpishard.plan.search import least_ranks, most_samples
from mpishard.plan.sent import SETTLED, sent_in_a_step
from mpishard.shard.forecast import forecast
from mpishard.shard.instructions import Instruction, Outline
from mpishard.shard.layout import layout
from mpishard.shard.outline import outline_of, separated
from mpishard.shard.precision import Precision
from mpishard.shard.schedule import STRATEGIES, Settings, build_step, canonical
from mpishard.shard.steps import Steps, placed, steps_of
from mpishard.shard.strategy import ALIASES
from mpishard.shard.world import World

__all__ = ["KEPT", "MOST_SAMPLES", "PLANNED", "STATE", "Job", "Planner", "planned"]

#: ``full_shard`` without ``reshard_after_forward``
KEPT = "full_shard_kept"
#: what is planned unless something else is asked for, from the most memory a rank to the least
PLANNED = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", KEPT, "hybrid_shard")
#: categories of what more ranks can divide
STATE = ("parameters", "masters", "gradients", "optimizer")
#: as many as a configuration takes
MOST_SAMPLES = 10_000_000
#: bytes a unit by which padding can make a buffer larger
_PADDING = 64 * 1024
#: the compute capability whose cuBLAS takes most
_HOPPER = 90
_TOO_LARGE = 1 << 62


def planned(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return strategies by their own names, each once; ``PLANNED`` without any.

    Raises:
        ConfigError: there is no such strategy.
    """
    found = []
    for name in names:
        own = canonical(name.strip())
        if own not in (*STRATEGIES, KEPT):
            raise ConfigError(
                f"there is no strategy {name.strip()!r} to plan; there are {', '.join(PLANNED)}, and by other names "
                f"{', '.join(ALIASES)}"
            )
        found.append(own)
    return tuple(dict.fromkeys(found)) or PLANNED


@dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        settings: of a step; ``strategy`` is the one that micro-batches are sought for, ``micros`` follows from the
            batch.
        micro_batch, global_batch: samples; a global batch of 0 is one micro-batch a rank.
        node: ranks of a node, of which ``hybrid_shard`` makes its groups unless the settings do.
        transport: how ranks talk; ``auto`` is MPI for several, or ``node`` for those of one node without GPUs.
        algorithm: how reduce-scatters over ``mpi`` and ``hierarchical`` go without GPUs.
        shares_gathered: let ranks of a host share one gathered copy, where they can.
        on_device: whether arrays are on GPUs, as they are with offload: MPI and NCCL receive a whole unit there.
        states: names of what the optimiser keeps for each parameter.
        offload: ``none``, or ``optimizer``: masters and moments lie in the host's memory.
    """

    model: Model
    settings: Settings
    types: Precision
    micro_batch: int = 1
    global_batch: int = 0
    node: int = 8
    transport: str = "auto"
    algorithm: str = "alltoall"
    shares_gathered: bool = True
    on_device: bool = False
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    offload: str = "none"

    @property
    def gpu(self) -> bool:
        """Whether arrays are on GPUs."""
        return self.on_device or self.offload != "none"

    @property
    def strategy(self) -> str:
        """The settings' strategy, by the names of ``PLANNED``."""
        kept = self.settings.strategy == "full_shard" and not self.settings.reshard_after_forward
        return KEPT if kept else self.settings.strategy

    def micros(self, ranks: int, samples: int) -> int:
        """Return the micro-batches of a rank; 1 where the global batch cannot be dealt evenly."""
        batches, rest = divmod(self.global_batch, samples)
        return batches // ranks if batches and not rest and batches % ranks == 0 else 1

    def dealt(self, ranks: int) -> bool:
        """Whether the global batch can be dealt evenly to so many ranks."""
        batches, rest = divmod(self.global_batch, self.micro_batch)
        return self.global_batch == 0 or (not rest and batches % ranks == 0)

    def group(self, strategy: str, ranks: int) -> int:
        """Return the ranks of a group of ``hybrid_shard``: those of a node, or fewer that divide all; else 0."""
        if strategy != "hybrid_shard":
            return 0
        return self.settings.group or next(n for n in range(min(self.node, ranks), 0, -1) if ranks % n == 0)


@dataclass
class Planner:
    """Answers about a job."""

    job: Job
    _ranks: dict[tuple[str, int, int, int], dict[str, int]] = field(default_factory=dict)
    _lists: dict[Settings, Steps] = field(default_factory=dict)
    _placed: dict[tuple[Settings, int], Steps] = field(default_factory=dict)
    _samples: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)

    @cached_property
    def _model(self) -> Model:
        return separated(self.job.model)

    @cached_property
    def _outline(self) -> Outline:
        return outline_of(self._model)

    def settings(self, strategy: str, ranks: int, samples: int) -> Settings:
        """Return the settings of a step with one of the strategies of ``PLANNED``."""
        job = self.job
        hybrid = strategy == "hybrid_shard"
        return replace(
            job.settings,
            strategy="full_shard" if strategy == KEPT else strategy,
            micros=job.micros(ranks, samples),
            reshard_after_forward=job.settings.reshard_after_forward if hybrid else strategy != KEPT,
            group=job.group(strategy, ranks),
        )

    def rank(self, strategy: str, ranks: int, samples: int = 0, micros: int = 0) -> dict[str, int]:
        """Return the bytes that a rank holds, by category, and their sum, ``peak``; beside it ``host`` with offload.

        Args:
            samples: micro-batch in place of the job's.
            micros: micro-batches in place of what follows from the batch.

        Raises:
            ConfigError: a group of ``hybrid_shard`` does not divide the ranks, or the plan is beyond any machine.
        """
        samples = samples or self.job.micro_batch
        micros = min(micros or self.job.micros(ranks, samples), SETTLED)
        key = (strategy, ranks, samples, micros)
        if key not in self._ranks:
            settings = replace(self.settings(strategy, ranks, samples), micros=micros)
            try:
                self._ranks[key] = self._held(settings, ranks, samples)
            except ArenaError as error:
                raise ConfigError(f"{error}; use a smaller model or batch") from None
        return self._ranks[key]

    def _held(self, settings: Settings, ranks: int, samples: int) -> dict[str, int]:
        job = self.job
        world = self._world(settings, ranks)
        found = forecast(
            self._model,
            job.states,
            settings,
            job.types,
            world,
            micro_batch=samples,
            ops_bytes=self._ops_bytes,
            offload=job.offload,
            steps=self._steps(settings, world),
        )
        held = dict(found.held) | {"peak": found.total}
        return held | {"host": found.host} if job.offload != "none" else held

    def _world(self, settings: Settings, ranks: int) -> World:
        job = self.job
        name = job.transport
        if name == "auto":
            inside = not job.gpu and ranks <= job.node
            name = "local" if ranks == 1 else "node" if inside else "mpi"
        own = 0
        if name not in ("local", "threads", "node"):  # operations of a second stream's, or of MPI's thread
            own = 2 * SMALL_SCRATCH if job.gpu else SCRATCH
        return World.imagined(
            0,
            ranks,
            settings,
            node=job.node,
            transport=name,
            on_device=job.gpu,
            own_bytes=own,
            algorithm=job.algorithm,
            shares_gathered=job.shares_gathered,
        )

    def shares(self, ranks: int) -> bool:
        """Whether so many ranks share what they gather."""
        return self._world(self.settings("full_shard", ranks, self.job.micro_batch), ranks).sharers > 1

    @cached_property
    def _ops_bytes(self) -> int:
        """What the backend holds for itself."""
        if self.job.gpu:
            return DEVICE_SCRATCH + TABLES + workspace_bytes(_HOPPER)
        return SCRATCH + (WIDE if 2 in (self.job.types.kind.itemsize, self.job.types.wire.itemsize) else 0)

    def _steps(self, settings: Settings, world: World) -> Steps:
        """Return the steps of the settings. On other ranks the lists are the same; buffers have other sizes."""
        lists = replace(settings, group=0)
        layouts = {unit.name: layout(unit.specs, world.size) for unit in self._model.units}
        types = self.job.types
        if lists not in self._lists:
            self._lists[lists] = steps_of(self._outline, layouts, settings, types, world, trained=True)
            self._placed[settings, world.size] = self._lists[lists]
        if (settings, world.size) not in self._placed:
            like = self._lists[lists]
            self._placed[settings, world.size] = placed(
                self._outline, layouts, settings, types, world, like.schedules, like.gradient_types
            )
        return self._placed[settings, world.size]

    def sent(self, strategy: str, ranks: int) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, by kind, and their ``total``."""
        settings = self.settings(strategy, ranks, self.job.micro_batch)
        shards = {unit.name: layout(unit.specs, ranks).shard for unit in self._model.units}

        def listed(micros: int) -> Sequence[Instruction]:
            some = replace(settings, micros=micros)
            known = self._lists.get(replace(some, group=0))
            return known.schedules[0] if known else build_step(self._outline, some)

        return sent_in_a_step(listed, settings.micros, shards, self.job.types, ranks, settings.group or ranks)

    def least_ranks(self, memory: int) -> tuple[int | None, str]:
        """Return the smallest number of ranks whose ``full_shard`` fits, or None and why there is none."""
        strategy = self.job.strategy if self.job.strategy == KEPT else "full_shard"

        def parts(ranks: int, micros: int = 0) -> tuple[int, int]:
            held = self.rank(strategy, ranks, micros=micros)
            state = sum(held[name] for name in STATE)
            return state, held["peak"] - state

        job, slack = self.job, _PADDING * len(self.job.model.units)
        share = job.shares_gathered and not job.gpu and job.transport in ("auto", "node", "hierarchical")
        inside = job.node if share else 1
        found = least_ranks(parts, lambda ranks: parts(ranks, 1), memory, slack, MOST_RANKS, inside=inside)
        if found is not None:
            return found, ""
        many = max(2, inside + 1)
        held = self.rank(strategy, many)
        name = max((each for each in CATEGORIES if each not in STATE), key=lambda each: held[each])
        rest = held["peak"] - parts(many)[0]
        return None, (
            f"{readable(rest)} of a rank do not shrink when there are more; the largest part is "
            f"{name}, {readable(held[name])}: {self._remedy(name)}"
        )

    def _remedy(self, category: str) -> str:
        """Say what makes a category smaller that more ranks do not."""
        job, settings = self.job, self.job.settings
        if category in ("saved", "workspace"):
            helps = ['set shard.recompute to "block"'] if category == "saved" and settings.recompute == "none" else []
            helps.append("take a smaller micro-batch" if job.micro_batch > 1 else "take shorter sequences")
        else:
            helps = [] if job.types.kind.itemsize == 2 else ["compute in 16 bits"]
            helps += ["set shard.prefetch to 0"] if settings.prefetch else []
            helps = helps or ["make units smaller, as by a smaller width or vocabulary"]
        return ", or ".join(helps)

    def most_samples(self, memory: int, strategy: str, ranks: int) -> int | None:
        """Return the largest micro-batch that fits; None where one sample does not."""

        def peak(samples: int) -> int:
            try:
                return self.rank(strategy, ranks, samples)["peak"]
            except ConfigError:
                return _TOO_LARGE

        return most_samples(peak, memory, MOST_SAMPLES, self._samples.setdefault((strategy, ranks), {}))
