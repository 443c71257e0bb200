"""The workshop of docs/workshop.md: one model with one thing broken at a time, and what shows it.

stages      the broken models; strided: attention that reads any layout
checks      what finds each fault
contender   a stage in its worker, and what is seen of it
running     all stages timed, and what is written
exercises   the tables that a participant fills in
blanks      starters and solutions
"""
