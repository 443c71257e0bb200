"""What the provider by torch's fused attention does before that is called."""

from typing import Any

import pytest
import torch

from tinyllama.harness.check.cases import OpCase
from tinyllama.harness.check.evaluate import evaluate
from tinyllama.ops.attention import attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lies", ["offset", "padded"])
def test_fused_attention_of_torch_gets_rows_from_multiples_of_16_bytes(
    dtype: torch.dtype, lies: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels do not check it: others gave NaN, or an error after which no GPU call worked."""
    stock, operands = torch.nn.functional.scaled_dot_product_attention, list[torch.Tensor]()

    def spied(*args: Any, **options: Any) -> torch.Tensor:
        operands.extend(args)
        o = stock(*args, **options)
        o.register_hook(operands.append)
        return o

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    case = OpCase(
        attention, attention["torch"], attention.cases[0], dtype, layout=lies, upstream=lies
    )
    inputs = case.inputs(device, 0)
    evaluate(attention, attention["torch"].call, inputs)
    tensors = [*inputs.args.values(), *inputs.upstream.values()]
    starts = [[x.data_ptr(), *(s * x.element_size() for s in x.stride()[:-1])] for x in tensors]
    assert any(start % 16 for pair in starts for start in pair), "the layout is one of these"
    assert len(operands) == 4
    for x in operands:
        strides = [stride * x.element_size() for stride in x.stride()[:-1]]
        assert not any(start % 16 for start in (x.data_ptr(), *strides))
