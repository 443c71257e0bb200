"""The tables of docs/model.md, computed from configs, ops and the model itself."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch

from tinyllama.harness import Op
from tinyllama.model.config import PRESETS, WORKLOADS, ModelConfig, Workload
from tinyllama.model.llama import TinyLlama
from tinyllama.model.tiers import TIERS, V1, Tier
from tinyllama.ops import OPS
from tinyllama.ops.block import PARTS

FP32 = 4  # bytes
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64"}


LETTERS: dict[str, Any] = {letter: sympy.Symbol(letter) for letter in "sLBTNDHGKCQRFVP"}


def formula(polynomial: Any) -> str:
    """A declared cost, called with `LETTERS`, as text. ``s`` is the size of an element."""

    def total(terms: Iterable[tuple[tuple[int, ...], Any]]) -> str:
        return " + ".join(term(powers, times) for (_, *powers), times in terms)

    def term(powers: Iterable[int], times: Any) -> str:
        letters = "".join(
            letter + ("²" if power == 2 else "")
            for letter, power in zip([*LETTERS][1:], powers, strict=True)
            if power
        )
        return (str(times) if times > 1 or not letters else "") + letters

    terms = sympy.Poly(polynomial, *LETTERS.values()).terms()
    sized, plain = [t for t in terms if t[0][0]], [t for t in terms if not t[0][0]]
    if not sized:
        return total(plain)
    scaled = f"s({total(sized)})" if len(sized) > 1 else f"s·{total(sized)}"
    return f"{scaled} + {total(plain)}" if plain else scaled


def sizes(workload: Workload) -> dict[str, int]:
    """The size of every dimension in a workload, by its letter."""
    return workload.model.dims(workload.batch_size, workload.seq_len)


def cost(op: Op, kind: str, which: str, of: Mapping[str, Any], size: Any = FP32) -> Any:
    """A declared cost of an op: ``kind`` bytes or flops, ``which`` forward or backward."""
    dims = {name: of[name] for name in op.cases[0].dims}
    if "P" in dims:
        dims["P"] = (dims["P"],)  # a list of tensors; one of them stands for all
    declared = getattr(op, kind)[which]
    return declared(size, **dims) if kind == "bytes" else declared(**dims)


# Products of one step, forward and backward: 2 operations a multiply-add, 3 products a weight.
# Causal attention has T (T + 1) / 2 scores and 2 products forward, 4 backward.
PRODUCTS: dict[str, Callable[..., Any]] = {
    "w_q, w_k, w_v": lambda L, N, D, Q, R, **_: L * N * D * (6 * Q + 12 * R),
    "attention": lambda L, B, T, Q, **_: 6 * L * B * Q * T * (T + 1),
    "w_o": lambda L, N, D, Q, **_: 6 * L * N * D * Q,
    "w_gate, w_up": lambda L, N, D, F, **_: 12 * L * N * D * F,
    "w_down": lambda L, N, D, F, **_: 6 * L * N * D * F,
    "embedding as projection": lambda N, D, V, **_: 6 * N * D * V,
}

# What autograd keeps from V1's forward pass for its backward pass, in float32: bytes.
LAYER_KEEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "`rms_norm`": ("x, x·r, r", lambda B, T, D, **_: 8 * B * T * D + 4 * B * T),
    "`qkv`": ("its input", lambda B, T, D, **_: 4 * B * T * D),
    "`attention`": (
        "rotated q; k, v, repeated for each query head; weights; mask (bool)",
        lambda B, T, H, Q, **_: 12 * B * T * Q + 4 * B * H * T * T + T * T,
    ),
    "`w_o`": ("its input", lambda B, T, Q, **_: 4 * B * T * Q),
    "`add_rms_norm`": ("sum, sum·r, r", lambda B, T, D, **_: 8 * B * T * D + 4 * B * T),
    "`swiglu`": (
        "its input; gate, up, silu(gate)",
        lambda B, T, D, F, **_: 4 * B * T * D + 12 * B * T * F,
    ),
    "`w_down`": ("its input", lambda B, T, F, **_: 4 * B * T * F),
}
MODEL_KEEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "final `rms_norm`": ("x, x·r, r", lambda N, D, **_: 8 * N * D + 4 * N),
    "`linear_cross_entropy`": (
        "its input; log-probabilities",
        lambda N, D, V, **_: 4 * N * D + 4 * N * V,
    ),
}


def kept_bytes(of: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that V1 keeps in one layer, and in the whole model."""
    layer = sum(keeps(**of) for _, keeps in LAYER_KEEPS.values())
    return layer, of["L"] * layer + sum(keeps(**of) for _, keeps in MODEL_KEEPS.values())


def table(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; a column that holds numbers only is aligned right."""
    heads, body = list(headers), [[str(cell) for cell in row] for row in rows]
    numeric = re.compile(r"[\d,.]*")

    def rule(column: int) -> str:
        return "---:" if all(numeric.fullmatch(row[column]) for row in body) else "---"

    lines = [heads, [rule(column) for column in range(len(heads))], *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def mib(count: float) -> str:
    return f"{count / 2**20:,.1f}"


def presets() -> str:
    def row(name: str, model: ModelConfig) -> list[object]:
        of = sizes(Workload(model=model, batch_size=1, seq_len=1))
        used = WORKLOADS.get(name)
        workload = f"{used.batch_size} × {used.seq_len}" if used else "none"
        return [f"`{name}`", *(of[c] for c in "DLHGKFV"), f"{model.parameters:,}", workload]

    headers = ["preset", *"DLHGKFV", "parameters", "workload B × T"]
    return table(headers, (row(*item) for item in PRESETS.items()))


def tiers() -> str:
    """What the model of each tier calls. One with a ``block`` calls the block's parts in that
    alone, but for the norm, which is the model's last as well; one with a ``stack`` calls that, or
    block by block where its plan says so."""

    def cell(tier: Tier, op: str) -> str:
        if "block" in tier.table and op in PARTS and op != "rms_norm":
            return "in `block`"
        if "stack" in tier.table and op == "block":
            return "in `stack`, or by itself"
        return f"`{tier.table[op]}`" if op in tier.table else ""

    parts = [op for op in V1.table if op in PARTS]
    ops = [*parts, "block", "stack", *(op for op in V1.table if op not in PARTS)]
    rows = ([f"`{op}`", *(cell(tier, op) for tier in TIERS.values())] for op in ops)
    return table(["op", *(tier.name.upper() for tier in TIERS.values())], rows)


def traced(tier: Tier) -> Iterator[tuple[str, str, str]]:
    """Each op's call in a forward pass under bf16 autocast: its name, dtypes in, dtypes out."""
    seen: list[tuple[str, str, str]] = []

    class Watched(Tier):
        def providers(self) -> dict[str, Callable[..., Any]]:
            return {op: watch(OPS[op], call) for op, call in super().providers().items()}

    def dtypes(names: Iterable[str], tensors: Iterable[torch.Tensor]) -> str:
        pairs = zip(names, tensors, strict=True)
        return ", ".join(f"{name} {DTYPES[tensor.dtype]}" for name, tensor in pairs)

    def watch(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: torch.Tensor, **params: Any) -> Any:
            found = call(*args, **params)
            results = found if isinstance(found, tuple) else (found,)
            seen.append((op.name, dtypes(op.inputs, args), dtypes(op.outputs, results)))
            return found

        return watched

    shape = replace(PRESETS["small"], hidden_dim=16, ffn_dim=16, vocab_size=16)
    model = TinyLlama(shape, Watched(tier.name, tier.title, tier.table))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(tokens, tokens)
    yield from seen


def autocast() -> str:
    by_tier: dict[tuple[str, str, str], list[str]] = {}
    for name in ("v1", "v2"):
        for call in dict.fromkeys(traced(TIERS[name])):
            by_tier.setdefault(call, []).append(name.upper())
    rows = ([f"`{op}`", given, made, ", ".join(t)] for (op, given, made), t in by_tier.items())
    return table(["op", "inputs", "outputs", "tiers"], rows)


def step_flops() -> str:
    of = {name: sizes(workload) for name, workload in WORKLOADS.items()}
    totals = {
        name: workload.model.step_flops(workload.batch_size, workload.seq_len)
        for name, workload in WORKLOADS.items()
    }
    for name, total in totals.items():
        parts = sum(part(**of[name]) for part in PRODUCTS.values())
        assert parts == total, f"{name}: the parts are {parts}, step_flops is {total}"

    def giga(count: float) -> str:
        return f"{count / 1e9:,.3f}"

    rows: list[list[object]] = [
        [name, formula(part(**LETTERS)), *(giga(part(**of[w])) for w in WORKLOADS)]
        for name, part in PRODUCTS.items()
    ]
    rows.append(["`step_flops`", "", *map(giga, totals.values())])
    return table(["part", "operations", *(f"`{w}`, GFLOP" for w in WORKLOADS)], rows)


def activations() -> str:
    of = {name: sizes(workload) for name, workload in WORKLOADS.items()}

    def rows(keeps: Mapping[str, tuple[str, Callable[..., Any]]]) -> Iterator[list[object]]:
        for name, (what, count) in keeps.items():
            yield [name, what, formula(count(**LETTERS)), *(mib(count(**of[w])) for w in WORKLOADS)]

    layer, model = zip(*map(kept_bytes, of.values()), strict=True)
    body: list[list[object]] = [
        *rows(LAYER_KEEPS),
        ["one layer", "", "", *map(mib, layer)],
        *rows(MODEL_KEEPS),
        ["the model", "L layers and the last two", "", *map(mib, model)],
    ]
    return table(["part", "kept", "bytes", *(f"`{w}`, MiB" for w in WORKLOADS)], body)
