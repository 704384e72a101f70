"""`make gpu-check`: what only a card can show, in one script of a few minutes.

Times against the memory bandwidth, memory against the plan, recorded passes against launched ones, waits of
the host, coupled noise against the CPU's bits, recovery from faults. Every case is one row of a report, and a
failure costs its row only. Needs torch with CUDA, transformers, numpy, numba, llguidance, protobuf and
grpcio-status; no network, no checkpoint, no embedded models, nothing of the test suite.

`--pretend` runs every case in small shapes on the pretended CUDA device of the tests. That shows that the
script works; its figures are those of no card.
"""
