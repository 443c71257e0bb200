"""The harness in a repository of one's own: its suites, for the ops of files.

entry.py        the pytest plugin that an installed harness brings; it imports pytest alone
selection.py    which ops are meant; suites beside the repository's own tests, groups, benchmarks
accuracy.py     are they right? timings.py: how fast are they?
"""
