"""Batches: which tokens a step sees, and that nothing but its number decides it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinyllama.model.config import ConfigError, TrainConfig
from tinyllama.training.data import Batches, RandomTokens, TextBytes

CONFIG = TrainConfig(batch_size=3, seq_len=5)
TEXT = b"The quick brown fox jumps over the lazy dog.\n"

Source = Callable[[TrainConfig], Batches]


@pytest.fixture(params=["random", "text"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """A function from a TrainConfig to batches of either kind."""
    file = tmp_path / "text"
    file.write_bytes(TEXT)
    if request.param == "random":
        return lambda config: RandomTokens(256, config)
    return lambda config: TextBytes(file, 256, config)


def test_targets_are_tokens_one_later(source: Source) -> None:
    tokens, targets = source(CONFIG).batch(0)
    assert tokens.shape == targets.shape == (3, 5)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_batch_depends_on_seed_and_number_alone(source: Source) -> None:
    """Seed 0's second batch would be seed 1's first if both were added."""
    drawn = []
    for seed in range(6):
        batches, jumped = (source(TrainConfig(batch_size=3, seq_len=12, seed=seed)) for _ in "ab")
        drawn += [bytes(batches.batch(index)[0].to(torch.uint8).flatten()) for index in range(6)]
        assert drawn[-1] == bytes(jumped.batch(5)[0].to(torch.uint8).flatten())
    assert len(set(drawn)) == 36
    tokens, _ = source(TrainConfig(batch_size=8, accumulate=2, seq_len=12)).batch(0)
    assert len(tokens.unique(dim=0)) > 8, "rows are drawn one by one"


def test_random_tokens_cover_vocabulary_and_no_more() -> None:
    batches = RandomTokens(10, TrainConfig(batch_size=8, seq_len=64))
    assert batches.batch(0)[0].unique().tolist() == list(range(10))


def test_text_comes_in_windows_from_every_position(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(1, 10)))
    tokens, targets = TextBytes(file, 256, TrainConfig(batch_size=64, seq_len=5)).batch(0)
    windows = {bytes([*row, last]) for row, last in zip(tokens, targets[:, -1], strict=True)}
    assert windows == {bytes(range(start, start + 6)) for start in range(1, 5)}


def test_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"second ",
        "a-b/x": b"as texts, ",  # not as their parts: "-" comes before "/"
        "a/z.txt": b"first ",
        "c.unknown-ending": "dritt\u00e9".encode(),
        "empty": b"",
        ".hidden": b"never",
        ".git/config": b"never",
        "image": b"ne\0ver",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to("nowhere")
    batches = TextBytes(tmp_path, 256, CONFIG)
    assert batches.bytes.tobytes() == "as texts, first second dritt\u00e9".encode()
    assert batches.describe()["files_taken"] == 5
    assert batches.describe()["files_left_out"] == 3


@pytest.mark.parametrize(
    ("content", "vocab_size", "message"),
    [
        (None, 256, "does not exist: name a text file or a folder"),
        (b"abcde", 256, "has 5 bytes of text in 1 files .* takes 6: give more text or a smaller"),
        (b"ab\0cdefgh", 256, "0 files .1 left out"),
        (b"abcdefgh\xff", 255, "has byte 255, and vocab_size is 255: use a vocabulary of 256"),
    ],
    ids=["missing", "short", "binary", "vocabulary"],
)
def test_text_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, content: bytes | None, vocab_size: int, message: str
) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        TextBytes(file, vocab_size, CONFIG)
    assert repr(str(file)) in str(error.value)
