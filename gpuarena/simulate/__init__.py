"""What serving requests of given lengths does to the memory of a KV cache: contiguous pieces, buddies, pages, an arena."""

from gpuarena.simulate._arguments import Linear, linear
from gpuarena.simulate._synthetic import synthetic
from gpuarena.simulate.engine import run
from gpuarena.simulate.result import LengthClass, Moment, Result, Sample
from gpuarena.simulate.trace import Request, RequestTrace, RequestTraceError, load_trace

__all__ = [
    "LengthClass",
    "Linear",
    "Moment",
    "Request",
    "RequestTrace",
    "RequestTraceError",
    "Result",
    "Sample",
    "linear",
    "load_trace",
    "run",
    "synthetic",
]
