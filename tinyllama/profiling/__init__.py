"""Profiling: one command for each tool, and one way to read what the tools wrote.

command_lines  command lines of external tools
running        a profiled program with a time limit, and the folder that it leaves
observe        what PyTorch itself can see of a step: ranges (ops of kernels), memory, flops
readers        what a profile says (kernels with calls and times, counters), from files of profilers
               of every supported version, and traces of PyTorch
tables         what is printed; hotspots: of one step
"""
