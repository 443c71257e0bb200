"""Loss curves: what a point of one is the mean of, and which points a record keeps."""

import torch

from tinyllama.bench import curves


def test_a_point_is_the_mean_of_the_window_that_begins_there() -> None:
    losses = torch.arange(float(curves.STEPS)) ** 2
    smooth = curves.curve(losses)
    assert len(smooth) == curves.STEPS - curves.WINDOW + 1
    for step in (0, 7, len(smooth) - 1):
        window = losses[step : step + curves.WINDOW]
        torch.testing.assert_close(smooth[step], window.mean())
    entry = curves.entry_of("v1", "bf16", smooth)
    assert entry.losses == [round(loss, 6) for loss in smooth.tolist()[:: curves.EVERY]]
    assert (entry.window, entry.every, entry.steps) == (curves.WINDOW, curves.EVERY, curves.STEPS)
