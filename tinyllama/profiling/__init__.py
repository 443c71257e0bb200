"""Profiling: one command for each tool of the documents, and one way to read what they wrote.

kernels     what a profile says: kernels with calls and times, dispatches, counters
rocprof     files of AMD's profilers, of every supported version
chrome      traces of PyTorch's profiler
lines       command lines of external tools, by version
running     a profiled program with a time limit, and the folder that it leaves
observe     what PyTorch itself can see of a step: trace, memory, operations, energy
documents   the documents' scripts and commands, and what does their work here
"""
