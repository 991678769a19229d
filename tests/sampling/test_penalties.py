"""Penalties, DRY, XTC, bad words: against transformers, the rules as published, and exact distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from headrace.ops.reference import Ops
from headrace.sampling.adjust import adjusted
from headrace.sampling.history import History
from headrace.sampling.params import MAX_REPETITION, SampleRequest, SamplingParams
from headrace.sampling.random import uniform
from headrace.sampling.sampler import XTC_STREAM, sample_tokens
from headrace.sampling.words import history_of
from helpers.distribution import exact_distribution, p_value

OPS = Ops()
V = 12

tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=40)


def logits_of(rows=1, seed=1, size=V):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, size)).astype(np.float32))


def request(prompt, output=(), bad_words=(), breakers=frozenset(), **params):
    params = SamplingParams(**params, bad_words=["-"] if bad_words else None)
    history = History(len(prompt), tuple(bad_words), breakers, counts_prompt=params.repetition_penalty != 1)
    ids = [*prompt, *output]
    for end in range(len(prompt), len(ids) + 1):  # as it comes, token by token
        history.update(ids[:end])
    return SampleRequest(params, 0, 0, len(ids), (), history)


@settings(max_examples=60, deadline=None)
@given(tokens, tokens, st.sampled_from([0.5, 1.1, 2.0, 10.0]))
def test_repetition_penalty_is_that_of_transformers(prompt, output, penalty):
    logits = logits_of()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    assert torch.allclose(adjusted(logits, [request(prompt, output, repetition_penalty=penalty)]), expected)


@settings(max_examples=60, deadline=None)
@given(tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalty_count_the_output_alone(prompt, output, presence, frequency):
    """OpenAI's formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    logits = logits_of()
    counts = np.bincount(output, minlength=V)
    expected = logits[0].numpy().astype(np.float64) - counts * frequency - (counts > 0) * presence
    asked = request(prompt, output, presence_penalty=presence, frequency_penalty=frequency)
    np.testing.assert_allclose(adjusted(logits, [asked])[0].numpy(), expected, atol=1e-4)


def test_repetition_comes_before_frequency_and_presence_and_bias_before_all():
    logits = torch.tensor([[4.0, -4.0, 1.0]])
    asked = request([1], [0, 0], repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={1: -2})
    assert adjusted(logits, [asked]).tolist() == [[4 / 2 - 1 - 0.25, -6 * 2, 1.0]]


def dry_as_published(ids, breakers, multiplier, base, allowed_length):
    """What each token loses: the loops of the rule's publication (text-generation-webui, pull request 5677)."""
    losses = np.zeros(V)
    if ids[-1] in breakers:
        return losses
    longest = {}
    for i in range(len(ids) - 1):
        if ids[i] != ids[-1] or ids[i + 1] in breakers:
            continue
        length = 1
        while i - length >= 0 and ids[i - length] == ids[-1 - length] and ids[-1 - length] not in breakers:
            length += 1
        longest[ids[i + 1]] = max(length, longest.get(ids[i + 1], 0))
    for token, length in longest.items():
        if length >= allowed_length:
            losses[token] = multiplier * base ** (length - allowed_length)
    return losses


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 40),
    st.frozensets(st.integers(0, 3), max_size=2),
    st.integers(1, 4),
    st.sampled_from([1.0, 1.5, 1.75]),
)
def test_dry_is_as_published(ids, split, breakers, allowed_length, base):
    logits = logits_of()
    asked = request(
        ids[:split],
        ids[split:],
        breakers=breakers,
        dry_multiplier=0.8,
        dry_base=base,
        dry_allowed_length=allowed_length,
    )
    expected = logits[0].numpy() - dry_as_published(ids, breakers, 0.8, base, allowed_length)
    np.testing.assert_allclose(adjusted(logits, [asked])[0].numpy(), expected, rtol=1e-5, atol=1e-4)


def test_dry_on_endless_repetition_stays_finite():
    asked = request([3] * 5000, dry_multiplier=100.0, dry_base=100.0)
    changed = adjusted(logits_of(), [asked])[0]
    assert changed[3] < -1e38
    assert not changed.isnan().any()
    assert int(asked.history.repetitions(MAX_REPETITION)[1].max()) == MAX_REPETITION


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_bad_words_are_those_of_transformers(output, words):
    logits = logits_of(size=6)
    expected = NoBadWordsLogitsProcessor([list(w) for w in words], eos_token_id=5)(torch.tensor([output]), logits)
    assert torch.equal(adjusted(logits, [request([], output, bad_words=[tuple(w) for w in words])]), expected)


def test_a_bad_word_does_not_begin_in_the_prompt():
    logits = logits_of()
    assert torch.equal(adjusted(logits, [request([1, 2], [], bad_words=[(1, 2, 3)])]), logits)
    assert adjusted(logits, [request([1], [1, 2], bad_words=[(1, 2, 3)])])[0, 3] == -np.inf


class Letters:
    """A tokenizer with a token for each character, and one for a space with the letter after it."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        ids = []
        for before, character in zip(" " + text, text, strict=False):
            ids += [] if character == " " else [ord(character) + 1000 * (before == " " and text[0] == " ")]
        return ids


def test_words_become_tokens_with_and_without_a_space():
    history = history_of(SamplingParams(bad_words=["ab", " c"], dry_multiplier=1), Letters(), 3)
    a, b, c = map(ord, "abc")
    assert set(history.bad_words) == {(a, b), (a + 1000, b), (c + 1000,)}
    assert history.breakers == frozenset(map(ord, '\n:"*'))
    assert history_of(SamplingParams(dry_multiplier=1, dry_sequence_breakers=[]), Letters(), 3).breakers == frozenset()


def test_only_allowed_tokens_are_drawn_even_if_all_else_forbids_them():
    logits = logits_of()
    params = SamplingParams(temperature=2.0, allowed_token_ids=[3, 7])
    requests = [SampleRequest(params, 0, 0, position) for position in range(2000)]
    drawn = np.array([t.token_id for t in sample_tokens(OPS, logits.expand(2000, V), requests)])
    kept = logits[0].numpy().astype(np.float64)
    kept[[t for t in range(V) if t not in (3, 7)]] = -np.inf
    assert p_value(drawn, exact_distribution(kept, temperature=2.0)) > 1e-3
    (token,) = sample_tokens(OPS, logits, [SampleRequest(params, 0, 0, 0, forbidden=(3, 7))])
    assert token.token_id in (3, 7)
    (token,) = sample_tokens(OPS, torch.full((1, V), -np.inf), [SampleRequest(params, 0, 0, 0)])
    assert token.token_id in (3, 7)


XTC = [(1.0, 0.1, {}), (0.4, 0.1, {}), (1.0, 0.5, {}), (0.7, 0.05, {"temperature": 1.5, "top_k": 8, "min_p": 0.02})]


@pytest.mark.parametrize(("probability", "threshold", "filters"), XTC)
def test_xtc_draws_from_the_mixture_of_both_distributions(probability, threshold, filters):
    logits = logits_of(seed=4) / 2
    params = SamplingParams(xtc_probability=probability, xtc_threshold=threshold, **filters)
    requests = [SampleRequest(params, 5, 0, position) for position in range(20_000)]
    drawn = np.array([t.token_id for t in sample_tokens(OPS, logits.expand(len(requests), V), requests)])
    wide = logits[0].numpy().astype(np.float64)
    with_it, without = exact_distribution(wide, xtc_threshold=threshold, **filters), exact_distribution(wide, **filters)
    assert p_value(drawn, probability * with_it + (1 - probability) * without) > 1e-3
    if threshold < 0.5:  # the test can fail
        assert p_value(drawn, without) < 1e-9


def test_xtc_needs_two_top_choices_and_a_temperature():
    certain = torch.tensor([[10.0, 0.0, 0.0]])
    for params in (
        {"xtc_probability": 1.0},
        {"xtc_probability": 1.0, "temperature": 0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, "temperature": 0},
    ):
        (token,) = sample_tokens(OPS, certain, [SampleRequest(SamplingParams(**params), 0, 0, 0)])
        assert token.token_id == 0
    even = torch.zeros(1, 4)
    (token,) = sample_tokens(OPS, even, [SampleRequest(SamplingParams(xtc_probability=1.0), 3, 0, 9)])
    assert token.token_id == int(uniform(3, 0, 9) * 4)  # equally likely ones all stay
    assert uniform(3, 0, 9) != uniform(3, 0, 9, XTC_STREAM)


def test_a_row_alone_is_what_it_is_in_any_batch():
    rng = np.random.default_rng(6)
    logits = logits_of(32)
    requests = []
    for row in range(32):
        r = request(
            rng.integers(0, V, 8).tolist(),
            rng.integers(0, V, rng.integers(0, 9)).tolist(),
            bad_words=[(1,), (2, 3)] if row % 3 == 0 else (),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, -0.4])),
            dry_multiplier=float(rng.choice([0.0, 0.8])),
            dry_allowed_length=1,
            xtc_probability=float(rng.choice([0.0, 0.5])),
            allowed_token_ids=[None, [1, 2, 3, 4]][rng.integers(2)],
        )
        r.position = row
        requests.append(r)
    before = logits.clone()
    together = sample_tokens(OPS, logits, requests)
    assert torch.equal(logits, before)
    order = rng.permutation(32)
    assert sample_tokens(OPS, logits[order], [requests[i] for i in order]) == [together[i] for i in order]
    for row in range(32):
        assert sample_tokens(OPS, logits[row : row + 1], requests[row : row + 1]) == [together[row]]


def test_nothing_is_copied_when_nothing_is_asked_for():
    logits = logits_of(3)
    plain = [SampleRequest(SamplingParams(top_k=3, min_p=0.1), 0, 0, i) for i in range(3)]
    assert adjusted(logits, plain) is logits
