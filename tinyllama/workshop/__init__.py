"""The workshop of docs/workshop.md: one model with one thing broken at a time, and what shows it.

stages      the broken models; strided: attention that reads any layout
contender   a stage in its worker, what is seen of it, and the checks that find each fault
running     all stages timed, and what is written
exercises   the tables that a participant fills in
blanks      starters and solutions
"""
