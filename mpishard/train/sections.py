"""The sections of the configuration: one frozen class each, defaults and limits in the fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mpishard.errors import ConfigError
from mpishard.shard.dealing import divisors
from mpishard.shard.loss_scale import scale_problem
from mpishard.shard.schedule import ALIASES
from mpishard.shard.traced import traced_steps

__all__ = [
    "DTYPES",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "DeviceConfig",
    "ModelConfig",
    "OptimConfig",
    "PrecisionConfig",
    "ShardConfig",
    "TrainConfig",
]

#: precision.compute and precision.reduce -> name of the element type
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """The GPT: its shape, its initial values, and the blocks in which it is computed."""

    layers: int = Field(default=4, ge=1, le=10_000, description="transformer blocks")
    width: int = Field(
        default=128, ge=1, le=100_000_000, description="features of the residual stream; a multiple of heads"
    )
    heads: int = Field(default=4, ge=1, le=100_000_000, description="attention heads of a block")
    sequence: int = Field(default=128, ge=1, le=100_000_000, description="tokens in a sequence")
    positions: int = Field(
        default=0, ge=0, le=100_000_000, description="positions known, at least sequence; 0 = as many as sequence"
    )
    vocabulary: int = Field(default=256, ge=1, le=100_000_000, description="tokens known; 256 for text as bytes")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of activations that are dropped")
    gelu: Literal["tanh", "exact"] = Field(default="tanh", description="form of GELU; GPT-2 has tanh")
    attention_block: int = Field(default=64, ge=0, description="query rows computed at once; 0 = the whole sequence")
    head_chunk: int = Field(default=256, ge=1, description="tokens whose logits and loss are computed at once")
    init_std: float = Field(default=0.02, gt=0, le=100, description="standard deviation of the initial weights")
    init_from: str = Field(
        default="", description="file or directory of GPT-2 weights (model.safetensors) to begin with; empty = random"
    )
    frozen: str = Field(
        default="", description="parameters that are not trained: patterns of their names, as in 'wte.*, h.0.*'"
    )

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.width % self.heads:
            raise ConfigError(
                f"model.width is {self.width} and model.heads is {self.heads}; "
                "the width must be a multiple of the heads, so change one of them"
            )
        if 0 < self.positions < self.sequence:
            raise ConfigError(
                f"model.sequence is {self.sequence} and model.positions is {self.positions}; "
                "a sequence cannot be longer than the positions, so lower model.sequence"
            )
        _check_path("model.init_from", self.init_from)
        return self


class DataConfig(_Section):
    """Where the tokens come from. Both files, or neither for the default corpus: Python's own source as bytes."""

    train: str = Field(default="", description="token file to train on; empty = the default corpus")
    heldout: str = Field(default="", description="token file of held-out text; empty = the default corpus")
    epochs: int = Field(default=0, ge=0, description="passes over the training file; 0 = repeat without end")

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for name, path in (("train", self.train), ("heldout", self.heldout)):
            _check_path(f"data.{name}", path)
        if bool(self.train) != bool(self.heldout):
            given, absent = ("train", "heldout") if self.train else ("heldout", "train")
            raise ConfigError(
                f"data.{given} is set and data.{absent} is empty; name both files "
                "('mpishard data build' makes both), or neither for the default corpus"
            )
        return self


def _check_path(key: str, path: str) -> None:
    if "\0" in path or path.encode(errors="replace").decode() != path:
        raise ConfigError(f"{key} is {path!r}; it must be a path in UTF-8: rename the file")


class OptimConfig(_Section):
    """AdamW, and the learning rate: a linear rise, then a half cosine down to the last step."""

    lr: float = Field(default=1e-3, gt=0, description="highest learning rate")
    lr_min: float = Field(default=0.1, ge=0, le=1, description="last learning rate, as a fraction of lr")
    warmup: int = Field(default=20, ge=0, description="steps in which the learning rate rises to lr")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment per step")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment per step")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    decay: float = Field(default=0.1, ge=0, description="weight decay of matrices, per unit of learning rate")
    clip: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0 = no clipping")


def _canonical(value: object) -> object:
    """Give a strategy its own name where it was called by another."""
    return ALIASES.get(value, value) if isinstance(value, str) else value


class ShardConfig(_Section):
    """How parameters, gradients and moments are spread over the ranks: what it takes of memory and communication.

    It changes no bit of the result, but for hybrid_shard and no_sync, which add up in another order.
    """

    strategy: Annotated[
        Literal["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"],
        BeforeValidator(_canonical),
    ] = Field(
        default="full_shard",
        description="full_shard (or zero3) keeps 1/N of everything on each rank, shard_grad_op (zero2) and "
        "shard_optimizer (zero1) of gradients and moments, no_shard (ddp) a whole copy; hybrid_shard shards inside "
        "groups of ranks, each of which has a copy",
    )
    group: int = Field(
        default=0,
        ge=0,
        le=100_000_000,
        description="ranks of a group of hybrid_shard, a divisor of all; 0 = those of a node",
    )
    prefetch: int = Field(default=1, ge=0, description="units gathered ahead of the one that computes")
    reshard_after_forward: bool = Field(
        default=True, description="false keeps what full_shard and hybrid_shard gathered until its backward"
    )
    recompute: Literal["none", "block", "attention"] = Field(
        default="none",
        description="block keeps only the input of each block and computes the rest again in backward; attention "
        "computes again what lies between a block's first norm and its attention's output",
    )
    recompute_every: int = Field(
        default=1, ge=1, le=10_000, description="of the blocks, every so many is computed again (recompute = block)"
    )
    accumulate: Literal["reduce", "no_sync"] = Field(
        default="reduce",
        description="reduce adds each micro-batch to the sharded gradient; no_sync keeps whole gradients and reduces "
        "once a step",
    )
    offload: Literal["none", "optimizer"] = Field(
        default="none", description="optimizer keeps masters and moments in host memory, for a GPU that lacks room"
    )

    @model_validator(mode="after")
    def _check(self) -> ShardConfig:
        if self.group and self.strategy != "hybrid_shard":
            raise ConfigError(
                f"shard.group is {self.group} and shard.strategy is {self.strategy}; only hybrid_shard has groups: "
                "leave shard.group at 0, or set shard.strategy to hybrid_shard"
            )
        if self.recompute_every > 1 and self.recompute != "block":
            raise ConfigError(
                f"shard.recompute_every is {self.recompute_every} and shard.recompute is {self.recompute}; it chooses "
                "among blocks: leave it at 1, or set shard.recompute to block"
            )
        if not self.reshard_after_forward and self.strategy not in ("full_shard", "hybrid_shard"):
            raise ConfigError(
                f"shard.reshard_after_forward is false and shard.strategy is {self.strategy}, which gathers nothing "
                "for a forward; leave it at true, or set shard.strategy to full_shard"
            )
        return self


class PrecisionConfig(_Section):
    """The element types. Masters, gradient shards, moments, losses and statistics are fp32 in each."""

    compute: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="of gathered parameters and activations; 16 bits round where docs/strategies-and-memory.md says",
    )
    reduce: Literal["same", "fp32", "bf16", "fp16"] = Field(
        default="same", description="of gradients on their way between ranks; same as compute, or one of its own"
    )
    tf32: bool = Field(
        default=False, description="let a GPU round the factors of fp32 matrix products to 10 bits (TF32); faster"
    )
    loss_scale: Literal["dynamic", "fixed"] = Field(
        default="dynamic",
        description="of fp16: dynamic doubles after scale_every finite steps and halves after one that is not",
    )
    scale: float = Field(default=65536.0, description="first loss scale, or the fixed one: a power of two")
    scale_every: int = Field(default=2000, ge=1, le=10**9, description="finite steps after which the scale doubles")

    @property
    def scaled(self) -> bool:
        """Whether there is fp16 in a step, so that the loss is scaled."""
        return "fp16" in (self.compute, self.reduce)

    @model_validator(mode="after")
    def _check(self) -> PrecisionConfig:
        if problem := scale_problem("precision.scale", self.scale):
            raise ConfigError(problem)
        for key in ("loss_scale", "scale", "scale_every"):
            value, usual = getattr(self, key), type(self).model_fields[key].default
            if not self.scaled and value != usual:
                raise ConfigError(
                    f"precision.{key} is {value} and precision.compute is {self.compute}; only fp16 needs a loss "
                    f"scale: leave it at {usual}, or set precision.compute to fp16"
                )
        usual = type(self).model_fields["scale_every"].default
        if self.loss_scale == "fixed" and self.scale_every != usual:
            raise ConfigError(
                f"precision.scale_every is {self.scale_every} and precision.loss_scale is fixed; a fixed scale never "
                f"moves: leave scale_every at {usual}, or set precision.loss_scale to dynamic"
            )
        return self


class DeviceConfig(_Section):
    """Where the arrays are. With cuda each rank has a GPU of its own."""

    kind: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto is cuda where CuPy finds a GPU, else cpu; --device sets it"
    )
    share: bool = Field(default=False, description="let ranks of a node share a GPU (for tests; NCCL cannot)")


class TrainConfig(_Section):
    """How long, in what batches, and what is measured on the way."""

    steps: int = Field(default=200, ge=1, description="steps of the optimizer")
    global_batch: int = Field(default=16, ge=1, le=10_000_000, description="sequences in a step, over all ranks")
    micro_batch: int = Field(
        default=4, ge=1, le=10_000_000, description="sequences in one pass on one rank; divides global_batch"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="selects initial weights, data order and dropout")
    heldout_every: int = Field(default=0, ge=0, description="steps between held-out losses; 0 = only at the end")
    heldout_batches: int = Field(default=8, ge=1, description="global batches in a held-out loss, at most")
    log_every: int = Field(default=10, ge=1, description="steps between lines of the log; one comes after 10 s too")
    sample: int = Field(default=0, ge=0, description="bytes of text generated at the end; needs model.vocabulary 256")

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.global_batch % self.micro_batch:
            raise ConfigError(
                f"train.global_batch is {self.global_batch} and train.micro_batch is {self.micro_batch}; "
                f"the micro-batch must divide the global batch: use one of {divisors(self.global_batch)}"
            )
        return self


class CheckpointConfig(_Section):
    """When the state is saved, under checkpoints/ in the run directory."""

    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 = only at the end, or when stopped")
    keep: int = Field(default=2, ge=0, description="newest checkpoints that are kept; 0 = all")
    final: bool = Field(default=True, description="save at the end of the run too")


class CommConfig(_Section):
    """How the ranks talk."""

    transport: Literal["auto", "node", "mpi", "hierarchical", "staged", "nccl", "local"] = Field(
        default="auto",
        description="auto is local (one rank, no MPI) for one process; for more it is node (shared memory) on one host "
        "and mpi on several, on GPUs mpi, or staged (through host memory) where MPI is not GPU-aware; hierarchical "
        "adds up inside each node first",
    )
    algorithm: Literal["auto", "alltoall", "pairwise", "ring", "native", "tree"] = Field(
        default="auto",
        description="of a reduce-scatter over mpi on the CPU: auto measures alltoall and pairwise, which give the same "
        "bits; ring, and native (the MPI library's own), add up in another order, as does tree, which is for "
        "hierarchical",
    )
    sums: Literal["flat", "by_node"] = Field(
        default="flat",
        description="order in which ranks' gradients are added: one after another, or first inside each node, as "
        "hybrid_shard does",
    )
    share_gathered: bool = Field(
        default=True,
        description="ranks of one host gather into one copy that all of them read, where that takes less memory "
        "(transport node, full_shard and hybrid_shard); false = each into its own",
    )
    silence: float = Field(
        default=30.0,
        ge=0,
        description="seconds without a sign of life after which a rank of another node counts as gone; 0 = never",
    )
    stall: float = Field(
        default=300.0,
        ge=0,
        description="seconds without progress of any rank after which the job ends, and says where each rank is; "
        "0 = never",
    )

    @model_validator(mode="after")
    def _check(self) -> CommConfig:
        if self.algorithm == "tree" and self.transport != "hierarchical":
            raise ConfigError(
                f"comm.algorithm is tree and comm.transport is {self.transport}; only transport hierarchical has it: "
                "leave comm.algorithm at auto, or set comm.transport to hierarchical"
            )
        forced = self.algorithm not in ("auto", "alltoall", "tree")
        if forced and self.transport not in ("auto", "mpi"):
            raise ConfigError(
                f"comm.algorithm is {self.algorithm} and comm.transport is {self.transport}; only transport mpi has a "
                "choice: leave comm.algorithm at auto, or set comm.transport to mpi"
            )
        if self.algorithm in ("ring", "native") and self.sums != "flat":
            raise ConfigError(
                f"comm.algorithm is {self.algorithm}, which adds up in its own order, and comm.sums is {self.sums}; "
                "leave comm.sums at flat, or comm.algorithm at auto"
            )
        return self


class DebugConfig(_Section):
    """Checks that cost time."""

    poison: bool = Field(default=False, description="fill released and not yet arrived buffers with NaN")
    trace: str = Field(
        default="",
        description="steps, counted from 0, that are timed for mpishard timeline, as in 10-12; empty = none",
    )

    @model_validator(mode="after")
    def _check(self) -> DebugConfig:
        traced_steps(self.trace)
        return self


class Config(_Section):
    """Everything that a training run was asked to do."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    device: DeviceConfig = DeviceConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    comm: CommConfig = CommConfig()
    debug: DebugConfig = DebugConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if not self.data.train and self.model.vocabulary < 256:
            raise ConfigError(
                f"model.vocabulary is {self.model.vocabulary} and the default corpus is of bytes; "
                "set model.vocabulary to at least 256, or data.train and data.heldout to files of your own"
            )
        travels = self.precision.compute if self.precision.reduce == "same" else self.precision.reduce
        if self.comm.algorithm == "native" and travels != "fp32":
            raise ConfigError(
                f"comm.algorithm is native and gradients travel as {travels}; MPI's own sums are of fp32: set "
                "precision.reduce to fp32, or leave comm.algorithm at auto"
            )
        if self.comm.sums == "by_node" and self.shard.strategy == "hybrid_shard":
            raise ConfigError(
                "comm.sums is by_node and shard.strategy is hybrid_shard, which adds up by its groups anyway; leave "
                "comm.sums at flat"
            )
        if (
            self.comm.transport == "hierarchical"
            and self.comm.sums == "flat"
            and self.shard.strategy != "hybrid_shard"
        ):
            raise ConfigError(
                "comm.transport is hierarchical, which adds up inside each node first, and comm.sums is flat; set "
                "comm.sums to by_node, or use transport mpi"
            )
        if self.shard.offload != "none" and self.device.kind == "cpu":
            raise ConfigError(
                f"shard.offload is {self.shard.offload} and device.kind is cpu, where all memory is the host's; "
                "leave shard.offload at none, or compute on a GPU"
            )
        if (traced := traced_steps(self.debug.trace)) and traced[0] >= self.train.steps:
            steps = f"train.steps is {self.train.steps}"
            raise ConfigError(f"debug.trace is {self.debug.trace} and {steps}; name steps below that, counted from 0")
        if self.train.sample and self.model.vocabulary != 256:
            raise ConfigError(
                f"train.sample is {self.train.sample} and model.vocabulary is {self.model.vocabulary}; "
                "text can be made of bytes alone, so set train.sample to 0 or the vocabulary to 256"
            )
        return self
