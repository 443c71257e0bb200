"""The documents say what is true: tables, links, the worked example, operations, memory."""

import itertools
import math
import random
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from correctness_tests.support.commands import printed
from tinyllama.cli import parser
from tinyllama.harness import Op
from tinyllama.model.config import PRESETS, WORKLOADS, ModelConfig
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, Tier
from tinyllama.ops import OPS
from tools import generate_docs, tables

ROOT = generate_docs.ROOT
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=\"([^\"]+)", re.M)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)? *$", re.M)
NAMED = re.compile(r"<\w+ [^>]*?\b(?:id|name)=\"([^\"]+)\"")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)
PATH = re.compile(r"`((?:tinyllama|correctness_tests|perf_tests|tools|field|docs)/[\w./-]*)`")
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"(?:^\s*|`)(?:\$ )?(?:\S*python\"? -m )?tinyllama ([a-z][^`\n]+)", re.M)
SCRIPTS = [
    *(ROOT / ".ci").iterdir(),
    *(ROOT / ".github/workflows").glob("*.yml"),
    *(ROOT / "docs/examples").glob("*.sh"),
]
COUNTS = re.compile(r"^\| `(\w+)` \| (forward|backward) \| `(.+?)` \| `(.+?)` \| `(.+?)` \|", re.M)
PLACEHOLDER = re.compile(r"(?<![\w./-])[A-Z]{3,}(?![\w.])|\.\.\.")

SHAPE = ModelConfig(
    hidden_dim=48, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=40, vocab_size=50
)
BATCH, TIME = 3, 7


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.long
@pytest.mark.parametrize("path", generate_docs.documents(), ids=name)
def test_generated_tables_are_current(path: Path) -> None:
    _, stale = generate_docs.fill(path.read_text(encoding="utf-8"), name(path))
    assert not stale, f"{name(path)}: {', '.join(stale)}: run python -m tools.generate_docs"


@cache
def anchors(path: Path) -> set[str]:
    """What a link may name in a document after its ``#``: headings, as GitHub spells them, and what
    HTML gives a name."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    names, before = set(NAMED.findall(text)), Counter[str]()
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()  # of a link its text
        anchor = re.sub(r"[^\w -]", "", words).replace(" ", "-")
        names.add(f"{anchor}-{before[anchor]}" if before[anchor] else anchor)
        before[anchor] += 1
    return names


def broken_links(path: Path) -> list[str]:
    """Relative links to what is no file, or is no anchor of a document."""
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    targets = ["".join(groups) for groups in LINK.findall(text)]
    broken = []
    for target in targets:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        wrong = anchor and there.suffix == ".md" and there.exists() and anchor not in anchors(there)
        if wrong or not there.exists():
            broken.append(target)
    return broken


def test_relative_links_point_to_files_and_headings() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: which documents belong to it is unknown")
    documents = [
        path for path in map(ROOT.joinpath, listed.stdout.split("\0")[:-1]) if path.exists()
    ]
    assert ROOT / "docs/model.md" in documents
    assert not {name(p): links for p in documents if (links := broken_links(p))}


@pytest.mark.parametrize("path", generate_docs.documents(), ids=name)
def test_files_and_folders_that_a_page_names_exist(path: Path) -> None:
    named = [p for p in PATH.findall(path.read_text(encoding="utf-8")) if "NAME" not in p]
    missing = [p for p in named if not ((ROOT / p).exists() or (ROOT / f"{p}.py").is_file())]
    assert not missing


@pytest.mark.parametrize("path", [*generate_docs.documents(), *SCRIPTS], ids=name)
def test_every_command_that_a_page_or_script_names_is_accepted(path: Path) -> None:
    """Its parser takes it; what runs is tested elsewhere."""
    text = re.sub(r"\\\n\s*|\"\$\{\w+\[@\]\}\"", "", path.read_text(encoding="utf-8"))  # of shells
    for command in COMMAND.findall(text):
        words = re.split(r"\s+#|\s*[|;&)]|\s{2,}| >", command)[0]
        if not PLACEHOLDER.search(words) and "--help" not in words:
            parser().parse_args(shlex.split(words))


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_the_worked_example_is_right_as_it_stands() -> None:
    words = ("--only", "outputs,gradients,extreme values", "--fail-on", "warning")
    printed("check", ROOT / "docs/examples/layer_norm.py", *words, "--device", "cpu")


def rows_of(first: str) -> list[list[str]]:
    """The rows of the table in docs/model.md whose heading begins with these columns."""
    text = (ROOT / "docs/model.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {re.escape(first)} .*\n\| -.*\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip(" `") for cell in line.split(" | ")] for line in table.splitlines()]


def calls(tier: Tier) -> dict[str, tuple[str, str]]:
    """The dtypes in and out of each op that a forward pass under bf16 autocast calls."""
    dtypes_of: dict[str, tuple[str, str]] = {}
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64"}

    def dtypes(names: Iterable[str], values: Iterable[torch.Tensor]) -> str:
        pairs = zip(names, values, strict=True)
        return ", ".join(f"{name} {short[tensor.dtype]}" for name, tensor in pairs)

    def watched(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: torch.Tensor, **params: Any) -> Any:
            outputs = call(*args, **params)
            results = outputs if isinstance(outputs, tuple) else (outputs,)
            dtypes_of[op.name] = dtypes(op.inputs, args), dtypes(op.outputs, results)
            return outputs

        return calling

    class Watched(Tier):
        def providers(self) -> dict[str, Callable[..., Any]]:
            return {op: watched(OPS[op], call) for op, call in super().providers().items()}

    shape = replace(PRESETS["small"], hidden_dim=16, ffn_dim=16, vocab_size=16)
    model = TinyLlama(shape, Watched(tier.name, tier.title, tier.table))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(tokens, tokens)
    return dtypes_of


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS.values(), ids=lambda tier: tier.name)
def test_the_table_of_tiers_names_what_the_model_of_each_calls(tier: Tier) -> None:
    if tier.interpreted:
        pytest.importorskip("triton")
    heads, _, *rows = (line.strip("| ").split(" | ") for line in tables.tiers().splitlines())
    column = heads.index(tier.name.upper())
    named = {row[0].strip("`"): row[column].strip("`") for row in rows if len(row) > column}
    assert {op: tier.table[op] for op in {*calls(tier), "adamw"}} == {
        op: provider
        for op, provider in named.items()
        if provider and not provider.startswith("in `")
    }


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_the_table_of_dtypes_under_autocast_is_what_ops_take_and_return(name: str) -> None:
    rows = rows_of("op | inputs | outputs")
    assert calls(TIERS[name]) == {op.strip("| `"): (ins, outs) for op, ins, outs, _ in rows}


def value_of(formula: str, dims: Mapping[str, int]) -> int:
    """The value of a sum of products such as ``6LBT² + 4N``."""
    total = 0
    for term in formula.split(" + "):
        number, letters = re.fullmatch(r"(\d*)(.*)", term).groups()  # type: ignore[union-attr]
        factors = [
            dims[c] ** (2 if square else 1) for c, square in re.findall(r"(\w)(²?)", letters)
        ]
        total += math.prod(factors) * int(number or 1)
    return total


def test_the_operations_of_a_step_add_up() -> None:
    *parts, (_, _, *totals) = rows_of("part | operations")
    for place, workload in enumerate(WORKLOADS.values()):
        dims = workload.model.dims(workload.batch_size, workload.seq_len)
        counts = [value_of(formula, dims) for _, formula, *_ in parts]
        assert sum(counts) == workload.model.step_flops(workload.batch_size, workload.seq_len)
        shown = [cells[place].strip("| ") for _, _, *cells in parts] + [totals[place].strip("| ")]
        assert shown == [f"{count / 1e9:,.3f}" for count in [*counts, sum(counts)]]


def sizes(seed: int) -> dict[str, Any]:
    """Numbers for every letter; those that are products of others are."""
    draw = random.Random(seed)
    of = {letter: draw.randint(2, 50) for letter in "BTDHGFVCP"}
    of["K"], of["N"] = 2 * of["C"], of["B"] * of["T"]
    return {**of, "Q": of["H"] * of["K"], "R": of["G"] * of["K"]}


def test_derived_counts_of_bytes_and_operations_are_those_that_ops_declare() -> None:
    rows = COUNTS.findall((ROOT / "docs/model.md").read_text(encoding="utf-8"))
    assert {name for name, *_ in rows} >= {"rms_norm", "attention", "swiglu", "adamw"}
    for (name, passes, reads, writes, operations), seed in itertools.product(rows, range(3)):
        op, of = OPS[name], sizes(seed)
        dims = {axis: [of["P"]] if axis == "P" else of[axis] for axis in op.cases[0].dims}
        elements, done = (eval(text, {}, of) for text in (f"{reads} + {writes}", operations))
        moved = [op.bytes[passes](size, **dims) for size in (1, 2)]
        # The difference, since tables and numbers have a size of their own.
        assert (moved[1] - moved[0], op.flops[passes](**dims)) == (elements, done), (name, passes)


def kept_bytes(dims: Mapping[str, int]) -> int:
    """What the table of activations says that V1's forward pass keeps."""
    rows = [row[2] for row in rows_of("part | kept | bytes")]
    end = rows.index("")  # after it come the model's own
    layer, model = rows[:end], rows[end + 1 : -1]
    return sum(value_of(f, dims) for f in [*layer * dims["L"], *model])


def test_the_megabytes_of_kept_activations_are_those_of_their_formulas() -> None:
    *parts, total = rows_of("part | kept | bytes")
    for place, workload in enumerate(WORKLOADS.values(), 3):
        dims = workload.model.dims(workload.batch_size, workload.seq_len)
        for row in parts:
            if row[2]:
                assert row[place].strip(" |") == f"{value_of(row[2], dims) / 2**20:,.1f}"
        assert total[place].strip(" |") == f"{kept_bytes(dims) / 2**20:,.1f}"


def test_kept_activations_are_those_that_autograd_saves() -> None:
    """All but parameters, tables of `rope`, tokens, and the loss's scalar weight."""
    model = TinyLlama(SHAPE, "v1")
    tokens = torch.randint(SHAPE.vocab_size, (BATCH, TIME), generator=torch.Generator())
    model.rope(TIME)
    not_saved = [*model.parameters(), *model.rope(TIME), tokens]
    left_out = {tensor.untyped_storage().data_ptr() for tensor in not_saved}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out and tensor.numel() > 1:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(tokens, tokens)
    assert sum(storage.nbytes() for storage in saved.values()) == kept_bytes(
        SHAPE.dims(BATCH, TIME)
    )
