"""Profiling: one command for each tool, and one way to read what the tools wrote.

profiles       what a profile says: kernels with calls and times, launches, counters
readers        files of AMD's profilers, of every supported version, and traces of PyTorch
nsight         files of Nsight Compute
command_lines  command lines of external tools, by version
running        a profiled program with a time limit, and the folder that it leaves
observe        what PyTorch itself can see of a step: trace, memory, operations, energy
shown          the tables
course         scripts and commands of the published course, and what does their work here
"""
