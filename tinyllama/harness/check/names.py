"""The names of all checks, without torch: what a command line is held to before anything loads."""

# In the order in which they are tried: what finds most faults per second comes first.
DEFAULT = (
    "kernel launched",
    "outputs",
    "gradients",
    "unwritten memory",
    "untouched inputs",
    "extreme values",
    "input layouts",
    "gradient layouts",
    "absent gradients",
    "wanted gradients",
    "out of bounds",
    "sizes",
    "special values",
    "fresh contents",
    "races",
    "program order",
    "large offsets",
    "scaled upstream",
    "backward twice",
    "determinism",
    "empty batch",
    "autocast",
    "second derivative",
    "captured",
    "side stream",
)
APART = "judged apart"  # of this check alone, the candidate is not in the process that decides
LAUNCHED = "kernel launched"
ALL = (*DEFAULT, "resources", "compiled", "configurations", APART)

# On a GPU a second process, which interprets kernels on the CPU, makes these checks as well. A GPU
# shows nothing of the first ones, or less.
INTERPRETED_ALONE = ("out of bounds", "races", "program order", "large offsets")
INTERPRETED = (
    *INTERPRETED_ALONE,
    *("untouched inputs", "extreme values", "input layouts", "gradient layouts"),
    *("sizes", "special values"),
)
