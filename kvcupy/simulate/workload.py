"""Synthetic requests: Poisson arrivals, lengths from a named distribution, from one seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcupy.simulate.trace import MAX_TOKENS, Trace
from kvcupy.spec import whole_number

IntArray = NDArray[np.int64]

_MAX_ZIPF = 10**7  # the distribution is tabulated


def _fixed(rng: np.random.Generator, count: int, tokens: float) -> IntArray:
    return np.full(count, int(tokens), dtype=np.int64)


def _uniform(rng: np.random.Generator, count: int, low: float, high: float) -> IntArray:
    return rng.integers(int(low), int(high), size=count, endpoint=True)


def _lognormal(rng: np.random.Generator, count: int, mean: float, sigma: float) -> IntArray:
    lengths = rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, size=count)
    return np.clip(np.rint(lengths), 1, MAX_TOKENS).astype(np.int64)


def _zipf(rng: np.random.Generator, count: int, alpha: float, maximum: float) -> IntArray:
    shares = np.cumsum(np.arange(1, int(maximum) + 1, dtype=np.float64) ** -alpha)
    lengths: IntArray = np.searchsorted(shares, rng.random(count) * shares[-1], side="right") + 1
    return lengths


class _Parameter(NamedTuple):
    name: str
    minimum: float
    maximum: float
    whole: bool = True


class _Kind(NamedTuple):
    sample: Callable[..., IntArray]
    parameters: tuple[_Parameter, ...]


_KINDS = {
    "fixed": _Kind(_fixed, (_Parameter("tokens", 1, MAX_TOKENS),)),
    "uniform": _Kind(_uniform, (_Parameter("low", 1, MAX_TOKENS), _Parameter("high", 1, MAX_TOKENS))),
    "lognormal": _Kind(
        _lognormal, (_Parameter("mean", 1, MAX_TOKENS, whole=False), _Parameter("sigma", 0, 10, whole=False))
    ),
    "zipf": _Kind(_zipf, (_Parameter("alpha", 0, 100, whole=False), _Parameter("max", 1, _MAX_ZIPF))),
}


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens. Make one with `parse_lengths`."""

    kind: str
    parameters: tuple[float, ...]

    def sample(self, rng: np.random.Generator, count: int) -> IntArray:
        """`count` lengths, int64, 1 or more."""
        return _KINDS[self.kind].sample(rng, count, *self.parameters)


def parse_lengths(name: str, text: str) -> Lengths:
    """A distribution of lengths from text; `name` is the argument's name in the ValueError of a bad one.

    "512" or "fixed:512": every length is 512.
    "uniform:100:500": whole numbers from 100 to 500, both included, equally likely.
    "lognormal:mean:sigma": mean is the mean length in tokens, sigma the standard deviation of its natural
        logarithm (so the median is mean / exp(sigma^2 / 2)); rounded to whole tokens, at least 1.
    "zipf:alpha:max": length n from 1 to max with probability proportional to n^-alpha.

    >>> parse_lengths("prompt_tokens", "uniform:100:500")
    Lengths(kind='uniform', parameters=(100, 500))
    """
    kind, *fields = text.strip().split(":")
    if not fields:
        kind, fields = "fixed", [kind]
    kind = kind.strip().lower()
    if kind not in _KINDS:
        raise ValueError(f"{name} must be a number of tokens or one of {', '.join(_KINDS)}, got {text!r}")
    parameters = _KINDS[kind].parameters
    if len(fields) != len(parameters):
        form = ":".join([kind, *(parameter.name for parameter in parameters)])
        raise ValueError(f"{name} must have the form {form}, got {text!r}")
    values = tuple(_number(name, text, parameter, value) for parameter, value in zip(parameters, fields, strict=True))
    if kind == "uniform" and values[0] > values[1]:
        raise ValueError(f"{name}: low must be at most high, got {text!r}")
    return Lengths(kind, values)


def _number(name: str, text: str, parameter: _Parameter, value: str) -> float:
    try:
        number = (int if parameter.whole else float)(value)
    except ValueError:
        number = math.nan
    if "_" in value or not parameter.minimum <= number <= parameter.maximum:
        kind = "a whole number" if parameter.whole else "a number"
        expected = f"{kind} from {parameter.minimum} to {parameter.maximum}"
        raise ValueError(f"{name}: {parameter.name} must be {expected}, got {value!r} in {text!r}")
    return number


def synthesize(
    num_requests: int,
    rate_per_s: float,
    prompt_tokens: str | int = "512",
    output_tokens: str | int = "128",
    seed: int = 0,
) -> Trace:
    """num_requests requests that arrive as a Poisson process of rate_per_s; rate 0 or inf: all at time 0.

    prompt_tokens, output_tokens: distributions as `parse_lengths` reads them. Arrivals, prompts and outputs
    draw from streams of their own, so that changing one leaves the others as they were.
    """
    count = whole_number("num_requests", num_requests, 1)
    seed = whole_number("seed", seed, 0)
    rate_per_s = float(rate_per_s)
    prompts = parse_lengths("prompt_tokens", str(prompt_tokens))
    outputs = parse_lengths("output_tokens", str(output_tokens))
    # The slowest rate keeps a million gaps within what a trace may hold.
    if not (rate_per_s == 0 or rate_per_s >= 1e-3):
        raise ValueError(f"rate_per_s must be 0 (all at once) or at least 0.001, got {rate_per_s}")
    arrivals, for_prompts, for_outputs = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    at_once = rate_per_s in (0, math.inf)
    arrival_s = np.zeros(count) if at_once else np.cumsum(arrivals.exponential(1 / rate_per_s, count))
    return Trace("synthetic", arrival_s, prompts.sample(for_prompts, count), outputs.sample(for_outputs, count))
