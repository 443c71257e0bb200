"""Where batches come from: random tokens, or the bytes of any text.

Batch number n of a seed is always the same: it is drawn by a generator made from (seed, n).
The position in the data is therefore the number of steps done, and nothing else must be saved.

Shape suffixes: B batch, T time (sequence length).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.training.ranks import ALONE, Ranks

Batch = tuple[torch.Tensor, torch.Tensor]

MOST_BYTES = 4 * 2**30  # of all text: it is held in memory


class Batches:
    """A source of training batches. A subclass says how windows are drawn, and what it is."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def batch(self, index: int, ranks: Ranks = ALONE) -> Batch:
        """Batch ``index`` (from 0): tokens and targets (B T), int64 on the CPU.

        B is `TrainConfig.samples_per_step`: all samples over which a step accumulates. With several
        ranks, each gets its part. A target is the next token.
        """
        generator = np.random.default_rng((self.config.seed, index))
        count = self.config.samples_per_step
        windows = self._draw(generator, count, self.config.seq_len + 1, ranks.part(count))
        drawn = torch.from_numpy(windows.astype(np.int64))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def describe(self) -> dict[str, Any]:
        """What the source is, as plain data: for the record of a run and for checkpoints."""
        raise NotImplementedError

    def _draw(
        self, generator: np.random.Generator, count: int, window: int, part: slice
    ) -> np.ndarray:
        """The windows of tokens (count window) of which this is the part."""
        raise NotImplementedError


class RandomTokens(Batches):
    """New uniformly random tokens in every step; the loss cannot go below log(vocabulary)."""

    def __init__(self, vocab_size: int, config: TrainConfig) -> None:
        super().__init__(config)
        self.vocab_size = vocab_size

    def describe(self) -> dict[str, Any]:
        return {"kind": "random tokens"}

    def _draw(
        self, generator: np.random.Generator, count: int, window: int, part: slice
    ) -> np.ndarray:
        return generator.integers(self.vocab_size, size=(count, window))[part]


class TextBytes(Batches):
    """The bytes of a text file, or of all text files under a folder one after the other.

    A batch is B windows of T + 1 bytes at uniformly drawn positions; a window may span two
    files. In a folder, files are taken in the order of their paths; hidden ones and those
    with a NUL byte (which no text has) are left out.

    Raises ConfigError when there is nothing at the path, when it cannot be read, when it has more
    than `MOST_BYTES` bytes, when the text is shorter than one window, or when a byte is not below
    the vocabulary's size.
    """

    def __init__(self, path: str | Path, vocab_size: int, config: TrainConfig) -> None:
        super().__init__(config)
        contents, hidden = _contents(Path(path))
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

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "text",
            "bytes": len(self.bytes),
            "sha256": self.digest,
            "files_taken": self.files_taken,
            "files_left_out": self.files_left_out,
        }

    def _draw(
        self, generator: np.random.Generator, count: int, window: int, part: slice
    ) -> np.ndarray:
        starts = generator.integers(len(self.bytes) - window + 1, size=(count, 1))[part]
        return self.bytes[starts + np.arange(window)]


def _contents(path: Path) -> tuple[list[bytes], int]:
    """The bytes of a file, or of a folder's files in order, and how many hidden ones are left
    out."""
    if not path.is_file() and not path.is_dir():
        why = "is a pipe or a device" if path.exists() else "does not exist"
        raise ConfigError(f"data {str(path)!r} {why}: name a text file or a folder")
    try:
        there = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
        names = {file: file.relative_to(path) for file in there}
        visible = [f for f in there if not any(part[0] == "." for part in names[f].parts)]
        visible.sort(key=lambda file: names[file].as_posix())
        sizes = {file: file.stat().st_size for file in visible}
        if sum(sizes.values()) > MOST_BYTES:
            raise ConfigError(
                f"data {str(path)!r} has more than {MOST_BYTES} bytes: name a smaller folder"
            )
        # Some files of the operating system's kernel have no size and never end.
        contents = [file.read_bytes() if size else b"" for file, size in sizes.items()]
    except OSError as error:
        place = error.filename or str(path)
        raise ConfigError(
            f"data {place!r} cannot be read: {error.strerror}; make it readable or move it"
        ) from error
    return contents, len(there) - len(visible)
