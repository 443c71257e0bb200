"""The gate: it measures blocks of a base and a candidate alternately, and decides which is slower.

command, options, judge_process, cancel     the command, and the process that judges
config, waivers                             what a repository sets, and accepts
snapshots, workspace, protected_files       both trees, with the judge's harness in them
affected, declarations                      what a change can reach, and what of it would judge
benchmarks                                  what a side declares, and what both have
session, setting                            the whole comparison; its input and state
schedule, pair, wave                        which processes work when; two sides take turns
worker, timed_call, unproven, verification  a side in its process; its times and results
metric, sequential_test                     figures over blocks, and the rule that decides
counters, kernel_fingerprint, attribution   what has no noise; which kernels moved
device_guard                                the device's lock; others on it, throttled clocks
calibrate                                   a device's noise, and the error rates that follow
report                                      what is written, and proves a green run
"""
