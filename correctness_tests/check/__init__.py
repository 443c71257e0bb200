"""Tests of what `tinyllama check` promises."""
