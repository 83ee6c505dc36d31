"""Synthetic requests: distributions mean what they say, and the seed decides everything."""

import math

import numpy as np
import pytest

from kvcupy.simulate.workload import parse_lengths, synthesize


def sample(text, count=20_000):
    return parse_lengths("tokens", text).sample(np.random.default_rng(1), count)


def test_fixed():
    assert sample("512", 3).tolist() == sample("fixed:512", 3).tolist() == [512, 512, 512]


def test_uniform_includes_both_ends():
    lengths = sample("uniform:3:6")
    assert np.unique(lengths).tolist() == [3, 4, 5, 6]
    assert lengths.mean() == pytest.approx(4.5, abs=0.05)
    assert set(sample("uniform:7:7", 5)) == {7}


def test_lognormal_mean_is_the_mean_of_the_lengths():
    lengths = sample("lognormal:500:0.7", 100_000)
    assert lengths.mean() == pytest.approx(500, rel=0.02)
    assert np.median(lengths) == pytest.approx(500 / math.exp(0.7**2 / 2), rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.02)
    assert set(sample("lognormal:20:0", 10)) == {20}
    assert sample("lognormal:1:5").min() == 1


def test_zipf_is_bounded_and_falls_off_by_its_exponent():
    lengths = sample("zipf:1.5:1000", 100_000)
    assert 1 <= lengths.min() <= lengths.max() <= 1000
    counts = np.bincount(lengths)
    assert counts[1] / counts[4] == pytest.approx(4**1.5, rel=0.05)
    assert np.unique(sample("zipf:0:3")).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a number of tokens or one of fixed, uniform, lognormal, zipf, got ''|tokens must be"),
        ("0", "tokens must be a whole number from 1"),
        ("-5", "tokens must be a whole number from 1"),
        ("1.5", "tokens must be a whole number"),
        ("1_000", "tokens must be a whole number"),
        ("normal:5:1", "one of fixed, uniform, lognormal, zipf, got 'normal:5:1'"),
        ("uniform:5", "must have the form uniform:low:high, got 'uniform:5'"),
        ("uniform:6:5", "low must be at most high"),
        ("uniform:a:5", "low must be a whole number"),
        ("lognormal:nan:1", "mean must be a number"),
        ("lognormal:5:-1", "sigma must be a number from 0 to 10"),
        ("lognormal:inf:1", "mean must be a number"),
        ("zipf:1:99999999999", "max must be a whole number from 1 to 10000000"),
    ],
)
def test_bad_distributions_are_named(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_lengths("prompt_tokens", text)
    assert str(error.value).startswith("prompt_tokens")


def test_arrivals_are_poisson():
    trace = synthesize(20_000, 5.0, "10", "10")
    gaps = np.diff(trace.arrival_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize("rate", [0, math.inf])
def test_no_rate_means_all_at_once(rate):
    assert synthesize(5, rate).arrival_s.tolist() == [0.0] * 5


def test_seed_decides_and_columns_draw_from_their_own_streams():
    def columns(*arguments, **options):
        trace = synthesize(50, 2.0, *arguments, **options)
        return trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()

    lengths = ("uniform:1:1000", "zipf:1.1:500")
    assert columns(*lengths, seed=3) == columns(*lengths, seed=3)
    assert all(a != b for a, b in zip(columns(*lengths, seed=3), columns(*lengths, seed=4), strict=True))
    assert columns("7", lengths[1], seed=3)[::2] == columns(*lengths, seed=3)[::2]


@pytest.mark.parametrize("rate", [-1, math.nan, 1e-300])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match="rate_per_s must be 0"):
        synthesize(5, rate)


def test_bad_counts():
    with pytest.raises(ValueError, match="num_requests must be at least 1, got 0"):
        synthesize(0, 1.0)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        synthesize(1, 1.0, seed=-1)
