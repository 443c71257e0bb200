"""A provider of an op that is timed by calls in a row, too: the host's time as a training step has
it, where calls follow each other.

A single call also wakes the thread of torch's backward pass, and finds its code in no cache of the
processor.
"""

from typing import Any

import torch

from tinyllama.harness.check.evaluate import Inputs, Leaves
from tinyllama.harness.measure.clock import Clock
from tinyllama.harness.measure.op_contender import KEPT_SHARE, OpContender

IN_A_ROW = 20  # calls whose host time is read together
QUEUED_KERNELS = 512  # of a row; the queue of a GPU holds about 1,024 launches


class RowContender(OpContender):
    """A provider on one timed case, by single calls and by calls in a row."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.row_clock = Clock(self.clock.queue, IN_A_ROW * self.clock.spin_seconds)
        self.kernels: int | None = None  # of the last pass, once `facts` has counted them

    def facts(self) -> dict[str, Any]:
        found = super().facts()
        self.kernels = found[self.passes[-1]]["kernels"]
        return found

    def in_a_row(self) -> float | None:
        """Host seconds of a call of the last pass: the mean of `IN_A_ROW` calls, each on inputs of
        its own. The results of the last one are checked.

        None if the inputs of so many calls would take more than `KEPT_SHARE` of a GPU's memory, or
        more than `QUEUED_KERNELS` would be launched. Raises WrongResultError, or NotQueuedError
        when a call waits for the device and its provider does not declare that.
        """
        if (self.kernels or 0) * IN_A_ROW > QUEUED_KERNELS or not self._holds(IN_A_ROW):
            return None
        calls: list[tuple[Inputs, Leaves]] = []

        def prepare() -> None:
            calls.clear()
            for _ in range(IN_A_ROW):
                self._give(self.passes[-1])
                calls.append((self.inputs, self.args))

        def run() -> None:
            for self.inputs, self.args in calls:
                self._run()

        if self.case.provider.waits:
            prepare()
            self.clock.queue.synchronize()  # else the first call waits for its inputs, too
            start = self.clock.queue.now()
            run()
            host = self.clock.queue.now() - start
        else:
            host = self.row_clock.read(run, before=prepare).host
        self._check()
        self._forget()
        return host / IN_A_ROW

    def _holds(self, sets: int) -> bool:
        """Whether so many sets of inputs take little of the device's memory."""
        if self.device.type == "cpu":
            return True
        self._give(self.passes[-1])
        tensors = (*self.args.values(), *self.inputs.upstream.values())
        bytes_each = sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        _, total = torch.cuda.mem_get_info(self.device)
        return sets * bytes_each <= KEPT_SHARE * total
