"""Configurations of attention's kernels: those that are tried, and the defaults among them."""

from collections.abc import Callable
from itertools import product

from tinyllama.harness.kernels.configs import Config, Space

# A block: its own rows, rows that a step of its loop takes, warps, stages. Keys of the spaces: D,
# the kind of product ("16bit", "fp32", "tf32", "tf32x3"), and forward "short", "long", or "turned":
# short, and transposes are given.
Block = tuple[int, int, int, int]

DEFAULTS: dict[str, dict[str, tuple[Block, ...]]] = {  # up to D = 64, 128, 256
    "16bit": {
        "long": ((128, 32, 4, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
        "short": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
        "queries": ((128, 64, 8, 2), (64, 32, 4, 2), (64, 16, 4, 2)),
        "keys": ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2)),
    },
    "tf32x3": {  # a product holds both halves of its operands in registers
        "long": ((64, 32, 8, 2), (32, 32, 8, 2)),
        "short": ((64, 32, 8, 2), (32, 32, 8, 2)),
        "turned": ((64, 32, 8, 2), (32, 32, 8, 2)),
        # Eight warps on 64 rows of width 32 gave wrong results (triton 3.6, sm_90).
        "queries": ((32, 32, 4, 2), (16, 32, 8, 2)),
        "keys": ((32, 16, 4, 2), (16, 16, 4, 2)),
    },
    "tf32": {
        "long": ((128, 32, 8, 2), (64, 32, 4, 2), (32, 16, 8, 2)),
        "short": ((64, 32, 4, 2), (64, 32, 4, 2), (32, 16, 8, 2)),
        "turned": ((64, 32, 4, 2), (64, 32, 4, 2), (32, 16, 8, 2)),
        "queries": ((64, 32, 4, 2), (64, 16, 4, 2), (32, 16, 4, 2)),
        "keys": ((64, 16, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2)),
    },
}
DEFAULTS["fp32"] = DEFAULTS["tf32"]

# How many elements of accumulators and scores a thread may hold before registers spill (sm_90), in
# programs forward, for queries, and for keys.
ROOM = {"16bit": (144, 128, 160), "tf32": (80, 128, 144), "fp32": (80, 128, 144)}
ROOM_TF32X3 = {True: (64, 64, 48), False: (37, 22, 37)}  # D up to 64, and beyond


def _default(D: int, kind: str, what: str) -> Block:
    return DEFAULTS[kind][what][0 if D <= 64 else 1 if D <= 128 else 2]


def _config(block: Block, program_axis: str, step_axis: str, turn: int = 0, **more: int) -> Config:
    """TURN: whether products read copies of transposes; a question for tf32 alone."""
    rows, taken, warps, stages = block
    sizes = {program_axis: rows, step_axis: taken}
    return Config(num_warps=warps, num_stages=stages, TURN=turn, **sizes, **more)


def _configs(
    blocks: list[Block], program_axis: str, step_axis: str, kind: str, **more: int
) -> list[Config]:
    """Transposes are tried with the rows that such matrix units take at once, 64, and more."""
    return [
        _config(block, program_axis, step_axis, turn, **more)
        for turn in ((0, 1) if kind == "tf32" else (0,))
        for block in dict.fromkeys(blocks)
        if block[0] >= 64 * turn
    ]


def _default_pair(D: int, kind: str) -> Config:
    if kind == "tf32x3" and D > 32:
        return Config(QM=32, QN=16, KN=32, KM=16, num_warps=4, num_stages=2)
    step = 32 if kind == "16bit" else 16
    return Config(QM=64, QN=2 * step, KN=64, KM=step, num_warps=4, num_stages=2)


def _blocks(D: int, kind: str, which: int, warps: tuple[int, ...] = (4, 8)) -> list[Block]:
    """What fits in registers and shared memory. which: programs forward, for queries, for keys."""
    tiles, sums, scores = ((1, 1, 1), (2, 1, 2), (2, 2, 2))[which]
    room = ROOM_TF32X3[D <= 64][which] if kind == "tf32x3" else ROOM[kind][which]
    shared = (64 if kind == "fp32" else 227) * 1024  # IEEE products are for chips with less
    size = 2 if kind == "16bit" else 4
    steps = {"16bit": (32, 64, 128), "tf32x3": (16, 32)}.get(kind, (16, 32, 64))
    blocks = []
    for rows, step, warp, stages in product((16, 32, 64, 128), steps, warps, (2, 3)):
        registers = rows * (sums * D + scores * step) // (32 * warp)
        buffers = stages - 1 if kind == "fp32" else stages
        memory = (tiles * rows + 2 * step * buffers) * D * size
        cramped = size > 2 and D > 64
        if rows >= (2 if cramped else 8) * warp and 16 <= registers <= room and memory <= shared:
            blocks.append((rows, step, warp, stages))
    return blocks


def _pairs(D: int, kind: str) -> list[Config]:
    """A block of queries and one of keys for one launch, on short sequences."""
    longest = {"16bit": 64, "tf32x3": 16}.get(kind, 32)
    queries, keys = (
        [block for block in _blocks(D, kind, which, (2, 4)) if block[0] <= 64 and block[1] <= step]
        for which, step in ((1, max(32, longest)), (2, longest))
    )
    return [
        Config(QM=QM, QN=QN, KN=KN, KM=KM, num_warps=warps, num_stages=stages)
        for (QM, QN, warps, stages), (KN, KM, *same) in product(queries, keys)
        if same == [warps, stages] and 16 * warps >= QM >= KN >= 32
        if KM < 64 or same == [4, 2]  # others were seen to spill
    ]


# Fastest on an H200 of what an earlier, wider search tried.
FOUND_FORWARD = [(32, 32, 4, 3), (64, 64, 4, 3), (128, 32, 4, 3), (128, 64, 8, 3)]
FOUND_QUERIES = [(32, 32, 4, 3), (128, 64, 8, 3)]
FOUND_KEYS = [(32, 32, 4, 3)]
FOUND_TURNED = Config(QM=64, QN=64, KN=64, KM=32, num_warps=4, num_stages=2)  # on an H100
FOUND_PAIRS = [Config(QM=n, QN=n, KN=n, KM=n, num_warps=4, num_stages=3) for n in (32, 64)]

FORWARD = Space(
    "attention.forward",
    default=lambda D, kind, length: _config(_default(D, kind, length), "QM", "QN"),
    configs=lambda D, kind, length: _configs(
        [*_blocks(D, kind, 0), *FOUND_FORWARD], "QM", "QN", kind
    ),
)
BACKWARD_QUERIES = Space(
    "attention.backward_queries",
    default=lambda D, kind: _config(_default(D, kind, "queries"), "QM", "QN"),
    configs=lambda D, kind: _configs([*_blocks(D, kind, 1), *FOUND_QUERIES], "QM", "QN", kind),
)
BACKWARD_KEYS = Space(
    "attention.backward_keys",
    default=lambda D, kind: _config(_default(D, kind, "keys"), "KN", "KM", AHEAD=0),
    configs=lambda D, kind: [
        config
        for ahead in ((0, 1) if kind == "16bit" else (0,))  # wider scores leave no registers
        for config in _configs([*_blocks(D, kind, 2), *FOUND_KEYS], "KN", "KM", kind, AHEAD=ahead)
    ],
)
BACKWARD = Space(
    "attention.backward",
    default=_default_pair,
    configs=lambda D, kind: list(dict.fromkeys([*_pairs(D, kind), *FOUND_PAIRS])),
)
# The same from transposes that are given.
BACKWARD_TURNED = Space(
    "attention.backward_turned",
    default=_default_pair,
    configs=lambda D, kind: list(dict.fromkeys([*_pairs(D, kind), *FOUND_PAIRS, FOUND_TURNED])),
)

# Kernels with specialised warps (see `tinyllama.ops.attention.specialised`): whether they are used
# (ON), the rows that a step takes, and so many steps' tiles in shared memory (num_stages). Keys: D,
# the tokens of a sequence, and whether the chip and this triton can run them.
OFF = Config(ON=0, STEP=64, num_warps=4, num_stages=1)


def _specialised(tiles: int) -> Callable[..., list[Config]]:
    """Off, and all that fits. tiles: of 128 rows, that a program holds besides those of steps."""

    def configs(D: int, tokens: int, gluon: bool) -> list[Config]:
        configs_that_fit = [OFF]
        for step, stages in product((64, 128), (2, 3, 4)) if gluon else ():
            if 2 * D * (128 * tiles + 2 * step * stages) <= 225 * 1024:
                configs_that_fit.append(Config(ON=1, STEP=step, num_warps=4, num_stages=stages))
        return configs_that_fit

    return configs


SPECIALISED_FORWARD = Space(
    "attention.specialised_forward", default=lambda D, tokens, gluon: OFF, configs=_specialised(1)
)
SPECIALISED_QUERIES = Space(
    "attention.specialised_queries", default=lambda D, tokens, gluon: OFF, configs=_specialised(2)
)
SPECIALISED_KEYS = Space(
    "attention.specialised_keys", default=lambda D, tokens, gluon: OFF, configs=_specialised(2)
)
