"""Test bodies that run on every backend: each takes the fixture `case`, which says on which.

A test module imports the bodies it wants; its directory's fixture decides about the backend. So the same bodies run on
a CPU (tests/backends) and on a GPU (tests/gpu).
"""
