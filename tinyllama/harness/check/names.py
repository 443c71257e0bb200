"""The names of all checks, without torch: what a command line is held to before anything loads."""

# What each check tries, as it is said beside a fault. In the order in which they are tried: what
# finds most faults per second comes first.
TRIED = {
    "kernel launched": "whether a provider that declares a kernel launches one",
    "outputs": "outputs in the declared cases, against the reference",
    "gradients": "gradients in the declared cases, against the reference",
    "unwritten memory": "the declared cases on memory that is filled with NaN",
    "untouched inputs": "whether a call changes its inputs or upstream gradients",
    "extreme values": "the extreme values that the op declares",
    "input layouts": "inputs that are strided, transposed, expanded, unaligned or padded",
    "gradient layouts": "upstream gradients that are strided, transposed, expanded, or faint",
    "absent gradients": "a backward pass in which one output gets no upstream gradient",
    "wanted gradients": "a backward pass in which only some inputs require a gradient",
    "out of bounds": "whether an access leaves the memory of its tensor",
    "sizes": "axes of other lengths than declared",
    "special values": "values that random inputs never have, and other parameters",
    "fresh contents": "histories of calls, each of which must be right whatever came before",
    "races": "whether two programs of a launch store to one address",
    "program order": "programs that run backwards, shuffled and interleaved",
    "large offsets": "rows that lie 2^30 elements apart",
    "scaled upstream": "upstream gradients with other values: larger, zero, infinite",
    "backward twice": "histories of calls and backward passes, such as backward A; backward A",
    "determinism": "whether equal inputs give equal bits again",
    "empty batch": "inputs without rows",
    "autocast": "calls under torch.autocast",
    "second derivative": "derivatives of the gradients",
    "captured": "a captured device graph that is replayed on new contents",
    "side stream": "a call on another stream",
}
APART = "judged apart"  # of this check alone, the candidate is not in the process that decides
LAUNCHED = "kernel launched"
DEFAULT = tuple(TRIED)
TRIED |= {
    "resources": "the compilation of each kernel for each chip",
    "compiled": "the provider under torch.compile",
    "configurations": "each configuration of the kernels",
    APART: "values from a secret seed, compared in another process",
}
ALL = tuple(TRIED)
# Of the declared cases, which run once for all of these.
PLAIN = OUTPUTS, GRADIENTS, UNWRITTEN, TOUCHED, BOUNDS = (
    "outputs",
    "gradients",
    "unwritten memory",
    "untouched inputs",
    "out of bounds",
)

# On a GPU a second process, which interprets kernels on the CPU, makes these checks as well. A GPU
# shows nothing of the first ones, or less.
INTERPRETED_ALONE = ("out of bounds", "races", "program order", "large offsets")
INTERPRETED = (
    *INTERPRETED_ALONE,
    *("untouched inputs", "extreme values", "input layouts", "gradient layouts"),
    *("sizes", "special values"),
)
