"""Offsets past 2^31 without the memory: every kernel, interpreted, on addresses that cost nothing.

The results are those of dense and small tensors, bit for bit, and no sum or product of 32 bits may
overflow on the way to an address. What is launched is registered with each op
(`Op.rows_apart`, `Op.many_programs`).
"""

import functools

import pytest
import torch

pytest.importorskip("triton")


from correctness_tests.support.launched import (
    chosen_kernels,
    growing_arguments,
    large_kernels,
    small_kernels,
    tensors,
    tree_ops,
)
from correctness_tests.support.many_programs import EndsAlone, load, near
from tinyllama.harness.check.offsets import Far, NoAddressesError
from tinyllama.harness.declare.offsets import ManyPrograms, Pairs, Results, RowsApart
from tinyllama.harness.kernels import layout
from tinyllama.harness.kernels.launch import Launch, recorded

LOADED = [load(op) for op in tree_ops()]
ROWS = {f"{op.name}-{name}": call for op in LOADED for name, call in op.rows.items()}
PROGRAMS = {f"{op.name}-{name}": call for op in LOADED for name, call in op.programs.items()}


def apart(call: RowsApart) -> Results:
    try:
        return call(Far())
    except NoAddressesError as error:
        pytest.skip(f"this system promises no memory that it may not have: {error}")


def at_ends(call: ManyPrograms) -> Pairs:
    try:
        return call(EndsAlone())
    except NoAddressesError as error:
        pytest.skip(f"this system promises no memory that it may not have: {error}")


@pytest.mark.long
@pytest.mark.parametrize("call", ROWS.values(), ids=ROWS)
def test_rows_far_apart_give_the_same_bits(call: RowsApart, checked: None) -> None:
    expected, before = call(near), layout.copies
    found = apart(call)
    assert layout.copies == before, "they were brought together"
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("call", PROGRAMS.values(), ids=PROGRAMS)
def test_the_first_and_the_last_of_many_give_the_same_bits(
    call: ManyPrograms, checked: None
) -> None:
    for found, expected in at_ends(call):
        assert torch.equal(found, expected)


@pytest.mark.long
def test_every_kernel_is_tried() -> None:
    """A new kernel fails here; `Op.rows_apart` says what to register."""
    tried = {launch.identity for launch in registered()} - small_kernels()
    by_table = chosen_kernels() | {kernel for kernel, _ in growing_arguments()} - small_kernels()
    assert tried == large_kernels() | by_table


def test_every_tensor_that_may_be_large_is_tried() -> None:
    """A new argument of a kernel fails here: it belongs to a call that is registered."""
    far = {
        (launch.identity, name)
        for launch in registered()
        for name, x in tensors(launch)
        if 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) > 2**31
    }
    missing = growing_arguments() - far
    small = small_kernels()
    assert not {(one, name) for one, name in missing if not {one, f"{one}.{name}"} & small}


@functools.cache
def registered() -> list[Launch]:
    """What the registered calls launch: nothing runs."""
    with recorded() as launches:
        for rows in ROWS.values():
            apart(rows)
        for many in PROGRAMS.values():
            at_ends(many)
    return launches
