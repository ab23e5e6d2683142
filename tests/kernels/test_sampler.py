import torch

from kernels.sampler import (
    argmax,
    choose,
    draw,
    logprobs_of,
    lowest_kept,
    penalise,
    penalise_rows,
    philox,
    token_logprobs,
    uniform,
)


def keep(
    probabilities: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, candidates: int = 256
) -> list[int]:
    logits = torch.tensor([probabilities]).log()
    low = lowest_kept(logits, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]), candidates)
    return (logits >= low).nonzero()[:, 1].tolist()


def test_philox_gives_the_published_numbers() -> None:
    # Known answers of the authors' Random123 library for a counter of zeros, then of all ones.
    zeros = philox(torch.tensor([0]), torch.tensor([0]))
    assert [f"{int(word):08x}" for word in zeros] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_uniform_numbers_are_even_and_differ_by_seed_and_position() -> None:
    positions = torch.arange(100_000)
    numbers = uniform(torch.full_like(positions, 42), positions)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 150  # 99 degrees of freedom: one in a thousand is above 149
    other = uniform(torch.full_like(positions, 43), positions)
    assert abs(float(torch.corrcoef(torch.stack((numbers, other)))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1])) < 0.02


def test_negative_and_large_seeds_are_seeds_of_their_own() -> None:
    seeds = torch.tensor([-1, 0, 1, 2**32, 2**63 - 1, -(2**63)])
    assert len(set(uniform(seeds, torch.zeros_like(seeds)).tolist())) == len(seeds)


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    positions = torch.arange(10_000)
    numbers = uniform(torch.full_like(positions, 7), positions)
    tokens = draw(probabilities.log().expand(10_000, 4), numbers)
    shares = torch.bincount(tokens, minlength=4) / 10_000
    torch.testing.assert_close(shares, probabilities, atol=0.02, rtol=0)


def test_top_p_draws_only_from_the_nucleus() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(10_000, 4).clone()
    n = torch.arange(10_000)
    low = lowest_kept(logits, torch.zeros_like(n), torch.full((10_000,), 0.6), torch.zeros(10_000))
    logits[logits < low] = -torch.inf
    assert set(draw(logits, uniform(torch.full_like(n, 3), n)).tolist()) == {2, 3}


def test_filters_keep_what_they_say() -> None:
    p = [0.05, 0.3, 0.15, 0.4, 0.1]
    assert keep(p) == [0, 1, 2, 3, 4]
    assert keep(p, top_k=1) == [3]
    assert keep(p, top_k=3) == [1, 2, 3]
    assert keep(p, top_k=99) == [0, 1, 2, 3, 4]
    assert keep(p, top_p=0.39) == [3]
    assert keep(p, top_p=0.75) == [1, 2, 3]
    assert keep(p, min_p=0.5) == [1, 3]
    assert keep(p, top_p=1e-9) == [3]
    assert keep(p, top_p=1e-50) == [3]  # 0 in float32
    # top_p counts within what top_k leaves: 0.4 / 0.7 is below 0.6
    assert keep(p, top_k=2, top_p=0.6) == [1, 3]
    assert keep(p, top_k=2, top_p=0.55) == [3]


def test_ties_with_the_last_one_kept_are_kept() -> None:
    assert keep([0.25, 0.25, 0.25, 0.25], top_k=2) == [0, 1, 2, 3]


def test_filters_that_reach_beyond_the_candidates_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 1000, generator=generator)
    top_k = torch.tensor([0, 700, 0, 30, 0, 999])
    top_p = torch.tensor([0.97, 1.0, 0.5, 0.9, 1.0, 0.6])
    min_p = torch.tensor([0.0, 0.0, 0.02, 0.0, 0.3, 0.0])
    few = lowest_kept(logits, top_k, top_p, min_p, candidates=32)
    whole = lowest_kept(logits, top_k, top_p, min_p, candidates=1000)
    torch.testing.assert_close(few, whole, atol=0, rtol=0)


def test_barred_tokens_are_never_drawn_even_by_the_largest_number() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    largest = torch.tensor([1 - 2.0**-24])
    assert draw(logits, largest).item() == 1
    assert draw(logits.flip(-1), torch.tensor([0.0])).item() == 2


def test_a_row_without_a_distribution_still_gives_an_id_of_the_vocabulary() -> None:
    logits = torch.tensor([[-torch.inf] * 4, [1.0, torch.nan, 0.0, 2.0], [0.0, 0.0, 5.0, 0.0]])
    tokens = draw(logits, torch.tensor([0.5, 0.5, 0.5])).tolist()
    assert all(0 <= token < 4 for token in tokens)
    assert tokens[2] == 2


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0, 4.0]])
    #                 not there, prompt, once, both, three times in the output
    seen = torch.tensor([[0, 1, 2, 3, 6]], dtype=torch.int32)
    result = penalise(logits, seen, torch.tensor([[0.5]]), torch.tensor([[0.25]]), torch.tensor([[2.0]]))
    expected = [2.0, -2.0, 0.25 - 0.75, -6.0 - 0.75, 2.0 - 0.5 - 0.75]
    torch.testing.assert_close(result, torch.tensor([expected]), atol=0, rtol=0)
    assert logits[0].tolist() == [2.0, -1.0, 0.5, -3.0, 4.0]


def test_penalties_leave_barred_tokens_barred_and_neighbours_alone() -> None:
    logits = torch.tensor([[-torch.inf, 1.0], [-torch.inf, 1.0]])
    seen = torch.tensor([[3, 2], [0, 0]], dtype=torch.int32)
    column = torch.tensor([[-2.0], [-2.0]])
    result = penalise(logits, seen, column, column, torch.tensor([[0.5], [0.5]]))
    assert result.tolist() == [[-torch.inf, 6.0], [-torch.inf, 1.0]]


def test_logprobs_name_the_token_and_the_most_likely_ones() -> None:
    logprobs = torch.tensor([[0.1, 0.2, 0.4, 0.3], [0.25, 0.25, 0.4, 0.1]]).log()
    found = token_logprobs(logprobs, torch.tensor([1, 0]), 2)
    assert found.token_ids.tolist()[0] == [1, 2, 3]
    assert found.token_ids.tolist()[1][:2] == [0, 2]
    assert found.ranks.tolist() == [3, 2]
    torch.testing.assert_close(found.logprobs.exp(), torch.tensor([[0.2, 0.4, 0.3], [0.25, 0.4, 0.25]]))
    none = token_logprobs(logprobs, torch.tensor([1, 0]), 0)
    assert none.token_ids.tolist() == [[1], [0]]
    assert token_logprobs(logprobs, torch.tensor([1, 0]), 20).token_ids.shape == (2, 5)


def test_choose_takes_each_rows_parameters_from_where_they_are() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows, positions = torch.tensor([4, 0, 2]), torch.tensor([10, 11, 12])
    temperature, seeds = torch.tensor([0.0, 9.0, 0.7, 9.0, 1.3]), torch.arange(5)
    top_k, top_p, min_p = torch.tensor([0, 1, 3, 1, 0]), torch.tensor([1.0, 0.1, 1.0, 0.1, 0.8]), torch.zeros(5)
    scaled = logits / torch.tensor([1.3, 1.0, 0.7])[:, None]
    plain = draw(scaled, uniform(rows, positions))
    assert choose(logits.clone(), rows, temperature, seeds, positions).tolist() == [
        plain[0], logits[1].argmax(), plain[2],
    ]  # fmt: skip
    kept = scaled.masked_fill(scaled < lowest_kept(scaled, top_k[rows], top_p[rows], min_p[rows]), -torch.inf)
    filtered = draw(kept, uniform(rows, positions))
    got = choose(logits.clone(), rows, temperature, seeds, positions, (top_k, top_p, min_p))
    assert got.tolist() == [filtered[0], logits[1].argmax(), filtered[2]]
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()


def test_penalties_by_row_and_log_probabilities_of_logits() -> None:
    logits, seen = torch.randn(4, 20), torch.randint(0, 4, (2, 20), dtype=torch.int32)
    penalties = torch.tensor([[0.5, 0.1, 1.2], [-0.5, 0.0, 1.0]])
    changed = logits.clone()
    penalise_rows(changed, torch.tensor([3, 1]), seen, torch.tensor([1, 0]), penalties)
    for row, slot in ((3, 1), (1, 0)):
        alone = penalise(logits[row : row + 1], seen[slot : slot + 1], *penalties[slot, :, None, None])
        assert torch.equal(changed[row], alone[0])
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    got, expected = logprobs_of(logits, torch.arange(4), 3), token_logprobs(logits.log_softmax(-1), torch.arange(4), 3)
    assert torch.equal(got.logprobs, expected.logprobs)
    assert torch.equal(got.token_ids, expected.token_ids)
