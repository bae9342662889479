"""The token files of a run, opened and compared by all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mpishard.comm.base import Communicator
from mpishard.comm.together import on_rank_zero, same_on_all_ranks, together
from mpishard.data.corpus import ensure_default_corpus
from mpishard.data.loader import Batches
from mpishard.train.sections import Config

__all__ = ["open_data", "open_training"]


def open_data(config: Config, run_dir: Path, comm: Communicator) -> tuple[Batches, Batches]:
    """Return the batches of the training and of the held-out file, checked. Collective.

    The default corpus is made in ``run_dir`` where no files are named.

    Raises:
        ConfigError: on all ranks, when a file is missing, damaged, too small, or another one on another node.
    """
    folder = run_dir / "corpus"
    if not config.data.train:
        on_rank_zero(comm, lambda: ensure_default_corpus(folder))

    def open_both() -> tuple[Batches, Batches]:
        both = _open(config, folder, "train"), _open(config, folder, "heldout")
        if comm.node.local_rank == 0:  # the file may be another one on each node
            for batches in both:
                batches.file.verify()
        return both

    opened = together(comm, open_both)
    names = ("training", "held-out")
    same_on_all_ranks(comm, [f"{name} file {b.file.identity.hex()}" for name, b in zip(names, opened, strict=True)])
    return opened


def open_training(config: Config, run_dir: Path) -> Batches:
    """Return the batches of the training file for one process alone; not collective.

    Raises:
        ConfigError: the file is missing, damaged or too small.
    """
    folder = run_dir / "corpus"
    if not config.data.train:
        ensure_default_corpus(folder)
    batches = _open(config, folder, "train")
    batches.file.verify()
    return batches


def _open(config: Config, corpus: Path, name: Literal["train", "heldout"]) -> Batches:
    """Open a token file, or that of the default corpus. What is held out is read once, in one order."""
    data, train = config.data, config.train
    training = name == "train"
    path = (data.train if training else data.heldout) or corpus / f"{name}.tokens"
    return Batches.open(
        Path(path),
        config.model.sequence,
        config.model.vocabulary,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        seed=train.seed if training else 0,
        epochs=data.epochs if training else 1,
    )
