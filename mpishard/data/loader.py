"""From windows to the arrays of a micro-batch."""

from __future__ import annotations

from pathlib import Path

from mpishard.array.dtypes import Array
from mpishard.data.sampler import Sampler, window_count
from mpishard.data.tokens import TokenFile
from mpishard.errors import DataError, ShapeError

__all__ = ["Batches"]


class Batches:
    """The micro-batches of one token file.

    Attributes:
        file: where the tokens come from.
        sampler: which windows make a micro-batch.
        sequence: tokens per sequence, T.
        vocabulary: tokens must be below it: the model's; the file's own where none is given.

    Raises:
        DataError: the file is of a larger vocabulary, or has fewer windows than the sampler draws from.
    """

    def __init__(self, file: TokenFile, sampler: Sampler, sequence: int, vocabulary: int | None = None) -> None:
        self.file = file
        self.sampler = sampler
        self.sequence = sequence
        self.vocabulary = file.vocabulary if vocabulary is None else vocabulary
        if file.vocabulary > self.vocabulary:
            raise DataError(
                f"{file.path}: its vocabulary is {file.vocabulary}, the model's is {self.vocabulary}; "
                f"set model.vocabulary to at least {file.vocabulary} or use another file"
            )
        held = window_count(len(file), sequence)
        if sampler.windows > held:
            raise DataError(
                f"{file.path}: holds {held} windows of {sequence} tokens, {sampler.windows} were expected; "
                "make the sampler of this file"
            )

    @classmethod
    def open(
        cls,
        path: Path,
        sequence: int,
        vocabulary: int,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        epochs: int,
    ) -> Batches:
        """Open a token file to be read in the order of ``seed``; sizes as in :class:`Sampler`.

        Raises:
            DataError: the file is missing, damaged or of a larger vocabulary, or has too few tokens for one step.
        """
        file = TokenFile(path)
        windows = window_count(len(file), sequence)
        need = 1 if epochs == 0 else -(-global_batch // epochs)
        if windows < need:
            raise DataError(
                f"{path}: holds {len(file)} tokens, one step needs {need * sequence + 1} "
                f"({need} sequences of {sequence}); use more text or smaller train.global_batch or model.sequence"
            )
        return cls(file, Sampler(windows, global_batch, micro_batch, seed, epochs), sequence, vocabulary)

    def read(self, step: int, micro: int, tokens_out: Array, targets_out: Array) -> None:
        """Fill ``tokens_out`` and ``targets_out``, int64 (B, T), with global micro-batch ``micro`` of ``step``.

        ``targets_out[b, t]`` is the token that follows ``tokens_out[b, t]``. Rows are copied from the mapped file
        one by one, so nothing of a batch's size is allocated.

        Raises:
            DataError: a token is not below the vocabulary.
            EngineError: there is no such step or micro-batch.
            ShapeError: an output is not int64 of shape (micro_batch, sequence).
        """
        expected = (self.sampler.micro_batch, self.sequence)
        for name, array in (("tokens_out", tokens_out), ("targets_out", targets_out)):
            if array.shape != expected or array.dtype.name != "int64":
                raise ShapeError(f"{name} is {array.dtype} {array.shape}; int64 {expected} is needed")
        for row, window in enumerate(self.sampler.samples(step, micro)):
            start = window * self.sequence
            piece = self.file.tokens[start : start + self.sequence + 1]
            highest = int(piece.max())
            if highest >= self.vocabulary:
                raise DataError(
                    f"{self.file.path}: holds token {highest} in window {window}, the vocabulary is "
                    f"0 .. {self.vocabulary - 1}; the file is damaged or of another tokenizer: build it again"
                )
            tokens_out[row] = piece[:-1]
            targets_out[row] = piece[1:]
