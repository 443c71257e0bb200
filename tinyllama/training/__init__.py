"""Training a Tiny LLaMA: one step, the loop around it, and several ranks.

step         forward, backward and update of one batch, eager or captured
plans        which ways a step can run here
loss         the loss: compiled, and with gradients reduced over ranks
updates      when parameters are updated, and how an update is left out
train        the loop: its checks, Ctrl-C; result: what it gives
data         batches of random tokens or of text
checkpoint   a run on disk
diagnose     which gradients arrive, and the output of every op
ranks        the processes of a job; shards: parameters by FSDP2
"""
