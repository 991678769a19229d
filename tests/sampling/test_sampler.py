"""From logits and requests to tokens: against exact distributions, and each request alone against in a batch."""

import numpy as np
import pytest
import torch

from headrace.ops.reference import Ops
from headrace.sampling.params import SampledToken, SampleRequest, SamplingParams, TokenLogprob
from headrace.sampling.random import uniform
from headrace.sampling.sampler import prompt_logprobs, sample_tokens
from helpers.distribution import exact_distribution, p_value

OPS = Ops()
V = 30


def logits_of(rows, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32))


def request(seed=0, index=0, position=0, forbidden=(), **params):
    return SampleRequest(SamplingParams(**params), seed, index, position, forbidden)


def log_softmax(logits):
    wide = logits.numpy().astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_draws_follow_the_distribution_with_bias_and_forbidden_tokens():
    logits = logits_of(1)
    bias = {3: 2.5, 4: -1.5, 9: -100.0}
    changed = logits[0].numpy().astype(np.float64)
    for token, amount in bias.items():
        changed[token] += amount
    changed[[0, 7]] = -np.inf
    params = SamplingParams(temperature=1.2, top_k=20, top_p=0.95, min_p=0.01, logit_bias=bias)
    requests = [SampleRequest(params, 9, 0, position, (0, 7)) for position in range(10_000)]
    tokens = [t.token_id for t in sample_tokens(OPS, logits.expand(len(requests), V), requests)]
    filters = {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    assert p_value(np.array(tokens), exact_distribution(changed, **filters)) > 1e-3
    # The test can fail: without the bias the fit is hopeless.
    assert p_value(np.array(tokens), exact_distribution(logits[0].numpy().astype(np.float64), **filters)) < 1e-9


def test_the_draw_is_that_of_seed_index_and_position():
    logits = logits_of(1)
    ends = exact_distribution(logits[0].numpy().astype(np.float64)).cumsum()
    places = [(seed, index, position) for seed in (5, 2**64 - 1) for index in (0, 1) for position in (0, 1, 500)]
    sampled = sample_tokens(OPS, logits.expand(len(places), V), [request(*place) for place in places])
    assert [t.token_id for t in sampled] == [np.searchsorted(ends, uniform(*place), side="right") for place in places]


def test_a_request_alone_gives_what_it_gives_in_any_batch():
    rng = np.random.default_rng(4)
    logits = logits_of(40)
    requests = [
        request(
            seed=int(rng.integers(100)),
            position=row,
            forbidden=tuple(rng.integers(0, V, rng.integers(0, 3)).tolist()),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 2.0])),
            top_k=int(rng.choice([-1, 0, 1, 5, 2**63 - 1])),
            top_p=float(rng.choice([1.0, 0.9, 0.2])),
            min_p=float(rng.choice([0.0, 0.1])),
            logprobs=[None, 0, 1, 5][rng.integers(4)],
            logit_bias=[None, {}, {3: 4.0}][rng.integers(3)],
        )
        for row in range(40)
    ]
    together = sample_tokens(OPS, logits, requests)
    order = rng.permutation(40)
    assert sample_tokens(OPS, logits[order], [requests[i] for i in order]) == [together[i] for i in order]
    for row in range(40):
        assert sample_tokens(OPS, logits[row : row + 1], requests[row : row + 1]) == [together[row]]
    assert {bool(t.logprob) for t in together} == {True, False}


def test_logprobs_are_the_models_own_before_anything_is_changed():
    logits = logits_of(3)
    before = logits.clone()
    best = int(logits[1].argmax())
    requests = [
        request(temperature=0, logprobs=3),
        request(temperature=0, logprobs=2, forbidden=(best,), logit_bias={best: 100, 4: 50.0}),
        request(temperature=0),
    ]
    sampled = sample_tokens(OPS, logits, requests)
    assert torch.equal(logits, before)
    assert [t.token_id for t in sampled] == [int(logits[0].argmax()), 4, int(logits[2].argmax())]
    exact = log_softmax(logits)
    for row, size in ((0, 3), (1, 2)):
        report = sampled[row].logprob
        assert report.token_id == sampled[row].token_id
        assert report.logprob == pytest.approx(exact[row, report.token_id], abs=1e-5)
        assert [token for token, _ in report.top] == np.argsort(-exact[row])[:size].tolist()
        assert [value for _, value in report.top] == pytest.approx(sorted(exact[row])[::-1][:size], abs=1e-5)
    assert sampled[2] == SampledToken(sampled[2].token_id, None)


def test_logprobs_without_alternatives():
    (sampled,) = sample_tokens(OPS, logits_of(1), [request(logprobs=0)])
    assert sampled.logprob.top == []
    assert sampled.logprob.logprob <= 0


def test_a_forbidden_token_is_not_drawn_whatever_its_bias():
    logits = torch.zeros(1, V)
    logits[0, 8] = 50
    for temperature in (0.0, 1.0):
        (sampled,) = sample_tokens(
            OPS, logits, [request(temperature=temperature, forbidden=(8,), logit_bias={8: 100, 2: 99})]
        )
        assert sampled.token_id == 2


def test_prompt_logprobs():
    logits = logits_of(6)
    next_ids = [3, 0, 29, 7, 7, 12]
    exact = log_softmax(logits)
    reports = prompt_logprobs(OPS, logits, next_ids, 2)
    for row, (token, report) in enumerate(zip(next_ids, reports, strict=True)):
        assert report.token_id == token
        assert report.logprob == pytest.approx(exact[row, token], abs=1e-5)
        assert [t for t, _ in report.top] == np.argsort(-exact[row])[:2].tolist()
    assert prompt_logprobs(OPS, logits[:1], [5], 0) == [TokenLogprob(5, pytest.approx(exact[0, 5], abs=1e-5), [])]


def test_a_step_in_which_nothing_is_sampled():
    assert sample_tokens(OPS, torch.empty(0, V), []) == []
    assert prompt_logprobs(OPS, torch.empty(0, V), [], 3) == []
