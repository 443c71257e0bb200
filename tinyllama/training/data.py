"""Where batches come from: random tokens, or the bytes of any text.

Batch number n of a seed is always the same: it is drawn by a generator made from (seed, n).
The place in the data is therefore a number of steps, and nothing else has to be saved.

Shape suffixes: B batch, T time (sequence length).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tinyllama.model.config import ConfigError, TrainConfig

Batch = tuple[torch.Tensor, torch.Tensor]


class Batches(Protocol):
    """A source of training batches."""

    def batch(self, index: int) -> Batch:
        """Batch ``index`` (from 0): tokens and targets (B T), int64 on the CPU.

        B is `TrainConfig.samples_per_step`: all that a step accumulates over.
        """

    def describe(self) -> dict[str, Any]:
        """What the source is, as plain data: for the record of a run and for checkpoints."""


def _tokens_and_targets(windows: np.ndarray) -> Batch:
    """Windows (B T+1) -> tokens and targets (B T); a target is the token one later."""
    drawn = torch.from_numpy(windows.astype(np.int64))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class RandomTokens:
    """Fresh uniformly random tokens in every step; the loss cannot go below log(vocabulary)."""

    def __init__(self, vocab_size: int, config: TrainConfig) -> None:
        self.vocab_size = vocab_size
        self.config = config

    def batch(self, index: int) -> Batch:
        generator = np.random.default_rng((self.config.seed, index))
        shape = (self.config.samples_per_step, self.config.seq_len + 1)
        return _tokens_and_targets(generator.integers(self.vocab_size, size=shape))

    def describe(self) -> dict[str, Any]:
        return {"kind": "random tokens"}


class TextBytes:
    """The bytes of a text file, or of all text files under a folder one after the other.

    A batch is B windows of T + 1 bytes at uniformly drawn positions; a window may span two
    files. In a folder, files are taken in the order of their paths; hidden ones and those
    with a NUL byte (which no text has) are left out.

    Raises ConfigError when there is nothing at the path, when it cannot be read, when its
    text is shorter than one window, or when a byte is not below the vocabulary's size.
    """

    def __init__(self, path: str | Path, vocab_size: int, config: TrainConfig) -> None:
        self.config = config
        files, hidden = _files(Path(path))
        contents = [_read(file) for file in files]
        texts = [content for content in contents if b"\0" not in content]
        self.files_taken = len(texts)
        self.files_left_out = len(contents) - len(texts) + hidden
        text = b"".join(texts)
        self.digest = hashlib.sha256(text).hexdigest()
        self.bytes = np.frombuffer(text, dtype=np.uint8)
        window = config.seq_len + 1
        if len(text) < window:
            raise ConfigError(
                f"data {str(path)!r} has {len(text)} bytes of text in {self.files_taken} files "
                f"({self.files_left_out} left out: hidden or with NUL bytes), and a sequence of "
                f"{config.seq_len} takes {window}: give more text or a smaller seq_len"
            )
        largest = int(self.bytes.max())
        if largest >= vocab_size:
            raise ConfigError(
                f"data {str(path)!r} has byte {largest}, and vocab_size is {vocab_size}: "
                "use a vocabulary of 256 or more"
            )

    def batch(self, index: int) -> Batch:
        window = self.config.seq_len + 1
        generator = np.random.default_rng((self.config.seed, index))
        shape = (self.config.samples_per_step, 1)
        starts = generator.integers(len(self.bytes) - window + 1, size=shape)
        return _tokens_and_targets(self.bytes[starts + np.arange(window)])

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "text",
            "bytes": len(self.bytes),
            "sha256": self.digest,
            "files_taken": self.files_taken,
            "files_left_out": self.files_left_out,
        }


def _files(path: Path) -> tuple[list[Path], int]:
    """The files to read, in order, and how many hidden ones are left out."""
    if path.is_file():
        return [path], 0
    if not path.is_dir():
        raise ConfigError(f"data {str(path)!r} does not exist: name a text file or a folder")
    inside = sorted(
        (file.relative_to(path) for file in path.rglob("*") if file.is_file()),
        key=lambda relative: relative.as_posix(),
    )
    seen = [file for file in inside if not any(part.startswith(".") for part in file.parts)]
    return [path / file for file in seen], len(inside) - len(seen)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data {str(file)!r} cannot be read: {error.strerror}; make it readable or move it"
        ) from error
