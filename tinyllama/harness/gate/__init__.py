"""The gate: it measures blocks of a base and a candidate alternately, and decides which is slower.

The pytest plugin is `tinyllama.harness.plugins.gate`.

registered.py   the ops and benchmarks that a layer above registers
own.py          the ops of a repository of one's own
judge.py        which harness judges; judged.py: what of a candidate would
comparison.py   prepares both sides, from a revision or an interpreter
session.py      the whole comparison; setting.py: its input and its state
listing.py      which benchmarks both sides have
revision.py     a revision's tree; sources.py: what of a tree a benchmark runs
identity.py     whether equal source is the same code; opened.py: what an op opens, seen in a fork
process_state.py  what an import may change for every op
turns.py        a share of slow turns; turns on values that no process has seen
pair.py         two workers, one of each side, take turns: a block
side.py         one side, inside its worker; subject.py: an op's provider there
digests.py      how a verified result is recognised
compiled.py     the code of a launch without debug lines
decision.py     the rule: block statistics -> SLOWER, SAME, FASTER, or more blocks
figures.py      a metric over its blocks; exact.py: what has no noise
attribution.py  which kernels of a slower benchmark moved
accepted.py     slowdowns that a committed file allows; team.py: what pyproject.toml sets
proof.py        the file that says a gate was green, held to the tree
watch.py        the device's lock; others on it, and throttled clocks
noise.py        the device's own A/A blocks; certify.py: the error rates that follow from them
certificates.py certificates as they are stored
"""
