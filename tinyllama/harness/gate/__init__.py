"""The gate: whether a candidate is slower than a base, told by interleaved blocks of both.

plugin.py       pytest's options, verdicts as test cases, exit status
comparison.py   from a revision or an interpreter to both sides beside each other
session.py      the whole comparison; setting.py: what it is given, what it finds
revision.py     a revision's tree; sources.py: what of a tree a benchmark runs
pair.py         two workers, one of each side, by turns: a block
side.py         one side, inside its worker; subject.py: an op's provider there
compiled.py     the code of a launch without debug lines
decision.py     the rule: block statistics -> SLOWER, SAME, FASTER, or more blocks
figures.py      a metric over its blocks; exact.py: what has no noise
attribution.py  which kernels of a slower benchmark moved
accepted.py     slowdowns that a committed file allows
watch.py        the device's lock; others on it, and throttled clocks
noise.py        the device's own A/A blocks; certify.py: the error rates that follow from them
"""
