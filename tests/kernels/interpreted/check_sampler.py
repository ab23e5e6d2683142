"""The sampler: the tokens, thresholds and log probabilities of the definition."""

import pytest
import torch

from kernels import sampler
from kernels.gpu import filters as gpu_filters
from kernels.gpu import sampler as gpu_sampler

VOCAB = 1000
ROWS = 40


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks in a small vocabulary, the last one cut short."""
    monkeypatch.setattr(gpu_sampler, "CHUNK", 256)
    monkeypatch.setattr(gpu_filters, "LANES", 256)
    monkeypatch.setattr(gpu_filters, "CANDIDATES", 32)


class Batch:
    """n sequences that hold rows of R, with random parameters; settings: row index in the batch -> (k, p, min_p)."""

    def __init__(self, n, settings=(), spread=3.0):
        g = torch.Generator().manual_seed(n)
        self.logits = torch.randn(n, VOCAB, generator=g) * spread
        self.rows = torch.randperm(ROWS, generator=g)[:n]
        self.temperature = torch.rand(ROWS, generator=g) + 0.3
        self.top_k = torch.zeros(ROWS, dtype=torch.int32)
        self.top_p, self.min_p = torch.ones(ROWS), torch.zeros(ROWS)
        self.seeds = torch.randint(-(2**62), 2**62, (ROWS,), generator=g)
        self.positions = torch.arange(n) * 37 + 2**33
        for i, (k, p, min_p) in enumerate(settings):
            row = self.rows[i]
            self.top_k[row], self.top_p[row], self.min_p[row] = k, p, min_p

    @property
    def filters(self):
        return self.top_k, self.top_p, self.min_p

    def choose(self, module, filters):
        return module.choose(
            self.logits.clone(), self.rows, self.temperature, self.seeds, self.positions, filters
        )  # fmt: skip

    def lowest_kept(self):
        scaled = self.logits / self.temperature[self.rows, None]
        return sampler.lowest_kept(scaled, *(each[self.rows] for each in self.filters))[:, 0]


def test_plain_sampling_gives_the_tokens_of_the_definition():
    batch = Batch(24)
    batch.temperature[batch.rows[3]] = 0.0
    assert torch.equal(batch.choose(gpu_sampler, None), batch.choose(sampler, None))


SETTINGS = [
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (50, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 0.95, 0.0),
    (0, 1.0, 0.05),
    (20, 0.7, 0.1),
    (700, 1.0, 0.0),  # more than there are lanes
    (300, 0.99, 0.0),
    (5000, 0.3, 0.0),  # more than the vocabulary
    (0, 1e-9, 0.0),
    (0, 0.999, 0.001),
    (0, 1.0, 0.0),
]


def test_filters_keep_and_draw_what_the_definition_does():
    batch = Batch(len(SETTINGS), SETTINGS, spread=1.0)
    assert torch.equal(batch.choose(gpu_sampler, batch.filters), batch.choose(sampler, batch.filters))
    found = gpu_filters.thresholds(batch.logits, batch.rows, batch.temperature, *batch.filters)
    filtered = torch.tensor([0 < k < VOCAB or p < 1 or min_p > 0 for k, p, min_p in SETTINGS])
    torch.testing.assert_close(found[filtered], batch.lowest_kept()[filtered], rtol=1e-6, atol=0)


def test_ties_and_barred_tokens():
    batch = Batch(3, [(2, 1.0, 0.0), (2, 0.5, 0.0), (0, 0.9, 0.0)])
    batch.logits[:, :] = -torch.inf
    batch.logits[:, [7, 300, 301, 999]] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    for seed in range(2):
        batch.seeds[:] = seed
        assert torch.equal(batch.choose(gpu_sampler, batch.filters), batch.choose(sampler, batch.filters))
        assert torch.equal(batch.choose(gpu_sampler, None), batch.choose(sampler, None))


def test_a_row_without_a_distribution_still_gives_an_id_of_the_vocabulary():
    batch = Batch(2, [(5, 0.9, 0.0), (5, 0.9, 0.0)])
    batch.logits[0], batch.logits[1, 5] = -torch.inf, torch.nan
    for filters in (None, batch.filters):
        tokens = batch.choose(gpu_sampler, filters)
        assert (tokens >= 0).all()
        assert (tokens < VOCAB).all()


def test_the_first_of_equal_logits_is_the_best():
    logits = torch.randn(4, VOCAB)
    logits[:, [300, 301, 900]] = 50.0
    assert gpu_sampler.argmax(logits).tolist() == [300] * 4
    assert gpu_sampler.argmax(logits[:, :200]).tolist() == logits[:, :200].argmax(-1).tolist()


@pytest.mark.parametrize("k", [0, 7])
def test_log_probabilities_of_the_token_and_of_the_most_likely(k):
    logits, own = torch.randn(4, VOCAB) * 3, torch.randint(0, VOCAB, (4,))
    own[0] = logits[0].argmax()
    got = sampler.TokenLogprobs(*gpu_sampler.token_logprobs(logits, own, k))
    expected = sampler.token_logprobs(logits.log_softmax(-1), own, k)
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.ranks, expected.ranks)
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_equal_logits_are_listed_in_vocabulary_order():
    logits = torch.zeros(1, VOCAB)
    logits[0, 600:] = 1.0
    ids, _, ranks = gpu_sampler.token_logprobs(logits, torch.tensor([0]), 4)
    assert ids.tolist() == [[0, 600, 601, 602, 603]]
    assert ranks.tolist() == [401]
