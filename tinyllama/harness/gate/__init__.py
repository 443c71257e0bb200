"""The gate: whether a candidate is slower than a base, told by interleaved blocks of both.

decision.py   the rule: block statistics -> SLOWER, SAME, FASTER, or more blocks
revision.py   a revision's tree beside the candidate's, and what in it a benchmark runs
subject.py    what is timed, inside a worker of either side
pair.py       two workers, one of each side, by turns: a block
session.py    the whole comparison: what is identical, what differs, what cannot be told
noise.py      the device's own A/A blocks; certify.py: the error rates that follow from them
attribution.py  which kernels of a slower benchmark moved
accepted.py   slowdowns that a committed file allows
watch.py      the device's lock; others on it, and throttled clocks
"""
