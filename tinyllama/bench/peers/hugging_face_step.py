"""A training step of Hugging Face's Llama, with or without Liger-Kernel and torch.compile."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tinyllama.bench.peers import LLAMA
from tinyllama.bench.peers.hugging_face import (
    as_hugging_face,
    as_ours,
    hugging_face_llama,
    hugging_face_names,
)
from tinyllama.bench.peers.with_ours import loss_with, with_ours
from tinyllama.bench.steps import AUTOCAST, StepContender
from tinyllama.harness.measure.memory import forget_peak
from tinyllama.model.llama import TinyLlama
from tinyllama.training.step import capture_graphs


class HuggingFaceStep(StepContender):
    """`LlamaForCausalLM` with torch's fused AdamW (the default one with eager attention,
    which is V1's counterpart).

    mode: of torch.compile; the step is then captured as well. liger: with Liger-Kernel's
    kernels, fused linear cross-entropy included. ours: with this project's ops in their place.
    """

    def __init__(
        self,
        attention: str = "sdpa",
        liger: bool = False,
        ours: bool = False,
        mode: str | None = None,
        **where: Any,
    ) -> None:
        importlib.import_module(LLAMA)  # not compiling
        super().__init__(**where)
        self.software = _software("transformers", *(["liger_kernel"] if liger else []))
        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=True)
        self.model = hugging_face_llama(self.shape, attention).to(self.device).train()
        if ours:
            self.model = with_ours(self.model)
        self._take_weights()
        settings = self.config
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            # None is torch's default; False would choose the loop over single tensors.
            fused=None if attention == "eager" else True,
            capturable=mode is not None,
        )
        loss = self._liger_loss if liger else self._our_loss if ours else self._loss
        self._loss_of: Callable[..., torch.Tensor] = loss
        self.step = self._eager_step
        if mode is not None:
            self.plan = f"compile ({mode}) + capture" if mode != "default" else "compile + capture"
            self._loss_of = torch.compile(self._loss_of, mode=mode, dynamic=False)
            self._capture()
        self.started()

    def _take_weights(self) -> None:
        ours = dict(TinyLlama(self.shape, "v1").named_parameters())
        theirs = dict(self.model.named_parameters())
        self.parameters = {}
        with torch.no_grad():
            for hf, name in hugging_face_names(self.shape).items():
                theirs[hf].copy_(as_hugging_face(self.shape, name, ours[name]))
                self.parameters[name] = theirs[hf]

    @torch.no_grad()
    def _start_again(self) -> None:
        """Back to the weights and states before the warm-up, in the same memory."""
        self._take_weights()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def weight_of(self, name: str) -> torch.Tensor:
        return as_ours(self.shape, name, self.parameters[name].detach())

    def gradient_of(self, name: str) -> torch.Tensor | None:
        gradient = self.parameters[name].grad
        return None if gradient is None else as_ours(self.shape, name, gradient)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def _liger_loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch[:, :-1], shift_labels=batch[:, 1:].contiguous()).loss

    def _our_loss(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_with(self.model, batch[:, :-1], batch[:, 1:])

    def _eager_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        dtype = AUTOCAST.get(self.group.precision)
        with torch.autocast(
            self.device.type, dtype, enabled=dtype is not None, cache_enabled=not self.graphs
        ):
            loss = self._loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def _capture(self) -> None:
        """Warm up, then capture the whole step on static tokens."""
        static = self.batches[0].clone()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(self.warm_ups):
                self._eager_step(static)
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        self._start_again()
        forget_peak(self.device)
        losses: list[torch.Tensor] = []
        self.graphs = capture_graphs([lambda: losses.append(self._eager_step(static))])

        def replay(batch: torch.Tensor) -> torch.Tensor:
            static.copy_(batch)
            self.graphs[0].replay()
            return losses[0]

        self.step = replay


def _software(*modules: str) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in modules)
