"""The floor of a step: its matrix products, AdamW and attention alone, each at its fastest.

Stock kernels in one captured graph, with nothing between them: no norms, no rotary
embedding, no activations, no loss. Only a step whose products or attention are faster than
torch's best, in the best layout of the operands, takes less time.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyllama.bench.steps import Repeated
from tinyllama.bench.workloads import Group
from tinyllama.harness.machine.device import current
from tinyllama.harness.measure.clock import queue_of, wall_seconds
from tinyllama.training.step import capture_graphs

UNCACHED = 2**30  # bytes: so many that the share in a device's caches is negligible
Product = tuple[int, int, int]  # M, K, N
Layout = tuple[bool, bool]  # whether each operand is the transpose of what is stored
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


class Floor(Repeated):
    """The three parts on random data, each captured where the device can, and all together."""

    def __init__(self, group: str, device: str) -> None:
        self.group = Group.parse(group)
        self.device = current(device)
        self.queue = queue_of(self.device)
        self.samples = self.group.shape.batch_size
        tf32 = self.group.precision == "tf32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        self.dtype = torch.bfloat16 if self.group.precision == "bf16" else torch.float32
        on_cpu = self.device.type == "cpu"
        self.backend, self.how = ("torch's choice", "eager") if on_cpu else ("", "capture")
        self.parts: dict[str, Callable[[], object]] = {
            "products": self._products(),
            "attention": self._fastest_attention(),
            "optimizer": self._optimizer(),
        }
        self._all = self._graph(*self.parts.values())
        self.parts = {name: self._graph(part) for name, part in self.parts.items()}

    def next(self) -> None:
        self._all()

    def facts(self) -> dict[str, Any]:
        """Seconds of each part alone, and how it ran."""
        return {
            "parts": {name: self._seconds(part) for name, part in self.parts.items()},
            "plan": f"{self.how}; attention by {self.backend}",
            "software": "torch",
        }

    def _seconds(self, part: Callable[[], object]) -> float:
        part()
        return statistics.median(wall_seconds(part, self.queue) for _ in range(10))

    def _graph(self, *parts: Callable[[], object]) -> Callable[[], None]:
        if self.device.type == "cpu":

            def one_by_one() -> None:
                for part in parts:
                    part()

            return one_by_one
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for part in parts:
                part()
        torch.cuda.synchronize()
        return capture_graphs(parts)[0].replay

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _products(self) -> Callable[[], None]:
        """y = x W^T, dx = dy W and dW = dy^T x of each projection (projections of one input are one
        product) and of the tied embedding, each in its fastest layout."""
        workload = self.group.shape
        model = workload.model
        n = workload.batch_size * workload.seq_len
        d, f = model.hidden_dim, model.ffn_dim
        qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        layer = ((qkv, d), (d, model.num_heads * model.head_dim), (2 * f, d), (d, f))
        shapes: Mapping[tuple[int, int], int] = {
            **{shape: model.num_layers for shape in layer},
            (model.vocab_size, d): 1,
        }
        work = []
        for (o, i), count in shapes.items():
            for size in ((n, i, o), (n, o, i), (o, n, i)):
                work += self._operands(size, count)

        def products() -> None:
            for a_MK, b_KN in work:
                torch.mm(a_MK, b_KN)

        return products

    def _operands(self, size: Product, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Operands of ``count`` products (M K) @ (K N), used in turn: new ones for each product,
        or so many that no cache holds them, since a step's operands are not in a cache either."""
        m, k, n = size
        sets = min(count, 1 + UNCACHED // ((m * k + k * n) * self.dtype.itemsize))
        transposed = self._fastest_layout(size)
        pairs = [self._pair(size, transposed) for _ in range(sets)]
        return [pairs[index % sets] for index in range(count)]

    def _pair(self, size: Product, transposed: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """a (M K) and b (K N), each contiguous or the transpose of a contiguous tensor."""
        m, k, n = size
        a_MK = self._random(k, m).t() if transposed[0] else self._random(m, k)
        b_KN = self._random(n, k).t() if transposed[1] else self._random(k, n)
        return a_MK, b_KN

    def _fastest_layout(self, size: Product) -> Layout:
        """The fastest layout; on a CPU that of a step's forward pass."""
        if self.device.type == "cpu":
            return False, True
        seconds: dict[Layout, float] = {}
        for transposed in itertools.product((False, True), (False, True)):
            a_MK, b_KN = self._pair(size, transposed)
            seconds[transposed] = self._seconds(self._graph(partial(torch.mm, a_MK, b_KN)))
        return min(seconds, key=seconds.__getitem__)

    def _attention(self, backend: SDPBackend | None) -> Callable[[], None]:
        workload = self.group.shape
        model, b, t = workload.model, workload.batch_size, workload.seq_len
        k = model.head_dim
        grouped = self.dtype is torch.bfloat16 and self.device.type != "cpu"
        groups = model.num_kv_heads if grouped else model.num_heads
        q = self._random(b, model.num_heads, t, k).requires_grad_()
        keys, values = (self._random(b, groups, t, k).requires_grad_() for _ in range(2))
        upstream = self._random(b, model.num_heads, t, k)

        def attention() -> None:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                for _ in range(model.num_layers):
                    o = F.scaled_dot_product_attention(
                        q, keys, values, is_causal=True, enable_gqa=grouped
                    )
                    torch.autograd.grad(o, (q, keys, values), upstream)

        return attention

    def _fastest_attention(self) -> Callable[[], None]:
        """Attention forward and backward of every layer, by the fastest backend there is."""
        if self.device.type == "cpu":
            return self._attention(None)
        seconds: dict[SDPBackend, float] = {}
        for backend in BACKENDS:
            call = self._attention(backend)
            try:
                call()
            except RuntimeError:  # the backend does not take these inputs
                continue
            seconds[backend] = self._seconds(self._graph(call))
        best = min(seconds, key=lambda backend: seconds[backend])
        self.backend = best.name
        return self._attention(best)

    def _optimizer(self) -> Callable[[], object]:
        count = self.group.shape.model.parameters
        parameter = torch.randn(count, device=self.device, requires_grad=True)
        parameter.grad = torch.randn_like(parameter)
        capturable = self.device.type != "cpu"
        return torch.optim.AdamW([parameter], fused=True, capturable=capturable).step
