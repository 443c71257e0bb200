"""What `check` finds right gets a time, and is verified by the gate."""

from pathlib import Path

import pytest

from correctness_tests.corpus.variants import FOLDER, variants_of
from tinyllama.harness.check.cases import SHORT
from tinyllama.harness.gate.timed_call import TimedCall
from tinyllama.harness.measure.op_contender import OpContender, Timed, ops_of

RIGHT = (
    "gated_product-frozen_as_stated",
    "gated_product-wide_output_as_stated",
    "logsumexp_with_mask",
    "positive_mask",
    "quantised_rows-half_up",
    "scaled_half",
    "short_attention",
)


@pytest.mark.parametrize("name", RIGHT)
def test_what_check_finds_right_gets_a_time_and_is_verified_by_the_gate(
    name: str, tmp_path: Path
) -> None:
    (variant,) = (v for v in variants_of(FOLDER / f"{name.split('-')[0]}.py") if str(v) == name)
    files = (str(variant.write(tmp_path)),)
    op = next(op for op in ops_of("tinyllama.ops", files).values() if op.name.startswith("corpus_"))
    op.timed = op.cases[:1]
    (provider,) = (provider for provider in op.providers.values() if provider.name != "eager")
    for dtype in provider.dtypes or op.dtypes:
        timed = Timed(op.name, provider.name, 0, SHORT[dtype])
        contender = OpContender(timed, "cpu", "tinyllama.ops", files)
        contender.check_first()
        for _ in range(3):
            contender.turn()
        TimedCall(timed, "cpu", "tinyllama.ops", files).verify(seed=1)
